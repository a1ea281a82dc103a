#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/prefill_operands.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/decode.cuh>
#include <penstock/dispatch/detail/warp.cuh>
#include <penstock/dispatch/detail/wgmma.cuh>
#include <penstock/model/dtype.hpp>
#include <penstock/model/weight_format.hpp>

#include <cstddef>
#include <cstdint>

/// What a format of weights and a precision of inputs make of the product: the instruction, how weights get to it, and where an input lies.

namespace penstock::inline v0_1 {

/// The precision of an expert's inputs, and of what lies between its two matrices. Sums are in float32.
namespace precision {

/// 16 bits: f16 for weights in f16, else bf16.
struct a16 {};

/// E4M3 with one float32 scale for 128 inputs of a token. For weights in fp8_block128.
struct a8 {};

}  // namespace precision

namespace detail {

/// Inputs of the products: of every 128 bytes of all rows an atom, [atoms, rows, 128], swizzled as the tensor cores read it. `scales`, for
/// 8-bit inputs: [atoms, rows].
struct prefill_inputs {
    std::byte* atoms = nullptr;
    float* scales = nullptr;
    std::uint64_t rows = 0;

    /// Byte `at` of a row's 128.
    [[nodiscard]] __device__ std::byte* place(std::uint32_t atom, std::uint64_t row, std::uint32_t at) const {
        return atoms + (atom * rows + row) * 128 + ((at / 16 ^ (static_cast<std::uint32_t>(row) & 7)) * 16 | at % 16);
    }
};

/// Where an input of a step is multiplied: element `position` of one of the step's atoms.
struct input_place {
    std::uint32_t atom, position;
};

/// prefill_operand<Format, Precision>:
/// `types` of the product; `type` of hidden states; `widened`: weights go through registers; `depth` of a step, and the `atoms` of inputs
/// and `row_bytes` of weights that it takes; `unit`: inputs that a lane prepares at once; `scaled`: sums of a step are multiplied by the
/// scales of weights and inputs; `by_row`: inputs are divided by a power of two for each pair; `neighbour`: the input so many after this
/// one lies next to it. Widened: where(k) of input k of a step, so that a lane's weights lie together; of `together` inputs, and those 32,
/// 64, 96 later, the places follow each other; load(...) what a lane has of a row for an atom; widen(...) a product's part of it.
template <class Format, class Precision>
struct prefill_operand;

struct prefill_direct {
    static constexpr bool by_row = false;
    static constexpr std::uint32_t neighbour = 1;
    static constexpr std::uint32_t unit = 8;
    static constexpr bool widened = false;
    static constexpr bool scaled = false;
    static constexpr std::uint32_t depth = 64;
    static constexpr std::uint32_t atoms = 1;
    static constexpr std::uint32_t row_bytes = 128;
};

template <>
struct prefill_operand<format::bf16, precision::a16> : prefill_direct {
    using types = wgmma_bf16;
    static constexpr dtype type = dtype::bf16;
};

template <>
struct prefill_operand<format::f16, precision::a16> : prefill_direct {
    using types = wgmma_f16;
    static constexpr dtype type = dtype::f16;
};

template <>
struct prefill_operand<format::fp8_block128, precision::a8> {
    static constexpr bool by_row = false;
    using types = wgmma_e4m3;
    static constexpr dtype type = dtype::bf16;
    static constexpr std::uint32_t neighbour = 1;
    static constexpr std::uint32_t unit = 16;
    static constexpr bool widened = false;
    static constexpr bool scaled = true;
    static constexpr std::uint32_t depth = 128;
    static constexpr std::uint32_t atoms = 1;
    static constexpr std::uint32_t row_bytes = 128;
};

/// Weights that go through registers, where they get their scale.
struct prefill_widened {
    static constexpr dtype type = dtype::bf16;
    static constexpr bool widened = true;
    static constexpr bool scaled = false;
    static constexpr std::uint32_t depth = 128;
    static constexpr std::uint32_t atoms = 2;
};

/// E4M3 become f16 two at a time, exactly, and are multiplied by their scale over the row's largest. So the inputs are f16, too: divided
/// by a power of two for each pair, so that the largest is between 2^14 and 2^15. A lane takes bytes 32 t to 32 t + 31 of a row, t = lane
/// % 4: 16 of them for each atom.
template <>
struct prefill_operand<format::fp8_block128, precision::a16> : prefill_widened {
    using types = wgmma_f16;
    static constexpr bool by_row = true;
    static constexpr std::uint32_t row_bytes = 128;
    static constexpr std::uint32_t neighbour = 1;
    static constexpr std::uint32_t together = 4;
    static constexpr std::uint32_t unit = 4 * together;

    /// Of 128 weights of a row: two f16.
    struct scale {
        std::uint32_t both;

        __device__ explicit scale(float of) { asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(both) : "f"(of)); }
    };

    struct scale_reader {
        const std::byte* record;
        std::uint32_t at;  // 32 bits, since registers are short where this is used
        float factor;

        /// The four lanes that have the row look for its largest scale together; times `factor`, that is between 2^6 and 2^7.
        __device__ scale_reader(const std::byte* from, const matrix_layout& m, std::uint32_t row, std::uint32_t steps)
            : record(from),
              at(static_cast<std::uint32_t>(m.scale_offset + decoder<format::fp8_block128>::scale_index(m, row, 0) * sizeof(float))) {
            std::uint32_t most = 0;
            for (std::uint32_t i = threadIdx.x % 4; i < steps; i += 4) {
                most = larger(most, __float_as_uint(value(i)) & 0x7fffffffu);
            }
            most = larger(most, __shfl_xor_sync(whole_warp, most, 1));
            most = larger(most, __shfl_xor_sync(whole_warp, most, 2));
            const std::uint32_t exponent = larger<std::uint32_t>(smaller<std::uint32_t>(most >> 23, 253), 20);
            factor = __uint_as_float((260 - exponent) << 23);
        }

        __device__ float load(std::uint32_t step) const { return value(step) * factor; }

        [[nodiscard]] __device__ float correction() const { return 1.0f / factor; }

    private:
        [[nodiscard]] __device__ float value(std::uint32_t step) const {
            return __ldg(reinterpret_cast<const float*>(record + (at + step * sizeof(float))));
        }
    };

    __device__ static constexpr input_place where(std::uint32_t k) {
        const std::uint32_t t = k / 32, within = k % 4;
        return {k / 16 % 2, k / 4 % 4 * 16 + within / 2 * 8 + 2 * t + within % 2};
    }

    /// What a lane has for atom `i` of a row that lies at `row`.
    __device__ static uint4 load(const std::byte* row, std::uint32_t row_in_group, std::uint32_t t, std::uint32_t i) {
        return *reinterpret_cast<const uint4*>(row + ((2 * t + i) ^ row_in_group) * 16);
    }

    /// Weights of product `j` of an atom: `first` goes with positions 2 t and 2 t + 1, `second` with those eight later.
    __device__ static void widen(const uint4& v, std::uint32_t, int j, const scale& s, std::uint32_t& first, std::uint32_t& second) {
        asm("{\n .reg .b16 l, h;\n .reg .b32 a, b;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 a, l;\n cvt.rn.f16x2.e4m3x2 b, h;\n"
            " mul.rn.f16x2 %0, a, %3;\n mul.rn.f16x2 %1, b, %3;\n}"
            : "=r"(first), "=r"(second)
            : "r"(word_of(v, j)), "r"(s.both));
    }
};

__device__ inline std::uint32_t multiply_bf16(std::uint32_t a, std::uint32_t b) {
    std::uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

/// The bits of an E2M1 at the end of bf16's exponent and at the start of its mantissa are 2^-126 of its value; the product with the scale
/// is 2^-64 of the weight, so that any scale has room, and sums are corrected at the end. A lane takes 16 bytes of a row's 64: 32 weights
/// and their scale.
template <>
struct prefill_operand<format::mxfp4, precision::a16> : prefill_widened {
    using types = wgmma_bf16;
    static constexpr bool by_row = false;
    static constexpr std::uint32_t row_bytes = 64;
    static constexpr std::uint32_t neighbour = 4;
    static constexpr std::uint32_t together = 8;
    static constexpr std::uint32_t unit = 4 * together;

    struct scale {
        std::uint32_t both = 0;

        /// @param of E8M0: 2^(of - 127)
        __device__ explicit scale(std::uint32_t of) : both((of < 193 ? of + 62 : 255) * 0x00800080u) {}
    };

    struct scale_reader {
        const std::uint8_t* at;
        std::uint32_t last;

        __device__ scale_reader(const std::byte* record, const matrix_layout& m, std::uint32_t row, std::uint32_t)
            : at(reinterpret_cast<const std::uint8_t*>(record + m.scale_offset) + decoder<format::mxfp4>::scale_index(m, row, 0)),
              last((m.cols - 1) / 32) {}

        __device__ std::uint32_t load(std::uint32_t step) const { return __ldg(at + smaller(step * 4 + threadIdx.x % 4, last)); }

        [[nodiscard]] __device__ static float correction() { return 0x1p64f; }
    };

    __device__ static constexpr input_place where(std::uint32_t k) {
        const std::uint32_t t = k / 32, n = k % 32, within = n % 4;  // word n / 8 holds two products' weights
        return {n / 16, (n / 8 % 2 * 2 + within / 2) * 16 + within % 2 * 8 + 2 * t + n / 4 % 2};
    }

    __device__ static uint4 load(const std::byte* row, std::uint32_t, std::uint32_t t, std::uint32_t) {
        return *reinterpret_cast<const uint4*>(row + t * 16);
    }

    __device__ static void widen(const uint4& v, std::uint32_t i, int j, const scale& s, std::uint32_t& first, std::uint32_t& second) {
        const std::uint32_t w = (i == 0 ? word_of(v, j / 2) : word_of(v, 2 + j / 2));
        if (j % 2 == 0) {
            first = multiply_bf16((w << 12 & 0x80008000u) | (w << 6 & 0x01c001c0u), s.both);
            second = multiply_bf16((w << 8 & 0x80008000u) | (w << 2 & 0x01c001c0u), s.both);
        } else {
            first = multiply_bf16((w << 4 & 0x80008000u) | (w >> 2 & 0x01c001c0u), s.both);
            second = multiply_bf16((w & 0x80008000u) | (w >> 6 & 0x01c001c0u), s.both);
        }
    }
};

}  // namespace detail
}  // namespace penstock::inline v0_1

#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/prefill_operands.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/decode.cuh>
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

/// Inputs of the products: of every 128 bytes of all rows an atom, [atoms, rows, 128], swizzled as the tensor cores read it. `scale`, for 8-bit
/// inputs: [atoms, rows].
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
/// `types` of the product; `type` of hidden states; `widened`: weights go through registers; `depth` of a step, and the `atoms` of inputs and
/// `row_bytes` of weights that it takes; `unit`: inputs that a lane prepares at once; `scaled`: sums of a step are multiplied by the scales of
/// weights and inputs; `correction` of all sums. Widened: where(k) of input k of a step, so that a lane's weights lie together; of `together`
/// inputs, and those 32, 64, 96 later, the places follow each other; load(...) what a lane has of a row for an atom; widen(...) a product's part
/// of it.
template <class Format, class Precision>
struct prefill_operand;

struct prefill_direct {
    static constexpr std::uint32_t unit = 8;
    static constexpr bool widened = false;
    static constexpr bool scaled = false;
    static constexpr std::uint32_t depth = 64;
    static constexpr std::uint32_t atoms = 1;
    static constexpr std::uint32_t row_bytes = 128;
    static constexpr float correction = 1.0f;
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
    using types = wgmma_e4m3;
    static constexpr dtype type = dtype::bf16;
    static constexpr std::uint32_t unit = 16;
    static constexpr bool widened = false;
    static constexpr bool scaled = true;
    static constexpr std::uint32_t depth = 128;
    static constexpr std::uint32_t atoms = 1;
    static constexpr std::uint32_t row_bytes = 128;
    static constexpr float correction = 1.0f;
};

/// Two bf16 in a word: a * b + c, rounded once.
__device__ inline std::uint32_t multiply_add_bf16(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    std::uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ inline std::uint32_t multiply_bf16(std::uint32_t a, std::uint32_t b) {
    std::uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

/// One bf16 in both halves of a word.
__device__ inline std::uint32_t both_bf16(float value) {
    std::uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(value));
    return d;
}

/// Weights that are read as bf16 of tiny exponents, then multiplied by their scale times a power of two. The product is 2^-64 of the weight, so
/// that any scale has room; sums are corrected at the end.
struct prefill_widened {
    using types = wgmma_bf16;
    static constexpr dtype type = dtype::bf16;
    static constexpr bool widened = true;
    static constexpr bool scaled = false;
    static constexpr std::uint32_t depth = 128;
    static constexpr std::uint32_t atoms = 2;
    static constexpr float correction = 0x1p64f;
};

/// The bits of an E4M3 at the end of bf16's exponent and at the start of its mantissa are 2^-120 of its value, subnormals too. NaN becomes 480.
/// A lane takes bytes 32 t to 32 t + 31 of a row, t = lane % 4: 16 of them for each atom.
template <>
struct prefill_operand<format::fp8_block128, precision::a16> : prefill_widened {
    static constexpr std::uint32_t row_bytes = 128;
    static constexpr std::uint32_t together = 4;
    static constexpr std::uint32_t unit = 4 * together;

    /// Of 128 weights of a row. Its two parts together are the scale to some 16 bits, so that a weight is rounded once.
    struct scale {
        std::uint32_t high = 0, low = 0;

        __device__ explicit scale(float of) {
            const float shifted = of * 0x1p56f;
            high = both_bf16(shifted);
            low = both_bf16(shifted - __uint_as_float(high << 16));
        }
    };

    struct scale_reader {
        const float* at;

        __device__ scale_reader(const std::byte* record, const matrix_layout& m, std::uint32_t row)
            : at(reinterpret_cast<const float*>(record + m.scale_offset) + decoder<format::fp8_block128>::scale_index(m, row, 0)) {}

        __device__ float load(std::uint32_t step) const { return __ldg(at + step); }
    };

    __device__ static constexpr input_place where(std::uint32_t k) {
        const std::uint32_t t = k / 32, within = k % 4;
        return {k / 16 % 2, k / 4 % 4 * 16 + within % 2 * 8 + 2 * t + within / 2};
    }

    /// What a lane has for atom `i` of a row that lies at `row`.
    __device__ static uint4 load(const std::byte* row, std::uint32_t row_in_group, std::uint32_t t, std::uint32_t i) {
        return *reinterpret_cast<const uint4*>(row + ((2 * t + i) ^ row_in_group) * 16);
    }

    /// Weights of product `j` of an atom: `even` goes with positions 2 t and 2 t + 1, `odd` with those eight later.
    __device__ static void widen(const uint4& v, std::uint32_t, int j, const scale& s, std::uint32_t& even, std::uint32_t& odd) {
        const std::uint32_t w = word_of(v, j);
        const std::uint32_t e = (w << 4 & 0x07f007f0u) | (w << 8 & 0x80008000u);
        const std::uint32_t o = (w >> 4 & 0x07f007f0u) | (w & 0x80008000u);
        even = multiply_add_bf16(e, s.high, multiply_bf16(e, s.low));
        odd = multiply_add_bf16(o, s.high, multiply_bf16(o, s.low));
    }
};

/// The bits of an E2M1 there are 2^-126 of its value. A lane takes 16 bytes of a row's 64: 32 weights and their scale.
template <>
struct prefill_operand<format::mxfp4, precision::a16> : prefill_widened {
    static constexpr std::uint32_t row_bytes = 64;
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

        __device__ scale_reader(const std::byte* record, const matrix_layout& m, std::uint32_t row)
            : at(reinterpret_cast<const std::uint8_t*>(record + m.scale_offset) + decoder<format::mxfp4>::scale_index(m, row, 0)),
              last((m.cols - 1) / 32) {}

        __device__ std::uint32_t load(std::uint32_t step) const { return __ldg(at + smaller(step * 4 + threadIdx.x % 4, last)); }
    };

    __device__ static constexpr input_place where(std::uint32_t k) {
        const std::uint32_t t = k / 32, n = k % 32, within = n % 4;  // word n / 8 holds two products' weights
        return {n / 16, (n / 8 % 2 * 2 + within / 2) * 16 + within % 2 * 8 + 2 * t + n / 4 % 2};
    }

    __device__ static uint4 load(const std::byte* row, std::uint32_t, std::uint32_t t, std::uint32_t) {
        return *reinterpret_cast<const uint4*>(row + t * 16);
    }

    __device__ static void widen(const uint4& v, std::uint32_t i, int j, const scale& s, std::uint32_t& even, std::uint32_t& odd) {
        const std::uint32_t w = (i == 0 ? word_of(v, j / 2) : word_of(v, 2 + j / 2));
        if (j % 2 == 0) {
            even = multiply_bf16((w << 12 & 0x80008000u) | (w << 6 & 0x01c001c0u), s.both);
            odd = multiply_bf16((w << 8 & 0x80008000u) | (w << 2 & 0x01c001c0u), s.both);
        } else {
            even = multiply_bf16((w << 4 & 0x80008000u) | (w >> 2 & 0x01c001c0u), s.both);
            odd = multiply_bf16((w & 0x80008000u) | (w >> 6 & 0x01c001c0u), s.both);
        }
    }
};

}  // namespace detail
}  // namespace penstock::inline v0_1

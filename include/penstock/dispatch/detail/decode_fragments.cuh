#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/decode_fragments.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/decode.cuh>
#include <penstock/model/weight_format.hpp>

#include <cstdint>

/// Weights as the wide operand of mma.sync.m16n8k16: 16 rows of a matrix against 8 tokens. The order of the inputs inside a product is free
/// as long as both operands agree, so that a lane takes 16 bytes of one row as they lie. PTX ISA, "Matrix fragments for mma.m16n8k16".

namespace penstock::inline v0_1::detail {

/// Sums of a 16 x 8 tile as the tensor core holds them: rows lane / 4 (0, 1) and lane / 4 + 8 (2, 3), tokens lane % 4 * 2 and the next.
struct tile_sums {
    float of[4] = {0.0f, 0.0f, 0.0f, 0.0f};
};

/// Element types of the two operands.
enum class operand : std::uint8_t { bf16, f16 };

template <operand Type>
__device__ inline void multiply_add(tile_sums& d, std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                    std::uint32_t b1) {
    if constexpr (Type == operand::bf16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d.of[0]), "+f"(d.of[1]), "+f"(d.of[2]), "+f"(d.of[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d.of[0]), "+f"(d.of[1]), "+f"(d.of[2]), "+f"(d.of[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

/// Two bf16, each times 2^60.
__device__ inline std::uint32_t raised(std::uint32_t pair) {
    std::uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0x5d805d80u), "r"(0x80008000u));
    return result;
}

/// fragment<Format>: `inputs` of one row in 16 bytes, `input_vectors` 16-byte vectors of inputs that go with them, `raise` whether the inputs
/// are multiplied by 2^60, `correction` what the sums are then to be multiplied by,
/// `add(sums, upper, lower, inputs)` adds the products of 16 bytes of rows lane / 4 and lane / 4 + 8 with a token's inputs.
template <class Format>
struct fragment;

template <operand Type>
struct fragment_of_halves {
    static constexpr operand type = Type;
    static constexpr std::uint32_t inputs = 8;
    static constexpr int input_vectors = 1;
    static constexpr bool raise = false;
    static constexpr float correction = 1.0f;

    __device__ static void add(tile_sums& sums, const uint4& upper, const uint4& lower, const uint4 (&x)[1]) {
        multiply_add<Type>(sums, upper.x, lower.x, upper.y, lower.y, x[0].x, x[0].y);
        multiply_add<Type>(sums, upper.z, lower.z, upper.w, lower.w, x[0].z, x[0].w);
    }
};

template <>
struct fragment<format::bf16> : fragment_of_halves<operand::bf16> {};

template <>
struct fragment<format::f16> : fragment_of_halves<operand::f16> {};

/// An E4M3 code moved into a bf16 is 2^-120 of its value, subnormals too. So that no sum of products is too small for a float, the inputs are
/// raised by 2^60.
template <>
struct fragment<format::fp8_block128> {
    static constexpr operand type = operand::bf16;
    static constexpr std::uint32_t inputs = 16;
    static constexpr int input_vectors = 2;
    static constexpr bool raise = true;
    static constexpr float correction = 0x1p60f;

    /// Bytes First and First + 1 of a word.
    template <std::uint32_t First>
    __device__ static std::uint32_t pair(std::uint32_t word) {
        const std::uint32_t spread = __byte_perm(word, 0, First == 0 ? 0x4140 : 0x4342);
        return (spread * 0x10u & 0x07f007f0u) | (spread * 0x100u & 0x80008000u);
    }

    __device__ static void add_word(tile_sums& sums, std::uint32_t upper, std::uint32_t lower, std::uint32_t x01, std::uint32_t x23) {
        multiply_add<type>(sums, pair<0>(upper), pair<0>(lower), pair<2>(upper), pair<2>(lower), x01, x23);
    }

    __device__ static void add(tile_sums& sums, const uint4& upper, const uint4& lower, const uint4 (&x)[2]) {
        add_word(sums, upper.x, lower.x, x[0].x, x[0].y);
        add_word(sums, upper.y, lower.y, x[0].z, x[0].w);
        add_word(sums, upper.z, lower.z, x[1].x, x[1].y);
        add_word(sums, upper.w, lower.w, x[1].z, x[1].w);
    }
};

}  // namespace penstock::inline v0_1::detail

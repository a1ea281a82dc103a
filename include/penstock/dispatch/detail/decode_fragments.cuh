#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/decode_fragments.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/decode.cuh>
#include <penstock/model/dtype.hpp>
#include <penstock/model/weight_format.hpp>

#include <nv/target>

#include <cstddef>
#include <cstdint>

/// Weights as the wide operand of mma.sync.m16n8k16: 16 rows of a matrix against 8 tokens. The order of the inputs inside a product is free
/// as long as both operands agree, so that a lane takes 16 bytes of one row as they lie. PTX ISA, "Matrix fragments for mma.m16n8k16".

namespace penstock::inline v0_1::detail {

/// Sums of a 16 x 8 tile as the tensor core holds them: rows lane / 4 (0, 1) and lane / 4 + 8 (2, 3), tokens lane % 4 * 2 and the next.
struct tile_sums {
    float of[4] = {0.0f, 0.0f, 0.0f, 0.0f};
};

/// @tparam Type of both operands: bf16 or f16
template <dtype Type>
__device__ inline void multiply_add(tile_sums& d, std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                    std::uint32_t b1) {
    if constexpr (Type == dtype::bf16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d.of[0]), "+f"(d.of[1]), "+f"(d.of[2]), "+f"(d.of[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d.of[0]), "+f"(d.of[1]), "+f"(d.of[2]), "+f"(d.of[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

/// fragment<Format>: `type` of the inputs, as they come and between the two matrices; `vectors`: 16-byte vectors of inputs that go with 16
/// bytes of weights; `planes`: in so many arrays they lie, vector v in plane v, or in one array as they come.
/// `add(sums, upper, lower, x)` adds the products of 16 bytes of rows lane / 4 and lane / 4 + 8 with what belongs to them of a token's inputs;
/// with the E8M0 codes of the two rows for formats that have them. The sums are 1 / `correction` of what they should be.
template <class Format>
struct fragment;

template <dtype Type>
struct fragment_of_halves {
    static constexpr dtype type = Type;
    static constexpr std::uint32_t vectors = 1;
    static constexpr std::uint32_t planes = 1;
    static constexpr float correction = 1.0f;

    __device__ static void add(tile_sums& sums, const uint4& upper, const uint4& lower, const uint4 (&x)[1]) {
        multiply_add<Type>(sums, upper.x, lower.x, upper.y, lower.y, x[0].x, x[0].y);
        multiply_add<Type>(sums, upper.z, lower.z, upper.w, lower.w, x[0].z, x[0].w);
    }
};

template <>
struct fragment<format::bf16> : fragment_of_halves<dtype::bf16> {};

template <>
struct fragment<format::f16> : fragment_of_halves<dtype::f16> {};

/// Two E4M3 become two f16 in one instruction, exactly; two bf16 take several. So the inputs are f16, too: x / s, where s, for 128 inputs of a
/// token, is the power of two that puts the largest between 128 and 256. Inputs of more than its 2^21th part are exact.
template <>
struct fragment<format::fp8_block128> {
    static constexpr dtype type = dtype::bf16;
    static constexpr std::uint32_t vectors = 2;
    static constexpr std::uint32_t planes = 2;
    static constexpr float correction = 1.0f;

    /// Bytes 0 and 1, 2 and 3 of a word.
    __device__ static void widen(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
        NV_IF_ELSE_TARGET(NV_PROVIDES_SM_89,
                          (asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h;\n}"
                               : "=r"(low), "=r"(high)
                               : "r"(word));),
                          (float f[4]; e4m3_to_floats(word & 0xffffu, f[0], f[1]); e4m3_to_floats(word >> 16, f[2], f[3]);
                           low = encode_f16(f[0]) | static_cast<std::uint32_t>(encode_f16(f[1])) << 16;
                           high = encode_f16(f[2]) | static_cast<std::uint32_t>(encode_f16(f[3])) << 16;))
    }

    __device__ static void add_word(tile_sums& sums, std::uint32_t upper, std::uint32_t lower, std::uint32_t x01, std::uint32_t x23) {
        std::uint32_t a[4];
        widen(upper, a[0], a[2]);
        widen(lower, a[1], a[3]);
        multiply_add<dtype::f16>(sums, a[0], a[1], a[2], a[3], x01, x23);
    }

    __device__ static void add(tile_sums& sums, const uint4& upper, const uint4& lower, const uint4 (&x)[2]) {
        add_word(sums, upper.x, lower.x, x[0].x, x[0].y);
        add_word(sums, upper.y, lower.y, x[0].z, x[0].w);
        add_word(sums, upper.z, lower.z, x[1].x, x[1].y);
        add_word(sums, upper.w, lower.w, x[1].z, x[1].w);
    }
};

/// Codes of E2M1 become bf16 by moving their bits: those are 2^-126 of the value, subnormals too. One product with a power of two puts the
/// group's E8M0 scale in. That power is kept 2^32 too small, so that scales up to 2^33 have one; above, the products are NaN.
template <>
struct fragment<format::mxfp4> {
    static constexpr dtype type = dtype::bf16;
    static constexpr std::uint32_t vectors = 4;
    static constexpr std::uint32_t planes = 1;
    static constexpr float correction = 4294967296.0f;

    /// 2^(code - 127) * 2^126 / 2^32, twice.
    __device__ static std::uint32_t power(std::uint32_t code) {
        const std::uint32_t bits = code <= 160 ? (code + 94) << 7 : 0x7fc0u;
        return bits | bits << 16;
    }

    __device__ static std::uint32_t times(std::uint32_t pair, std::uint32_t factor) {
        std::uint32_t product;
        NV_IF_ELSE_TARGET(NV_PROVIDES_SM_90,
                          (asm("mul.rn.bf16x2 %0, %1, %2;"
                               : "=r"(product)
                               : "r"(pair), "r"(factor));),
                          (asm("{\n .reg .b32 z;\n mov.b32 z, 0x80008000;\n fma.rn.bf16x2 %0, %1, %2, z;\n}"
                               : "=r"(product)
                               : "r"(pair), "r"(factor));))
        return product;
    }

    /// Codes I and I + 4 of a word.
    template <int I>
    __device__ static std::uint32_t widen(std::uint32_t word, std::uint32_t factor) {
        constexpr std::uint32_t magnitude = 0x01c001c0u;
        const std::uint32_t moved = I == 0 ? word << 6 : I == 1 ? word << 2 : I == 2 ? word >> 2 : word >> 6;
        return times((moved & magnitude) | (word << (12 - 4 * I) & 0x80008000u), factor);
    }

    __device__ static void add(tile_sums& sums, const uint4& upper, const uint4& lower, const uint4 (&x)[4], std::uint32_t upper_code,
                               std::uint32_t lower_code) {
        const std::uint32_t high = power(upper_code);
        const std::uint32_t low = power(lower_code);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const std::uint32_t a = word_of(upper, i);
            const std::uint32_t b = word_of(lower, i);
            multiply_add<dtype::bf16>(sums, widen<0>(a, high), widen<0>(b, low), widen<1>(a, high), widen<1>(b, low),
                                      __byte_perm(x[i].x, x[i].z, 0x5410), __byte_perm(x[i].x, x[i].z, 0x7632));
            multiply_add<dtype::bf16>(sums, widen<2>(a, high), widen<2>(b, low), widen<3>(a, high), widen<3>(b, low),
                                      __byte_perm(x[i].y, x[i].w, 0x5410), __byte_perm(x[i].y, x[i].w, 0x7632));
        }
    }
};

/// Scales 128 inputs, four a lane, of which `count` exist. Called by one warp. Of 16 inputs each, the first eight go to `first`, the others to
/// `second`. @param x bf16, at a multiple of 8 bytes @param first, second f16, at multiples of 16 bytes
__device__ inline void scale_block(const std::uint16_t* x, std::uint32_t count, std::byte* first, std::byte* second, float* scale) {
    const std::uint32_t lane = threadIdx.x % 32;
    const bool present = lane * 4 < count;
    const uint2 four = present ? __ldcg(reinterpret_cast<const uint2*>(x) + lane) : uint2{0, 0};
    const float value[4] = {__uint_as_float(four.x << 16), __uint_as_float(four.x & 0xffff0000u), __uint_as_float(four.y << 16),
                            __uint_as_float(four.y & 0xffff0000u)};
    // As bits, so that a NaN or an infinity is the largest.
    std::uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        most = larger(most, __float_as_uint(value[i]) & 0x7fffffffu);
    }
    most = __reduce_max_sync(0xffffffffu, most);
    const std::uint32_t exponent = larger<std::uint32_t>(most >> 23, 16);  // zeros and the tiniest: a scale that has an inverse
    const bool finite = exponent < 255;
    const float s = finite ? __uint_as_float((exponent - 7) << 23) : __int_as_float(0x7fc00000);
    const float inverse = __uint_as_float((261 - smaller<std::uint32_t>(exponent, 254)) << 23);
    if (present) {
        uint2 halves;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves.x) : "f"(value[1] * inverse), "f"(value[0] * inverse));
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves.y) : "f"(value[3] * inverse), "f"(value[2] * inverse));
        *reinterpret_cast<uint2*>((lane % 4 < 2 ? first : second) + lane / 4 * 16 + lane % 2 * 8) = halves;
    }
    if (lane == 0) {
        *scale = s;
    }
}

}  // namespace penstock::inline v0_1::detail

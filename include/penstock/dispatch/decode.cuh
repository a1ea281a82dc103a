#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/decode.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/decode.hpp>
#include <penstock/dispatch/detail/warp.cuh>
#include <penstock/model/weight_format.hpp>

#include <nv/target>

#include <cstdint>

/// Stored weights to float32, 16 bytes at a time, in registers. Values are those of decode.hpp.

namespace penstock::inline v0_1::detail {

/// 16 bytes of weights, which pass the L1 cache by: each is read once, and the cache is for what is read again. Stays where it is written,
/// so that loads can be in flight over a barrier.
__device__ inline uint4 load_weights(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

/// Word `i` of a vector, for constant `i`.
__device__ inline std::uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

/// Two f16 in one word.
__device__ inline void halves_to_floats(std::uint32_t pair, float& low, float& high) {
    asm("{\n .reg .f16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(pair));
}

/// Two E4M3 in the low half of `pair`.
__device__ inline void e4m3_to_floats(std::uint32_t pair, float& low, float& high) {
    NV_IF_ELSE_TARGET(NV_PROVIDES_SM_89,
                      (std::uint32_t halves; asm("{\n .reg .b16 p;\n cvt.u16.u32 p, %1;\n cvt.rn.f16x2.e4m3x2 %0, p;\n}"
                                                 : "=r"(halves)
                                                 : "r"(pair));
                       halves_to_floats(halves, low, high);),
                      (const std::uint32_t spread = __byte_perm(pair, 0, 0x1404);  // each byte on top of a half
                       // The exponent's bias is 7, f16's is 15, so the f16 read is 2^-8 of the value; 480 would be the code of NaN.
                       halves_to_floats((spread >> 1 & 0x3f803f80u) | (spread & 0x80008000u), low, high); low *= 256.0f; high *= 256.0f;
                       low = ::fabsf(low) == 480.0f ? __int_as_float(0x7fc00000) : low;
                       high = ::fabsf(high) == 480.0f ? __int_as_float(0x7fc00000) : high;))
}

/// decoder<Format>: `element` is what one weight is loaded as (mxfp4: two of them), `per_vector` the weights in 16 bytes,
/// `quad<Q>(v, out)` decodes weights 4 Q to 4 Q + 3 of a vector without their scale, times 1 / `correction`.
/// `scaled`: the weights of a vector share one scale, a float (fp8) or an E8M0 byte (mxfp4).
template <class Format>
struct decoder;

template <>
struct decoder<format::f32> {
    using element = std::uint32_t;
    static constexpr int per_vector = 4;
    static constexpr bool scaled = false;
    static constexpr float correction = 1.0f;

    template <int Q>
    __device__ static void quad(const uint4& v, float (&out)[4]) {
        static_assert(Q == 0);
        out[0] = __uint_as_float(v.x);
        out[1] = __uint_as_float(v.y);
        out[2] = __uint_as_float(v.z);
        out[3] = __uint_as_float(v.w);
    }

    __device__ static float one(element e) { return __uint_as_float(e); }
};

template <>
struct decoder<format::bf16> {
    using element = std::uint16_t;
    static constexpr int per_vector = 8;
    static constexpr bool scaled = false;
    static constexpr float correction = 1.0f;

    template <int Q>
    __device__ static void quad(const uint4& v, float (&out)[4]) {
        for (int i = 0; i < 2; ++i) {
            const std::uint32_t w = word_of(v, 2 * Q + i);
            out[2 * i] = __uint_as_float(w << 16);
            out[2 * i + 1] = __uint_as_float(w & 0xffff0000u);
        }
    }

    __device__ static float one(element e) { return __uint_as_float(static_cast<std::uint32_t>(e) << 16); }
};

template <>
struct decoder<format::f16> {
    using element = std::uint16_t;
    static constexpr int per_vector = 8;
    static constexpr bool scaled = false;
    static constexpr float correction = 1.0f;

    template <int Q>
    __device__ static void quad(const uint4& v, float (&out)[4]) {
        halves_to_floats(word_of(v, 2 * Q), out[0], out[1]);
        halves_to_floats(word_of(v, 2 * Q + 1), out[2], out[3]);
    }

    __device__ static float one(element e) {
        float low;
        float high;
        halves_to_floats(e, low, high);
        return low;
    }
};

template <>
struct decoder<format::fp8_block128> {
    using element = std::uint8_t;
    using scale = float;
    static constexpr int per_vector = 16;
    static constexpr bool scaled = true;
    static constexpr float correction = 1.0f;

    template <int Q>
    __device__ static void quad(const uint4& v, float (&out)[4]) {
        const std::uint32_t w = word_of(v, Q);
        e4m3_to_floats(w & 0xffffu, out[0], out[1]);
        e4m3_to_floats(w >> 16, out[2], out[3]);
    }

    __device__ static float one(element e) {
        float low;
        float high;
        e4m3_to_floats(e, low, high);
        return low;
    }

    /// Number of the scale of the weights of row `r` that begin with column `c`.
    __device__ static std::uint64_t scale_index(const matrix_layout& m, std::uint64_t r, std::uint32_t c) {
        return (r * m.scale_row_step + m.scale_row0) / 128 * m.scale_row_stride + c / 128;
    }

    __device__ static float scale_value(scale s) { return s; }
};

template <>
struct decoder<format::mxfp4> {
    using element = std::uint8_t;
    using scale = std::uint8_t;
    static constexpr int per_vector = 32;
    static constexpr bool scaled = true;
    static constexpr float correction = 16384.0f;  // a code read as the top of an f16 is 2^-14 of its value, subnormals too

    template <int Q>
    __device__ static void quad(const uint4& v, float (&out)[4]) {
        const std::uint32_t w = word_of(v, Q / 2);
        // Nibble i of both halves of the word moves to the sign and to the low exponent and high mantissa bits of two f16.
        const std::uint32_t pair[4] = {(w << 12 & 0x80008000u) | (w << 9 & 0x0e000e00u), (w << 8 & 0x80008000u) | (w << 5 & 0x0e000e00u),
                                       (w << 4 & 0x80008000u) | (w << 1 & 0x0e000e00u), (w & 0x80008000u) | (w >> 3 & 0x0e000e00u)};
        for (int i = 0; i < 4; ++i) {
            float low;
            float high;
            halves_to_floats(pair[i], low, high);
            out[i] = Q % 2 == 0 ? low : high;
        }
    }

    __device__ static std::uint64_t scale_index(const matrix_layout& m, std::uint64_t r, std::uint32_t c) {
        return (r * m.scale_row_step + m.scale_row0) * m.scale_row_stride + c / 32;
    }

    __device__ static float scale_value(scale s) { return decode_e8m0(s); }
};

/// Weight number `index` of an array, times its scale's correction: the loads are of single elements, which are aligned.
template <class Format>
__device__ float load_weight(const std::byte* array, std::uint64_t index) {
    using element = typename decoder<Format>::element;
    if constexpr (Format::bits == 4) {
        const std::uint8_t both = __ldg(reinterpret_cast<const std::uint8_t*>(array) + index / 2);
        return decode_e2m1(index % 2 == 0 ? both & 15u : both >> 4);
    } else {
        return decoder<Format>::one(__ldg(reinterpret_cast<const element*>(array) + index));
    }
}

/// Scale of weight (r, c); 1 for formats without.
template <class Format>
__device__ float load_scale(const std::byte* record, const matrix_layout& m, std::uint64_t r, std::uint32_t c) {
    using d = decoder<Format>;
    if constexpr (d::scaled) {
        return d::scale_value(__ldg(reinterpret_cast<const typename d::scale*>(record + m.scale_offset) + d::scale_index(m, r, c)));
    } else {
        return 1.0f;
    }
}

}  // namespace penstock::inline v0_1::detail

#pragma once

#include <penstock/dispatch/detail/host_kernels.hpp>

#if defined(__x86_64__)

#include <immintrin.h>

#include <utility>

/// The loops of host_kernels.hpp for AVX-512 F and BW. Each function names its instruction set, so that no build flag is
/// needed and the choice is made on the machine; that is also why the loops are written again for each set: the attribute takes no
/// parameter.

namespace penstock::inline v0_1 {
namespace detail::avx512 {

using lanes = __m512;
inline constexpr std::uint32_t half = 16;
inline constexpr std::uint32_t step = 32;  ///< columns of a pair

/// Columns i to i + 15 and i + 16 to i + 31.
struct pair {
    lanes low;
    lanes high;
};

[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline lanes zero_lanes() { return _mm512_setzero_ps(); }
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline lanes broadcast(float value) { return _mm512_set1_ps(value); }
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline lanes load_lanes(const float* from) {
    return _mm512_loadu_ps(from);
}
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline void store_lanes(float* to, lanes v) {
    _mm512_storeu_ps(to, v);
}
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline lanes multiply(lanes a, lanes b) {
    return _mm512_mul_ps(a, b);
}
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline lanes fma(lanes a, lanes b, lanes sum) {
    return _mm512_fmadd_ps(a, b, sum);
}

// The forms with a mask of all ones are those whose unmasked kin GCC 12 builds from an uninitialised value, and warns of it.
inline constexpr __mmask16 all_lanes = 0xffff;

[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline lanes load_even_bf16(const std::byte* data) {
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(all_lanes, _mm512_loadu_si512(data), 16));
}

template <int Which>
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline __m256i half_of(__m512i v) {
    return _mm512_maskz_extracti64x4_epi64(0xf, v, Which);
}

/// The sum of all lanes, in a fixed order.
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline float total(pair sums) {
    const __m512i both = _mm512_castps_si512(_mm512_add_ps(sums.low, sums.high));
    const __m256 eight = _mm256_add_ps(_mm256_castsi256_ps(half_of<0>(both)), _mm256_castsi256_ps(half_of<1>(both)));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/// Sixteen bf16.
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline lanes widen_bf16(const __m256i* from) {
    const __m512i bits = _mm512_maskz_cvtepu16_epi32(all_lanes, _mm256_loadu_si256(from));
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(all_lanes, bits, 16));
}

/// Weights i to i + step - 1, before their scale. @pre i is a multiple of step
template <class Format>
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline pair load(const std::byte* data, std::uint32_t i) {
    if constexpr (Format::kind == weight_kind::f32) {
        const auto* p = data + 4 * std::uint64_t{i};
        return {_mm512_castsi512_ps(_mm512_loadu_si512(p)), _mm512_castsi512_ps(_mm512_loadu_si512(p + 64))};
    } else if constexpr (Format::kind == weight_kind::bf16) {
        const auto* p = reinterpret_cast<const __m256i*>(data + 2 * std::uint64_t{i});
        return {widen_bf16(p), widen_bf16(p + 1)};
    } else if constexpr (Format::kind == weight_kind::f16) {
        const auto* p = reinterpret_cast<const __m256i*>(data + 2 * std::uint64_t{i});
        return {_mm512_maskz_cvtph_ps(all_lanes, _mm256_loadu_si256(p)), _mm512_maskz_cvtph_ps(all_lanes, _mm256_loadu_si256(p + 1))};
    } else if constexpr (Format::kind == weight_kind::fp8_block128) {
        // E4M3 moved into an f16 is the value / 256, subnormals too; block_factor makes up for it. The NaN pattern becomes one of f16.
        const __m512i v = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i)));
        const __m512i magnitude = _mm512_and_si512(v, _mm512_set1_epi16(0x7f));
        const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(v, _mm512_set1_epi16(0x80)), 8);
        const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
        const __m512i number = _mm512_mask_blend_epi16(nan, _mm512_slli_epi16(magnitude, 7), _mm512_set1_epi16(0x7e00));
        const __m512i f16 = _mm512_or_si512(number, sign);
        return {_mm512_maskz_cvtph_ps(all_lanes, half_of<0>(f16)), _mm512_maskz_cvtph_ps(all_lanes, half_of<1>(f16))};
    } else {
        // The permutation reads the low four bits of an index, so neighbours' bits above them need no mask.
        const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i / 2));
        const __m128i odd = _mm_srli_epi16(bytes, 4);
        const __m512i first = _mm512_maskz_cvtepu8_epi32(all_lanes, _mm_unpacklo_epi8(bytes, odd));
        const __m512i second = _mm512_maskz_cvtepu8_epi32(all_lanes, _mm_unpackhi_epi8(bytes, odd));
        return {_mm512_maskz_permutexvar_ps(all_lanes, first, values), _mm512_maskz_permutexvar_ps(all_lanes, second, values)};
    }
}

[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline pair zero() { return {zero_lanes(), zero_lanes()}; }

[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline pair load_floats(const float* from) {
    return {load_lanes(from), load_lanes(from + half)};
}

[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline pair multiply_add(pair a, pair b, pair sum) {
    return {fma(a.low, b.low, sum.low), fma(a.high, b.high, sum.high)};
}

/// The last columns, fewer than `step`, and zeros after them.
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline pair load_tail(const float* from, std::uint32_t count) {
    float padded[step]{};
    for (std::uint32_t i = 0; i < count; ++i) {
        padded[i] = from[i];
    }
    return load_floats(padded);
}

template <class Format>
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline pair load_stored_tail(const stored_run& run,
                                                                                                   std::uint32_t first,
                                                                                                   std::uint32_t count) {
    float padded[step]{};
    for (std::uint32_t i = 0; i < count; ++i) {
        padded[i] = weight_of<Format>(run, first + i);
    }
    return load_floats(padded);
}

/// Factor of a scale block, for what `load` returns; not used by formats without scales.
template <class Format>
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline lanes block_factor(const stored_run& run,
                                                                                                std::uint32_t column) {
    if constexpr (Format::kind == weight_kind::fp8_block128) {
        return broadcast(256.0f * load_unaligned<float>(run.scales, column / 128));
    } else if constexpr (Format::kind == weight_kind::mxfp4) {
        return broadcast(decode_e8m0(static_cast<std::uint8_t>(run.scales[column / 32])));
    } else {
        return zero_lanes();
    }
}

/// `load`, scaled where the format has scales.
template <class Format>
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline pair load_scaled(const std::byte* data, std::uint32_t i,
                                                                                              lanes factor) {
    pair w = load<Format>(data, i);
    if constexpr (block_columns<Format> != block_columns<void>) {
        w = {multiply(w.low, factor), multiply(w.high, factor)};
    }
    return w;
}

template <class Format>
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c")]] void decode(const stored_run& run, std::uint32_t n, float* out) {
    const std::uint32_t whole = n / step * step;
    for (std::uint32_t i = 0; i < whole;) {
        const std::uint32_t end = smaller(i + block_columns<Format>, whole);
        const lanes factor = block_factor<Format>(run, i);
        for (; i < end; i += step) {
            const pair w = load_scaled<Format>(run.data, i, factor);
            store_lanes(out + i, w.low);
            store_lanes(out + i + half, w.high);
        }
    }
    for (std::uint32_t i = whole; i < n; ++i) {
        out[i] = weight_of<Format>(run, i);
    }
}

// Indices come as packs where arrays should become registers: compilers do not unroll a loop at -O2.

/// Asks for the bytes `distance` after `from`, which need not exist.
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c"), gnu::always_inline]] inline void ask_for(const std::byte* from, std::uintptr_t distance) {
    _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(from) + distance), _MM_HINT_T0);
}

template <class Format, std::size_t... R>
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c")]] void dot_rows_of(std::index_sequence<R...>, const stored_run* runs, std::uint32_t n,
                                                                   const float* x, float* out) {
    const std::uint32_t whole = n / step * step;
    const std::byte* const data[] = {runs[R].data...};
    // The rows that the next call will want: a row is too short for the hardware to find its stride in time.
    const auto ahead = sizeof...(R) *
                       (reinterpret_cast<std::uintptr_t>(data[sizeof...(R) - 1]) - reinterpret_cast<std::uintptr_t>(data[0])) /
                       larger<std::size_t>(sizeof...(R) - 1, 1);
    pair sums[] = {(static_cast<void>(R), zero())...};
    for (std::uint32_t i = 0; i < whole;) {
        const std::uint32_t end = smaller(i + block_columns<Format>, whole);
        const lanes factor[] = {block_factor<Format>(runs[R], i)...};
        for (; i < end; i += step) {
            const pair input = load_floats(x + i);
            if constexpr (sizeof...(R) > 1) {
                (ask_for(data[R] + std::uint64_t{i} * Format::bits / 8, ahead), ...);
            }
            ((sums[R] = multiply_add(load_scaled<Format>(data[R], i, factor[R]), input, sums[R])), ...);
        }
    }
    if (whole < n) {
        const pair input = load_tail(x + whole, n - whole);
        ((sums[R] = multiply_add(load_stored_tail<Format>(runs[R], whole, n - whole), input, sums[R])), ...);
    }
    ((out[R] = total(sums[R])), ...);
}

template <class Format, std::size_t Rows>
void dot_rows(const stored_run* runs, std::uint32_t n, const float* x, float* out) {
    dot_rows_of<Format>(std::make_index_sequence<Rows>(), runs, n, x, out);
}

/// `P` counts the pairs of a row and a token, rows first.
template <std::size_t... R, std::size_t... P>
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c")]] void dot_tile_of(std::index_sequence<R...>, std::index_sequence<P...>, const float* w,
                                                                   std::size_t w_stride, const float* const* x, std::uint32_t n, float* out,
                                                                   std::size_t out_stride) {
    constexpr std::size_t rows = sizeof...(R);
    const std::uint32_t whole = n / step * step;
    pair sums[] = {(static_cast<void>(P), zero())...};
    for (std::uint32_t i = 0; i < whole; i += step) {
        const pair weights[] = {load_floats(w + R * w_stride + i)...};
        ((sums[P] = multiply_add(weights[P % rows], load_floats(x[P / rows] + i), sums[P])), ...);
    }
    if (whole < n) {
        const pair weights[] = {load_tail(w + R * w_stride + whole, n - whole)...};
        ((sums[P] = multiply_add(weights[P % rows], load_tail(x[P / rows] + whole, n - whole), sums[P])), ...);
    }
    ((out[P / rows * out_stride + P % rows] = total(sums[P])), ...);
}

template <std::size_t Rows, std::size_t Tokens>
void dot_some(const float* w, std::size_t w_stride, const float* const* x, std::uint32_t tokens, std::uint32_t n, float* out,
              std::size_t out_stride) {
    std::uint32_t t = 0;
    for (; t + Tokens <= tokens; t += Tokens) {
        dot_tile_of(std::make_index_sequence<Rows>(), std::make_index_sequence<Rows * Tokens>(), w, w_stride, x + t, n,
                    out + t * out_stride, out_stride);
    }
    for (; t < tokens; ++t) {
        dot_tile_of(std::make_index_sequence<Rows>(), std::make_index_sequence<Rows>(), w, w_stride, x + t, n, out + t * out_stride,
                    out_stride);
    }
}

inline void dot_tile(const float* w, std::size_t w_stride, std::uint32_t rows, const float* const* x, std::uint32_t tokens, std::uint32_t n,
                     float* out, std::size_t out_stride) {
    std::uint32_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        dot_some<4, 2>(w + r * w_stride, w_stride, x, tokens, n, out + r, out_stride);
    }
    for (; r < rows; ++r) {
        dot_some<1, 4>(w + r * w_stride, w_stride, x, tokens, n, out + r, out_stride);
    }
}

template <std::size_t... C>
[[gnu::target("avx512f,avx512bw,avx2,fma,f16c")]] void add_columns_of(std::index_sequence<C...>, const float* w, std::size_t w_stride,
                                                                      const float* factors, std::uint32_t n, float* sums) {
    const lanes factor[] = {broadcast(factors[C])...};
    std::uint32_t i = 0;
    for (; i + half <= n; i += half) {
        lanes s = load_lanes(sums + i);
        ((s = fma(load_lanes(w + C * w_stride + i), factor[C], s)), ...);
        store_lanes(sums + i, s);
    }
    for (; i < n; ++i) {
        float s = sums[i];
        ((s = __builtin_fmaf(w[C * w_stride + i], factors[C], s)), ...);
        sums[i] = s;
    }
}

inline void add_columns(const float* w, std::size_t w_stride, const float* factors, std::uint32_t columns, std::uint32_t n, float* sums) {
    if (columns == 4) {
        add_columns_of(std::make_index_sequence<4>(), w, w_stride, factors, n, sums);
        return;
    }
    for (std::uint32_t c = 0; c < columns; ++c) {
        add_columns_of(std::make_index_sequence<1>(), w + c * w_stride, w_stride, factors + c, n, sums);
    }
}

[[gnu::target("avx512f,avx512bw,avx2,fma,f16c")]] inline void decode_every_second_bf16(const std::byte* data, std::uint32_t n, float* out) {
    std::uint32_t i = 0;
    for (; i + half < n; i += half) {  // not to n itself: the last load would reach past the last element
        store_lanes(out + i, load_even_bf16(data + 4 * std::uint64_t{i}));
    }
    portable::decode_every_second_bf16(data + 4 * std::uint64_t{i}, n - i, out + i);
}

template <class... Formats>
constexpr host_kernels table() {
    return {{decode<Formats>...}, {dot_rows<Formats, 1>...}, {dot_rows<Formats, 4>...}, dot_tile, add_columns, decode_every_second_bf16};
}

inline constexpr host_kernels kernels = table<format::f32, format::bf16, format::f16, format::fp8_block128, format::mxfp4>();

}  // namespace detail::avx512
}  // namespace penstock::inline v0_1

#endif  // __x86_64__

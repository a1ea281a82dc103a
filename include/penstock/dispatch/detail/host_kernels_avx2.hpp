#pragma once

#include <penstock/dispatch/detail/host_kernels.hpp>

#if defined(__x86_64__)

#include <immintrin.h>

/// The loops of host_kernels.hpp for AVX2 with FMA and F16C. Each function names its instruction set, so that no build flag is needed and
/// the choice is made on the machine; that is also why the loops are written again for each set: the attribute takes no parameter.

namespace penstock::inline v0_1 {
namespace detail::avx2 {

inline constexpr std::uint32_t step = 16;  ///< columns that two vectors hold

/// `step` weights, columns i to i + 15, before their scale.
struct pair {
    __m256 low;
    __m256 high;
};

template <class Format>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline pair load(const std::byte* data, std::uint32_t i) {
    if constexpr (Format::kind == weight_kind::f32) {
        const auto* p = data + 4 * std::uint64_t{i};
        return {_mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
                _mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)))};
    } else if constexpr (Format::kind == weight_kind::bf16) {
        const auto* p = reinterpret_cast<const __m128i*>(data + 2 * std::uint64_t{i});
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p + 1)), 16))};
    } else if constexpr (Format::kind == weight_kind::f16) {
        const auto* p = reinterpret_cast<const __m128i*>(data + 2 * std::uint64_t{i});
        return {_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p + 1))};
    } else if constexpr (Format::kind == weight_kind::fp8_block128) {
        // E4M3 moved into an f16 is the value / 256, subnormals too; `scale` makes up for it. The NaN pattern becomes one of f16.
        const __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i)));
        const __m256i magnitude = _mm256_and_si256(v, _mm256_set1_epi16(0x7f));
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x80)), 8);
        const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
        const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign), nan);
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
    } else {
        // Only the low four bits of an index count, so neighbours' bits above them need no mask.
        const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
        const __m256i sign_bit = _mm256_set1_epi32(static_cast<int>(0x80000000u));
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data + i / 2));
        const __m128i nibbles = _mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4));
        const __m256i first = _mm256_cvtepu8_epi32(nibbles);
        const __m256i second = _mm256_cvtepu8_epi32(_mm_srli_si128(nibbles, 8));
        const __m256i first_sign = _mm256_and_si256(_mm256_slli_epi32(first, 28), sign_bit);
        const __m256i second_sign = _mm256_and_si256(_mm256_slli_epi32(second, 28), sign_bit);
        return {_mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, first), _mm256_castsi256_ps(first_sign)),
                _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, second), _mm256_castsi256_ps(second_sign))};
    }
}

/// Scale of a block, for what `load` returns.
template <class Format>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline __m256 scale(const std::byte* scales, std::uint32_t block) {
    if constexpr (Format::kind == weight_kind::fp8_block128) {
        return _mm256_set1_ps(256.0f * load_unaligned<float>(scales, block));
    } else {
        return _mm256_set1_ps(decode_e8m0(static_cast<std::uint8_t>(scales[block])));
    }
}

/// `load`, scaled where the format has scales.
template <class Format>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline pair load_scaled(const std::byte* data, std::uint32_t i, __m256 factor) {
    pair w = load<Format>(data, i);
    if constexpr (block_columns<Format> != block_columns<void>) {
        w.low = _mm256_mul_ps(w.low, factor);
        w.high = _mm256_mul_ps(w.high, factor);
    }
    return w;
}

[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline float sum(__m256 low, __m256 high) {
    const __m256 both = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <class Format>
[[gnu::target("avx2,fma,f16c")]] void decode(const stored_run& run, std::uint32_t n, float* out) {
    const std::uint32_t whole = n / step * step;
    __m256 factor = _mm256_setzero_ps();
    for (std::uint32_t begin = 0; begin < whole;) {
        const std::uint32_t end = smaller(begin + block_columns<Format>, whole);
        if constexpr (block_columns<Format> != block_columns<void>) {
            factor = scale<Format>(run.scales, begin / block_columns<Format>);
        }
        for (; begin < end; begin += step) {
            const pair w = load_scaled<Format>(run.data, begin, factor);
            _mm256_storeu_ps(out + begin, w.low);
            _mm256_storeu_ps(out + begin + 8, w.high);
        }
    }
    for (std::uint32_t i = whole; i < n; ++i) {
        out[i] = weight_of<Format>(run, i);
    }
}

template <class Format, std::uint32_t Rows>
[[gnu::target("avx2,fma,f16c")]] void dot_rows(const stored_run* runs, std::uint32_t n, const float* x, float* out) {
    const std::uint32_t whole = n / step * step;
    pair sums[Rows];
    __m256 factor[Rows];
    for (std::uint32_t r = 0; r < Rows; ++r) {
        sums[r] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        factor[r] = _mm256_setzero_ps();
    }
    for (std::uint32_t begin = 0; begin < whole;) {
        const std::uint32_t end = smaller(begin + block_columns<Format>, whole);
        if constexpr (block_columns<Format> != block_columns<void>) {
            for (std::uint32_t r = 0; r < Rows; ++r) {
                factor[r] = scale<Format>(runs[r].scales, begin / block_columns<Format>);
            }
        }
        for (; begin < end; begin += step) {
            const __m256 low = _mm256_loadu_ps(x + begin);
            const __m256 high = _mm256_loadu_ps(x + begin + 8);
            for (std::uint32_t r = 0; r < Rows; ++r) {
                const pair w = load_scaled<Format>(runs[r].data, begin, factor[r]);
                sums[r].low = _mm256_fmadd_ps(w.low, low, sums[r].low);
                sums[r].high = _mm256_fmadd_ps(w.high, high, sums[r].high);
            }
        }
    }
    if (whole < n) {
        float padded[step]{};
        for (std::uint32_t i = whole; i < n; ++i) {
            padded[i - whole] = x[i];
        }
        for (std::uint32_t r = 0; r < Rows; ++r) {
            float w[step]{};
            for (std::uint32_t i = whole; i < n; ++i) {
                w[i - whole] = weight_of<Format>(runs[r], i);
            }
            sums[r].low = _mm256_fmadd_ps(_mm256_loadu_ps(w), _mm256_loadu_ps(padded), sums[r].low);
            sums[r].high = _mm256_fmadd_ps(_mm256_loadu_ps(w + 8), _mm256_loadu_ps(padded + 8), sums[r].high);
        }
    }
    for (std::uint32_t r = 0; r < Rows; ++r) {
        out[r] = sum(sums[r].low, sums[r].high);
    }
}

template <std::uint32_t Tokens>
[[gnu::target("avx2,fma,f16c")]] void dot_some_tokens(const float* w, const float* const* x, std::uint32_t n, float* out) {
    const std::uint32_t whole = n / step * step;
    pair sums[Tokens];
    for (std::uint32_t t = 0; t < Tokens; ++t) {
        sums[t] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    }
    for (std::uint32_t i = 0; i < whole; i += step) {
        const __m256 low = _mm256_loadu_ps(w + i);
        const __m256 high = _mm256_loadu_ps(w + i + 8);
        for (std::uint32_t t = 0; t < Tokens; ++t) {
            sums[t].low = _mm256_fmadd_ps(low, _mm256_loadu_ps(x[t] + i), sums[t].low);
            sums[t].high = _mm256_fmadd_ps(high, _mm256_loadu_ps(x[t] + i + 8), sums[t].high);
        }
    }
    if (whole < n) {
        for (std::uint32_t t = 0; t < Tokens; ++t) {
            float tail[step]{};
            float padded[step]{};
            for (std::uint32_t i = whole; i < n; ++i) {
                tail[i - whole] = w[i];
                padded[i - whole] = x[t][i];
            }
            sums[t].low = _mm256_fmadd_ps(_mm256_loadu_ps(tail), _mm256_loadu_ps(padded), sums[t].low);
            sums[t].high = _mm256_fmadd_ps(_mm256_loadu_ps(tail + 8), _mm256_loadu_ps(padded + 8), sums[t].high);
        }
    }
    for (std::uint32_t t = 0; t < Tokens; ++t) {
        out[t] = sum(sums[t].low, sums[t].high);
    }
}

inline void dot_tokens(const float* w, const float* const* x, std::uint32_t tokens, std::uint32_t n, float* out) {
    std::uint32_t t = 0;
    for (; t + 4 <= tokens; t += 4) {
        dot_some_tokens<4>(w, x + t, n, out + t);
    }
    for (; t + 2 <= tokens; t += 2) {
        dot_some_tokens<2>(w, x + t, n, out + t);
    }
    if (t < tokens) {
        dot_some_tokens<1>(w, x + t, n, out + t);
    }
}

template <std::uint32_t Columns>
[[gnu::target("avx2,fma,f16c")]] void add_some_columns(const float* w, std::size_t stride, const float* factors, std::uint32_t n,
                                                       float* sums) {
    __m256 factor[Columns];
    for (std::uint32_t c = 0; c < Columns; ++c) {
        factor[c] = _mm256_set1_ps(factors[c]);
    }
    std::uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 s = _mm256_loadu_ps(sums + i);
        for (std::uint32_t c = 0; c < Columns; ++c) {
            s = _mm256_fmadd_ps(_mm256_loadu_ps(w + c * stride + i), factor[c], s);
        }
        _mm256_storeu_ps(sums + i, s);
    }
    for (; i < n; ++i) {
        for (std::uint32_t c = 0; c < Columns; ++c) {
            sums[i] = __builtin_fmaf(w[c * stride + i], factors[c], sums[i]);
        }
    }
}

inline void add_columns(const float* w, std::size_t stride, const float* factors, std::uint32_t columns, std::uint32_t n, float* sums) {
    if (columns == 4) {
        add_some_columns<4>(w, stride, factors, n, sums);
        return;
    }
    for (std::uint32_t c = 0; c < columns; ++c) {
        add_some_columns<1>(w + c * stride, stride, factors + c, n, sums);
    }
}

[[gnu::target("avx2,fma,f16c")]] inline void decode_every_second_bf16(const std::byte* data, std::uint32_t n, float* out) {
    std::uint32_t i = 0;
    for (; i + 8 < n; i += 8) {  // not to n itself: the last load would reach past the last element
        const __m256i two = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 4 * std::uint64_t{i}));
        _mm256_storeu_ps(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(two, 16)));
    }
    portable::decode_every_second_bf16(data + 4 * std::uint64_t{i}, n - i, out + i);
}

template <class... Formats>
constexpr host_kernels table() {
    return {{decode<Formats>...}, {dot_rows<Formats, 1>...}, {dot_rows<Formats, 4>...}, dot_tokens, add_columns, decode_every_second_bf16};
}

inline constexpr host_kernels kernels = table<format::f32, format::bf16, format::f16, format::fp8_block128, format::mxfp4>();

}  // namespace detail::avx2
}  // namespace penstock::inline v0_1

#endif  // __x86_64__

#pragma once

#include <penstock/dispatch/decode.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

/// The inner loops of the host executor: a table of functions for each instruction set, and the one that every machine can run.
///
/// In every table, the bits of a dot product depend on its weights and its x alone: a weight meets its x in a lane given by the column,
/// lanes are added in a fixed order, and a tail is padded with zeros. So a row gives the same bits alone or beside others, decoded first
/// or on the way.

namespace penstock::inline v0_1 {
namespace detail {

/// Consecutive weights of one matrix row (or of a column, for formats without scales), as stored. Packed formats start at a whole byte.
struct stored_run {
    const std::byte* data = nullptr;
    const std::byte* scales = nullptr;  ///< fp8_block128: the first block's float; mxfp4: the first block's E8M0 byte
};

inline constexpr std::size_t host_kinds = 5;  ///< f32, bf16, f16, fp8_block128, mxfp4: the first of weight_kind

/// Columns in one scale block; formats without scales count as one block.
template <class Format>
inline constexpr std::uint32_t block_columns = 0x80000000u;
template <>
inline constexpr std::uint32_t block_columns<format::fp8_block128> = 128;
template <>
inline constexpr std::uint32_t block_columns<format::mxfp4> = 32;

/// Weight `i` of a run.
template <class Format>
float weight_of(const stored_run& run, std::uint32_t i) noexcept {
    if constexpr (Format::kind == weight_kind::f32) {
        return load_unaligned<float>(run.data, i);
    } else if constexpr (Format::kind == weight_kind::bf16) {
        return decode_bf16(load_unaligned<std::uint16_t>(run.data, i));
    } else if constexpr (Format::kind == weight_kind::f16) {
        return decode_f16(load_unaligned<std::uint16_t>(run.data, i));
    } else if constexpr (Format::kind == weight_kind::fp8_block128) {
        return decode_e4m3(static_cast<std::uint8_t>(run.data[i])) * load_unaligned<float>(run.scales, i / 128);
    } else {
        const auto byte = static_cast<std::uint8_t>(run.data[i / 2]);
        return decode_e2m1(i % 2 == 0 ? byte & 15u : byte >> 4) * decode_e8m0(static_cast<std::uint8_t>(run.scales[i / 32]));
    }
}

struct host_kernels {
    using decode_function = void (*)(const stored_run& run, std::uint32_t n, float* out);
    using dot_function = void (*)(const stored_run* runs, std::uint32_t n, const float* x, float* out);

    /// out[i] = weight i, for i < n.
    std::array<decode_function, host_kinds> decode;
    /// out[0] = run . x
    std::array<dot_function, host_kinds> dot_one;
    /// out[r] = runs[r] . x, for r < 4
    std::array<dot_function, host_kinds> dot_four;
    /// out[t * out_stride + r] = (decoded row at w + r * w_stride) . x[t], for r < rows and t < tokens.
    void (*dot_tile)(const float* w, std::size_t w_stride, std::uint32_t rows, const float* const* x, std::uint32_t tokens, std::uint32_t n,
                     float* out, std::size_t out_stride);
    /// sums[i] += w[i] * factors[0], then += w[w_stride + i] * factors[1], and so on for `columns` columns; i < n. @pre columns <= 4
    void (*add_columns)(const float* w, std::size_t w_stride, const float* factors, std::uint32_t columns, std::uint32_t n, float* sums);
    /// out[i] = bf16 element 2 * i, for i < n.
    void (*decode_every_second_bf16)(const std::byte* data, std::uint32_t n, float* out);
};

namespace portable {

inline constexpr std::uint32_t lanes = 8;

template <class Format>
void decode(const stored_run& run, std::uint32_t n, float* out) {
    for (std::uint32_t i = 0; i < n; ++i) {
        out[i] = weight_of<Format>(run, i);
    }
}

inline float dot(const float* w, const float* x, std::uint32_t n) {
    float sum[lanes]{};
    std::uint32_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (std::uint32_t l = 0; l < lanes; ++l) {
            sum[l] += w[i + l] * x[i + l];
        }
    }
    for (; i < n; ++i) {
        sum[i % lanes] += w[i] * x[i];
    }
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

inline void dot_tile(const float* w, std::size_t w_stride, std::uint32_t rows, const float* const* x, std::uint32_t tokens, std::uint32_t n,
                     float* out, std::size_t out_stride) {
    for (std::uint32_t r = 0; r < rows; ++r) {
        for (std::uint32_t t = 0; t < tokens; ++t) {
            out[t * out_stride + r] = dot(w + r * w_stride, x[t], n);
        }
    }
}

/// Decodes piece by piece, the pieces a multiple of the lanes and of every scale block, so that the sums are those of `dot`.
template <class Format, std::uint32_t Rows>
void dot_rows(const stored_run* runs, std::uint32_t n, const float* x, float* out) {
    constexpr std::uint32_t piece = 256;
    for (std::uint32_t r = 0; r < Rows; ++r) {
        float sum[lanes]{};
        for (std::uint32_t begin = 0; begin < n; begin += piece) {
            float w[piece]{};
            float padded[piece]{};
            const std::uint32_t count = smaller(piece, n - begin);
            for (std::uint32_t i = 0; i < count; ++i) {
                w[i] = weight_of<Format>(runs[r], begin + i);
                padded[i] = x[begin + i];
            }
            for (std::uint32_t i = 0; i < count; i += lanes) {
                for (std::uint32_t l = 0; l < lanes; ++l) {
                    sum[l] += w[i + l] * padded[i + l];
                }
            }
        }
        out[r] = ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
    }
}

inline void add_columns(const float* w, std::size_t w_stride, const float* factors, std::uint32_t columns, std::uint32_t n, float* sums) {
    for (std::uint32_t c = 0; c < columns; ++c) {
        for (std::uint32_t i = 0; i < n; ++i) {
            sums[i] += w[c * w_stride + i] * factors[c];
        }
    }
}

inline void decode_every_second_bf16(const std::byte* data, std::uint32_t n, float* out) {
    for (std::uint32_t i = 0; i < n; ++i) {
        out[i] = decode_bf16(load_unaligned<std::uint16_t>(data, 2 * std::uint64_t{i}));
    }
}

template <class... Formats>
constexpr host_kernels table() {
    return {{decode<Formats>...}, {dot_rows<Formats, 1>...}, {dot_rows<Formats, 4>...}, dot_tile, add_columns, decode_every_second_bf16};
}

inline constexpr host_kernels kernels = table<format::f32, format::bf16, format::f16, format::fp8_block128, format::mxfp4>();

}  // namespace portable
}  // namespace detail
}  // namespace penstock::inline v0_1

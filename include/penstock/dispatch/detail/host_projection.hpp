#pragma once

#include <penstock/dispatch/detail/host_kernels.hpp>
#include <penstock/model/record.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

/// Some rows of matrix . x for a few tokens, whatever the matrix's strides.

namespace penstock::inline v0_1 {
namespace detail {

/// Tokens that use a weight once it is decoded.
inline constexpr std::uint32_t host_tokens = 8;

/// Rows of a column that are decoded at a time: long enough for the memory to stream, short enough for the first cache.
inline constexpr std::uint32_t host_strip = 512;

/// A worker's own memory: grows to the largest need and stays.
class host_scratch {
public:
    /// `count` floats for purpose number `which`; what they hold is not defined. Valid until the next call with the same `which`.
    [[nodiscard]] float* take(std::size_t which, std::size_t count) {
        if (parts_.size() <= which) {
            parts_.resize(which + 1);
        }
        if (parts_[which].size() < count) {
            parts_[which].resize(count);
        }
        return parts_[which].data();
    }

private:
    std::vector<std::vector<float>> parts_;
};

/// How the weights of a matrix can be walked.
enum class host_walk : std::uint8_t { rows, columns, singly };

[[nodiscard]] inline host_walk walk_of(weight_kind kind, const matrix_layout& m) noexcept {
    const bool plain = kind == weight_kind::f32 || kind == weight_kind::bf16 || kind == weight_kind::f16;
    if (m.col_stride == 1) {  // a row of packed weights must start at a whole byte
        return kind == weight_kind::mxfp4 && m.row_stride % 2 != 0 && m.rows > 1 ? host_walk::singly : host_walk::rows;
    }
    if (plain && (m.row_stride == 1 || (m.row_stride == 2 && kind == weight_kind::bf16))) {
        return host_walk::columns;
    }
    return host_walk::singly;
}

[[nodiscard]] constexpr std::uint32_t bits_of(weight_kind kind) noexcept {
    return kind == weight_kind::f32 ? 32 : kind == weight_kind::fp8_block128 ? 8 : kind == weight_kind::mxfp4 ? 4 : 16;
}

[[nodiscard]] inline stored_run run_of_row(weight_kind kind, const matrix_layout& m, const std::byte* record, std::uint32_t r) noexcept {
    stored_run run{record + m.offset + r * m.row_stride * bits_of(kind) / 8, nullptr};
    const std::uint64_t scale_row = static_cast<std::uint64_t>(r) * m.scale_row_step + m.scale_row0;
    if (kind == weight_kind::fp8_block128) {
        run.scales = record + m.scale_offset + scale_row / 128 * m.scale_row_stride * sizeof(float);
    } else if (kind == weight_kind::mxfp4) {
        run.scales = record + m.scale_offset + scale_row * m.scale_row_stride;
    }
    return run;
}

/// A matrix in a record, ready to be multiplied.
struct host_matrix {
    const host_kernels* kernels;
    weight_kind kind;
    const matrix_layout* layout;
    const std::byte* record;
};

/// out[t * stride + i] = row (first + i) . x[t], for i < rows and t < tokens. The bits of each depend on its row and its x alone.
/// @pre tokens <= host_tokens; for a matrix walked by columns rows <= host_strip
inline void multiply(const host_matrix& matrix, std::uint32_t first, std::uint32_t rows, const float* const* x, std::uint32_t tokens,
                     float* out, std::size_t stride, host_scratch& scratch) {
    const host_kernels& k = *matrix.kernels;
    const matrix_layout& m = *matrix.layout;
    const auto kind = static_cast<std::size_t>(matrix.kind);
    const host_walk walk = walk_of(matrix.kind, m);
    if (walk == host_walk::columns) {
        constexpr std::uint32_t columns = 4;
        float* w = scratch.take(0, columns * host_strip);
        for (std::uint32_t t = 0; t < tokens; ++t) {
            std::fill_n(out + t * stride, rows, 0.0f);
        }
        const std::uint64_t bytes = bits_of(matrix.kind) / 8;
        const std::byte* data = matrix.record + m.offset + first * m.row_stride * bytes;
        for (std::uint32_t c = 0; c < m.cols; c += columns) {
            const std::uint32_t count = smaller(columns, m.cols - c);
            // Pieces of columns lie too far apart for the hardware to see them coming.
            for (std::uint32_t i = c + columns; i < smaller(c + 2 * columns, m.cols); ++i) {
                for (std::uint64_t line = 0; line < rows * m.row_stride * bytes; line += 64) {
                    __builtin_prefetch(data + i * m.col_stride * bytes + line);
                }
            }
            for (std::uint32_t i = 0; i < count; ++i) {
                const std::byte* column = data + (c + i) * m.col_stride * bytes;
                if (m.row_stride == 1) {
                    k.decode[kind]({column, nullptr}, rows, w + i * host_strip);
                } else {
                    k.decode_every_second_bf16(column, rows, w + i * host_strip);
                }
            }
            for (std::uint32_t t = 0; t < tokens; ++t) {
                k.add_columns(w, host_strip, x[t] + c, count, rows, out + t * stride);
            }
        }
        return;
    }
    std::uint32_t i = 0;
    if (walk == host_walk::rows && tokens == 1) {
        for (; i + 4 <= rows; i += 4) {
            const stored_run runs[4] = {
                run_of_row(matrix.kind, m, matrix.record, first + i), run_of_row(matrix.kind, m, matrix.record, first + i + 1),
                run_of_row(matrix.kind, m, matrix.record, first + i + 2), run_of_row(matrix.kind, m, matrix.record, first + i + 3)};
            k.dot_four[kind](runs, m.cols, x[0], out + i);
        }
        for (; i < rows; ++i) {
            const stored_run run = run_of_row(matrix.kind, m, matrix.record, first + i);
            k.dot_one[kind](&run, m.cols, x[0], out + i);
        }
        return;
    }
    constexpr std::uint32_t tile = 4;  // decoded rows that meet every token
    float* w = scratch.take(0, tile * std::size_t{m.cols});
    for (; i < rows; i += tile) {
        const std::uint32_t count = smaller(tile, rows - i);
        for (std::uint32_t r = 0; r < count; ++r) {
            float* row = w + r * std::size_t{m.cols};
            if (walk == host_walk::rows) {
                k.decode[kind](run_of_row(matrix.kind, m, matrix.record, first + i + r), m.cols, row);
                continue;
            }
            for (std::uint32_t c = 0; c < m.cols; ++c) {
                row[c] = weight_at(matrix.kind, m, matrix.record, first + i + r, c);
            }
        }
        k.dot_tile(w, m.cols, count, x, tokens, m.cols, out + i, stride);
    }
}

/// Rows that one item of parallel work takes: about 128 KiB of weights, so that all cores have work at one token.
[[nodiscard]] inline std::uint32_t rows_per_item(weight_kind kind, const matrix_layout& m) noexcept {
    if (walk_of(kind, m) == host_walk::columns) {
        return host_strip;
    }
    const std::uint64_t row_bytes = larger<std::uint64_t>(static_cast<std::uint64_t>(m.cols) * bits_of(kind) / 8, 1);
    const std::uint64_t rows = round_up(larger<std::uint64_t>((128u << 10) / row_bytes, 1), 4);
    return static_cast<std::uint32_t>(smaller<std::uint64_t>(rows, host_strip));
}

}  // namespace detail
}  // namespace penstock::inline v0_1

#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/mlp_stage.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/activation.hpp>
#include <penstock/dispatch/decode.hpp>
#include <penstock/model/record.hpp>
#include <penstock/units.hpp>

/// One launch of the expert MLP as its kernels see it: pairs of rows, and the works of a batch.

namespace penstock::inline v0_1::detail {

/// Where the kernels find a work; passed by value, so that no copy to the device is due.
struct mlp_work {
    const std::byte* record;
    std::uint32_t first;
    std::uint32_t count;
};

inline constexpr std::uint32_t works_per_launch = 128;

struct mlp_works {
    mlp_work of[works_per_launch];
};

/// One of the two matrices of a pair. Weight (r, c) is number first + r * row_stride + c * col_stride from byte `offset`.
struct mlp_side {
    matrix_layout m;
    std::uint64_t first;
};

/// One launch. Input row of pair p: p / divisor of `input`; output row: p of `output`.
struct mlp_stage {
    mlp_side a;
    mlp_side b;
    std::uint32_t row_pairs;  ///< rows of a; b has as many or one less
    std::uint32_t cols;
    std::uint32_t tiles;    ///< blocks that share a work
    std::uint32_t groups;   ///< rows_by_vector: row groups that a warp computes, one after another
    std::uint32_t segment;  ///< rows_by_vector: steps of 32 vectors for which the inputs are in shared memory at a time
    std::uint32_t divisor;
    const std::int32_t* rows;
    const float* input;
    const float* input_scale;
    float* output;
    std::uint32_t output_cols;
    bool gated;  ///< output[r] = act(a, b), else output[2 r], output[2 r + 1] = a, b
    activation_rule rule;
};

/// Gate and up of a layout, side by side.
inline mlp_stage first_stage(const expert_layout& layout) {
    mlp_stage s{};
    s.a = {layout.gate, 0};
    s.b = {layout.up, 0};
    s.row_pairs = layout.gate.rows;
    s.cols = layout.gate.cols;
    s.output_cols = layout.gate.rows;
    s.gated = true;
    s.rule = rule_of(layout);
    return s;
}

/// Even and odd rows of down.
inline mlp_stage second_stage(const expert_layout& layout) {
    const matrix_layout& down = layout.down;
    mlp_stage s{};
    matrix_layout even = down;
    even.rows = static_cast<std::uint32_t>(ceil_div(down.rows, 2));
    even.row_stride *= 2;
    even.scale_row_step *= 2;
    even.bias_stride *= 2;
    matrix_layout odd = even;
    odd.rows = down.rows / 2;
    odd.scale_row0 += down.scale_row_step;
    odd.bias_offset += static_cast<std::uint64_t>(down.bias_stride) * bits(down.bias_type) / 8;
    s.a = {even, 0};
    s.b = odd.rows == 0 ? s.a : mlp_side{odd, down.row_stride};
    s.row_pairs = even.rows;
    s.cols = down.cols;
    s.output_cols = down.rows;
    return s;
}

/// Writes what a pair of rows gave for pair `p`. @pre not past the last row
__device__ inline void write_pair(const mlp_stage& s, std::uint32_t p, std::uint32_t row, float a, float b) {
    float* out = s.output + static_cast<std::uint64_t>(p) * s.output_cols;
    if (s.gated) {
        out[row] = activate(s.rule, a, b);
    } else {
        out[2 * row] = a;
        if (2 * row + 1 < s.output_cols) {
            out[2 * row + 1] = b;
        }
    }
}

/// Row `row` of a side, or its last row where it has fewer: what is read for it is not used.
__device__ inline std::uint32_t clamped(const mlp_side& side, std::uint32_t row) { return row < side.m.rows ? row : side.m.rows - 1; }

/// Warps of a block of rows_by_vector and rows_by_element.
inline constexpr std::uint32_t row_warps = 8;

}  // namespace penstock::inline v0_1::detail

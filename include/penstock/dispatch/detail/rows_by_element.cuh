#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/rows_by_element.cuh holds a kernel: compile this file with nvcc"
#endif

#include <penstock/dispatch/decode.cuh>
#include <penstock/dispatch/detail/mlp_stage.cuh>

/// The kernel for matrices of any strides.

namespace penstock::inline v0_1::detail {

/// A warp computes one row pair for up to 8 tokens at once, its lanes take columns in turn. Any strides.
template <class Format>
__global__ __launch_bounds__(row_warps * 32)
    __attribute__((visibility("hidden"))) void rows_by_element(const __grid_constant__ mlp_stage s,
                                                               const __grid_constant__ mlp_works works) {
    constexpr int slots = 8;
    const mlp_work work = works.of[blockIdx.x / s.tiles];
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t row = blockIdx.x % s.tiles * row_warps + threadIdx.x / 32;
    if (row >= s.row_pairs) {
        return;
    }
    for (std::uint32_t token0 = 0; token0 < work.count; token0 += slots) {
        const std::uint32_t present = smaller<std::uint32_t>(slots, work.count - token0);
        const float* input[slots];
        float scale[slots];
        float acc[2 * slots];
#pragma unroll
        for (std::uint32_t slot = 0; slot < slots; ++slot) {
            const std::uint32_t p = slot < present ? static_cast<std::uint32_t>(s.rows[work.first + token0 + slot]) : 0;
            input[slot] = s.input + static_cast<std::uint64_t>(p / s.divisor) * s.cols;
            scale[slot] = slot < present && s.input_scale != nullptr ? s.input_scale[p] : 1.0f;
            acc[2 * slot] = 0.0f;
            acc[2 * slot + 1] = 0.0f;
        }
#pragma unroll 4
        for (std::uint32_t c = lane; c < s.cols; c += 32) {
            float w[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const mlp_side& side = i == 0 ? s.a : s.b;
                const std::uint64_t r = clamped(side, row);
                w[i] = load_weight<Format>(work.record + side.m.offset, side.first + r * side.m.row_stride + c * side.m.col_stride) *
                       load_scale<Format>(work.record, side.m, r, c);
            }
#pragma unroll
            for (std::uint32_t slot = 0; slot < slots; ++slot) {
                if (slot < present) {
                    const float x = __ldg(input[slot] + c) * scale[slot];
                    acc[2 * slot] = ::fmaf(w[0], x, acc[2 * slot]);
                    acc[2 * slot + 1] = ::fmaf(w[1], x, acc[2 * slot + 1]);
                }
            }
        }
        const float sum = warp_sums<2 * slots>(acc);
        const std::uint32_t value = lane / 2;
        const mlp_side& side = value % 2 == 0 ? s.a : s.b;
        const float mine = sum + bias_at(side.m, work.record, clamped(side, row));
        const float other = __shfl_xor_sync(0xffffffffu, mine, 2);
        if (lane % 4 == 0 && lane / 4 < present) {
            write_pair(s, static_cast<std::uint32_t>(s.rows[work.first + token0 + lane / 4]), row, mine, other);
        }
    }
}

}  // namespace penstock::inline v0_1::detail

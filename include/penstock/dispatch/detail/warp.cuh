#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/warp.cuh holds device code: compile this file with nvcc"
#endif

#include <cstdint>

/// What the 32 lanes of a warp work out together.

namespace penstock::inline v0_1::detail {

inline constexpr unsigned whole_warp = 0xffffffffu;

/// Sum of `mine` over the lanes up to and with this one. All lanes of the warp take part.
__device__ inline std::uint32_t sum_up_to_lane(std::uint32_t mine) {
    const std::uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (unsigned distance = 1; distance < 32; distance *= 2) {
        const std::uint32_t other = __shfl_up_sync(whole_warp, mine, distance);
        mine += lane >= distance ? other : 0;
    }
    return mine;
}

/// Sum of each of `N` values over the 32 lanes of a warp, in 31 shuffles for N = 32. Afterwards value i is in the lanes whose number
/// divided by 32 / N is i. Each value is added in the same order whatever N is: lanes 16 apart first, neighbours last.
/// @pre N is a power of two, at most 32; all lanes of the warp take part.
template <int N>
__device__ float warp_sums(float (&value)[N]) {
    const std::uint32_t lane = threadIdx.x % 32;
    int held = N;
#pragma unroll
    for (std::uint32_t distance = 16; distance > 0; distance /= 2) {
        if (held > 1) {
            held /= 2;
            const bool upper = (lane & distance) != 0;
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                if (i < held) {
                    const float keep = upper ? value[i + held] : value[i];
                    const float give = upper ? value[i] : value[i + held];
                    value[i] = keep + __shfl_xor_sync(whole_warp, give, static_cast<int>(distance));
                }
            }
        } else {
            value[0] += __shfl_xor_sync(whole_warp, value[0], static_cast<int>(distance));
        }
    }
    return value[0];
}

}  // namespace penstock::inline v0_1::detail

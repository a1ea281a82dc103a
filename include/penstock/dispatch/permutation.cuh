#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/permutation.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/cuda_experts.hpp>

#include <cub/block/block_scan.cuh>

/// Pairs sorted by expert: a counting sort, stable by construction and without atomics. A thread owns an expert and walks through the ids
/// of its block, which all threads read together. One block and one launch for up to `pairs_per_block` pairs; beyond, each block counts
/// its share, one block adds up, and each block writes its share.

namespace penstock::inline v0_1::detail {

inline constexpr int permute_threads = 512;

/// The ids of one block, in shared memory; beyond the last they are -1.
struct staged_ids {
    int4 four[pairs_per_block / 4];

    __device__ void load(const std::int32_t* ids, std::uint32_t begin, std::uint32_t end) {
        auto* one = reinterpret_cast<std::int32_t*>(four);
        for (std::uint32_t i = threadIdx.x; i < round_up(end - begin, 4); i += permute_threads) {
            one[i] = begin + i < end ? ids[begin + i] : -1;
        }
    }
};

/// How many of the first `fours` * 4 ids are `expert`.
__device__ inline std::uint32_t count_of(const staged_ids& ids, std::uint32_t fours, std::int32_t expert) {
    std::uint32_t count = 0;
#pragma unroll 4
    for (std::uint32_t i = 0; i < fours; ++i) {
        const int4 id = ids.four[i];
        count += static_cast<std::uint32_t>((id.x == expert) + (id.y == expert) + (id.z == expert) + (id.w == expert));
    }
    return count;
}

/// Writes, in order, the numbers of the ids that are `expert`, counted from `begin`.
__device__ inline void write_pairs(const staged_ids& ids, std::uint32_t fours, std::int32_t expert, std::uint32_t begin, std::int32_t* to) {
    for (std::uint32_t i = 0; i < fours; ++i) {
        const int4 id = ids.four[i];
        const std::int32_t each[4] = {id.x, id.y, id.z, id.w};
#pragma unroll
        for (std::uint32_t j = 0; j < 4; ++j) {
            if (each[j] == expert) {
                *to++ = static_cast<std::int32_t>(begin + 4 * i + j);
            }
        }
    }
}

template <int Threads>
__global__ __launch_bounds__(Threads)
    __attribute__((visibility("hidden"))) void permute_in_one_block(const std::int32_t* ids, std::uint32_t pairs, std::uint32_t experts,
                                                                    std::int32_t* rows, std::uint32_t* offsets) {
    wait_for_launch_before();
    let_next_launch_begin();
    using scan = cub::BlockScan<std::uint32_t, Threads>;
    __shared__ staged_ids staged;
    __shared__ typename scan::TempStorage temporary;
    staged.load(ids, 0, pairs);
    __syncthreads();
    const std::uint32_t fours = (pairs + 3) / 4;
    std::uint32_t before = 0;
    for (std::uint32_t e0 = 0; e0 < experts; e0 += Threads) {
        const std::uint32_t e = e0 + threadIdx.x;
        const std::uint32_t count = e < experts ? count_of(staged, fours, static_cast<std::int32_t>(e)) : 0;
        std::uint32_t start = 0;
        std::uint32_t total = 0;
        scan(temporary).ExclusiveSum(count, start, total);
        __syncthreads();  // the storage is used again
        if (e < experts) {
            offsets[e] = before + start;
        }
        if (count > 0) {
            write_pairs(staged, fours, static_cast<std::int32_t>(e), 0, rows + before + start);
        }
        before += total;
    }
    if (threadIdx.x == 0) {
        offsets[experts] = before;
    }
}

/// counts[e * blocks + b] = number of pairs of block b that visit expert e.
template <int Threads>
__global__ __launch_bounds__(Threads) __attribute__((visibility("hidden"))) void count_pairs(const std::int32_t* ids, std::uint32_t pairs,
                                                                                             std::uint32_t experts, std::uint32_t* counts) {
    wait_for_launch_before();
    let_next_launch_begin();
    __shared__ staged_ids staged;
    const std::uint32_t begin = blockIdx.x * pairs_per_block;
    const std::uint32_t end = smaller(begin + pairs_per_block, pairs);
    staged.load(ids, begin, end);
    __syncthreads();
    for (std::uint32_t e = threadIdx.x; e < experts; e += Threads) {
        counts[static_cast<std::uint64_t>(e) * gridDim.x + blockIdx.x] =
            count_of(staged, (end - begin + 3) / 4, static_cast<std::int32_t>(e));
    }
}

/// Turns the counts into the places where each block's pairs of each expert begin. One block.
template <int Threads>
__global__ __launch_bounds__(Threads)
    __attribute__((visibility("hidden"))) void scan_counts(std::uint32_t blocks, std::uint32_t experts, std::uint32_t* counts,
                                                           std::uint32_t* offsets) {
    wait_for_launch_before();
    let_next_launch_begin();
    constexpr int items = 8;
    using scan = cub::BlockScan<std::uint32_t, Threads>;
    __shared__ typename scan::TempStorage temporary;
    const std::uint64_t size = static_cast<std::uint64_t>(experts) * blocks;
    std::uint32_t before = 0;
    for (std::uint64_t begin = 0; begin < size; begin += Threads * items) {
        const std::uint64_t mine = begin + threadIdx.x * items;
        std::uint32_t value[items];
#pragma unroll
        for (int i = 0; i < items; ++i) {
            value[i] = mine + i < size ? counts[mine + i] : 0;
        }
        std::uint32_t total = 0;
        scan(temporary).ExclusiveSum(value, value, total);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < items; ++i) {
            if (mine + i < size) {
                counts[mine + i] = before + value[i];
                if ((mine + i) % blocks == 0) {
                    offsets[(mine + i) / blocks] = before + value[i];
                }
            }
        }
        before += total;
    }
    if (threadIdx.x == 0) {
        offsets[experts] = before;
    }
}

template <int Threads>
__global__ __launch_bounds__(Threads)
    __attribute__((visibility("hidden"))) void place_pairs(const std::int32_t* ids, std::uint32_t pairs, std::uint32_t experts,
                                                           const std::uint32_t* places, std::int32_t* rows) {
    wait_for_launch_before();
    let_next_launch_begin();
    __shared__ staged_ids staged;
    const std::uint32_t begin = blockIdx.x * pairs_per_block;
    const std::uint32_t end = smaller(begin + pairs_per_block, pairs);
    staged.load(ids, begin, end);
    __syncthreads();
    for (std::uint32_t e = threadIdx.x; e < experts; e += Threads) {
        write_pairs(staged, (end - begin + 3) / 4, static_cast<std::int32_t>(e), begin,
                    rows + places[static_cast<std::uint64_t>(e) * gridDim.x + blockIdx.x]);
    }
}

inline void load_permute() {
    load_kernels(permute_in_one_block<permute_threads>, count_pairs<permute_threads>, scan_counts<permute_threads>,
                 place_pairs<permute_threads>);
}

/// The body of executor::cuda::permute.
inline void run_permute(const std::int32_t* ids, std::uint32_t pairs, std::uint32_t experts, std::int32_t* rows, std::uint32_t* offsets,
                        std::span<std::byte> scratch, std::size_t scratch_bytes, cudaStream_t stream) {
    if (offsets == nullptr || (pairs == 0 && experts == 0)) {
        if (pairs > 0) {
            throw configuration_error("penstock: permute of " + std::to_string(pairs) + " pairs without a place for the offsets");
        }
        return;
    }
    if (scratch.size() < scratch_bytes) {
        throw configuration_error("penstock: permute of " + std::to_string(pairs) + " pairs to " + std::to_string(experts) +
                                  " experts needs " + std::to_string(scratch_bytes) + " bytes of scratch, " +
                                  std::to_string(scratch.size()) + " were given");
    }
    const dim3 block(permute_threads);
    if (pairs <= pairs_per_block) {
        launch_early(permute_in_one_block<permute_threads>, dim3(1), block, 0, stream, ids, pairs, experts, rows, offsets);
        return;
    }
    auto* counts = reinterpret_cast<std::uint32_t*>(scratch.data());
    const auto blocks = static_cast<std::uint32_t>(ceil_div(pairs, pairs_per_block));
    launch_early(count_pairs<permute_threads>, dim3(blocks), block, 0, stream, ids, pairs, experts, counts);
    launch_early(scan_counts<permute_threads>, dim3(1), block, 0, stream, blocks, experts, counts, offsets);
    launch_early(place_pairs<permute_threads>, dim3(blocks), block, 0, stream, ids, pairs, experts, counts, rows);
}

}  // namespace penstock::inline v0_1::detail

#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/decode_kernel.cuh holds a kernel: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/decode.hpp>
#include <penstock/dispatch/detail/decode_stages.cuh>
#include <penstock/dispatch/detail/shared_memory.cuh>

/// The whole expert MLP of a decode step in one launch.
///
/// The work is cut into items: 16-row tiles of gate and up (8 rows of each) of every expert, then of down. Blocks draw items in order from a
/// counter. Eight warps of a block multiply: `split` of them share a tile, each reading every split-th 256 bytes of its rows, and 8 / split
/// tiles side by side make the item. Each has a ring of stages of its own, filled by asynchronous copies of whole cache lines, and goes on
/// into the next items without waiting for anyone; so the weights never stop streaming. One warp draws the items and looks up what they
/// need, ahead of time; three add up the sums and write results, behind.
///
/// An item of down waits for the tiles of gate and up of its expert. Those have lower numbers, so running blocks hold them, and what a block
/// drew before goes on while it waits: whatever else runs on the device, and however few blocks of this launch do, it ends.

namespace penstock::inline v0_1::detail {

__device__ inline std::uint32_t load_acquire(const std::uint32_t* from) {
    std::uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

/// out of 16 rows for every token. Called by one warp, when all partial sums of these rows are written.
__device__ inline void combine_tile(const decode_arguments& a, std::uint32_t row0, std::uint32_t hidden, const std::int32_t* ids,
                                    const float* weights) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t row = row0 + lane % 16;
    const std::uint32_t tokens = a.pairs / a.k;
    if (row >= hidden) {
        return;
    }
    for (std::uint32_t t = lane / 16; t < tokens; t += 2) {
        float sum = 0.0f;
#pragma unroll 8
        for (std::uint32_t j = 0; j < a.k; ++j) {
            const std::uint32_t p = t * a.k + j;
            const bool visits = static_cast<std::uint32_t>(ids[p]) < a.experts;
            const float value = visits ? __ldcg(a.partial + static_cast<std::uint64_t>(p) * hidden + row) : 0.0f;
            sum = visits ? ::fmaf(weights[p], value, sum) : sum;
        }
        const std::uint64_t at = static_cast<std::uint64_t>(t) * hidden + row;
        store_element(a.out, a.out_type, at, sum + (a.shared != nullptr ? a.shared[at] : 0.0f));  // as combine_rows, -0 too
    }
}

/// Adds up what the warps that share a tile have, in their order, and writes it. Called by one warp.
template <class Format, std::uint32_t Tokens>
__device__ void write_tile(const decode_arguments& a, const decode_item<Tokens>& item, std::uint32_t tile, const float* sums,
                           std::uint32_t split) {
    const std::uint32_t lane = threadIdx.x % 32;
    const decode_phase& p = a.phase[item.phase];
    const auto sum_of = [&](std::uint32_t row, std::uint32_t token) {
        float sum = 0.0f;
        for (std::uint32_t s = 0; s < split; ++s) {
            sum += sums[(s * 16 + row) * Tokens + token];
        }
        return sum * fragment<Format>::correction;
    };
    if (item.phase == 0) {
        const std::uint32_t row = tile * 8 + lane % 8;
        for (std::uint32_t n = lane / 8; n < item.tokens && row < p.half[0].rows; n += 4) {
            const std::uint32_t pair = item.pair[n];
            const float scale = a.input_scale != nullptr ? a.input_scale[pair] : 1.0f;
            const float gate = ::fmaf(sum_of(lane % 8, n), scale, bias_at(p.half[0], item.record, row));
            const float up = ::fmaf(sum_of(lane % 8 + 8, n), scale, bias_at(p.half[1], item.record, row));
            store_element(a.activated, fragment<Format>::type, static_cast<std::uint64_t>(pair) * a.phase[1].cols + row,
                          activate(a.rule, gate, up));
        }
    } else {
        const std::uint32_t row = tile * 16 + lane % 16;
        for (std::uint32_t n = lane / 16; n < item.tokens && row < p.half[0].rows; n += 2) {
            const std::uint32_t pair = item.pair[n];
            a.partial[static_cast<std::uint64_t>(pair) * p.half[0].rows + row] =
                sum_of(lane % 16, n) + bias_at(p.half[0], item.record, row);
        }
    }
}

/// What the warps of a block tell each other.
template <std::uint32_t Tokens>
struct decode_board {
    decode_item<Tokens> items[decode_ahead];
    std::uint32_t drawn;                  ///< items that were put on the board
    std::uint32_t end;                    ///< how many that will have been; ~0u until it is known
    std::uint32_t written[decode_ahead];  ///< at number % decode_ahead: 1 + number of the last item there that is done with
    std::uint32_t arrived[decode_buffers];
};

/// Waits until item `number` is on the board. @returns false where there will be none
template <std::uint32_t Tokens>
__device__ bool wait_drawn(const decode_board<Tokens>& board, std::uint32_t number) {
    while (load_shared(&board.drawn) <= number) {
        if (load_shared(&board.end) <= number) {
            return false;
        }
    }
    return true;
}

/// Waits until item `number` and its sums are done with.
template <std::uint32_t Tokens>
__device__ void wait_written(const decode_board<Tokens>& board, std::uint32_t number) {
    while (load_shared(&board.written[number % decode_ahead]) <= number) {
    }
}

/// The warp that draws items. It waits for the inputs of down before it shows an item.
template <class Format, std::uint32_t Tokens>
__device__ void draw_items(const decode_arguments& a, decode_board<Tokens>& board, const decode_work* works, std::uint32_t count,
                           std::uint32_t groups, const std::int32_t* rows, std::uint32_t ticket) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t items = groups * (a.phase[0].items + a.phase[1].items);
    const std::uint32_t tiles = a.phase[0].items * (decode_warps / a.phase[0].split);
    const std::uint32_t wanted = fragment<Format>::planes == 2 ? (tiles + 15) / 16 : tiles;
    const std::uint32_t of_first = groups * a.phase[0].items;
    std::uint32_t ready_group = ~0u;  // the last that was
    std::uint32_t low = 0;
    std::uint32_t before = 0;
    const auto draw = [&] { return lane == 0 ? atomicAdd(a.counters, 1) : 0; };
    // Shows item `number`. @returns whether there was one
    const auto show = [&](std::uint32_t number, std::uint32_t& ticket) {
        const std::uint32_t now = __shfl_sync(whole_warp, ticket, 0);
        if (now >= items) {
            bool last = false;
            if (lane == 0) {
                store_shared(&board.end, number);
                __threadfence();
                last = atomicAdd(a.counters + 1, 1) + 1 == gridDim.x;
            }
            __syncwarp();
            if (__shfl_sync(whole_warp, static_cast<int>(last), 0) != 0) {  // nobody reads a counter any more, save done
                for (std::uint32_t i = lane; i < 2 + groups; i += 32) {
                    a.counters[i] = 0;
                }
            }
            return false;
        }
        ticket = draw();
        if (number >= decode_ahead) {
            wait_written(board, number - decode_ahead);
        }
        decode_item<Tokens>& item = board.items[number % decode_ahead];
        low = before < of_first && now >= of_first ? 0 : low;
        before = now;
        find_item<Format, Tokens>(a, works, count, groups, rows, now, low, item);
        __syncwarp();
        if (lane == 0) {
            if (item.phase == 1 && item.group != ready_group) {
                ready_group = item.group;
                const long long begin = clock64();
                while (load_acquire(a.counters + 2 + item.group) < wanted) {
                    __nanosleep(32);
                    if (clock64() - begin > (1ll << 35)) {
                        __trap();
                    }
                }
            }
            store_shared(&board.drawn, number + 1);
        }
        __syncwarp();
        return true;
    };
    // Three tickets under way, in registers of their own, since a ticket takes longer than an item.
    std::uint32_t second = draw();
    std::uint32_t third = draw();
    for (std::uint32_t number = 0;; number += 3) {
        if (!show(number, ticket) || !show(number + 1, second) || !show(number + 2, third)) {
            return;
        }
    }
}

/// Counts tiles of activated values, eight each, and scales blocks of 128 of them that are complete. Called by one warp.
template <class Format, std::uint32_t Tokens>
__device__ void scale_activated(const decode_arguments& a, const decode_item<Tokens>& item, std::uint32_t tiles_here) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t tiles = a.phase[0].items * (decode_warps / a.phase[0].split);
    const std::uint32_t blocks = (tiles + 15) / 16;
    const std::uint32_t block = item.tile0 / 16;  // an item lies in one
    const std::uint32_t wanted = smaller(16u, tiles - block * 16);
    std::uint32_t* const counter =
        a.counters + 2 + a.most_groups + (a.phase[1].half[0].rows + 15) / 16 + static_cast<std::uint64_t>(item.group) * blocks + block;
    bool complete = false;
    if (lane == 0) {
        __threadfence();
        complete = atomicAdd(counter, tiles_here) + tiles_here == wanted;
        if (complete) {
            *counter = 0;
        }
        __threadfence();
    }
    __syncwarp();
    if (__shfl_sync(whole_warp, static_cast<int>(complete), 0) == 0) {
        return;
    }
    const std::uint32_t cols = a.phase[1].cols;
    if (block * 128 < cols) {
        for (std::uint32_t n = 0; n < item.tokens; ++n) {
            const std::uint64_t pair = item.pair[n];
            std::byte* const planes = a.scaled[1].planes + pair * 2 * cols + block * 128;
            scale_block(static_cast<const std::uint16_t*>(a.activated) + pair * cols + block * 128, cols - block * 128, planes,
                        planes + cols, a.scaled[1].scales + pair * ((cols + 127) / 128) + block);
        }
    }
    __syncwarp();
    if (lane == 0) {
        __threadfence();
        atomicAdd(a.counters + 2 + item.group, 1);
    }
}

/// Scales the hidden states. A warp takes 128 of a token's.
template <std::uint32_t Warps>
__global__ __launch_bounds__(Warps * 32)
    __attribute__((visibility("hidden"))) void scale_hidden(const std::uint16_t* hidden, std::uint32_t tokens, std::uint32_t cols,
                                                            decode_scaled to) {
    wait_for_launch_before();
    let_next_launch_begin();
    const std::uint32_t blocks = (cols + 127) / 128;
    const std::uint32_t n = blockIdx.x * Warps + threadIdx.x / 32;
    const std::uint64_t token = n / blocks;
    const std::uint32_t begin = n % blocks * 128;
    if (token < tokens) {
        const std::uint64_t row = blockIdx.y * std::uint64_t{to.rows} + token;
        std::byte* const planes = to.planes + row * 2 * cols + begin;
        scale_block(hidden + token * cols + begin, cols - begin, planes, planes + cols, to.scales + row * blocks + begin / 128);
    }
}

/// A warp that adds up and writes every decode_writers-th item, from number `first`.
template <class Format, std::uint32_t Tokens>
__device__ void write_items(const decode_arguments& a, decode_board<Tokens>& board, const float* sums, std::uint32_t groups,
                            const std::int32_t* ids, const float* weights, std::uint32_t first) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t hidden = a.phase[1].half[0].rows;
    const std::uint32_t tiles = (hidden + 15) / 16;
    std::uint32_t* const ready = a.counters + 2;
    std::uint32_t* const done = ready + a.most_groups;
    for (std::uint32_t number = first; wait_drawn(board, number); number += decode_writers) {
        const decode_item<Tokens>& item = board.items[number % decode_ahead];
        while (load_shared(&board.arrived[number % decode_buffers]) < decode_warps * (number / decode_buffers + 1)) {
        }
        const std::uint32_t split = a.phase[item.phase].split;
        const float* const buffer = sums + number % decode_buffers * (decode_warps * 16 * Tokens);
        for (std::uint32_t i = 0; i < decode_warps / split; ++i) {
            write_tile<Format, Tokens>(a, item, item.tile0 + i, buffer + i * split * (16 * Tokens), split);
        }
        __syncwarp();
        if (item.phase == 0) {
            if constexpr (fragment<Format>::planes == 2) {
                scale_activated<Format, Tokens>(a, item, decode_warps / split);
            } else if (lane == 0) {
                __threadfence();
                atomicAdd(ready + item.group, decode_warps / split);
            }
        } else if (a.combines) {
            std::uint32_t before = 0;
            const std::uint32_t tile = item.tile0 + lane;
            const bool counts = lane < decode_warps / split && tile < tiles;
            if (counts) {
                __threadfence();
                before = atomicAdd(done + tile, 1) + 1;
                __threadfence();
                if (before == groups) {
                    done[tile] = 0;
                }
            }
            __syncwarp();
            for (std::uint32_t last = __ballot_sync(whole_warp, counts && before == groups); last != 0; last &= last - 1) {
                combine_tile(a, (item.tile0 + static_cast<std::uint32_t>(__ffs(static_cast<int>(last)) - 1)) * 16, hidden, ids, weights);
            }
        }
        __syncwarp();
        if (lane == 0) {
            store_shared(&board.written[number % decode_ahead], number + 1);
        }
    }
}

/// A warp that multiplies.
template <class Format, std::uint32_t Tokens>
__device__ void multiply_items(const decode_arguments& a, decode_board<Tokens>& board, float* all_sums, const std::byte* ring_start) {
    using ring = decode_ring<Format, Tokens>;
    const std::uint32_t warp = threadIdx.x / 32;
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t ring_address = shared_address(ring_start);
    decode_cursor<Format, Tokens> cursor;
    std::uint32_t opened = 0;  // items in which copies were begun
    std::uint32_t under_way = 0;
    ring_end issue;
    ring_end take;
    const auto fill = [&] {
        __syncwarp();  // what is copied to was read by all
        while (under_way < ring::most_stages - 1) {
            if (cursor.over()) {
                if (load_shared(&board.drawn) <= opened) {
                    return;
                }
                cursor.open(a, board.items[opened % decode_ahead], warp, lane);
                ++opened;
                continue;
            }
            ring_end then = issue;
            const std::uint32_t begin = then.next(ring::stage_bytes(cursor.tokens), ring::warp_bytes);
            if (then.passed - take.passed > ring::warp_bytes) {
                return;
            }
            cursor.copy(ring_address + begin, lane);
            issue = then;
            ++under_way;
        }
    };
    for (std::uint32_t number = 0; wait_drawn(board, number); ++number) {
        const decode_item<Tokens>& item = board.items[number % decode_ahead];
        const std::uint32_t phase = item.phase;
        tile_sums sums[2];
        const std::uint32_t tokens = item.tokens;
        const std::uint32_t split = a.phase[phase].split;
        const std::uint32_t stages = a.phase[phase].stages;
        std::uint32_t skew[2] = {};
        if constexpr (ring::grouped) {
            const std::uint32_t row0 = (item.tile0 + warp / split) * a.phase[phase].step;
            for (std::uint32_t h = 0; h < 2; ++h) {
                skew[h] = static_cast<std::uint32_t>(group_scales_at<Format>(a.phase[phase], row0, h * 8 + lane / 4) % 4);
            }
        }
        for (std::uint32_t s = warp % split; s < stages; s += split) {
            fill();
            wait_for_copies(under_way - 1);
            __syncwarp();
            add_stage<Format, Tokens>(sums, ring_start + take.next(ring::stage_bytes(tokens), ring::warp_bytes), tokens, lane, skew,
                                      a.phase[phase].row_bytes / 16 - s * decode_row_chunks);
            --under_way;
        }
        fill();
        if (number >= decode_buffers) {
            wait_written(board, number - decode_buffers);
        }
        float* const mine = all_sums + (number % decode_buffers * decode_warps + warp) * (16 * Tokens);
        const std::uint32_t g = lane / 4;
        const std::uint32_t t = lane % 4;
        if constexpr (Tokens == 1) {
            if (t == 0) {
                mine[g] = sums[0].of[0] + sums[1].of[0];
                mine[g + 8] = sums[0].of[2] + sums[1].of[2];
            }
        } else {
            *reinterpret_cast<float2*>(mine + g * Tokens + 2 * t) = {sums[0].of[0] + sums[1].of[0], sums[0].of[1] + sums[1].of[1]};
            *reinterpret_cast<float2*>(mine + (g + 8) * Tokens + 2 * t) = {sums[0].of[2] + sums[1].of[2], sums[0].of[3] + sums[1].of[3]};
        }
        __syncwarp();
        if (lane == 0) {
            add_shared(&board.arrived[number % decode_buffers], 1);
        }
    }
}

/// Dynamic shared memory: the rings, the sums, the works.
template <class Format, std::uint32_t Tokens>
__global__ __launch_bounds__(decode_threads, 1)
    __attribute__((visibility("hidden"))) void decode_experts(const __grid_constant__ decode_arguments a) {
    using ring = decode_ring<Format, Tokens>;
    extern __shared__ __align__(128) std::byte penstock_decode_shared[];
    __shared__ decode_board<Tokens> board;
    __shared__ std::uint32_t counts[3];
    auto* const sums = reinterpret_cast<float*>(penstock_decode_shared + ring::bytes);
    auto* const works = reinterpret_cast<decode_work*>(penstock_decode_shared + ring::bytes + ring::sums_bytes);
    auto* const rows = reinterpret_cast<std::int32_t*>(works + smaller(a.pairs, a.experts));
    auto* const few_ids = rows + (a.rows_in_shared ? a.pairs : 0);
    auto* const few_weights = reinterpret_cast<float*>(few_ids + (a.combines ? a.pairs : 0));
    const std::uint32_t warp = threadIdx.x / 32;
    const std::uint32_t lane = threadIdx.x % 32;
    wait_for_launch_before();
    let_next_launch_begin();
    if (threadIdx.x == 0) {
        board.drawn = 0;
        board.end = ~0u;
        for (std::uint32_t& one : board.written) {
            one = 0;
        }
        for (std::uint32_t& one : board.arrived) {
            one = 0;
        }
    }
    if (warp == decode_warps + 1 && lane == 0) {
        counts[2] = atomicAdd(a.counters, 1);
    }
    // For sorted pairs in three steps, so that loads from global memory follow each other once.
    auto* const offsets = reinterpret_cast<std::uint32_t*>(penstock_decode_shared);  // in the rings, which are not used yet
    if (a.rows != nullptr) {
        for (std::uint32_t i = threadIdx.x; i <= a.experts; i += decode_threads) {
            offsets[i] = a.offsets[i];
        }
        for (std::uint32_t i = threadIdx.x; a.rows_in_shared && i < a.pairs; i += decode_threads) {
            rows[i] = a.rows[i];  // those past the last that visits anyone mean nothing
        }
        __syncthreads();
    } else if (warp == decode_warps + 1 && lane < a.pairs) {
        few_ids[lane] = a.ids[lane];
        few_weights[lane] = a.weights != nullptr ? a.weights[lane] : 1.0f;
    }
    if (warp == decode_warps) {
        std::uint32_t groups_found = 0;
        const std::uint32_t found =
            a.rows != nullptr ? list_sorted<Tokens>(a, offsets, works, groups_found) : list_few<Tokens>(a, works, rows, groups_found);
        if (lane == 0) {
            counts[0] = found;
            counts[1] = groups_found;
        }
    }
    __syncthreads();
    if (a.rows != nullptr) {
        for (std::uint32_t i = threadIdx.x; i < counts[0]; i += decode_threads) {
            works[i].record = a.records[works[i].expert];
        }
        __syncthreads();
    }
    const std::uint32_t groups = counts[1];
    const std::uint32_t hidden = a.phase[1].half[0].rows;
    const std::uint32_t tiles = (hidden + 15) / 16;
    if (warp < decode_warps) {
        multiply_items<Format, Tokens>(a, board, sums, penstock_decode_shared + warp * ring::warp_bytes);
    } else if (warp == decode_warps) {
        draw_items<Format, Tokens>(a, board, works, counts[0], groups, a.rows_in_shared ? rows : a.rows, counts[2]);
    } else {
        write_items<Format, Tokens>(a, board, sums, groups, few_ids, few_weights, warp - decode_warps - 1);
    }
    if (groups == 0 && a.combines) {
        for (std::uint32_t tile = blockIdx.x * (decode_threads / 32) + warp; tile < tiles; tile += gridDim.x * (decode_threads / 32)) {
            combine_tile(a, tile * 16, hidden, few_ids, few_weights);
        }
    }
}

}  // namespace penstock::inline v0_1::detail

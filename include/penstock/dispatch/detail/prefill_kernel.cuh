#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/prefill_kernel.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/detail/prefill_results.cuh>

/// One of an expert's two products: 128 rows of weights, 64 of gate and 64 of up or 128 of down, by the pairs of a tile. A block has a
/// thread for each part of a stage that the copy engine brings, and two groups of four warps that multiply 64 rows each. Registers go from
/// the one to the others (setmaxnreg).

namespace penstock::inline v0_1::detail {

inline constexpr std::uint32_t prefill_threads = 384;
inline constexpr std::uint32_t prefill_rows = 128;

/// @tparam Most columns of a tile
template <class Operand, std::uint32_t Most>
struct prefill_ring {
    static constexpr std::uint32_t weights = prefill_rows * Operand::row_bytes;
    static constexpr std::uint32_t inputs = Operand::atoms * Most * 128;
    static constexpr std::uint32_t scales = Operand::scaled ? (Most * 4 + 1023) / 1024 * 1024 : 0;
    static constexpr std::uint32_t stage = weights + inputs + scales;
    static constexpr std::uint32_t stages = 224 * 1024 / stage < 8 ? 224 * 1024 / stage : 8;
    static constexpr std::uint32_t bytes = stages * stage;
    static constexpr std::uint32_t copiers = 1 + Operand::atoms + (Operand::scaled ? 1 : 0);  ///< warps that ask for a stage's parts
};

struct prefill_barriers {
    std::uint64_t full[8];
    std::uint64_t empty[8];
};

/// Columns that are multiplied for so many: what instructions there are for.
template <std::uint32_t Most>
__device__ std::uint32_t columns_for(std::uint32_t count) {
    if constexpr (Most <= 64) {
        return count <= 16 ? 16 : count <= 32 ? 32 : 64;
    } else {
        return count <= 64                   ? 64
               : count <= 96                 ? 96
               : count <= 192                ? (count + 15) / 16 * 16
               : count > 256 && count <= 272 ? 272
                                             : (count + 31) / 32 * 32;
    }
}

/// What a block does, one after another: row tiles of tiles of pairs, so that blocks that run at the same time share a tile's inputs.
struct prefill_walk {
    std::uint32_t next;
    std::uint32_t end;

    __device__ explicit prefill_walk(const prefill_arguments& a) : next(blockIdx.x), end(*a.tile_count * a.row_tiles) {}

    [[nodiscard]] __device__ bool over() const { return next >= end; }

    /// @returns the row tile
    __device__ std::uint32_t take(const prefill_arguments& a, prefill_tile& tile) {
        tile = a.tiles[next / a.row_tiles];
        const std::uint32_t row_tile = next % a.row_tiles;
        next += gridDim.x;
        return row_tile;
    }
};

/// Asks for the weights of all tiles. Called by one thread.
template <class Operand, bool Down, std::uint32_t Most>
__device__ void copy_weights(const prefill_arguments& a, std::byte* shared, prefill_barriers& barriers) {
    using ring = prefill_ring<Operand, Most>;
    const std::uint32_t address = shared_address(shared);
    ring_place at;
    prefill_tile tile;
    for (prefill_walk walk(a); !walk.over();) {
        const std::uint32_t group = walk.take(a, tile) * (Down ? 16 : 8);
        const CUtensorMap* map = a.maps + tile.expert;
        see_map(map);
        std::uint32_t byte = 0;
#pragma unroll 1
        for (std::uint32_t step = 0; step < a.steps; ++step) {
            wait_barrier(&barriers.empty[at.stage], at.lap ^ 1);
            arrive_and_expect(&barriers.full[at.stage], ring::weights);
            copy_box(address + at.stage * ring::stage, map, byte, group, &barriers.full[at.stage]);
            byte += Operand::row_bytes;
            at.step(ring::stages);
        }
    }
}

/// Asks for one part of the inputs of all tiles: an atom of each step, or their scales. Called by one thread.
template <class Operand, std::uint32_t Most>
__device__ void copy_inputs(const prefill_arguments& a, std::byte* shared, prefill_barriers& barriers, std::uint32_t part) {
    using ring = prefill_ring<Operand, Most>;
    const bool scales = part == Operand::atoms;
    const std::uint32_t pair_bytes = scales ? 4 : 128;
    const std::byte* const parts = scales ? reinterpret_cast<const std::byte*>(a.in.scales) : a.in.atoms + part * a.in.rows * 128;
    const std::uint64_t step_bytes = a.in.rows * pair_bytes * (scales ? 1 : Operand::atoms);
    const std::uint32_t to = shared_address(shared) + ring::weights + (scales ? ring::inputs : part * Most * 128);
    ring_place at;
    prefill_tile tile;
    for (prefill_walk walk(a); !walk.over();) {
        walk.take(a, tile);
        const std::uint32_t bytes = columns_for<Most>(tile.end - tile.begin) * pair_bytes;
        const std::byte* from = parts + tile.begin * static_cast<std::uint64_t>(pair_bytes);
#pragma unroll 1
        for (std::uint32_t step = 0; step < a.steps; ++step) {
            wait_barrier(&barriers.empty[at.stage], at.lap ^ 1);
            arrive_and_expect(&barriers.full[at.stage], bytes);
            copy_bulk(to + at.stage * ring::stage, from, bytes, &barriers.full[at.stage]);
            from += step_bytes;
            at.step(ring::stages);
        }
    }
}

/// The scales of the rows that a thread has sums of.
template <class Operand>
__device__ const float* scales_of(const std::byte* record, const matrix_layout& m, std::uint32_t row) {
    return reinterpret_cast<const float*>(record + m.scale_offset) +
           decoder<format::fp8_block128>::scale_index(m, smaller(row, m.rows - 1), 0);
}

/// Sums of a tile for a group of warps, to be multiplied by `correction`. @param row the tile's rows that this thread has, in half 0 and 1
template <class Operand, std::uint32_t Most, std::uint32_t N>
__device__ __forceinline__ void multiply(const prefill_arguments& a, const std::byte* record, const std::uint32_t (&row)[2],
                                         const std::byte* shared, prefill_barriers& barriers, ring_place& at, tile_of_sums<N>& sum,
                                         float (&correction)[2]) {
    using ring = prefill_ring<Operand, Most>;
    using types = typename Operand::types;
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t group = threadIdx.x / 128 - 1;
    const auto release = [&](std::uint32_t stage) {
        __syncwarp();
        if (lane == 0) {
            arrive(&barriers.empty[stage]);
        }
    };
#pragma unroll
    for (std::uint32_t p = 0; p < sum.parts; ++p) {
#pragma unroll
        for (float& one : sum.of[p]) {
            one = 0.0f;
        }
    }
    if constexpr (Operand::widened) {
        const std::uint32_t g = lane / 4;
        const std::uint32_t mine = (group * 64 + threadIdx.x / 32 % 4 * 16 + g) * Operand::row_bytes;
        const typename Operand::scale_reader read[2] = {{record, a.half[0], smaller(row[0], a.half[0].rows - 1), a.steps},
                                                        {record, a.half[1], smaller(row[1], a.half[1].rows - 1), a.steps}};
        decltype(read[0].load(0)) next[2] = {read[0].load(0), read[1].load(0)};
#pragma unroll 1
        for (std::uint32_t step = 0; step < a.steps; ++step) {
            const typename Operand::scale upper_scale(next[0]), lower_scale(next[1]);
            if (step + 1 < a.steps) {
                next[0] = read[0].load(step + 1);
                next[1] = read[1].load(step + 1);
            }
            wait_barrier(&barriers.full[at.stage], at.lap);
            const std::byte* stage = shared + at.stage * ring::stage;
#pragma unroll
            for (std::uint32_t i = 0; i < 2; ++i) {
                const uint4 upper = Operand::load(stage + mine, g, lane % 4, i);
                const uint4 lower = Operand::load(stage + mine + 8 * Operand::row_bytes, g, lane % 4, i);
                std::uint32_t w[4][4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    Operand::widen(upper, i, j, upper_scale, w[j][0], w[j][2]);
                    Operand::widen(lower, i, j, lower_scale, w[j][1], w[j][3]);
                }
                const std::uint64_t b = wgmma_operand(shared_address(stage + ring::weights + i * Most * 128));
                sum.hold();
                wgmma_begin();
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    wgmma<N>::template add<types>(sum.of[0], w[j], b + j * wgmma_next_depth, false);
                }
                wgmma_end();
                sum.hold();
                wgmma_wait<1>();
                if (i == 0 && step > 0) {
                    release(at.before(ring::stages));
                }
            }
            at.step(ring::stages);
        }
        wgmma_wait<0>();
        sum.hold();
        release(at.before(ring::stages));
        correction[0] = read[0].correction();
        correction[1] = read[1].correction();
    } else if constexpr (Operand::scaled) {
        const float* weight_scale[2] = {scales_of<Operand>(record, a.half[0], row[0]), scales_of<Operand>(record, a.half[1], row[1])};
        float next[2] = {__ldg(weight_scale[0]), __ldg(weight_scale[1])};
        const auto begin = [&](float(&part)[N / 2]) {
            wait_barrier(&barriers.full[at.stage], at.lap);
            const std::byte* stage = shared + at.stage * ring::stage;
            const std::uint64_t w = wgmma_operand(shared_address(stage + group * 64 * 128));
            const std::uint64_t b = wgmma_operand(shared_address(stage + ring::weights));
            wgmma_begin();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                wgmma<N>::template add<types>(part, w + j * wgmma_next_depth, b + j * wgmma_next_depth, j == 0);
            }
            wgmma_end();
        };
        const auto add_up = [&](float(&part)[N / 2], std::uint32_t step) {
            const float of_upper = next[0], of_lower = next[1];
            if (step + 1 < a.steps) {
                next[0] = __ldg(weight_scale[0] + step + 1);
                next[1] = __ldg(weight_scale[1] + step + 1);
            }
            hold(part);
            const auto* scale = reinterpret_cast<const float2*>(shared + at.stage * ring::stage + ring::weights + ring::inputs) + lane % 4;
#pragma unroll
            for (std::uint32_t j = 0; j < N / 8; ++j) {
                const float2 s = scale[4 * j];
                sum.of[0][4 * j] = ::fmaf(part[4 * j], of_upper * s.x, sum.of[0][4 * j]);
                sum.of[0][4 * j + 1] = ::fmaf(part[4 * j + 1], of_upper * s.y, sum.of[0][4 * j + 1]);
                sum.of[0][4 * j + 2] = ::fmaf(part[4 * j + 2], of_lower * s.x, sum.of[0][4 * j + 2]);
                sum.of[0][4 * j + 3] = ::fmaf(part[4 * j + 3], of_lower * s.y, sum.of[0][4 * j + 3]);
            }
            release(at.stage);
            at.step(ring::stages);
        };
        float part[N / 2];
#pragma unroll 1
        for (std::uint32_t step = 0; step < a.steps; ++step) {
            begin(part);
            wgmma_wait<0>();
            add_up(part, step);
        }
    } else {
#pragma unroll 1
        for (std::uint32_t step = 0; step < a.steps; ++step) {
            wait_barrier(&barriers.full[at.stage], at.lap);
            const std::byte* stage = shared + at.stage * ring::stage;
            const std::uint64_t w = wgmma_operand(shared_address(stage + group * 64 * 128));
            const std::uint64_t b = wgmma_operand(shared_address(stage + ring::weights));
            sum.hold();
            wgmma_begin();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (std::uint32_t p = 0; p < sum.parts; ++p) {
                    wgmma<sum.columns>::template add<types>(sum.of[p], w + j * wgmma_next_depth,
                                                            b + p * (sum.columns * 8) + j * wgmma_next_depth, false);
                }
            }
            wgmma_end();
            sum.hold();
            wgmma_wait<1>();
            if (step > 0) {
                release(at.before(ring::stages));
            }
            at.step(ring::stages);
        }
        wgmma_wait<0>();
        sum.hold();
        release(at.before(ring::stages));
    }
}

template <class Operand, bool Down, std::uint32_t Most, std::uint32_t N>
__device__ __forceinline__ void multiply_tile(const prefill_arguments& a, const std::byte* record, const prefill_tile& tile,
                                              std::uint32_t row_tile, const std::byte* shared, prefill_barriers& barriers, ring_place& at) {
    const std::uint32_t group = threadIdx.x / 128 - 1;
    const std::uint32_t warp = group * 4 + threadIdx.x / 32 % 4;
    const std::uint32_t g = threadIdx.x % 32 / 4;
    const std::uint32_t first = Down ? row_tile * 128 + warp * 16 + g : row_tile * 64 + warp * 8 + g;
    const std::uint32_t row[2] = {first, Down ? first + 8 : first};
    tile_of_sums<N> sum;
    float correction[2] = {1.0f, 1.0f};
    multiply<Operand, Most, N>(a, record, row, shared, barriers, at, sum, correction);
    if constexpr (Down) {
        write_partial<Operand, N>(a, record, tile, row, sum, correction);
    } else {
        write_activated<Operand, N>(a, record, tile, first, sum, correction);
    }
}

template <class Operand, bool Down, std::uint32_t Most>
__device__ __forceinline__ void run_product(const prefill_arguments& a, std::byte* shared, prefill_barriers& barriers) {
    if (threadIdx.x == 0) {
        for (std::uint32_t i = 0; i < prefill_ring<Operand, Most>::stages; ++i) {
            init_barrier(&barriers.full[i], prefill_ring<Operand, Most>::copiers);
            init_barrier(&barriers.empty[i], 8);  // warps that multiply
        }
        show_barriers();
    }
    __syncthreads();
    if constexpr (!Down) {
        wait_for_launch_before();  // the list of tiles
    }
    let_next_launch_begin();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        const std::uint32_t warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0 && warp == 0) {
            copy_weights<Operand, Down, Most>(a, shared, barriers);
        } else if (threadIdx.x % 32 == 0 && warp < prefill_ring<Operand, Most>::copiers) {
            if constexpr (Down) {
                wait_for_launch_before();  // wrote the inputs; the weights are there
            }
            copy_inputs<Operand, Most>(a, shared, barriers, warp - 1);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        // What follows a tile is asked for before it, so that nothing waits for it.
        prefill_walk walk(a);
        ring_place at;
        prefill_tile tile{}, following{};
        std::uint32_t row_tile = 0, following_row_tile = 0;
        const std::byte *record = nullptr, *following_record = nullptr;
        const auto look = [&] {
            following_row_tile = walk.take(a, following);
            following_record = a.records[following.expert];
        };
        bool more = !walk.over();
        if (more) {
            look();
        }
        while (more) {
            tile = following;
            row_tile = following_row_tile;
            record = following_record;
            more = !walk.over();
            if (more) {
                look();
            }
            const auto with = [&]<std::uint32_t N>() {
                multiply_tile<Operand, Down, Most, N>(a, record, tile, row_tile, shared, barriers, at);
            };
            const std::uint32_t columns = columns_for<Most>(tile.end - tile.begin);
            if constexpr (Most <= 64) {
                switch (columns) {
                    case 16: with.template operator()<16>(); break;
                    case 32: with.template operator()<32>(); break;
                    default: with.template operator()<64>(); break;
                }
            } else {
                const auto with_few = [&]<std::uint32_t N>() {
                    if constexpr (N <= Most) {
                        with.template operator()<N>();
                    }
                };
                switch (columns) {
                    case 64: with.template operator()<64>(); break;
                    case 96: with.template operator()<96>(); break;
                    case 112: with.template operator()<112>(); break;
                    case 128: with.template operator()<128>(); break;
                    case 144: with.template operator()<144>(); break;
                    case 160: with.template operator()<160>(); break;
                    case 176: with_few.template operator()<176>(); break;
                    case 192: with_few.template operator()<192>(); break;
                    case 224: with_few.template operator()<224>(); break;
                    case 256: with_few.template operator()<256>(); break;
                    case 272: with_few.template operator()<272>(); break;
                    case 288: with_few.template operator()<288>(); break;
                    default: with_few.template operator()<320>(); break;
                }
            }
        }
    }
}

template <class Operand, bool Down, std::uint32_t Most>
__global__ __launch_bounds__(prefill_threads, 1)
    __attribute__((visibility("hidden"))) void prefill_product(const __grid_constant__ prefill_arguments a) {
    extern __shared__ __align__(1024) std::byte penstock_prefill_shared[];
    __shared__ prefill_barriers barriers;
    NV_IF_ELSE_TARGET(NV_HAS_FEATURE_SM_90a, (run_product<Operand, Down, Most>(a, penstock_prefill_shared, barriers);),
                      (static_cast<void>(a); static_cast<void>(barriers); __trap();))
}

}  // namespace penstock::inline v0_1::detail

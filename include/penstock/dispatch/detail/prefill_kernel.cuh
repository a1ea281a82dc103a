#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/prefill_kernel.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/activation.hpp>
#include <penstock/dispatch/detail/prefill_begin.cuh>

/// One of an expert's two products: 128 rows of weights, 64 of gate and 64 of up or 128 of down, by the pairs of a tile. A block has a thread that
/// asks the copy engine for weights and inputs, and two groups of four warps that multiply 64 rows each.

namespace penstock::inline v0_1::detail {

struct prefill_arguments {
    const std::byte* const* records;
    const prefill_tile* tiles;
    const std::uint32_t* tile_count;
    const CUtensorMap* maps;  ///< [experts]
    prefill_inputs in;
    matrix_layout half[2];  ///< gate and up in the order of their bytes; down twice
    activation_rule rule;
    bool up_first;
    std::uint32_t row_tiles;
    std::uint32_t steps;
    prefill_inputs activated;   ///< gate and up, 16-bit: inputs of down
    std::uint16_t* rows_out;    ///< bf16: activated rows in the order of sorted pairs, for 8-bit inputs; of down [pairs, hidden]
    std::uint32_t pitch;        ///< of rows_out
    const std::int32_t* pairs;  ///< down: pair of each sorted row
};

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
        return count <= 64 ? 64 : count <= 192 ? (count + 31) / 32 * 32 : 256;
    }
}

template <class Operand, bool Down, std::uint32_t Most>
__device__ void copy_tiles(const prefill_arguments& a, std::byte* shared, prefill_barriers& barriers) {
    using ring = prefill_ring<Operand, Most>;
    const std::uint32_t total = *a.tile_count * a.row_tiles;
    const std::uint32_t address = shared_address(shared);
    ring_place at;
    // Weights that nobody before writes are asked for before the launch before ends, as many as there is room for.
    bool waits = Down;
    const auto copy_inputs = [&](const prefill_tile& tile, std::uint32_t columns, std::uint32_t step, std::uint32_t stage) {
        const std::uint32_t to = address + stage * ring::stage + ring::weights;
#pragma unroll
        for (std::uint32_t i = 0; i < Operand::atoms; ++i) {
            copy_bulk(to + i * Most * 128, a.in.place(step * Operand::atoms + i, tile.begin, 0), columns * 128, &barriers.full[stage]);
        }
        if constexpr (Operand::scaled) {
            copy_bulk(to + ring::inputs, a.in.scales + step * a.in.rows + tile.begin, columns * 4, &barriers.full[stage]);
        }
    };
    for (std::uint32_t t = blockIdx.x; t < total; t += gridDim.x) {
        const prefill_tile tile = a.tiles[t / a.row_tiles];
        const CUtensorMap* map = a.maps + tile.expert;
        see_map(map);
        const std::uint32_t group = t % a.row_tiles * (Down ? 16 : 8);
        const std::uint32_t columns = columns_for<Most>(tile.end - tile.begin);
        const std::uint32_t bytes = ring::weights + columns * (Operand::atoms * 128 + (Operand::scaled ? 4 : 0));
        std::uint32_t early = 0;
        for (std::uint32_t step = 0; step < a.steps; ++step) {
            wait_barrier(&barriers.empty[at.stage], at.lap ^ 1);
            arrive_and_expect(&barriers.full[at.stage], bytes);
            copy_box(address + at.stage * ring::stage, map, step * Operand::row_bytes, group, &barriers.full[at.stage]);
            if (waits) {
                if (++early == smaller(ring::stages, a.steps)) {
                    wait_for_launch_before();
                    for (std::uint32_t i = 0; i < early; ++i) {
                        copy_inputs(tile, columns, i, i);
                    }
                    waits = false;
                }
            } else {
                copy_inputs(tile, columns, step, at.stage);
            }
            at.step(ring::stages);
        }
    }
    if (waits) {
        wait_for_launch_before();
    }
}

/// The scales of the rows that a thread has sums of.
template <class Operand>
__device__ const float* scales_of(const std::byte* record, const matrix_layout& m, std::uint32_t row) {
    return reinterpret_cast<const float*>(record + m.scale_offset) +
           decoder<format::fp8_block128>::scale_index(m, smaller(row, m.rows - 1), 0);
}

/// Sums of a tile for a group of warps. @param row the tile's rows that this thread has, in half 0 and 1
template <class Operand, std::uint32_t Most, std::uint32_t N>
__device__ __forceinline__ void multiply(const prefill_arguments& a, const std::byte* record, const std::uint32_t (&row)[2],
                                         const std::byte* shared, prefill_barriers& barriers, ring_place& at, float (&sum)[N / 2]) {
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
    for (std::uint32_t i = 0; i < N / 2; ++i) {
        sum[i] = 0.0f;
    }
    if constexpr (Operand::widened) {
        const std::uint32_t g = lane / 4;
        const std::uint32_t mine = (group * 64 + threadIdx.x / 32 % 4 * 16 + g) * Operand::row_bytes;
        const typename Operand::scale_reader read[2] = {{record, a.half[0], smaller(row[0], a.half[0].rows - 1)},
                                                        {record, a.half[1], smaller(row[1], a.half[1].rows - 1)}};
        auto next_upper = read[0].load(0);
        auto next_lower = read[1].load(0);
        std::uint32_t before = 0;
        for (std::uint32_t step = 0; step < a.steps; ++step) {
            const typename Operand::scale upper_scale(next_upper), lower_scale(next_lower);
            if (step + 1 < a.steps) {
                next_upper = read[0].load(step + 1);
                next_lower = read[1].load(step + 1);
            }
            wait_barrier(&barriers.full[at.stage], at.lap);
            const std::byte* stage = shared + at.stage * ring::stage;
            uint4 upper[2], lower[2];
#pragma unroll
            for (std::uint32_t i = 0; i < 2; ++i) {
                upper[i] = Operand::load(stage + mine, g, lane % 4, i);
                lower[i] = Operand::load(stage + mine + 8 * Operand::row_bytes, g, lane % 4, i);
            }
#pragma unroll
            for (std::uint32_t i = 0; i < 2; ++i) {
                std::uint32_t w[4][4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    Operand::widen(upper[i], i, j, upper_scale, w[j][0], w[j][2]);
                    Operand::widen(lower[i], i, j, lower_scale, w[j][1], w[j][3]);
                }
                const std::uint64_t b = wgmma_operand(shared_address(stage + ring::weights + i * Most * 128));
                hold(sum);
                wgmma_begin();
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    wgmma<N>::template add<types>(sum, w[j], b + j * wgmma_next_depth, false);
                }
                wgmma_end();
                hold(sum);
                wgmma_wait<1>();
                if (i == 0 && step > 0) {
                    release(before);
                }
            }
            before = at.stage;
            at.step(ring::stages);
        }
        wgmma_wait<0>();
        hold(sum);
        release(before);
    } else if constexpr (Operand::scaled) {
        const float* weight_scale[2] = {scales_of<Operand>(record, a.half[0], row[0]), scales_of<Operand>(record, a.half[1], row[1])};
        float next[2] = {__ldg(weight_scale[0]), __ldg(weight_scale[1])};
        for (std::uint32_t step = 0; step < a.steps; ++step) {
            const float of_upper = next[0], of_lower = next[1];
            if (step + 1 < a.steps) {
                next[0] = __ldg(weight_scale[0] + step + 1);
                next[1] = __ldg(weight_scale[1] + step + 1);
            }
            wait_barrier(&barriers.full[at.stage], at.lap);
            const std::byte* stage = shared + at.stage * ring::stage;
            const std::uint64_t w = wgmma_operand(shared_address(stage + group * 64 * 128));
            const std::uint64_t b = wgmma_operand(shared_address(stage + ring::weights));
            float part[N / 2];
            wgmma_begin();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                wgmma<N>::template add<types>(part, w + j * wgmma_next_depth, b + j * wgmma_next_depth, j == 0);
            }
            wgmma_end();
            wgmma_wait<0>();
            hold(part);
            const auto* scale = reinterpret_cast<const float2*>(stage + ring::weights + ring::inputs) + lane % 4;
#pragma unroll
            for (std::uint32_t j = 0; j < N / 8; ++j) {
                const float2 s = scale[4 * j];
                sum[4 * j] = ::fmaf(part[4 * j], of_upper * s.x, sum[4 * j]);
                sum[4 * j + 1] = ::fmaf(part[4 * j + 1], of_upper * s.y, sum[4 * j + 1]);
                sum[4 * j + 2] = ::fmaf(part[4 * j + 2], of_lower * s.x, sum[4 * j + 2]);
                sum[4 * j + 3] = ::fmaf(part[4 * j + 3], of_lower * s.y, sum[4 * j + 3]);
            }
            release(at.stage);
            at.step(ring::stages);
        }
    } else {
        std::uint32_t before = 0;
        for (std::uint32_t step = 0; step < a.steps; ++step) {
            wait_barrier(&barriers.full[at.stage], at.lap);
            const std::byte* stage = shared + at.stage * ring::stage;
            const std::uint64_t w = wgmma_operand(shared_address(stage + group * 64 * 128));
            const std::uint64_t b = wgmma_operand(shared_address(stage + ring::weights));
            hold(sum);
            wgmma_begin();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                wgmma<N>::template add<types>(sum, w + j * wgmma_next_depth, b + j * wgmma_next_depth, false);
            }
            wgmma_end();
            hold(sum);
            wgmma_wait<1>();
            if (step > 0) {
                release(before);
            }
            before = at.stage;
            at.step(ring::stages);
        }
        wgmma_wait<0>();
        hold(sum);
        release(before);
    }
}

/// Activated sums of gate and up to where down reads them.
template <class Operand, std::uint32_t N>
__device__ __forceinline__ void write_activated(const prefill_arguments& a, const std::byte* record, const prefill_tile& tile,
                                                std::uint32_t row, const float (&sum)[N / 2]) {
    const std::uint32_t t = threadIdx.x % 4;
    const bool present = row < a.half[0].rows;
    const float bias[2] = {present ? bias_at(a.half[0], record, row) : 0.0f, present ? bias_at(a.half[1], record, row) : 0.0f};
    std::uint32_t atom = row / 64, byte = row % 64 * 2;
    if constexpr (Operand::widened) {
        const input_place place = Operand::where(row % Operand::depth);
        atom = row / Operand::depth * Operand::atoms + place.atom;
        byte = place.position * 2;
    }
#pragma unroll
    for (std::uint32_t j = 0; j < N / 8; ++j) {
#pragma unroll
        for (std::uint32_t e = 0; e < 2; ++e) {
            const std::uint32_t pair = tile.begin + 8 * j + 2 * t + e;
            const float one = sum[4 * j + e] * Operand::correction + bias[0];
            const float other = sum[4 * j + 2 + e] * Operand::correction + bias[1];
            const float value = a.up_first ? activate(a.rule, other, one) : activate(a.rule, one, other);
            if (pair >= tile.first && pair < tile.end) {
                const std::uint16_t bits = Operand::type == dtype::bf16 ? encode_bf16(value) : encode_f16(value);
                if constexpr (Operand::scaled) {
                    if (present) {
                        a.rows_out[static_cast<std::uint64_t>(pair) * a.pitch + row] = bits;
                    }
                } else {
                    *reinterpret_cast<std::uint16_t*>(a.activated.place(atom, pair, byte)) = bits;
                }
            }
        }
    }
}

/// Sums of down to their pairs, in bf16: half the traffic of float32, and no more than what lies between the matrices loses.
template <class Operand, std::uint32_t N>
__device__ __forceinline__ void write_partial(const prefill_arguments& a, const std::byte* record, const prefill_tile& tile,
                                              const std::uint32_t (&row)[2], const float (&sum)[N / 2]) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t t = lane % 4;
    const std::uint32_t odd = lane / 4 % 2;
    const bool present[2] = {row[0] < a.half[0].rows, row[1] < a.half[0].rows};
    const float bias[2] = {present[0] ? bias_at(a.half[0], record, row[0]) : 0.0f, present[1] ? bias_at(a.half[0], record, row[1]) : 0.0f};
#pragma unroll
    for (std::uint32_t j = 0; j < N / 8; ++j) {
        // Lanes of neighbouring rows exchange, so that each has two rows of one pair.
        std::uint32_t mine[2];
#pragma unroll
        for (std::uint32_t e = 0; e < 2; ++e) {
            mine[e] =
                two_halves<dtype::bf16>(sum[4 * j + e] * Operand::correction + bias[0], sum[4 * j + 2 + e] * Operand::correction + bias[1]);
        }
        const std::uint32_t other = __shfl_xor_sync(whole_warp, odd != 0 ? mine[0] : mine[1], 4);
        const std::uint32_t keep = odd != 0 ? mine[1] : mine[0];
        const std::uint32_t lower = odd != 0 ? other : keep, upper = odd != 0 ? keep : other;
        const std::uint32_t sorted = tile.begin + 8 * j + 2 * t + odd;
        if (sorted >= tile.first && sorted < tile.end) {
            std::uint16_t* const to = a.rows_out + static_cast<std::uint64_t>(a.pairs[sorted]) * a.pitch;
            if (present[0]) {
                *reinterpret_cast<std::uint32_t*>(to + row[0] - odd) = __byte_perm(lower, upper, 0x5410);
            }
            if (present[1]) {
                *reinterpret_cast<std::uint32_t*>(to + row[1] - odd) = __byte_perm(lower, upper, 0x7632);
            }
        }
    }
}

template <class Operand, bool Down, std::uint32_t Most, std::uint32_t N>
__device__ __forceinline__ void multiply_tile(const prefill_arguments& a, const prefill_tile& tile, std::uint32_t row_tile,
                                              const std::byte* shared, prefill_barriers& barriers, ring_place& at) {
    const std::byte* record = a.records[tile.expert];
    const std::uint32_t group = threadIdx.x / 128 - 1;
    const std::uint32_t warp = group * 4 + threadIdx.x / 32 % 4;
    const std::uint32_t g = threadIdx.x % 32 / 4;
    const std::uint32_t first = Down ? row_tile * 128 + warp * 16 + g : row_tile * 64 + warp * 8 + g;
    const std::uint32_t row[2] = {first, Down ? first + 8 : first};
    float sum[N / 2];
    multiply<Operand, Most, N>(a, record, row, shared, barriers, at, sum);
    if constexpr (Down) {
        write_partial<Operand, N>(a, record, tile, row, sum);
    } else {
        write_activated<Operand, N>(a, record, tile, first, sum);
    }
}

template <class Operand, bool Down, std::uint32_t Most>
__device__ __forceinline__ void run_product(const prefill_arguments& a, std::byte* shared, prefill_barriers& barriers) {
    if (threadIdx.x == 0) {
        for (std::uint32_t i = 0; i < prefill_ring<Operand, Most>::stages; ++i) {
            init_barrier(&barriers.full[i], 1);
            init_barrier(&barriers.empty[i], 8);
        }
        show_barriers();
    }
    __syncthreads();
    if constexpr (!Down) {
        wait_for_launch_before();  // the list of tiles
    }
    let_next_launch_begin();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            copy_tiles<Operand, Down, Most>(a, shared, barriers);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const std::uint32_t total = *a.tile_count * a.row_tiles;
        ring_place at;
        for (std::uint32_t t = blockIdx.x; t < total; t += gridDim.x) {
            const prefill_tile tile = a.tiles[t / a.row_tiles];
            const std::uint32_t row_tile = t % a.row_tiles;
            const auto with = [&]<std::uint32_t N>() { multiply_tile<Operand, Down, Most, N>(a, tile, row_tile, shared, barriers, at); };
            const std::uint32_t columns = columns_for<Most>(tile.end - tile.begin);
            if constexpr (Most <= 64) {
                switch (columns) {
                    case 16: with.template operator()<16>(); break;
                    case 32: with.template operator()<32>(); break;
                    default: with.template operator()<64>(); break;
                }
            } else {
                switch (columns) {
                    case 64: with.template operator()<64>(); break;
                    case 96: with.template operator()<96>(); break;
                    case 128: with.template operator()<128>(); break;
                    case 160:
                        if constexpr (Most >= 160) {
                            with.template operator()<160>();
                        }
                        break;
                    case 192:
                        if constexpr (Most >= 192) {
                            with.template operator()<192>();
                        }
                        break;
                    default:
                        if constexpr (Most >= 256) {
                            with.template operator()<256>();
                        }
                        break;
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

/// out[t] = sum over j, ascending, of weights[t, j] * partial[t, j], + shared[t]. A thread adds up eight columns.
struct prefill_combine_arguments {
    const std::uint16_t* partial;  ///< bf16, [tokens, k, hidden]
    const std::int32_t* ids;
    const float* weights;
    const float* shared;
    std::uint32_t k;
    std::uint32_t hidden;
    std::uint32_t experts;
    std::uint64_t vectors;  ///< of eight columns, in all
    void* out;
};

template <dtype Out>
__global__ __launch_bounds__(begin_threads)
    __attribute__((visibility("hidden"))) void prefill_combine(const __grid_constant__ prefill_combine_arguments a) {
    wait_for_launch_before();
    let_next_launch_begin();
    const std::uint64_t n = static_cast<std::uint64_t>(blockIdx.x) * begin_threads + threadIdx.x;
    if (n >= a.vectors) {
        return;
    }
    const std::uint32_t of_row = a.hidden / 8;
    const std::uint64_t token = n / of_row;
    const std::uint32_t c = static_cast<std::uint32_t>(n % of_row) * 8;
    float sum[8] = {};
    for (std::uint32_t j = 0; j < a.k; ++j) {
        const std::uint64_t pair = token * a.k + j;
        if (static_cast<std::uint32_t>(a.ids[pair]) >= a.experts) {
            continue;
        }
        const float weight = a.weights != nullptr ? a.weights[pair] : 1.0f;
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(a.partial + pair * a.hidden + c));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[2 * i] = ::fmaf(weight, widen_half<dtype::bf16>(word_of(v, i), false), sum[2 * i]);
            sum[2 * i + 1] = ::fmaf(weight, widen_half<dtype::bf16>(word_of(v, i), true), sum[2 * i + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum[i] += a.shared != nullptr ? a.shared[token * a.hidden + c + i] : 0.0f;
    }
    if constexpr (Out == dtype::f32) {
        auto* to = static_cast<float*>(a.out) + token * a.hidden + c;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            to[i] = sum[i];
        }
    } else {
        auto* to = static_cast<std::uint16_t*>(a.out) + token * a.hidden + c;
        *reinterpret_cast<uint4*>(to) = {two_halves<Out>(sum[0], sum[1]), two_halves<Out>(sum[2], sum[3]), two_halves<Out>(sum[4], sum[5]),
                                         two_halves<Out>(sum[6], sum[7])};
    }
}

}  // namespace penstock::inline v0_1::detail

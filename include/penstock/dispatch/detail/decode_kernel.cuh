#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/decode_kernel.cuh holds a kernel: compile this file with nvcc"
#endif

#include <penstock/dispatch/activation.hpp>
#include <penstock/dispatch/decode.hpp>
#include <penstock/dispatch/detail/decode_fragments.cuh>
#include <penstock/model/record.hpp>
#include <penstock/units.hpp>

#include <cstdint>

/// The whole expert MLP of a decode step in one launch.
///
/// The work is cut into items: 16-row tiles of gate and up (8 rows of each) of every expert, then of down. Blocks draw items in order from a
/// counter. The warps of a block split an item: `split` of them share a tile, each reading every split-th 256 bytes of its rows, and 8 / split
/// tiles side by side make the item. Each warp has a ring of stages of its own, filled by asynchronous copies of whole cache lines, and
/// goes on into the next item while the sums of this one are added up; so the weights never stop streaming.
///
/// An item of down waits for the tiles of gate and up of its expert. Those have lower numbers, so running blocks hold them, and a block
/// finishes its item before it waits for another: whatever else runs on the device, and however few blocks of this launch do, it ends.

namespace penstock::inline v0_1::detail {

inline constexpr std::uint32_t decode_warps = 8;
inline constexpr std::uint32_t decode_row_bytes = 256;  ///< of a row in a stage: two cache lines
inline constexpr std::uint32_t decode_tile_bytes = 16 * decode_row_bytes;
inline constexpr std::uint32_t decode_pairs_without_sorting = 32;  ///< a warp groups them itself

/// Gate and up, or down. Row r of half h of tile t is row t * step + h * shift + r, r < 8, of `half[h]`.
struct decode_phase {
    matrix_layout half[2];
    std::uint32_t step;
    std::uint32_t shift;
    std::uint32_t cols;
    std::uint32_t row_bytes;
    std::uint32_t stages;  ///< pieces of 256 bytes in a row
    std::uint32_t split;
    std::uint32_t items;  ///< of one expert and up to a stage's tokens
};

struct decode_arguments {
    decode_phase phase[2];
    activation_rule rule;
    const std::byte* const* records;  ///< [experts]
    std::uint32_t experts;
    std::uint32_t pairs;
    std::uint32_t k;
    const void* hidden;  ///< [tokens, cols of phase 0] in the operand's type
    const std::int32_t* ids;
    const std::int32_t* rows;      ///< pairs sorted by expert; null: `ids` are few enough to group here
    const std::uint32_t* offsets;  ///< [experts + 1]
    const float* input_scale;      ///< [pairs], or null
    const float* weights;          ///< [pairs], or null
    const float* shared;           ///< [tokens, hidden], or null
    std::uint16_t* activated;      ///< [pairs, intermediate] in the operand's type
    float* partial;                ///< [pairs, hidden]
    std::uint32_t* counters;       ///< ticket, exits, ready [groups], done [tiles of down]: all zero before and after
    std::uint32_t most_groups;
    bool combines;
    void* out;  ///< [tokens, hidden]
    dtype out_type;
};

/// An expert that tokens visit.
struct decode_work {
    const std::byte* record;
    std::uint32_t first;
    std::uint32_t count;
    std::uint32_t group0;  ///< groups of works before: a group is as many tokens as a stage holds
};

/// Where an item lies.
struct decode_item {
    std::uint32_t phase;
    std::uint32_t group;  ///< number over all works
    std::uint32_t tile0;
    std::uint32_t first;  ///< of the rows
    std::uint32_t tokens;
    const std::byte* record;
};

template <class Format, std::uint32_t Tokens>
struct decode_ring {
    static constexpr std::uint32_t inputs = decode_row_bytes * 8 / Format::bits;  ///< of a stage
    static constexpr std::uint32_t token_bytes = inputs * 2;
    static constexpr bool scaled = decoder<Format>::scaled;
    static constexpr std::uint32_t scale_blocks = inputs / 128;
    static constexpr std::uint32_t scale_bytes = scaled ? scale_blocks * 16 * 4 : 0;
    static constexpr std::uint32_t stage_bytes = decode_tile_bytes + Tokens * token_bytes + scale_bytes;
    /// Two blocks of a multiprocessor have one token's rings, one block those of more.
    static constexpr std::uint32_t depth = Tokens == 1 ? 3 : smaller<std::uint32_t>(5, (204u << 10) / (decode_warps * stage_bytes));
    static constexpr std::uint32_t bytes = decode_warps * depth * stage_bytes;
    static constexpr std::uint32_t sums_bytes = 2 * decode_warps * 16 * Tokens * 4;
};

__device__ inline void copy_16(std::uint32_t to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0) : "memory");
}

__device__ inline void copy_4(std::uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ inline std::uint32_t load_acquire(const std::uint32_t* from) {
    std::uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

/// Which of the 16-byte chunks of a row of a tile, modulo 8, holds chunk 0: rows that lanes read together lie in different banks.
__device__ inline std::uint32_t tile_swizzle(std::uint32_t row) { return (row & 1) << 2 | (row >> 1 & 3); }

/// The same for the inputs of a token.
template <int Vectors>
__device__ std::uint32_t input_swizzle(std::uint32_t token) {
    return Vectors == 1 ? tile_swizzle(token) : token & 7;
}

/// Groups the pairs by expert, in the order of their first pairs. Called by one warp. @returns the number of works
template <std::uint32_t Tokens>
__device__ std::uint32_t list_few(const decode_arguments& a, decode_work* works, std::int32_t* rows, std::uint32_t& groups) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::int32_t id = lane < a.pairs ? a.ids[lane] : -1;
    const bool valid = id >= 0 && static_cast<std::uint32_t>(id) < a.experts;
    const std::uint32_t same = __match_any_sync(0xffffffffu, valid ? id : -1);
    const std::uint32_t before = (1u << lane) - 1;
    const bool leads = valid && (same & before) == 0;
    const std::uint32_t leaders = __ballot_sync(0xffffffffu, leads);
    const auto count = static_cast<std::uint32_t>(__popc(same));
    const std::uint32_t mine = leads ? count | ((count + Tokens - 1) / Tokens) << 16 : 0;
    std::uint32_t sum = mine;
#pragma unroll
    for (std::uint32_t d = 1; d < 32; d *= 2) {
        const std::uint32_t other = __shfl_up_sync(0xffffffffu, sum, d);
        sum += lane >= d ? other : 0;
    }
    const std::uint32_t start = sum - mine;
    const std::uint32_t of_leader = __shfl_sync(0xffffffffu, start, __ffs(static_cast<int>(same)) - 1);
    if (leads) {
        works[__popc(leaders & before)] = {a.records[id], start & 0xffff, count, start >> 16};
    }
    if (valid) {
        rows[(of_leader & 0xffff) + static_cast<std::uint32_t>(__popc(same & before))] = static_cast<std::int32_t>(lane);
    }
    groups = __shfl_sync(0xffffffffu, sum, 31) >> 16;
    return static_cast<std::uint32_t>(__popc(leaders));
}

/// The experts that pairs sorted before visit, by ascending number. Called by one warp.
template <std::uint32_t Tokens>
__device__ std::uint32_t list_sorted(const decode_arguments& a, decode_work* works, std::uint32_t& groups) {
    const std::uint32_t lane = threadIdx.x % 32;
    std::uint32_t count_before = 0;
    groups = 0;
    for (std::uint32_t e0 = 0; e0 < a.experts; e0 += 32) {
        const std::uint32_t e = e0 + lane;
        const std::uint32_t first = a.offsets[smaller(e, a.experts)];
        const std::uint32_t count = a.offsets[smaller(e + 1, a.experts)] - first;
        const std::uint32_t visited = __ballot_sync(0xffffffffu, count > 0);
        const std::uint32_t mine = (count + Tokens - 1) / Tokens;
        std::uint32_t sum = mine;
#pragma unroll
        for (std::uint32_t d = 1; d < 32; d *= 2) {
            const std::uint32_t other = __shfl_up_sync(0xffffffffu, sum, d);
            sum += lane >= d ? other : 0;
        }
        if (count > 0) {
            works[count_before + static_cast<std::uint32_t>(__popc(visited & ((1u << lane) - 1)))] = {a.records[e], first, count,
                                                                                                     groups + sum - mine};
        }
        count_before += static_cast<std::uint32_t>(__popc(visited));
        groups += __shfl_sync(0xffffffffu, sum, 31);
    }
    return count_before;
}

/// Item number `n`. Groups of one expert take turns, so that they meet in the L2 cache. @pre n is an item
template <std::uint32_t Tokens>
__device__ decode_item find_item(const decode_arguments& a, const decode_work* works, std::uint32_t count, std::uint32_t groups,
                                 std::uint32_t n) {
    decode_item item;
    const std::uint32_t of_first = groups * a.phase[0].items;
    item.phase = n >= of_first ? 1 : 0;
    n -= item.phase * of_first;
    const std::uint32_t items = a.phase[item.phase].items;
    const std::uint32_t number = n / items;
    std::uint32_t low = 0;
    for (std::uint32_t high = count; high - low > 1;) {
        const std::uint32_t middle = (low + high) / 2;
        (works[middle].group0 <= number ? low : high) = middle;
    }
    const decode_work& work = works[low];
    const std::uint32_t groups_here = (work.count + Tokens - 1) / Tokens;
    const std::uint32_t local = n - work.group0 * items;
    const std::uint32_t group = local % groups_here;
    item.group = work.group0 + group;
    item.tile0 = local / groups_here * (decode_warps / a.phase[item.phase].split);
    item.first = work.first + group * Tokens;
    item.tokens = smaller(Tokens, work.count - group * Tokens);
    item.record = work.record;
    return item;
}

/// out of 16 rows for every token. Called by one warp, when all partial sums of these rows are written.
__device__ inline void combine_tile(const decode_arguments& a, std::uint32_t row0, std::uint32_t hidden) {
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
            const bool visits = a.ids[p] >= 0 && static_cast<std::uint32_t>(a.ids[p]) < a.experts;
            const float value = visits ? __ldcg(a.partial + static_cast<std::uint64_t>(p) * hidden + row) : 0.0f;
            sum = visits ? ::fmaf(a.weights != nullptr ? a.weights[p] : 1.0f, value, sum) : sum;
        }
        if (a.shared != nullptr) {
            sum += a.shared[static_cast<std::uint64_t>(t) * hidden + row];
        }
        store_element(a.out, a.out_type, static_cast<std::uint64_t>(t) * hidden + row, sum);
    }
}

/// One warp's copies into its ring: which item they are in, and where its lanes read.
template <class Format, std::uint32_t Tokens>
struct decode_cursor {
    using ring = decode_ring<Format, Tokens>;

    std::uint32_t stage = 0;  ///< next of the row
    std::uint32_t stages = 0;
    std::uint32_t split = 1;
    std::uint32_t row_chunks = 0;
    std::uint32_t input_chunks = 0;
    std::uint32_t tokens = 0;
    const std::byte* from[2] = {};
    std::uint64_t stride[2] = {};  ///< of two rows
    std::uint32_t last[2] = {};    ///< of the eight rows of a half, the last there is, counted from this lane's first
    const std::byte* input = nullptr;  ///< of the token that this lane knows about
    const float* scale = nullptr;      ///< of the row lane % 16
    std::uint32_t scale_cols = 0;

    __device__ void open(const decode_arguments& a, const decode_item& item, const std::int32_t* rows, std::uint32_t warp,
                         std::uint32_t lane) {
        const decode_phase& p = a.phase[item.phase];
        split = p.split;
        stage = warp % split;
        stages = p.stages;
        row_chunks = p.row_bytes / 16;
        input_chunks = p.cols / 8;
        tokens = item.tokens;
        const std::uint32_t row0 = (item.tile0 + warp / split) * p.step;
#pragma unroll
        for (std::uint32_t h = 0; h < 2; ++h) {
            const matrix_layout& m = p.half[h];
            const std::uint32_t begin = smaller(row0 + h * p.shift, m.rows - 1);
            const std::uint32_t mine = smaller(begin + lane / 16, m.rows - 1);
            stride[h] = m.row_stride * Format::bits / 8;
            from[h] = item.record + m.offset + mine * stride[h] + lane % 16 * 16;
            stride[h] *= 2;
            last[h] = m.rows - 1 - mine;
        }
        const std::uint32_t pair = lane < tokens ? static_cast<std::uint32_t>(rows[item.first + lane]) : 0;
        input = item.phase == 0 ? static_cast<const std::byte*>(a.hidden) + static_cast<std::uint64_t>(pair / a.k) * p.cols * 2
                                : reinterpret_cast<const std::byte*>(a.activated) + static_cast<std::uint64_t>(pair) * p.cols * 2;
        if constexpr (ring::scaled) {
            const std::uint32_t h = lane % 16 / 8;
            const matrix_layout& m = p.half[h];
            const std::uint32_t row = smaller(row0 + h * p.shift + lane % 8, m.rows - 1);
            scale = reinterpret_cast<const float*>(item.record + m.scale_offset) + decoder<Format>::scale_index(m, row, 0);
            scale_cols = (p.cols + 127) / 128;
        }
    }

    /// Whether this warp has copied its part of the item.
    __device__ bool over() const { return stage >= stages; }

    __device__ void copy(std::uint32_t to, std::uint32_t lane) {
        const std::uint32_t chunk = lane % 16;
        const bool present = stage * 16 + chunk < row_chunks;
        const std::uint64_t along = present ? static_cast<std::uint64_t>(stage) * decode_row_bytes : 0;
#pragma unroll
        for (std::uint32_t i = 0; i < 8; ++i) {
            const std::uint32_t row = 2 * i + lane / 16;
            const std::uint32_t two = smaller(i % 4 * 2, last[i / 4]) / 2;
            copy_16(to + row * decode_row_bytes + (chunk ^ tile_swizzle(row)) * 16, from[i / 4] + two * stride[i / 4] + along, present);
        }
        constexpr std::uint32_t chunks = ring::token_bytes / 16;  // 16 or 32
        const std::uint32_t inputs_to = to + decode_tile_bytes;
        constexpr std::uint32_t together = 32 / chunks;
#pragma unroll
        for (std::uint32_t n0 = 0; n0 < Tokens; n0 += together) {
            const std::uint32_t n = n0 + lane / chunks;
            const auto base = reinterpret_cast<const std::byte*>(
                __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(input), static_cast<int>(n % 32)));
            const std::uint32_t c = stage * chunks + lane % chunks;
            if (n < tokens) {
                copy_16(inputs_to + n * ring::token_bytes +
                            (lane % chunks ^ input_swizzle<fragment<Format>::input_vectors>(n)) * 16,
                        base + (c < input_chunks ? static_cast<std::uint64_t>(c) * 16 : 0), c < input_chunks);
            }
        }
        if constexpr (ring::scaled) {
            const std::uint32_t block = smaller(stage * ring::scale_blocks + lane / 16, scale_cols - 1);
            copy_4(inputs_to + Tokens * ring::token_bytes + lane * 4, scale + block);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        stage += split;
    }
};

/// Adds the products of one stage.
template <class Format, std::uint32_t Tokens>
__device__ void add_stage(tile_sums& sums, const std::byte* at, std::uint32_t lane) {
    using ring = decode_ring<Format, Tokens>;
    using frag = fragment<Format>;
    constexpr int vectors = frag::input_vectors;
    const std::uint32_t g = lane / 4;
    const std::uint32_t t = lane % 4;
    const std::uint32_t token = Tokens == 1 ? 0 : g;
    const auto* upper = reinterpret_cast<const uint4*>(at + g * decode_row_bytes);
    const auto* lower = upper + 8 * decode_row_bytes / 16;
    const auto* inputs = reinterpret_cast<const uint4*>(at + decode_tile_bytes + token * ring::token_bytes);
    const auto* scales = reinterpret_cast<const float*>(at + decode_tile_bytes + Tokens * ring::token_bytes);
    const std::uint32_t swizzle = tile_swizzle(g);
    const std::uint32_t turn = input_swizzle<vectors>(token);
    tile_sums part;
#pragma unroll
    for (std::uint32_t u = 0; u < 4; ++u) {
        const std::uint32_t chunk = u * 4 + t;
        uint4 x[vectors];
#pragma unroll
        for (std::uint32_t v = 0; v < vectors; ++v) {
            x[v] = inputs[(chunk * vectors + v) ^ turn];
            if constexpr (frag::raise) {
                x[v] = {raised(x[v].x), raised(x[v].y), raised(x[v].z), raised(x[v].w)};
            }
        }
        tile_sums& target = ring::scaled ? part : sums;
        frag::add(target, upper[chunk ^ swizzle], lower[chunk ^ swizzle], x);
        if constexpr (ring::scaled) {
            if (u % 2 == 1) {
                const float high = scales[u / 2 * 16 + g];
                const float low = scales[u / 2 * 16 + 8 + g];
                sums.of[0] = ::fmaf(part.of[0], high, sums.of[0]);
                sums.of[1] = ::fmaf(part.of[1], high, sums.of[1]);
                sums.of[2] = ::fmaf(part.of[2], low, sums.of[2]);
                sums.of[3] = ::fmaf(part.of[3], low, sums.of[3]);
                part = {};
            }
        }
    }
}

/// Two or four results of rows of a tile, in the operand's type.
template <operand Type>
__device__ std::uint16_t to_operand(float value) {
    return Type == operand::bf16 ? encode_bf16(value) : encode_f16(value);
}

/// Adds up what the warps that share a tile have, in their order, and writes it. Called by one warp.
template <class Format, std::uint32_t Tokens>
__device__ void write_tile(const decode_arguments& a, const decode_item& item, std::uint32_t tile, const float* sums, std::uint32_t split,
                           const std::int32_t* rows) {
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
            const auto pair = static_cast<std::uint32_t>(rows[item.first + n]);
            const float scale = a.input_scale != nullptr ? a.input_scale[pair] : 1.0f;
            const float gate = sum_of(lane % 8, n) * scale + bias_at(p.half[0], item.record, row);
            const float up = sum_of(lane % 8 + 8, n) * scale + bias_at(p.half[1], item.record, row);
            a.activated[static_cast<std::uint64_t>(pair) * a.phase[1].cols + row] =
                to_operand<fragment<Format>::type>(activate(a.rule, gate, up));
        }
    } else {
        const std::uint32_t row = tile * 16 + lane % 16;
        for (std::uint32_t n = lane / 16; n < item.tokens && row < p.half[0].rows; n += 2) {
            const auto pair = static_cast<std::uint32_t>(rows[item.first + n]);
            a.partial[static_cast<std::uint64_t>(pair) * p.half[0].rows + row] =
                sum_of(lane % 16, n) + bias_at(p.half[0], item.record, row);
        }
    }
}

/// Dynamic shared memory: the rings, the sums, the works.
template <class Format, std::uint32_t Tokens>
__global__ __launch_bounds__(decode_warps * 32, Tokens == 1 ? 2 : 1)
    __attribute__((visibility("hidden"))) void decode_experts(const __grid_constant__ decode_arguments a) {
    using ring = decode_ring<Format, Tokens>;
    extern __shared__ __align__(128) std::byte penstock_decode_shared[];
    __shared__ std::int32_t few_rows[decode_pairs_without_sorting];
    __shared__ std::uint32_t tickets[4];
    __shared__ std::uint32_t counts[2];
    auto* const all_sums = reinterpret_cast<float*>(penstock_decode_shared + ring::bytes);
    auto* const works = reinterpret_cast<decode_work*>(penstock_decode_shared + ring::bytes + ring::sums_bytes);
    const std::uint32_t warp = threadIdx.x / 32;
    const std::uint32_t lane = threadIdx.x % 32;
    std::uint32_t* const ready = a.counters + 2;
    std::uint32_t* const done = ready + a.most_groups;
    const std::int32_t* const rows = a.rows != nullptr ? a.rows : few_rows;

    if (threadIdx.x == 32) {
        const std::uint32_t two = atomicAdd(a.counters, 2);
        tickets[0] = two;
        tickets[1] = two + 1;
    }
    if (warp == 0) {
        std::uint32_t groups_found = 0;
        const std::uint32_t found = a.rows != nullptr ? list_sorted<Tokens>(a, works, groups_found)
                                                      : list_few<Tokens>(a, works, few_rows, groups_found);
        if (lane == 0) {
            counts[0] = found;
            counts[1] = groups_found;
        }
    }
    __syncthreads();
    const std::uint32_t count = counts[0];
    const std::uint32_t groups = counts[1];
    const std::uint32_t items = groups * (a.phase[0].items + a.phase[1].items);
    const std::uint32_t hidden = a.phase[1].half[0].rows;
    const std::uint32_t tiles = (hidden + 15) / 16;

    const std::byte* const my_ring = penstock_decode_shared + warp * (ring::depth * ring::stage_bytes);
    const auto ring_address = static_cast<std::uint32_t>(__cvta_generic_to_shared(my_ring));
    decode_cursor<Format, Tokens> cursor;
    std::uint32_t opened = 0;  // items of this block in which copies were begun
    std::uint32_t issued = 0;
    std::uint32_t taken = 0;
    std::uint32_t issue_slot = 0;
    std::uint32_t take_slot = 0;

    // The inputs of an item of down are there when all tiles of gate and up of its tokens are.
    const auto is_ready = [&](const decode_item& item, bool wait) {
        if (item.phase == 0) {
            return true;
        }
        const std::uint32_t wanted = a.phase[0].items * (decode_warps / a.phase[0].split);
        std::uint32_t there = 0;
        if (lane == 0) {
            there = load_acquire(ready + item.group) >= wanted;
            const long long begin = clock64();
            while (wait && there == 0) {
                __nanosleep(32);
                there = load_acquire(ready + item.group) >= wanted;
                if (clock64() - begin > (1ll << 35)) {
                    __trap();
                }
            }
        }
        return __shfl_sync(0xffffffffu, there, 0) != 0;
    };
    // Fills the ring. Past the item `number`, which the block computes, only what waits for nobody.
    const auto fill = [&](std::uint32_t number) {
        __syncwarp();
        while (issued - taken < ring::depth - 1) {
            if (cursor.over()) {
                if (opened > number + 1) {
                    return;
                }
                const std::uint32_t next = tickets[opened % 4];
                if (next >= items) {
                    return;
                }
                const decode_item item = find_item<Tokens>(a, works, count, groups, next);
                if (!is_ready(item, opened == number)) {
                    return;
                }
                cursor.open(a, item, rows, warp, lane);
                ++opened;
                continue;
            }
            cursor.copy(ring_address + issue_slot * ring::stage_bytes, lane);
            issue_slot = issue_slot + 1 == ring::depth ? 0 : issue_slot + 1;
            ++issued;
        }
    };

    for (std::uint32_t number = 0;; ++number) {
        const std::uint32_t ticket = tickets[number % 4];
        if (ticket >= items) {
            break;
        }
        std::uint32_t claimed = 0;
        if (threadIdx.x == 0) {
            claimed = atomicAdd(a.counters, 1);
        }
        const decode_item item = find_item<Tokens>(a, works, count, groups, ticket);
        const decode_phase& p = a.phase[item.phase];
        tile_sums sums;
        for (std::uint32_t s = warp % p.split; s < p.stages; s += p.split) {
            fill(number);
            if (issued - taken == ring::depth - 1) {
                asm volatile("cp.async.wait_group %0;" ::"n"(ring::depth - 2) : "memory");
            } else {
                asm volatile("cp.async.wait_group 0;" ::: "memory");
            }
            __syncwarp();
            add_stage<Format, Tokens>(sums, my_ring + take_slot * ring::stage_bytes, lane);
            take_slot = take_slot + 1 == ring::depth ? 0 : take_slot + 1;
            ++taken;
        }
        fill(number);
        float* const buffer = all_sums + number % 2 * (decode_warps * 16 * Tokens);
        float* const mine = buffer + warp * (16 * Tokens);
        const std::uint32_t g = lane / 4;
        const std::uint32_t t = lane % 4;
        if constexpr (Tokens == 1) {
            if (t == 0) {
                mine[g] = sums.of[0];
                mine[g + 8] = sums.of[2];
            }
        } else {
            *reinterpret_cast<float2*>(mine + g * Tokens + 2 * t) = {sums.of[0], sums.of[1]};
            *reinterpret_cast<float2*>(mine + (g + 8) * Tokens + 2 * t) = {sums.of[2], sums.of[3]};
        }
        if (threadIdx.x == 0) {
            tickets[(number + 2) % 4] = claimed;
        }
        __syncthreads();
        if (warp % p.split == number % p.split) {
            const std::uint32_t tile = item.tile0 + warp / p.split;
            write_tile<Format, Tokens>(a, item, tile, buffer + warp / p.split * p.split * (16 * Tokens), p.split, rows);
            __syncwarp();
            if (item.phase == 0) {
                if (lane == 0) {
                    __threadfence();
                    atomicAdd(ready + item.group, 1);
                }
            } else if (a.combines && tile < tiles) {
                std::uint32_t before = 0;
                if (lane == 0) {
                    __threadfence();
                    before = atomicAdd(done + tile, 1);
                    __threadfence();
                }
                if (__shfl_sync(0xffffffffu, before, 0) + 1 == groups) {
                    combine_tile(a, tile * 16, hidden);
                }
            }
        }
    }
    if (groups == 0 && a.combines) {
        for (std::uint32_t tile = blockIdx.x * decode_warps + warp; tile < tiles; tile += gridDim.x * decode_warps) {
            combine_tile(a, tile * 16, hidden);
        }
    }
    // The last block to leave puts the counters back.
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        counts[0] = atomicAdd(a.counters + 1, 1);
    }
    __syncthreads();
    if (counts[0] + 1 == gridDim.x) {
        const std::uint32_t used = 2 + a.most_groups + tiles;
        for (std::uint32_t i = threadIdx.x; i < used; i += decode_warps * 32) {
            a.counters[i] = 0;
        }
    }
}

}  // namespace penstock::inline v0_1::detail

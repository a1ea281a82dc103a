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
/// counter. Eight warps of a block multiply: `split` of them share a tile, each reading every split-th 256 bytes of its rows, and 8 / split
/// tiles side by side make the item. Each has a ring of stages of its own, filled by asynchronous copies of whole cache lines, and goes on
/// into the next items without waiting for anyone; so the weights never stop streaming. One warp draws the items and looks up what they
/// need, ahead of time; one adds up the sums and writes results, behind.
///
/// An item of down waits for the tiles of gate and up of its expert. Those have lower numbers, so running blocks hold them, and what a block
/// drew before goes on while it waits: whatever else runs on the device, and however few blocks of this launch do, it ends.

namespace penstock::inline v0_1::detail {

inline constexpr std::uint32_t decode_warps = 8;  ///< that multiply
inline constexpr std::uint32_t decode_threads = (decode_warps + 2) * 32;
/// Items of a block that are drawn and not yet written.
template <std::uint32_t Tokens>
inline constexpr std::uint32_t decode_ahead = Tokens == 1 ? 4 : 8;
/// Buffers of sums: what two blocks of one token each leave room for, or enough that nobody waits.
template <std::uint32_t Tokens>
inline constexpr std::uint32_t decode_buffers = Tokens == 1 ? 2 : 4;
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

/// Inputs scaled for formats with two planes.
struct decode_scaled {
    std::byte* planes;  ///< [rows, 2, cols] bytes
    float* scales;      ///< [rows, ceil(cols / 128)]
};

struct decode_arguments {
    decode_phase phase[2];
    activation_rule rule;
    const std::byte* const* records;  ///< [experts]
    std::uint32_t experts;
    std::uint32_t pairs;
    std::uint32_t k;
    const void* hidden;  ///< [tokens, cols of phase 0] in the operand's type
    decode_scaled scaled[2];  ///< the hidden states, and what is activated, for formats with two planes
    const std::int32_t* ids;
    const std::int32_t* rows;      ///< pairs sorted by expert; null: `ids` are few enough to group here
    const std::uint32_t* offsets;  ///< [experts + 1]
    const float* input_scale;      ///< [pairs], or null
    const float* weights;          ///< [pairs], or null
    const float* shared;           ///< [tokens, hidden], or null
    std::uint16_t* activated;      ///< [pairs, intermediate] in the operand's type
    float* partial;                ///< [pairs, hidden]
    /// Ticket, exits, ready [groups], done [tiles of down], and for formats with two planes activated tiles [groups, blocks of 128]: all
    /// zero before and after.
    std::uint32_t* counters;
    std::uint32_t most_groups;
    bool combines;
    bool rows_in_shared;
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

/// One item, as the warps that multiply need it. Phase 2: there are no more.
template <std::uint32_t Tokens>
struct decode_item {
    std::uint32_t phase;
    std::uint32_t group;  ///< number over all works
    std::uint32_t tile0;
    std::uint32_t tokens;
    const std::byte* record;
    const std::byte* input[Tokens];
    const float* input_scale[Tokens];
    std::uint32_t pair[Tokens];
};

/// A stage: 16 rows of weights, then rows of inputs and scales for as many tokens as the item has. So a ring holds the more stages the fewer
/// tokens there are.
template <class Format, std::uint32_t Tokens>
struct decode_ring {
    static constexpr std::uint32_t inputs = decode_row_bytes * 8 / Format::bits;  ///< of a stage
    static constexpr std::uint32_t token_bytes = inputs * 2;
    static constexpr bool scaled = decoder<Format>::scaled;
    static constexpr std::uint32_t scale_blocks = inputs / 128;
    static constexpr std::uint32_t planes = fragment<Format>::planes;
    static constexpr std::uint32_t scale_bytes = scaled ? scale_blocks * 16 * 4 : 0;

    static constexpr PENSTOCK_HD std::uint32_t stage_bytes(std::uint32_t tokens) {
        return decode_tile_bytes + tokens * token_bytes + scale_bytes +
               (planes == 2 ? static_cast<std::uint32_t>(round_up(tokens * scale_blocks * 4, 16)) : 0);
    }

    static constexpr std::uint32_t most_stages = 6;  ///< under way
    /// Of a warp. Two blocks of a multiprocessor have one token's rings, one block those of more.
    static constexpr std::uint32_t warp_bytes = Tokens == 1 ? 3 * stage_bytes(1) : 25u << 10;
    static constexpr std::uint32_t bytes = decode_warps * warp_bytes;
    static constexpr std::uint32_t sums_bytes = decode_buffers<Tokens> * decode_warps * 16 * Tokens * 4;
};

/// Where the next stage of a ring lies. Both ends of the ring count the same way.
struct ring_end {
    std::uint32_t offset = 0;
    std::uint32_t passed = 0;  ///< bytes, those left out at the end of the ring among them

    /// @returns where a stage of `bytes` begins
    __device__ std::uint32_t next(std::uint32_t bytes, std::uint32_t ring_bytes) {
        if (offset + bytes > ring_bytes) {
            passed += ring_bytes - offset;
            offset = 0;
        }
        const std::uint32_t begin = offset;
        offset += bytes;
        passed += bytes;
        return begin;
    }
};

/// Until at most `pending` of the youngest copies of this thread are under way.
__device__ inline void wait_for_copies(std::uint32_t pending) {
    switch (pending) {
        case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); return;
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); return;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); return;
        case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); return;
        default: asm volatile("cp.async.wait_group 4;" ::: "memory"); return;
    }
}

__device__ inline void copy_16(std::uint32_t to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0) : "memory");
}

__device__ inline void copy_4(std::uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ inline std::uint32_t load_shared(const std::uint32_t* from) {
    std::uint32_t value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
                 : "=r"(value)
                 : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(from)))
                 : "memory");
    return value;
}

__device__ inline void store_shared(std::uint32_t* to, std::uint32_t value) {
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(to))), "r"(value)
                 : "memory");
}

__device__ inline void add_shared(std::uint32_t* to, std::uint32_t value) {
    asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(to))), "r"(value)
                 : "memory");
}

__device__ inline std::uint32_t load_acquire(const std::uint32_t* from) {
    std::uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

/// Which of the 16-byte chunks of a row of a tile, modulo 8, holds chunk 0: rows that lanes read together lie in different banks.
__device__ inline std::uint32_t tile_swizzle(std::uint32_t row) { return (row & 1) << 2 | (row >> 1 & 3); }

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

/// Item number `n`. Groups of one expert take turns, so that they meet in the L2 cache. Called by one warp. @pre n is an item
template <class Format, std::uint32_t Tokens>
__device__ void find_item(const decode_arguments& a, const decode_work* works, std::uint32_t count, std::uint32_t groups,
                          const std::int32_t* rows, std::uint32_t n, decode_item<Tokens>& item) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t of_first = groups * a.phase[0].items;
    const std::uint32_t phase = n >= of_first ? 1 : 0;
    n -= phase * of_first;
    const std::uint32_t items = a.phase[phase].items;
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
    const std::uint32_t tokens = smaller(Tokens, work.count - group * Tokens);
    if (lane == 0) {
        item.phase = phase;
        item.group = work.group0 + group;
        item.tile0 = local / groups_here * (decode_warps / a.phase[phase].split);
        item.tokens = tokens;
        item.record = work.record;
    }
    if (lane < tokens) {
        const auto pair = static_cast<std::uint32_t>(rows[work.first + group * Tokens + lane]);
        const std::uint64_t bytes = std::uint64_t{2} * a.phase[phase].cols;
        item.pair[lane] = pair;
        const std::uint64_t row = phase == 0 ? pair / a.k : pair;
        if constexpr (fragment<Format>::planes == 2) {
            item.input[lane] = a.scaled[phase].planes + row * bytes;
            item.input_scale[lane] = a.scaled[phase].scales + row * ((a.phase[phase].cols + 127) / 128);
        } else {
            item.input[lane] = (phase == 0 ? static_cast<const std::byte*>(a.hidden) : reinterpret_cast<const std::byte*>(a.activated)) +
                               row * bytes;
        }
    }
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
    std::uint32_t input_chunks = 0;  ///< of a plane
    std::uint32_t plane_bytes = 0;
    std::uint32_t tokens = 0;
    const std::byte* from[2] = {};
    std::uint64_t stride[2] = {};  ///< of two rows
    std::uint32_t last[2] = {};    ///< of the eight rows of a half, the last there is, counted from this lane's first
    const std::byte* const* input = nullptr;  ///< [tokens]
    const float* const* input_scale = nullptr;
    const float* scale = nullptr;      ///< of the row lane % 16
    std::uint32_t scale_cols = 0;

    __device__ void open(const decode_arguments& a, const decode_item<Tokens>& item, std::uint32_t warp, std::uint32_t lane) {
        const decode_phase& p = a.phase[item.phase];
        split = p.split;
        stage = warp % split;
        stages = p.stages;
        row_chunks = p.row_bytes / 16;
        plane_bytes = p.cols * 2 / ring::planes;
        input_chunks = plane_bytes / 16;
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
        input = item.input;
        input_scale = item.input_scale;
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
        // Of every token a row of 16 chunks, or two of them.
        const std::uint32_t inputs_to = to + decode_tile_bytes;
        const std::uint32_t c = stage * 16 + chunk;
        const bool has_input = c < input_chunks;
        constexpr std::uint32_t input_rows = Tokens * ring::planes;
#pragma unroll
        for (std::uint32_t r0 = 0; r0 < input_rows; r0 += 2) {
            const std::uint32_t r = r0 + lane / 16;
            const std::uint32_t n = r / ring::planes;
            if (n < tokens && r < input_rows) {
                const std::byte* const base = input[n] + r % ring::planes * plane_bytes;
                copy_16(inputs_to + r * decode_row_bytes + (chunk ^ tile_swizzle(n)) * 16, base + (has_input ? c * 16 : 0), has_input);
            }
        }
        if constexpr (ring::scaled) {
            const std::uint32_t block = smaller(stage * ring::scale_blocks + lane / 16, scale_cols - 1);
            copy_4(inputs_to + tokens * ring::token_bytes + lane * 4, scale + block);
        }
        if constexpr (ring::planes == 2) {
            const std::uint32_t n = lane / 2;
            if (n < tokens) {
                copy_4(inputs_to + tokens * ring::token_bytes + ring::scale_bytes + lane * 4,
                       input_scale[n] + smaller(stage * 2 + lane % 2, scale_cols - 1));
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        stage += split;
    }
};

/// Adds the products of one stage.
template <class Format, std::uint32_t Tokens>
__device__ void add_stage(tile_sums (&sums)[2], const std::byte* at, std::uint32_t tokens, std::uint32_t lane) {
    using ring = decode_ring<Format, Tokens>;
    using frag = fragment<Format>;
    const std::uint32_t g = lane / 4;
    const std::uint32_t t = lane % 4;
    const std::uint32_t token = Tokens == 1 ? 0 : smaller(g, tokens - 1);  // those without a token compute what nobody reads
    const auto* upper = reinterpret_cast<const uint4*>(at + g * decode_row_bytes);
    const auto* lower = upper + 8 * decode_row_bytes / 16;
    const auto* inputs = reinterpret_cast<const uint4*>(at + decode_tile_bytes + token * ring::token_bytes);
    const auto* scales = reinterpret_cast<const float*>(at + decode_tile_bytes + (Tokens == 1 ? 1 : tokens) * ring::token_bytes);
    const auto* input_scales = scales + ring::scale_bytes / 4;
    const std::uint32_t even_token = Tokens == 1 ? 0 : smaller(2 * t, tokens - 1);
    const std::uint32_t odd_token = Tokens == 1 ? 0 : smaller(2 * t + 1, tokens - 1);
    const std::uint32_t swizzle = tile_swizzle(g);
    const std::uint32_t turn = tile_swizzle(token);
    // Two chains of products, so that one does not wait for the other.
#pragma unroll(ring::scaled ? 1 : 2)  // with scales there is enough to do in one round, and registers are few
    for (std::uint32_t u = 0; u < 4; u += 2) {
        tile_sums part[2];
#pragma unroll
        for (std::uint32_t i = 0; i < 2; ++i) {
            const std::uint32_t chunk = (u + i) * 4 + t;
            uint4 x[ring::planes];
#pragma unroll
            for (std::uint32_t v = 0; v < ring::planes; ++v) {
                x[v] = inputs[v * 16 + (chunk ^ turn)];
            }
            frag::add(ring::scaled ? part[i] : sums[i], upper[chunk ^ swizzle], lower[chunk ^ swizzle], x);
        }
        if constexpr (ring::scaled) {
            const float high = scales[u / 2 * 16 + g];
            const float low = scales[u / 2 * 16 + 8 + g];
            const float even = input_scales[even_token * 2 + u / 2];
            const float odd = input_scales[odd_token * 2 + u / 2];
            tile_sums& sum = sums[0];
            sum.of[0] = ::fmaf((part[0].of[0] + part[1].of[0]) * even, high, sum.of[0]);
            sum.of[1] = ::fmaf((part[0].of[1] + part[1].of[1]) * odd, high, sum.of[1]);
            sum.of[2] = ::fmaf((part[0].of[2] + part[1].of[2]) * even, low, sum.of[2]);
            sum.of[3] = ::fmaf((part[0].of[3] + part[1].of[3]) * odd, low, sum.of[3]);
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
__device__ void write_tile(const decode_arguments& a, const decode_item<Tokens>& item, std::uint32_t tile, const float* sums,
                           std::uint32_t split) {
    const std::uint32_t lane = threadIdx.x % 32;
    const decode_phase& p = a.phase[item.phase];
    const auto sum_of = [&](std::uint32_t row, std::uint32_t token) {
        float sum = 0.0f;
        for (std::uint32_t s = 0; s < split; ++s) {
            sum += sums[(s * 16 + row) * Tokens + token];
        }
        return sum;
    };
    if (item.phase == 0) {
        const std::uint32_t row = tile * 8 + lane % 8;
        for (std::uint32_t n = lane / 8; n < item.tokens && row < p.half[0].rows; n += 4) {
            const std::uint32_t pair = item.pair[n];
            const float scale = a.input_scale != nullptr ? a.input_scale[pair] : 1.0f;
            const float gate = sum_of(lane % 8, n) * scale + bias_at(p.half[0], item.record, row);
            const float up = sum_of(lane % 8 + 8, n) * scale + bias_at(p.half[1], item.record, row);
            a.activated[static_cast<std::uint64_t>(pair) * a.phase[1].cols + row] =
                to_operand<fragment<Format>::type>(activate(a.rule, gate, up));
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
    decode_item<Tokens> items[decode_ahead<Tokens>];
    std::uint32_t drawn;    ///< items that are on the board, the end among them
    std::uint32_t written;  ///< items that are done with
    std::uint32_t arrived[decode_buffers<Tokens>];
};

/// The warp that draws items. It waits for the inputs of down before it shows an item.
template <class Format, std::uint32_t Tokens>
__device__ void draw_items(const decode_arguments& a, decode_board<Tokens>& board, const decode_work* works, std::uint32_t count,
                           std::uint32_t groups, const std::int32_t* rows, std::uint32_t ticket) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t items = groups * (a.phase[0].items + a.phase[1].items);
    const std::uint32_t tiles = a.phase[0].items * (decode_warps / a.phase[0].split);
    const std::uint32_t wanted = fragment<Format>::planes == 2 ? (tiles + 15) / 16 : tiles;
    std::uint32_t ready_group = ~0u;  // the last that was
    std::uint32_t then = 0;           // the ticket after this one
    if (lane == 0) {
        then = atomicAdd(a.counters, 1);
    }
    for (std::uint32_t number = 0;; ++number) {
        while (load_shared(&board.written) + decode_ahead<Tokens> <= number) {
        }
        const std::uint32_t now = __shfl_sync(0xffffffffu, ticket, 0);
        ticket = then;
        decode_item<Tokens>& item = board.items[number % decode_ahead<Tokens>];
        if (now >= items) {
            bool last = false;
            if (lane == 0) {
                item.phase = 2;
                store_shared(&board.drawn, number + 1);
                __threadfence();
                last = atomicAdd(a.counters + 1, 1) + 1 == gridDim.x;
            }
            if (__shfl_sync(0xffffffffu, static_cast<int>(last), 0) != 0) {  // nobody reads a counter any more, save done
                for (std::uint32_t i = lane; i < 2 + groups; i += 32) {
                    a.counters[i] = 0;
                }
            }
            return;
        }
        if (lane == 0) {
            then = atomicAdd(a.counters, 1);
        }
        find_item<Format, Tokens>(a, works, count, groups, rows, now, item);
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
    if (__shfl_sync(0xffffffffu, static_cast<int>(complete), 0) == 0) {
        return;
    }
    const std::uint32_t cols = a.phase[1].cols;
    if (block * 128 < cols) {
        for (std::uint32_t n = 0; n < item.tokens; ++n) {
            const std::uint64_t pair = item.pair[n];
            std::byte* const planes = a.scaled[1].planes + pair * 2 * cols + block * 128;
            scale_block(a.activated + pair * cols + block * 128, cols - block * 128, planes, planes + cols,
                        a.scaled[1].scales + pair * ((cols + 127) / 128) + block);
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
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const std::uint32_t blocks = (cols + 127) / 128;
    const std::uint32_t n = blockIdx.x * Warps + threadIdx.x / 32;
    const std::uint64_t token = n / blocks;
    const std::uint32_t begin = n % blocks * 128;
    if (token < tokens) {
        std::byte* const planes = to.planes + token * 2 * cols + begin;
        scale_block(hidden + token * cols + begin, cols - begin, planes, planes + cols, to.scales + n);
    }
}

/// The warp that adds up and writes.
template <class Format, std::uint32_t Tokens>
__device__ void write_items(const decode_arguments& a, decode_board<Tokens>& board, const float* sums, std::uint32_t groups,
                            const std::int32_t* ids, const float* weights) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t hidden = a.phase[1].half[0].rows;
    const std::uint32_t tiles = (hidden + 15) / 16;
    std::uint32_t* const ready = a.counters + 2;
    std::uint32_t* const done = ready + a.most_groups;
    for (std::uint32_t number = 0;; ++number) {
        while (load_shared(&board.drawn) <= number) {
        }
        const decode_item<Tokens>& item = board.items[number % decode_ahead<Tokens>];
        if (item.phase == 2) {
            return;
        }
        while (load_shared(&board.arrived[number % decode_buffers<Tokens>]) < decode_warps * (number / decode_buffers<Tokens> + 1)) {
        }
        const std::uint32_t split = a.phase[item.phase].split;
        const float* const buffer = sums + number % decode_buffers<Tokens> * (decode_warps * 16 * Tokens);
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
            for (std::uint32_t last = __ballot_sync(0xffffffffu, counts && before == groups); last != 0; last &= last - 1) {
                combine_tile(a, (item.tile0 + static_cast<std::uint32_t>(__ffs(static_cast<int>(last)) - 1)) * 16, hidden, ids, weights);
            }
        }
        __syncwarp();
        if (lane == 0) {
            store_shared(&board.written, number + 1);
        }
    }
}

/// A warp that multiplies.
template <class Format, std::uint32_t Tokens>
__device__ void multiply_items(const decode_arguments& a, decode_board<Tokens>& board, float* all_sums, const std::byte* ring_start) {
    using ring = decode_ring<Format, Tokens>;
    const std::uint32_t warp = threadIdx.x / 32;
    const std::uint32_t lane = threadIdx.x % 32;
    const auto ring_address = static_cast<std::uint32_t>(__cvta_generic_to_shared(ring_start));
    decode_cursor<Format, Tokens> cursor;
    std::uint32_t opened = 0;  // items in which copies were begun
    std::uint32_t under_way = 0;
    ring_end issue;
    ring_end take;
    const auto fill = [&] {
        __syncwarp();  // what is copied to was read by all
        while (under_way < ring::most_stages - 1) {
            if (cursor.over()) {
                if (load_shared(&board.drawn) <= opened || board.items[opened % decode_ahead<Tokens>].phase == 2) {
                    return;
                }
                cursor.open(a, board.items[opened % decode_ahead<Tokens>], warp, lane);
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
    for (std::uint32_t number = 0;; ++number) {
        while (load_shared(&board.drawn) <= number) {
        }
        const decode_item<Tokens>& item = board.items[number % decode_ahead<Tokens>];
        const std::uint32_t phase = item.phase;
        if (phase == 2) {
            return;
        }
        tile_sums sums[2];
        const std::uint32_t tokens = item.tokens;
        const std::uint32_t split = a.phase[phase].split;
        const std::uint32_t stages = a.phase[phase].stages;
        for (std::uint32_t s = warp % split; s < stages; s += split) {
            fill();
            wait_for_copies(under_way - 1);
            __syncwarp();
            add_stage<Format, Tokens>(sums, ring_start + take.next(ring::stage_bytes(tokens), ring::warp_bytes), tokens, lane);
            --under_way;
        }
        fill();
        while (load_shared(&board.written) + decode_buffers<Tokens> <= number) {
        }
        float* const mine = all_sums + (number % decode_buffers<Tokens> * decode_warps + warp) * (16 * Tokens);
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
            add_shared(&board.arrived[number % decode_buffers<Tokens>], 1);
        }
    }
}

/// Dynamic shared memory: the rings, the sums, the works.
template <class Format, std::uint32_t Tokens>
__global__ __launch_bounds__(decode_threads, Tokens == 1 ? 2 : 1)
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
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (warp == decode_warps) {
        std::uint32_t groups_found = 0;
        const std::uint32_t found = a.rows != nullptr ? list_sorted<Tokens>(a, works, groups_found)
                                                      : list_few<Tokens>(a, works, rows, groups_found);
        if (lane == 0) {
            counts[0] = found;
            counts[1] = groups_found;
        }
    } else if (warp > decode_warps) {
        if (lane == 0) {
            counts[2] = atomicAdd(a.counters, 1);
        }
        if (a.combines && lane < a.pairs) {
            few_ids[lane] = a.ids[lane];
            few_weights[lane] = a.weights != nullptr ? a.weights[lane] : 1.0f;
        }
    } else {
        if (a.rows != nullptr && a.rows_in_shared) {
            for (std::uint32_t i = threadIdx.x; i < a.pairs; i += decode_warps * 32) {
                rows[i] = a.rows[i];  // those past the last that visits anyone mean nothing
            }
        }
        if (threadIdx.x == 0) {
            board.drawn = 0;
            board.written = 0;
            for (std::uint32_t& one : board.arrived) {
                one = 0;
            }
        }
    }
    __syncthreads();
    const std::uint32_t groups = counts[1];
    const std::uint32_t hidden = a.phase[1].half[0].rows;
    const std::uint32_t tiles = (hidden + 15) / 16;
    if (warp < decode_warps) {
        multiply_items<Format, Tokens>(a, board, sums, penstock_decode_shared + warp * ring::warp_bytes);
    } else if (warp == decode_warps) {
        draw_items<Format, Tokens>(a, board, works, counts[0], groups, a.rows_in_shared ? rows : a.rows, counts[2]);
    } else {
        write_items<Format, Tokens>(a, board, sums, groups, few_ids, few_weights);
    }
    if (groups == 0 && a.combines) {
        for (std::uint32_t tile = blockIdx.x * (decode_threads / 32) + warp; tile < tiles; tile += gridDim.x * (decode_threads / 32)) {
            combine_tile(a, tile * 16, hidden, few_ids, few_weights);
        }
    }
}

}  // namespace penstock::inline v0_1::detail

#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/decode_items.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/activation.hpp>
#include <penstock/dispatch/detail/decode_fragments.cuh>
#include <penstock/model/record.hpp>
#include <penstock/units.hpp>

#include <cstddef>
#include <cstdint>

/// How the work of decode_experts is cut: experts that tokens visit, groups of tokens, items.

namespace penstock::inline v0_1::detail {

inline constexpr std::uint32_t decode_warps = 8;  ///< that multiply
/// Warps of a block that write: one item takes longer to write than to read.
inline constexpr std::uint32_t decode_writers = 3;
inline constexpr std::uint32_t decode_threads = (decode_warps + 1 + decode_writers) * 32;
/// Items of a block that are drawn and not yet written.
inline constexpr std::uint32_t decode_ahead = 8;
/// Buffers of sums.
inline constexpr std::uint32_t decode_buffers = 3;
inline constexpr std::uint32_t decode_row_bytes = 256;  ///< of a row in a stage: two cache lines
inline constexpr std::uint32_t decode_row_chunks = decode_row_bytes / 16;
inline constexpr std::uint32_t decode_rows_together = 32 / decode_row_chunks;  ///< that a warp copies at once
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
    std::byte* planes;  ///< [copies, rows, 2, cols] bytes
    float* scales;      ///< [copies, rows, ceil(cols / 128)]
    std::uint32_t copies;
    std::uint32_t rows;
};

struct decode_arguments {
    decode_phase phase[2];
    activation_rule rule;
    const std::byte* const* records;  ///< [experts]
    std::uint32_t experts;
    std::uint32_t pairs;
    std::uint32_t k;
    const void* hidden;       ///< [tokens, cols of phase 0] in the operand's type
    decode_scaled scaled[2];  ///< the hidden states, and what is activated, for formats with two planes
    const std::int32_t* ids;
    const std::int32_t* rows;      ///< pairs sorted by expert; null: `ids` are few enough to group here
    const std::uint32_t* offsets;  ///< [experts + 1]
    const float* input_scale;      ///< [pairs], or null
    const float* weights;          ///< [pairs], or null
    const float* shared;           ///< [tokens, hidden], or null
    void* activated;               ///< [pairs, intermediate] in the operand's type
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
    std::uint32_t expert;
};

/// One item, as the warps that multiply need it.
template <std::uint32_t Tokens>
struct decode_item {
    std::uint32_t phase;  ///< 0: gate and up, 1: down
    std::uint32_t group;  ///< number over all works
    std::uint32_t tile0;
    std::uint32_t tokens;
    const std::byte* record;
    const std::byte* input[Tokens];
    const float* input_scale[Tokens];
    std::uint32_t pair[Tokens];
};

/// Groups the pairs by expert, in the order of their first pairs. Called by one warp. @returns the number of works
template <std::uint32_t Tokens>
__device__ std::uint32_t list_few(const decode_arguments& a, decode_work* works, std::int32_t* rows, std::uint32_t& groups) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::int32_t id = lane < a.pairs ? a.ids[lane] : -1;
    const bool valid = id >= 0 && static_cast<std::uint32_t>(id) < a.experts;
    const std::uint32_t same = __match_any_sync(whole_warp, valid ? id : -1);
    const std::uint32_t before = (1u << lane) - 1;
    const bool leads = valid && (same & before) == 0;
    const std::uint32_t leaders = __ballot_sync(whole_warp, leads);
    const auto count = static_cast<std::uint32_t>(__popc(same));
    const std::uint32_t mine = leads ? count | ((count + Tokens - 1) / Tokens) << 16 : 0;
    const std::uint32_t sum = sum_up_to_lane(mine);
    const std::uint32_t start = sum - mine;
    const std::uint32_t of_leader = __shfl_sync(whole_warp, start, __ffs(static_cast<int>(same)) - 1);
    if (leads) {
        works[__popc(leaders & before)] = {a.records[id], start & 0xffff, count, start >> 16, static_cast<std::uint32_t>(id)};
    }
    if (valid) {
        rows[(of_leader & 0xffff) + static_cast<std::uint32_t>(__popc(same & before))] = static_cast<std::int32_t>(lane);
    }
    groups = __shfl_sync(whole_warp, sum, 31) >> 16;
    return static_cast<std::uint32_t>(__popc(leaders));
}

/// The experts that pairs sorted before visit, by ascending number; where their records lie is left to others. Called by one warp.
/// @param offsets [experts + 1], in shared memory
template <std::uint32_t Tokens>
__device__ std::uint32_t list_sorted(const decode_arguments& a, const std::uint32_t* offsets, decode_work* works, std::uint32_t& groups) {
    const std::uint32_t lane = threadIdx.x % 32;
    std::uint32_t count_before = 0;
    groups = 0;
    for (std::uint32_t e0 = 0; e0 < a.experts; e0 += 32) {
        const std::uint32_t e = e0 + lane;
        const std::uint32_t first = offsets[smaller(e, a.experts)];
        const std::uint32_t count = offsets[smaller(e + 1, a.experts)] - first;
        const std::uint32_t visited = __ballot_sync(whole_warp, count > 0);
        const std::uint32_t mine = (count + Tokens - 1) / Tokens;
        const std::uint32_t sum = sum_up_to_lane(mine);
        if (count > 0) {
            works[count_before + static_cast<std::uint32_t>(__popc(visited & ((1u << lane) - 1)))] = {nullptr, first, count,
                                                                                                      groups + sum - mine, e};
        }
        count_before += static_cast<std::uint32_t>(__popc(visited));
        groups += __shfl_sync(whole_warp, sum, 31);
    }
    return count_before;
}

/// Item number `n`. Groups of one expert take turns, so that they meet in the L2 cache. Called by one
/// warp, with ascending n. @pre n is an item @param low the work of the item before; 0 at first and when down begins
template <class Format, std::uint32_t Tokens>
__device__ void find_item(const decode_arguments& a, const decode_work* works, std::uint32_t count, std::uint32_t groups,
                          const std::int32_t* rows, std::uint32_t n, std::uint32_t& low, decode_item<Tokens>& item) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t of_first = groups * a.phase[0].items;
    const std::uint32_t phase = n >= of_first ? 1 : 0;
    n -= phase * of_first;
    const std::uint32_t items = a.phase[phase].items;
    const std::uint32_t number = n / items;
    while (low + 1 < count && works[low + 1].group0 <= number) {
        ++low;
    }
    const decode_work& work = works[low];
    const std::uint32_t groups_here = (work.count + Tokens - 1) / Tokens;
    const std::uint32_t local = n - work.group0 * items;
    const std::uint32_t place = groups_here == 1 ? local : local / groups_here;
    const std::uint32_t group = local - place * groups_here;
    const std::uint32_t tokens = smaller(Tokens, work.count - group * Tokens);
    if (lane == 0) {
        item.phase = phase;
        item.group = work.group0 + group;
        item.tile0 = place * (decode_warps / a.phase[phase].split);
        item.tokens = tokens;
        item.record = work.record;
    }
    if (lane < tokens) {
        const auto pair = static_cast<std::uint32_t>(rows[work.first + group * Tokens + lane]);
        const std::uint64_t bytes = std::uint64_t{2} * a.phase[phase].cols;
        item.pair[lane] = pair;
        std::uint64_t row = phase == 0 ? pair / a.k : pair;
        if constexpr (fragment<Format>::planes == 2) {
            row += blockIdx.x % a.scaled[phase].copies * a.scaled[phase].rows;
            item.input[lane] = a.scaled[phase].planes + row * bytes;
            item.input_scale[lane] = a.scaled[phase].scales + row * ((a.phase[phase].cols + 127) / 128);
        } else {
            item.input[lane] =
                (phase == 0 ? static_cast<const std::byte*>(a.hidden) : static_cast<const std::byte*>(a.activated)) + row * bytes;
        }
    }
}

}  // namespace penstock::inline v0_1::detail

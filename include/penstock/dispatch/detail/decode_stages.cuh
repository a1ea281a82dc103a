#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/decode_stages.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/detail/decode_items.cuh>

/// How weights and inputs reach the tensor cores: a ring of stages in shared memory for each warp.

namespace penstock::inline v0_1::detail {

/// A stage: 16 rows of weights, then rows of inputs and scales for as many tokens as the item has. So a ring holds the more stages the fewer
/// tokens there are.
template <class Format, std::uint32_t Tokens>
struct decode_ring {
    static constexpr std::uint32_t inputs = decode_row_bytes * 8 / Format::bits;  ///< of a stage
    static constexpr std::uint32_t token_bytes = inputs * 2;
    static constexpr std::uint32_t input_rows = fragment<Format>::vectors;  ///< of 256 bytes, of one token
    static constexpr std::uint32_t planes = fragment<Format>::planes;
    static constexpr bool grouped = Format::bits == 4;                   ///< a scale of a byte for each 32 weights
    static constexpr bool scaled = decoder<Format>::scaled && !grouped;  ///< a float for 128 x 128
    static constexpr std::uint32_t scale_blocks = inputs / 128;
    /// Of grouped formats: a stage's 16 scales of a row begin anywhere in a word, so that they lie in five.
    static constexpr std::uint32_t group_words = 5;
    static constexpr std::uint32_t scale_bytes = scaled ? scale_blocks * 16 * 4 : grouped ? group_words * 16 * 4 : 0;

    static constexpr PENSTOCK_HD std::uint32_t stage_bytes(std::uint32_t tokens) {
        return decode_tile_bytes + tokens * token_bytes + scale_bytes +
               (planes == 2 ? static_cast<std::uint32_t>(round_up(tokens * scale_blocks * 4, 16)) : 0);
    }

    static constexpr std::uint32_t most_stages = 4;  ///< more under way gain nothing, and what follows in order behind them comes later
    /// Of a warp; a multiprocessor has one block.
    static constexpr std::uint32_t warp_bytes = (Tokens == 1 ? 27u : 25u) << 10;
    static constexpr std::uint32_t bytes = decode_warps * warp_bytes;
    static constexpr std::uint32_t sums_bytes = decode_buffers * decode_warps * 16 * Tokens * 4;
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

/// Which of the 16-byte chunks of a row of a tile, modulo 8, holds chunk 0: rows that lanes read together lie in different banks.
__device__ inline std::uint32_t tile_swizzle(std::uint32_t row) { return (row & 1) << 2 | (row >> 1 & 3); }

/// Where chunk `chunk` of a row of inputs of token `n` lies in its row: what lanes read together lies in different banks. They read chunks that
/// follow each other, or, where 64 bytes of inputs go with 16 of weights, every fourth.
template <class Format>
__device__ std::uint32_t chunk_place(std::uint32_t chunk, std::uint32_t n) {
    return fragment<Format>::vectors == 4 ? chunk ^ (chunk >> 3 & 1) ^ (n & 3) << 1 : chunk ^ tile_swizzle(n);
}

/// Byte of a record at which the scales begin of row `r` of the tile that begins with row `row0`, for formats with groups.
template <class Format>
__device__ std::uint64_t group_scales_at(const decode_phase& p, std::uint32_t row0, std::uint32_t r) {
    const matrix_layout& m = p.half[r / 8];
    return m.scale_offset + decoder<Format>::scale_index(m, smaller(row0 + r / 8 * p.shift + r % 8, m.rows - 1), 0);
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
    std::uint64_t stride[2] = {};             ///< of the rows that are copied together
    std::uint32_t last[2] = {};               ///< of the eight rows of a half, the last there is, counted from this lane's first
    const std::byte* const* input = nullptr;  ///< [tokens]
    const float* const* input_scale = nullptr;
    const float* scale = nullptr;  ///< of the row lane % 16
    std::uint32_t scale_cols = 0;
    const std::byte* group_scales[ring::grouped ? 3 : 1] = {};  ///< the words that the lane copies, of stage 0
    std::uint32_t groups_end[ring::grouped ? 3 : 1] = {};       ///< bytes from there to the end of the row's scales

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
            const std::uint32_t mine = smaller(begin + lane / decode_row_chunks, m.rows - 1);
            stride[h] = m.row_stride * Format::bits / 8;
            from[h] = item.record + m.offset + mine * stride[h] + lane % decode_row_chunks * 16;
            stride[h] *= decode_rows_together;
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
        if constexpr (ring::grouped) {
#pragma unroll
            for (std::uint32_t i = 0; i < 3; ++i) {
                const std::uint32_t r = smaller((lane + i * 32) / ring::group_words, 15u);
                const std::byte* of_row = item.record + group_scales_at<Format>(p, row0, r);
                const auto skew = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(of_row) % 4);
                const std::uint32_t word = (lane + i * 32) % ring::group_words * 4;
                group_scales[i] = of_row - skew + word;
                const std::uint32_t end = skew + row_chunks;  // a chunk of 16 bytes is a group
                groups_end[i] = lane + i * 32 < 16 * ring::group_words && end > word ? end - word : 0;
            }
        }
    }

    /// Whether this warp has copied its part of the item.
    __device__ bool over() const { return stage >= stages; }

    __device__ void copy(std::uint32_t to, std::uint32_t lane) {
        const std::uint32_t chunk = lane % decode_row_chunks;
        const bool present = stage * decode_row_chunks + chunk < row_chunks;
        const std::uint64_t along = present ? static_cast<std::uint64_t>(stage) * decode_row_bytes : 0;
        constexpr std::uint32_t copies_a_half = 8 / decode_rows_together;
#pragma unroll
        for (std::uint32_t i = 0; i < 2 * copies_a_half; ++i) {
            const std::uint32_t row = decode_rows_together * i + lane / decode_row_chunks;
            const std::uint32_t h = i / copies_a_half;
            const std::uint32_t further = smaller(i % copies_a_half * decode_rows_together, last[h]) / decode_rows_together;
            copy_16(to + row * decode_row_bytes + (chunk ^ tile_swizzle(row)) * 16, from[h] + further * stride[h] + along, present);
        }
        // Of every token a row or two.
        const std::uint32_t inputs_to = to + decode_tile_bytes;
        constexpr std::uint32_t input_rows = Tokens * ring::input_rows;
#pragma unroll
        for (std::uint32_t r0 = 0; r0 < input_rows; r0 += decode_rows_together) {
            const std::uint32_t r = r0 + lane / decode_row_chunks;
            const std::uint32_t n = r / ring::input_rows;
            const std::uint32_t part = r % ring::input_rows;
            const std::uint32_t c =
                ring::planes > 1 ? stage * decode_row_chunks + chunk : (stage * ring::input_rows + part) * decode_row_chunks + chunk;
            const bool has_input = c < input_chunks;
            if (n < tokens && r < input_rows) {
                const std::byte* const base = input[n] + (ring::planes > 1 ? part * plane_bytes : 0);
                copy_16(inputs_to + r * decode_row_bytes + chunk_place<Format>(chunk, n) * 16, base + (has_input ? c * 16 : 0), has_input);
            }
        }
        if constexpr (ring::scaled) {
            if (lane < 16 * ring::scale_blocks) {
                const std::uint32_t block = smaller(stage * ring::scale_blocks + lane / 16, scale_cols - 1);
                copy_4(inputs_to + tokens * ring::token_bytes + lane * 4, scale + block);
            }
        }
        if constexpr (ring::grouped) {
#pragma unroll
            for (std::uint32_t i = 0; i < 3; ++i) {
                if (stage * decode_row_chunks < groups_end[i]) {
                    copy_4(inputs_to + tokens * ring::token_bytes + (lane + i * 32) * 4, group_scales[i] + stage * decode_row_chunks);
                }
            }
        }
        if constexpr (ring::planes == 2) {
            const std::uint32_t n = lane / ring::scale_blocks;
            if (n < tokens) {
                copy_4(inputs_to + tokens * ring::token_bytes + ring::scale_bytes + lane * 4,
                       input_scale[n] + smaller(stage * ring::scale_blocks + lane % ring::scale_blocks, scale_cols - 1));
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        stage += split;
    }
};

/// Adds the products of one stage. @param chunks of the rows from this stage on. @param skew of grouped formats: bytes before the scales of rows
/// lane / 4 and lane / 4 + 8 in their first word
template <class Format, std::uint32_t Tokens>
__device__ void add_stage(tile_sums (&sums)[2], const std::byte* at, std::uint32_t tokens, std::uint32_t lane,
                          const std::uint32_t (&skew)[2], std::uint32_t chunks) {
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
    // Two chains of products, so that one does not wait for the other.
#pragma unroll
    for (std::uint32_t u = 0; u < decode_row_bytes / 64; u += 2) {
        tile_sums part[2];
#pragma unroll
        for (std::uint32_t i = 0; i < 2; ++i) {
            const std::uint32_t chunk = (u + i) * 4 + t;
            uint4 x[frag::vectors];
#pragma unroll
            for (std::uint32_t v = 0; v < frag::vectors; ++v) {
                const std::uint32_t n = frag::planes > 1 ? v * decode_row_chunks + chunk : chunk * frag::vectors + v;
                x[v] = inputs[n / decode_row_chunks * decode_row_chunks + chunk_place<Format>(n % decode_row_chunks, token)];
            }
            if constexpr (ring::grouped) {
                const auto* codes = reinterpret_cast<const std::uint8_t*>(scales) + chunk;
                constexpr std::uint32_t row_bytes = ring::group_words * 4;
                const bool there = chunk < chunks;  // what lies beyond the row's scales is no scale
                frag::add(sums[i], upper[chunk ^ swizzle], lower[chunk ^ swizzle], x, there ? codes[g * row_bytes + skew[0]] : 0u,
                          there ? codes[(g + 8) * row_bytes + skew[1]] : 0u);
            } else {
                frag::add(ring::scaled ? part[i] : sums[i], upper[chunk ^ swizzle], lower[chunk ^ swizzle], x);
            }
        }
        if constexpr (ring::scaled) {
            const float high = scales[u / 2 * 16 + g];
            const float low = scales[u / 2 * 16 + 8 + g];
            const float even = input_scales[even_token * ring::scale_blocks + u / 2];
            const float odd = input_scales[odd_token * ring::scale_blocks + u / 2];
            tile_sums& sum = sums[0];
            sum.of[0] = ::fmaf((part[0].of[0] + part[1].of[0]) * even, high, sum.of[0]);
            sum.of[1] = ::fmaf((part[0].of[1] + part[1].of[1]) * odd, high, sum.of[1]);
            sum.of[2] = ::fmaf((part[0].of[2] + part[1].of[2]) * even, low, sum.of[2]);
            sum.of[3] = ::fmaf((part[0].of[3] + part[1].of[3]) * odd, low, sum.of[3]);
        }
    }
}

}  // namespace penstock::inline v0_1::detail

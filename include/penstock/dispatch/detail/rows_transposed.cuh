#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/rows_transposed.cuh holds a kernel: compile this file with nvcc"
#endif

#include <penstock/dispatch/decode.cuh>
#include <penstock/dispatch/detail/mlp_stage.cuh>

/// The kernel for matrices stored with the inputs first: neighbours in memory are rows.

namespace penstock::inline v0_1::detail {

inline constexpr std::uint32_t transposed_warps = 16;
inline constexpr std::uint32_t transposed_rows = 64;  ///< row pairs of a block: two a lane

/// Columns of a batch.
template <class Format>
inline constexpr std::uint32_t transposed_columns = Format::bits == 32 ? 4 : 8;

/// How a lane loads rows r, r + 1 of both sides in one column.
enum class transposed_loads : std::uint32_t {
    apart,      ///< two elements of a, two of b
    alternate,  ///< a and b take turns: four elements at once
    single      ///< one element at a time
};

/// Two and four elements of a format in one word.
template <int Bytes>
struct element_words;
template <>
struct element_words<1> {
    using two = std::uint16_t;
    using four = std::uint32_t;
    __device__ static two low(four q) { return static_cast<two>(__byte_perm(q, 0, 0x4420)); }
    __device__ static two high(four q) { return static_cast<two>(__byte_perm(q, 0, 0x4431)); }
    __device__ static std::uint8_t first(two t) { return static_cast<std::uint8_t>(t & 0xffu); }
    __device__ static std::uint8_t second(two t) { return static_cast<std::uint8_t>(t >> 8); }
    __device__ static two join(std::uint8_t a, std::uint8_t b) { return static_cast<two>(a | b << 8); }
};
template <>
struct element_words<2> {
    using two = std::uint32_t;
    using four = uint2;
    __device__ static two low(four q) { return __byte_perm(q.x, q.y, 0x5410); }
    __device__ static two high(four q) { return __byte_perm(q.x, q.y, 0x7632); }
    __device__ static std::uint16_t first(two t) { return static_cast<std::uint16_t>(t & 0xffffu); }
    __device__ static std::uint16_t second(two t) { return static_cast<std::uint16_t>(t >> 16); }
    __device__ static two join(std::uint16_t a, std::uint16_t b) { return a | static_cast<std::uint32_t>(b) << 16; }
};
template <>
struct element_words<4> {
    using two = uint2;
    using four = uint4;
    __device__ static two low(four q) { return {q.x, q.z}; }
    __device__ static two high(four q) { return {q.y, q.w}; }
    __device__ static std::uint32_t first(two t) { return t.x; }
    __device__ static std::uint32_t second(two t) { return t.y; }
    __device__ static two join(std::uint32_t a, std::uint32_t b) { return {a, b}; }
};

/// A block computes 64 row pairs, two a lane; its warps take batches of columns in turn, and their sums are added in the order of the
/// warps. For matrices whose rows are next to each other in memory (row_stride 1 or 2).
template <class Format, int Slots>
__global__ __launch_bounds__(transposed_warps * 32)
    __attribute__((visibility("hidden"))) void rows_transposed(const __grid_constant__ mlp_stage s, const __grid_constant__ mlp_works works,
                                                               transposed_loads how) {
    using decode = decoder<Format>;
    using element = typename decode::element;
    using words = element_words<sizeof(element)>;
    using two = typename words::two;
    constexpr std::uint32_t columns = transposed_columns<Format>;
    __shared__ float sums[transposed_warps][2][transposed_rows];

    const mlp_work work = works.of[blockIdx.x / s.tiles];
    const std::uint32_t warp = threadIdx.x / 32;
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t tile_row = blockIdx.x % s.tiles * transposed_rows;
    const std::uint32_t row0 = tile_row + 2 * lane;
    const bool whole = row0 + 1 < s.b.m.rows && row0 + 1 < s.a.m.rows;
    const auto* a = reinterpret_cast<const element*>(work.record + s.a.m.offset) + s.a.first;
    const auto* b = reinterpret_cast<const element*>(work.record + s.b.m.offset) + s.b.first;
    const std::uint64_t row_a[2] = {clamped(s.a, row0), clamped(s.a, row0 + 1)};
    const std::uint64_t row_b[2] = {clamped(s.b, row0), clamped(s.b, row0 + 1)};

    for (std::uint32_t token0 = 0; token0 < work.count; token0 += Slots) {
        const float* input[Slots];
        float scale[Slots];
        float acc[Slots][4];  // a of both rows, b of both rows
#pragma unroll
        for (std::uint32_t slot = 0; slot < Slots; ++slot) {
            // An absent token computes what the last one does, and nobody writes it.
            const auto p = static_cast<std::uint32_t>(s.rows[work.first + smaller(token0 + slot, work.count - 1)]);
            input[slot] = s.input + static_cast<std::uint64_t>(p / s.divisor) * s.cols;
            scale[slot] = s.input_scale != nullptr ? s.input_scale[p] : 1.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                acc[slot][i] = 0.0f;
            }
        }
        for (std::uint32_t c0 = warp * columns; c0 < s.cols; c0 += transposed_warps * columns) {
            two in_a[columns];
            two in_b[columns];
            if (how == transposed_loads::alternate && whole) {
                typename words::four both[columns];
#pragma unroll
                for (std::uint32_t i = 0; i < columns; ++i) {
                    const std::uint64_t c = smaller(c0 + i, s.cols - 1);
                    both[i] = __ldg(reinterpret_cast<const typename words::four*>(a + c * s.a.m.col_stride + row_a[0] * 2));
                }
#pragma unroll
                for (std::uint32_t i = 0; i < columns; ++i) {
                    in_a[i] = words::low(both[i]);
                    in_b[i] = words::high(both[i]);
                }
            } else if (how == transposed_loads::apart && whole) {
#pragma unroll
                for (std::uint32_t i = 0; i < columns; ++i) {
                    const std::uint64_t c = smaller(c0 + i, s.cols - 1);
                    in_a[i] = __ldg(reinterpret_cast<const two*>(a + c * s.a.m.col_stride + row_a[0]));
                    in_b[i] = __ldg(reinterpret_cast<const two*>(b + c * s.b.m.col_stride + row_b[0]));
                }
            } else {
#pragma unroll
                for (std::uint32_t i = 0; i < columns; ++i) {
                    const std::uint64_t c = smaller(c0 + i, s.cols - 1);
                    in_a[i] = words::join(__ldg(a + c * s.a.m.col_stride + row_a[0] * s.a.m.row_stride),
                                          __ldg(a + c * s.a.m.col_stride + row_a[1] * s.a.m.row_stride));
                    in_b[i] = words::join(__ldg(b + c * s.b.m.col_stride + row_b[0] * s.b.m.row_stride),
                                          __ldg(b + c * s.b.m.col_stride + row_b[1] * s.b.m.row_stride));
                }
            }
            float factor[4];  // a batch lies in one block of 128 columns
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                factor[i] = load_scale<Format>(work.record, s.a.m, row_a[i], c0);
                factor[2 + i] = load_scale<Format>(work.record, s.b.m, row_b[i], c0);
            }
#pragma unroll
            for (std::uint32_t i = 0; i < columns; ++i) {
                if (c0 + i < s.cols) {
                    float w[4] = {decode::one(words::first(in_a[i])), decode::one(words::second(in_a[i])),
                                  decode::one(words::first(in_b[i])), decode::one(words::second(in_b[i]))};
                    if constexpr (decode::scaled) {
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            w[j] *= factor[j];
                        }
                    }
#pragma unroll
                    for (std::uint32_t slot = 0; slot < Slots; ++slot) {
                        const float x = __ldg(input[slot] + c0 + i) * scale[slot];
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            acc[slot][j] = ::fmaf(w[j], x, acc[slot][j]);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (std::uint32_t slot = 0; slot < Slots; ++slot) {
            __syncthreads();
            sums[warp][0][2 * lane] = acc[slot][0];
            sums[warp][0][2 * lane + 1] = acc[slot][1];
            sums[warp][1][2 * lane] = acc[slot][2];
            sums[warp][1][2 * lane + 1] = acc[slot][3];
            __syncthreads();
            const std::uint32_t row = tile_row + threadIdx.x;
            if (threadIdx.x < transposed_rows && row < s.row_pairs && token0 + slot < work.count) {
                float sum_a = 0.0f;
                float sum_b = 0.0f;
                for (std::uint32_t w = 0; w < transposed_warps; ++w) {
                    sum_a += sums[w][0][threadIdx.x];
                    sum_b += sums[w][1][threadIdx.x];
                }
                write_pair(s, static_cast<std::uint32_t>(s.rows[work.first + token0 + slot]), row,
                           sum_a + bias_at(s.a.m, work.record, clamped(s.a, row)), sum_b + bias_at(s.b.m, work.record, clamped(s.b, row)));
            }
        }
    }
}

}  // namespace penstock::inline v0_1::detail

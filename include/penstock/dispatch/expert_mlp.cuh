#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/expert_mlp.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/activation.hpp>
#include <penstock/dispatch/decode.cuh>
#include <penstock/dispatch/expert_work.hpp>
#include <penstock/model/record.hpp>

#include <span>
#include <string>
#include <utility>

/// The expert MLP: act(gate x, up x), then down. Both launches run the same kernels, which compute pairs of rows: row r of gate and row r
/// of up, or rows 2 r and 2 r + 1 of down. Three kernels: rows_by_vector (rows contiguous and 16-byte aligned), rows_transposed
/// (inputs-first tensors, rows next to each other), rows_by_element (everything else).
///
/// Same bits whatever else is in the call: the path is chosen by the layout alone, every token's slot runs the same instructions, and sums
/// have a fixed order, which neither the number of slots nor the cut into segments of shared memory changes.

namespace penstock::inline v0_1::detail {

/// Where the kernels find a work; passed by value, so that no copy to the device is due.
struct mlp_work {
    const std::byte* record;
    std::uint32_t first;
    std::uint32_t count;
};

inline constexpr std::uint32_t works_per_launch = 128;

struct mlp_works {
    mlp_work of[works_per_launch];
};

/// One of the two matrices of a pair. Weight (r, c) is number first + r * row_stride + c * col_stride from byte `offset`.
struct mlp_side {
    matrix_layout m;
    std::uint64_t first;
};

/// One launch. Input row of pair p: p / tokens_divisor of `input`; output row: p of `output`.
struct mlp_stage {
    mlp_side a;
    mlp_side b;
    std::uint32_t row_pairs;  ///< rows of a; b has as many or one less
    std::uint32_t cols;
    std::uint32_t tiles;   ///< blocks that share a work
    std::uint32_t groups;  ///< rows_by_vector: row groups that a warp computes, one after another
    std::uint32_t segment;  ///< rows_by_vector: steps of 32 vectors for which the inputs are in shared memory at a time
    std::uint32_t divisor;
    const std::int32_t* rows;
    const float* input;
    const float* input_scale;
    float* output;
    std::uint32_t output_cols;
    bool gated;  ///< output[r] = act(a, b), else output[2 r], output[2 r + 1] = a, b
    activation_rule rule;
};

/// Gate and up of a layout, side by side.
inline mlp_stage first_stage(const expert_layout& layout) {
    mlp_stage s{};
    s.a = {layout.gate, 0};
    s.b = {layout.up, 0};
    s.row_pairs = layout.gate.rows;
    s.cols = layout.gate.cols;
    s.output_cols = layout.gate.rows;
    s.gated = true;
    s.rule = rule_of(layout);
    return s;
}

/// Even and odd rows of down.
inline mlp_stage second_stage(const expert_layout& layout) {
    const matrix_layout& down = layout.down;
    mlp_stage s{};
    matrix_layout even = down;
    even.rows = static_cast<std::uint32_t>(ceil_div(down.rows, 2));
    even.row_stride *= 2;
    even.scale_row_step *= 2;
    even.bias_stride *= 2;
    matrix_layout odd = even;
    odd.rows = down.rows / 2;
    odd.scale_row0 += down.scale_row_step;
    odd.bias_offset += static_cast<std::uint64_t>(down.bias_stride) * bits(down.bias_type) / 8;
    s.a = {even, 0};
    s.b = odd.rows == 0 ? s.a : mlp_side{odd, down.row_stride};
    s.row_pairs = even.rows;
    s.cols = down.cols;
    s.output_cols = down.rows;
    return s;
}

/// Writes what a pair of rows gave for pair `p`. @pre not past the last row
__device__ inline void write_pair(const mlp_stage& s, std::uint32_t p, std::uint32_t row, float a, float b) {
    float* out = s.output + static_cast<std::uint64_t>(p) * s.output_cols;
    if (s.gated) {
        out[row] = activate(s.rule, a, b);
    } else {
        out[2 * row] = a;
        if (2 * row + 1 < s.output_cols) {
            out[2 * row + 1] = b;
        }
    }
}

/// Row `row` of a side, or its last row where it has fewer: what is read for it is not used.
__device__ inline std::uint32_t clamped(const mlp_side& side, std::uint32_t row) { return row < side.m.rows ? row : side.m.rows - 1; }

// ---------------------------------------------------------------------------------------------------- rows_by_vector

inline constexpr std::uint32_t vector_warps = 8;

/// How rows_by_vector is cut for a number of token slots: `pairs` of rows a warp computes at once, `unroll` vectors of each in flight.
/// Chosen so that nothing spills; none of it changes bits.
template <class Format, int Slots>
struct vector_shape {
    static constexpr bool scaled = decoder<Format>::scaled;
    static constexpr int pairs = Slots <= 2 || (Slots == 8 && scaled) ? 1 : 2;
    static constexpr int unroll = Slots <= 2 ? 4 : pairs == 1 || (Slots == 4 && !scaled) ? 2 : 1;
    static constexpr int blocks_per_sm = Slots == 1 || (Slots == 2 && !scaled) ? 3 : 2;
};

/// 16-byte vectors of the rows of `Pairs` row pairs, in flight.
template <class Format, int Pairs, int Unroll, bool Scaled = decoder<Format>::scaled>
struct vector_batch {
    uint4 weights[Unroll][2 * Pairs];
    typename decoder<Format>::scale scales[Unroll][2 * Pairs];
};

template <class Format, int Pairs, int Unroll>
struct vector_batch<Format, Pairs, Unroll, false> {
    uint4 weights[Unroll][2 * Pairs];
};

/// Puts the inputs of `Slots` tokens, columns of steps [begin, begin + steps), in shared memory: column quad q of the vector that lane l
/// reads in a step is at [slot][step][q][l], so that the lanes of a warp read neighbours. Absent tokens and columns are zero.
template <class Format, int Slots>
__device__ void fill_inputs(const mlp_stage& s, const mlp_work& work, std::uint32_t token0, std::uint32_t begin, std::uint32_t steps,
                            float4* inputs) {
    constexpr std::uint32_t vector = decoder<Format>::per_vector;
    constexpr std::uint32_t per_step = 8 * vector;  // float4
    const bool aligned = reinterpret_cast<std::uintptr_t>(s.input) % 16 == 0;  // rows are: the path asks that 4 divides cols
    for (std::uint32_t slot = 0; slot < Slots; ++slot) {
        const bool present = token0 + slot < work.count;
        const std::uint32_t p = present ? static_cast<std::uint32_t>(s.rows[work.first + token0 + slot]) : 0;
        const float* row = s.input + static_cast<std::uint64_t>(p / s.divisor) * s.cols;
        const float scale = present && s.input_scale != nullptr ? s.input_scale[p] : 1.0f;
        for (std::uint32_t i = threadIdx.x; i < steps * per_step; i += vector_warps * 32) {
            const std::uint32_t quad = i / 32 % (vector / 4);
            const std::uint32_t c = ((begin + i / per_step) * 32 + i % 32) * vector + quad * 4;
            float4 x{0.0f, 0.0f, 0.0f, 0.0f};
            if (present && c < s.cols) {
                x = aligned ? __ldg(reinterpret_cast<const float4*>(row + c))
                            : make_float4(__ldg(row + c), __ldg(row + c + 1), __ldg(row + c + 2), __ldg(row + c + 3));
            }
            inputs[slot * (steps * per_step) + i] = make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
        }
    }
}

/// acc += the products of one quad of columns.
template <class Format, int Q, int Rows, int Slots>
__device__ void add_quad(const uint4 (&weights)[Rows], const float4* inputs, std::uint32_t slot_stride, float (&acc)[Slots * Rows]) {
    float w[Rows][4];
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
        decoder<Format>::template quad<Q>(weights[r], w[r]);
    }
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) {
        const float4 x = inputs[slot * slot_stride + Q * 32];
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            float& sum = acc[slot * Rows + r];
            sum = ::fmaf(w[r][0], x.x, sum);
            sum = ::fmaf(w[r][1], x.y, sum);
            sum = ::fmaf(w[r][2], x.z, sum);
            sum = ::fmaf(w[r][3], x.w, sum);
        }
    }
}

template <class Format, int Rows, int Slots, int... Q>
__device__ void add_vector(const uint4 (&weights)[Rows], const float4* inputs, std::uint32_t slot_stride, float (&acc)[Slots * Rows],
                           std::integer_sequence<int, Q...>) {
    (add_quad<Format, Q, Rows, Slots>(weights, inputs, slot_stride, acc), ...);
}

/// A warp computes `pairs` row pairs for up to `Slots` tokens at once. @pre Both sides: col_stride 1, rows start at multiples of 16 bytes
/// and hold whole vectors. Dynamic shared memory: Slots * segment * 32 * per_vector floats.
template <class Format, int Slots>
__global__ __launch_bounds__(vector_warps * 32, vector_shape<Format, Slots>::blocks_per_sm) __attribute__((visibility("hidden"))) void
rows_by_vector(const __grid_constant__ mlp_stage s, const __grid_constant__ mlp_works works) {
    using decode = decoder<Format>;
    constexpr int pairs = vector_shape<Format, Slots>::pairs;
    constexpr int unroll = vector_shape<Format, Slots>::unroll;
    constexpr int rows = 2 * pairs;
    constexpr std::uint32_t vector = decode::per_vector;
    extern __shared__ float4 penstock_mlp_inputs[];
    float4* const inputs = penstock_mlp_inputs;

    const mlp_work work = works.of[blockIdx.x / s.tiles];
    const std::uint32_t tile = blockIdx.x % s.tiles;
    const std::uint32_t warp = threadIdx.x / 32;
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t vectors = s.cols / vector;
    const std::uint32_t steps = (vectors + 31) / 32;

    for (std::uint32_t token0 = 0; token0 < work.count; token0 += Slots) {
        for (std::uint32_t group = 0; group < s.groups; ++group) {
            const std::uint32_t group_row = (tile * s.groups + group) * (vector_warps * pairs);
            if (group_row >= s.row_pairs) {
                break;
            }
            const std::uint32_t row0 = group_row + warp * pairs;
            const std::byte* start[rows];
            std::uint32_t scale0[rows];  // number of the scale of column 0
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                const mlp_side& side = r % 2 == 0 ? s.a : s.b;
                const std::uint64_t row = clamped(side, row0 + r / 2);
                start[r] = work.record + side.m.offset + (side.first + row * side.m.row_stride) * Format::bits / 8;
                if constexpr (decode::scaled) {
                    scale0[r] = static_cast<std::uint32_t>(decode::scale_index(side.m, row, 0));
                }
            }

            vector_batch<Format, pairs, unroll> batch;
            const auto load = [&](std::uint32_t step, std::uint32_t end) {
#pragma unroll
                for (int u = 0; u < unroll; ++u) {
                    const std::uint32_t v = (step + u) * 32 + lane;
                    const bool present = step + u < end && v < vectors;
#pragma unroll
                    for (int r = 0; r < rows; ++r) {
                        batch.weights[u][r] = present ? load_weights(start[r] + static_cast<std::uint64_t>(v) * 16) : uint4{0, 0, 0, 0};
                        if constexpr (decode::scaled) {
                            const mlp_side& side = r % 2 == 0 ? s.a : s.b;
                            const auto* scales = reinterpret_cast<const typename decode::scale*>(work.record + side.m.scale_offset);
                            constexpr std::uint32_t block = Format::bits == 8 ? 128 : 32;
                            batch.scales[u][r] = present ? __ldg(scales + scale0[r] + v * vector / block) : typename decode::scale{};
                        }
                    }
                }
            };

            float acc[Slots * rows];
#pragma unroll
            for (int i = 0; i < Slots * rows; ++i) {
                acc[i] = 0.0f;
            }
            for (std::uint32_t begin = 0; begin < steps; begin += s.segment) {
                const std::uint32_t end = smaller(begin + s.segment, steps);
                const std::uint32_t slot_stride = (end - begin) * (8 * vector);
                load(begin, end);  // in flight while the inputs come
                if (group == 0 || s.segment < steps) {
                    __syncthreads();
                    fill_inputs<Format, Slots>(s, work, token0, begin, end - begin, inputs);
                    __syncthreads();
                }
                for (std::uint32_t step = begin;;) {
#pragma unroll
                    for (int u = 0; u < unroll; ++u) {
                        if (step + u < end) {
                            const float4* at = inputs + (step + u - begin) * (8 * vector) + lane;
                            if constexpr (decode::scaled) {
                                float dot[Slots * rows];
#pragma unroll
                                for (int i = 0; i < Slots * rows; ++i) {
                                    dot[i] = 0.0f;
                                }
                                add_vector<Format, rows, Slots>(batch.weights[u], at, slot_stride, dot,
                                                                std::make_integer_sequence<int, vector / 4>{});
#pragma unroll
                                for (int i = 0; i < Slots * rows; ++i) {
                                    acc[i] = ::fmaf(dot[i] * decode::correction, decode::scale_value(batch.scales[u][i % rows]), acc[i]);
                                }
                            } else {
                                add_vector<Format, rows, Slots>(batch.weights[u], at, slot_stride, acc,
                                                                std::make_integer_sequence<int, vector / 4>{});
                            }
                        }
                    }
                    step += unroll;
                    if (step >= end) {
                        break;
                    }
                    load(step, end);
                }
            }

            // Value number slot * rows + 2 * pair + side, held by 32 / N lanes each.
            constexpr int n = Slots * rows;
            const float sum = warp_sums<n>(acc);
            const std::uint32_t value = lane / (32 / n);
            const mlp_side& side = value % 2 == 0 ? s.a : s.b;
            const std::uint32_t row = row0 + value % rows / 2;
            const float mine = sum + bias_at(side.m, work.record, clamped(side, row));
            const float other = __shfl_xor_sync(0xffffffffu, mine, 32 / n);
            const std::uint32_t slot = value / rows;
            if (value % 2 == 0 && lane % (32 / n) == 0 && row < s.row_pairs && token0 + slot < work.count) {
                write_pair(s, static_cast<std::uint32_t>(s.rows[work.first + token0 + slot]), row, mine, other);
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------- rows_by_element

/// A warp computes one row pair for up to 8 tokens at once, its lanes take columns in turn. Any strides.
template <class Format>
__global__ __launch_bounds__(vector_warps * 32) __attribute__((visibility("hidden"))) void rows_by_element(
    const __grid_constant__ mlp_stage s, const __grid_constant__ mlp_works works) {
    constexpr int slots = 8;
    const mlp_work work = works.of[blockIdx.x / s.tiles];
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t row = blockIdx.x % s.tiles * vector_warps + threadIdx.x / 32;
    if (row >= s.row_pairs) {
        return;
    }
    for (std::uint32_t token0 = 0; token0 < work.count; token0 += slots) {
        const std::uint32_t present = smaller<std::uint32_t>(slots, work.count - token0);
        const float* input[slots];
        float scale[slots];
        float acc[2 * slots];
#pragma unroll
        for (std::uint32_t slot = 0; slot < slots; ++slot) {
            const std::uint32_t p = slot < present ? static_cast<std::uint32_t>(s.rows[work.first + token0 + slot]) : 0;
            input[slot] = s.input + static_cast<std::uint64_t>(p / s.divisor) * s.cols;
            scale[slot] = slot < present && s.input_scale != nullptr ? s.input_scale[p] : 1.0f;
            acc[2 * slot] = 0.0f;
            acc[2 * slot + 1] = 0.0f;
        }
#pragma unroll 4
        for (std::uint32_t c = lane; c < s.cols; c += 32) {
            float w[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const mlp_side& side = i == 0 ? s.a : s.b;
                const std::uint64_t r = clamped(side, row);
                w[i] = load_weight<Format>(work.record + side.m.offset, side.first + r * side.m.row_stride + c * side.m.col_stride) *
                       load_scale<Format>(work.record, side.m, r, c);
            }
#pragma unroll
            for (std::uint32_t slot = 0; slot < slots; ++slot) {
                if (slot < present) {
                    const float x = __ldg(input[slot] + c) * scale[slot];
                    acc[2 * slot] = ::fmaf(w[0], x, acc[2 * slot]);
                    acc[2 * slot + 1] = ::fmaf(w[1], x, acc[2 * slot + 1]);
                }
            }
        }
        const float sum = warp_sums<2 * slots>(acc);
        const std::uint32_t value = lane / 2;
        const mlp_side& side = value % 2 == 0 ? s.a : s.b;
        const float mine = sum + bias_at(side.m, work.record, clamped(side, row));
        const float other = __shfl_xor_sync(0xffffffffu, mine, 2);
        if (lane % 4 == 0 && lane / 4 < present) {
            write_pair(s, static_cast<std::uint32_t>(s.rows[work.first + token0 + lane / 4]), row, mine, other);
        }
    }
}

// -------------------------------------------------------------------------------------------------- rows_transposed

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
__global__ __launch_bounds__(transposed_warps * 32) __attribute__((visibility("hidden"))) void rows_transposed(
    const __grid_constant__ mlp_stage s, const __grid_constant__ mlp_works works, transposed_loads how) {
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
                    float w[4] = {decode::one(words::first(in_a[i])), decode::one(words::second(in_a[i])), decode::one(words::first(in_b[i])),
                                  decode::one(words::second(in_b[i]))};
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

// ------------------------------------------------------------------------------------------------------- host side

enum class mlp_path { vector, transposed, element };

/// The kernel for a stage: by its layout alone.
template <class Format>
mlp_path path_of(const mlp_stage& s) {
    const auto vectorised = [&](const mlp_side& side) {
        const std::uint64_t start = side.m.offset * 8 + side.first * Format::bits;
        return side.m.col_stride == 1 && start % 128 == 0 && side.m.row_stride * Format::bits % 128 == 0 &&
               s.cols % decoder<Format>::per_vector == 0;
    };
    const auto transposed = [](const mlp_side& side) { return side.m.col_stride > 2 && side.m.row_stride <= 2; };
    if (vectorised(s.a) && vectorised(s.b)) {
        return mlp_path::vector;
    }
    return Format::bits >= 8 && transposed(s.a) && transposed(s.b) ? mlp_path::transposed : mlp_path::element;
}

template <class Format>
transposed_loads loads_of(const mlp_stage& s) {
    const std::uint64_t size = Format::bits / 8;
    const auto fits = [&](const mlp_side& side, std::uint64_t elements) {
        return (side.m.offset + side.first * size) % (elements * size) == 0 && side.m.col_stride % elements == 0;
    };
    const bool neighbours = s.a.m.offset + (s.a.first + 1) * size == s.b.m.offset + s.b.first * size;
    if (s.a.m.row_stride == 2 && s.b.m.row_stride == 2 && s.a.m.col_stride == s.b.m.col_stride && neighbours && fits(s.a, 4)) {
        return transposed_loads::alternate;
    }
    return s.a.m.row_stride == 1 && s.b.m.row_stride == 1 && fits(s.a, 2) && fits(s.b, 2) ? transposed_loads::apart : transposed_loads::single;
}

/// What the kernels of a format cannot read. @throws configuration_error
template <class Format>
void check_side(const mlp_side& side) {
    const matrix_layout& m = side.m;
    if (m.offset % sizeof(typename decoder<Format>::element) != 0) {
        throw configuration_error("penstock: a matrix of " + std::string(name(Format::kind)) + " begins at byte " + std::to_string(m.offset) +
                                  " of the record, which its element size does not divide");
    }
    if (Format::kind == weight_kind::fp8_block128 && m.scale_offset % sizeof(float) != 0) {
        throw configuration_error("penstock: the scales of a matrix begin at byte " + std::to_string(m.scale_offset) +
                                  " of the record, which is no multiple of 4");
    }
}

inline int multiprocessors() {
    int device = 0;
    int count = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return count;
}

inline constexpr std::uint32_t input_bytes_per_block = 64 << 10;

template <class Format, int Slots>
void launch_by_vector(mlp_stage s, const mlp_works& works, std::uint32_t count, cudaStream_t stream) {
    constexpr std::uint32_t pairs = vector_shape<Format, Slots>::pairs;
    constexpr std::uint32_t vector = decoder<Format>::per_vector;
    constexpr std::uint32_t step_bytes = Slots * 32 * vector * sizeof(float);
    static_assert(step_bytes <= input_bytes_per_block);
    const auto steps = static_cast<std::uint32_t>(ceil_div(s.cols / vector, 32));
    s.segment = smaller(steps, input_bytes_per_block / step_bytes);
    const auto row_groups = static_cast<std::uint32_t>(ceil_div(s.row_pairs, vector_warps * pairs));
    s.groups = 1;
    if (s.segment == steps) {  // rows worth about eight times the inputs a block, if enough blocks remain
        const std::uint32_t wanted = larger<std::uint32_t>(1, 16 * Slots / (pairs * Format::bits));
        const std::uint64_t blocks_enough = 3ull * static_cast<std::uint64_t>(multiprocessors());
        const std::uint64_t affordable = static_cast<std::uint64_t>(row_groups) * count / blocks_enough;
        s.groups = static_cast<std::uint32_t>(smaller<std::uint64_t>(wanted, larger<std::uint64_t>(1, affordable)));
    }
    s.tiles = static_cast<std::uint32_t>(ceil_div(row_groups, s.groups));
    launch(rows_by_vector<Format, Slots>, dim3(s.tiles * count), dim3(vector_warps * 32), static_cast<std::size_t>(s.segment) * step_bytes, stream, s,
           works);
}

template <class Format>
void launch_stage(mlp_stage s, const mlp_works& works, std::uint32_t count, std::uint32_t most_tokens, cudaStream_t stream) {
    switch (path_of<Format>(s)) {
        case mlp_path::vector:
            if (most_tokens == 1) {
                launch_by_vector<Format, 1>(s, works, count, stream);
            } else if (most_tokens == 2) {
                launch_by_vector<Format, 2>(s, works, count, stream);
            } else if (most_tokens <= 4) {
                launch_by_vector<Format, 4>(s, works, count, stream);
            } else {
                launch_by_vector<Format, 8>(s, works, count, stream);
            }
            return;
        case mlp_path::transposed:
            if constexpr (Format::bits >= 8) {
                s.tiles = static_cast<std::uint32_t>(ceil_div(s.row_pairs, transposed_rows));
                launch(most_tokens == 1 ? rows_transposed<Format, 1> : rows_transposed<Format, 8>, dim3(s.tiles * count), dim3(transposed_warps * 32), 0,
                       stream, s, works, loads_of<Format>(s));
            }
            return;
        case mlp_path::element:
            s.tiles = static_cast<std::uint32_t>(ceil_div(s.row_pairs, vector_warps));
            launch(rows_by_element<Format>, dim3(s.tiles * count), dim3(vector_warps * 32), 0, stream, s, works);
            return;
    }
}

/// The body of executor::cuda::experts for one format.
template <class Format>
void run_experts(const expert_layout& layout, std::span<const expert_work> works, const std::int32_t* rows, std::uint32_t k, const float* x,
                 const float* input_scale, float* activated, float* partial, cudaStream_t stream) {
    mlp_stage first = first_stage(layout);
    mlp_stage second = second_stage(layout);
    if (layout.hidden() == 0 || layout.intermediate() == 0 || layout.up.rows != layout.gate.rows || layout.up.cols != layout.gate.cols ||
        layout.down.rows != layout.hidden() || layout.down.cols != layout.intermediate()) {
        throw configuration_error("penstock: an expert's matrices do not fit each other: gate " + std::to_string(layout.gate.rows) + " x " +
                                  std::to_string(layout.gate.cols) + ", up " + std::to_string(layout.up.rows) + " x " + std::to_string(layout.up.cols) +
                                  ", down " + std::to_string(layout.down.rows) + " x " + std::to_string(layout.down.cols));
    }
    if (k == 0) {
        throw configuration_error("penstock: experts of top-0");
    }
    for (const mlp_side* side : {&first.a, &first.b, &second.a}) {
        check_side<Format>(*side);
    }
    first.rows = rows;
    first.divisor = k;
    first.input = x;
    first.input_scale = input_scale;
    first.output = activated;
    second.rows = rows;
    second.divisor = 1;
    second.input = activated;
    second.output = partial;

    mlp_works batch;
    std::uint32_t count = 0;
    std::uint32_t most_tokens = 0;
    const auto flush = [&] {
        if (count > 0) {
            launch_stage<Format>(first, batch, count, most_tokens, stream);
            launch_stage<Format>(second, batch, count, most_tokens, stream);
        }
        count = 0;
        most_tokens = 0;
    };
    for (const expert_work& work : works) {
        if (work.count == 0) {
            continue;
        }
        if (reinterpret_cast<std::uintptr_t>(work.record) % 16 != 0) {
            throw configuration_error("penstock: the record of expert " + std::to_string(work.expert) + " does not start at a multiple of 16 bytes");
        }
        batch.of[count++] = {work.record, work.first, work.count};
        most_tokens = larger(most_tokens, work.count);
        if (count == works_per_launch) {
            flush();
        }
    }
    flush();
}

}  // namespace penstock::inline v0_1::detail

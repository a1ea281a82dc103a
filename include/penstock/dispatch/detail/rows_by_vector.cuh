#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/rows_by_vector.cuh holds a kernel: compile this file with nvcc"
#endif

#include <penstock/dispatch/decode.cuh>
#include <penstock/dispatch/detail/mlp_stage.cuh>

#include <utility>

/// The kernel for matrices whose rows are contiguous and aligned: 16-byte loads, inputs in shared memory.

namespace penstock::inline v0_1::detail {

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
    constexpr std::uint32_t per_step = 8 * vector;                             // float4
    const bool aligned = reinterpret_cast<std::uintptr_t>(s.input) % 16 == 0;  // rows are: the path asks that 4 divides cols
    for (std::uint32_t slot = 0; slot < Slots; ++slot) {
        const bool present = token0 + slot < work.count;
        const std::uint32_t p = present ? static_cast<std::uint32_t>(s.rows[work.first + token0 + slot]) : 0;
        const float* row = s.input + static_cast<std::uint64_t>(p / s.divisor) * s.cols;
        const float scale = present && s.input_scale != nullptr ? s.input_scale[p] : 1.0f;
        for (std::uint32_t i = threadIdx.x; i < steps * per_step; i += row_warps * 32) {
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
__global__ __launch_bounds__(row_warps * 32, vector_shape<Format, Slots>::blocks_per_sm)
    __attribute__((visibility("hidden"))) void rows_by_vector(const __grid_constant__ mlp_stage s,
                                                              const __grid_constant__ mlp_works works) {
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
            const std::uint32_t group_row = (tile * s.groups + group) * (row_warps * pairs);
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

}  // namespace penstock::inline v0_1::detail

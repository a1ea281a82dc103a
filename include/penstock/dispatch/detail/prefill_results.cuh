#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/prefill_results.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/dispatch/activation.hpp>
#include <penstock/dispatch/decode.hpp>
#include <penstock/dispatch/detail/prefill_begin.cuh>

/// What becomes of a tile's sums: activated inputs of down, an expert's output for a pair, and a token's sum over its experts.

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
    std::uint32_t padded_rows;  ///< gate and up: what down takes of a pair, zeros included
    prefill_inputs activated;   ///< gate and up, 16-bit: inputs of down
    std::uint16_t* rows_out;    ///< bf16: activated rows in the order of sorted pairs, for 8-bit inputs; of down [pairs, hidden]
    std::uint32_t pitch;        ///< of rows_out
    const std::int32_t* pairs;  ///< down: pair of each sorted row
};

/// Sums of a tile: of as many columns as an instruction has, or twice as many.
template <std::uint32_t N>
struct tile_of_sums {
    static constexpr std::uint32_t parts = N > 256 ? 2 : 1;
    static constexpr std::uint32_t columns = N / parts;
    float of[parts][columns / 2];

    /// Of columns 8 j and on, element i of this thread's four.
    [[nodiscard]] __device__ float at(std::uint32_t j, std::uint32_t i) const { return of[j / (columns / 8)][j % (columns / 8) * 4 + i]; }

    __device__ void hold() {
#pragma unroll
        for (std::uint32_t p = 0; p < parts; ++p) {
            detail::hold(of[p]);
        }
    }
};

/// What there is of a tile's columns, 32 of them in the lanes of a warp: asked for at once.
template <class T, std::uint32_t N>
struct column_values {
    T held[(N + 31) / 32];

    __device__ column_values(const T* from, const prefill_tile& tile, T otherwise) {
#pragma unroll
        for (std::uint32_t i = 0; i < (N + 31) / 32; ++i) {
            const std::uint32_t sorted = tile.begin + 32 * i + threadIdx.x % 32;
            held[i] = sorted >= tile.first && sorted < tile.end ? __ldg(from + sorted) : otherwise;
        }
    }

    /// Of column 8 j + `within`. All lanes of the warp take part.
    [[nodiscard]] __device__ T at(std::uint32_t j, std::uint32_t within) const {
        return __shfl_sync(whole_warp, held[j / 4], static_cast<int>(j % 4 * 8 + within));
    }
};

/// What the sums of a pair are multiplied by: 1, or where inputs were divided by row, the divisor.
template <class Operand, std::uint32_t N>
struct column_factors {
    column_values<float, N> divisors;

    __device__ column_factors(const prefill_arguments& a, const prefill_tile& tile) : divisors(a.in.scales, tile, 0.0f) {}

    [[nodiscard]] __device__ float at(std::uint32_t j, std::uint32_t within) const { return divisors.at(j, within); }
};

template <class Operand, std::uint32_t N>
    requires(!Operand::by_row)
struct column_factors<Operand, N> {
    __device__ column_factors(const prefill_arguments&, const prefill_tile&) {}

    [[nodiscard]] __device__ float at(std::uint32_t, std::uint32_t) const { return 1.0f; }
};

/// 1 / (1 + exp(-x)), right to some 2^-21.
__device__ inline float logistic(float x) {
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.442695041f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    return r;
}

/// activate() by that.
__device__ inline float activate_fast(const activation_rule& rule, float gate, float up) {
    if (rule.kind != activation::swiglu) {
        gate = gate > rule.limit ? rule.limit : gate;
        up = up > rule.limit ? rule.limit : up < -rule.limit ? -rule.limit : up;
    }
    const bool gpt_oss = rule.kind == activation::gpt_oss;
    return gate * logistic(gpt_oss ? rule.alpha * gate : gate) * (gpt_oss ? up + 1.0f : up);
}

/// Activated sums of gate and up to where down reads them.
template <class Operand, std::uint32_t N>
__device__ __forceinline__ void write_activated(const prefill_arguments& a, const std::byte* record, const prefill_tile& tile,
                                                std::uint32_t row, const tile_of_sums<N>& sum, const float (&correction)[2]) {
    const column_factors<Operand, N> factors(a, tile);
    // Lanes whose rows lie next to each other exchange, so that each has two rows of one pair.
    constexpr bool in_rows = Operand::scaled || Operand::by_row;
    constexpr std::uint32_t apart = Operand::neighbour * 4;
    const bool upper = (threadIdx.x & apart) != 0;
    const bool present = row < a.half[0].rows;
    const float bias[2] = {present ? bias_at(a.half[0], record, row) : 0.0f, present ? bias_at(a.half[1], record, row) : 0.0f};
    const std::uint32_t lower_row = row - (upper ? Operand::neighbour : 0);
    std::uint32_t atom = lower_row / 64, byte = lower_row % 64 * 2;
    if constexpr (Operand::widened && !in_rows) {
        const input_place place = Operand::where(lower_row % Operand::depth);
        atom = lower_row / Operand::depth * Operand::atoms + place.atom;
        byte = place.position * 2;
    }
    const bool written = in_rows ? present : row < a.padded_rows;
    const std::uint32_t first = tile.begin + 2 * (threadIdx.x % 4) + (upper ? 1 : 0);
    std::byte* to = in_rows ? reinterpret_cast<std::byte*>(a.rows_out + static_cast<std::uint64_t>(first) * a.pitch + lower_row)
                            : a.activated.place(atom, first, byte);
    const std::uint64_t eight_pairs = in_rows ? static_cast<std::uint64_t>(a.pitch) * 16 : 1024;
    const auto write = [&](const auto& activated) {
#pragma unroll
        for (std::uint32_t j = 0; j < N / 8; ++j) {
            float value[2];
#pragma unroll
            for (std::uint32_t e = 0; e < 2; ++e) {
                const float factor = factors.at(j, 2 * (threadIdx.x % 4) + e);
                value[e] =
                    activated(sum.at(j, e) * (factor * correction[0]) + bias[0], sum.at(j, 2 + e) * (factor * correction[1]) + bias[1]);
            }
            const float theirs = __shfl_xor_sync(whole_warp, upper ? value[0] : value[1], apart);
            const float low = upper ? theirs : value[0], high = upper ? value[1] : theirs;
            const std::uint32_t pair = first + 8 * j;
            if (written && pair >= tile.first && pair < tile.end) {
                *reinterpret_cast<std::uint32_t*>(to + j * eight_pairs) = two_halves<Operand::type>(low, high);
            }
        }
    };
    if (a.rule.kind == activation::swiglu && !a.up_first) {
        write([](float gate, float up) { return gate * logistic(gate) * up; });
    } else {
        write([&](float one, float other) { return a.up_first ? activate_fast(a.rule, other, one) : activate_fast(a.rule, one, other); });
    }
}

/// Sums of down to their pairs, in bf16: half the traffic of float32, and no more than what lies between the matrices loses.
template <class Operand, std::uint32_t N>
__device__ __forceinline__ void write_partial(const prefill_arguments& a, const std::byte* record, const prefill_tile& tile,
                                              const std::uint32_t (&row)[2], const tile_of_sums<N>& sum, const float (&correction)[2]) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t t = lane % 4;
    const std::uint32_t odd = lane / 4 % 2;
    const bool present[2] = {row[0] < a.half[0].rows, row[1] < a.half[0].rows};
    const float bias[2] = {present[0] ? bias_at(a.half[0], record, row[0]) : 0.0f, present[1] ? bias_at(a.half[0], record, row[1]) : 0.0f};
    const column_values<std::int32_t, N> pairs(a.pairs, tile, -1);
    const column_factors<Operand, N> factors(a, tile);
#pragma unroll
    for (std::uint32_t j = 0; j < N / 8; ++j) {
        // Lanes of neighbouring rows exchange, so that each has two rows of one pair.
        std::uint32_t mine[2];
#pragma unroll
        for (std::uint32_t e = 0; e < 2; ++e) {
            const float factor = factors.at(j, 2 * t + e);
            mine[e] = two_halves<dtype::bf16>(sum.at(j, e) * (factor * correction[0]) + bias[0],
                                              sum.at(j, 2 + e) * (factor * correction[1]) + bias[1]);
        }
        const std::uint32_t other = __shfl_xor_sync(whole_warp, odd != 0 ? mine[0] : mine[1], 4);
        const std::uint32_t keep = odd != 0 ? mine[1] : mine[0];
        const std::uint32_t lower = odd != 0 ? other : keep, upper = odd != 0 ? keep : other;
        const std::int32_t pair = pairs.at(j, 2 * t + odd);
        if (pair >= 0) {
            std::uint16_t* const to = a.rows_out + static_cast<std::uint64_t>(pair) * a.pitch;
            if (present[0]) {
                *reinterpret_cast<std::uint32_t*>(to + row[0] - odd) = __byte_perm(lower, upper, 0x5410);
            }
            if (present[1]) {
                *reinterpret_cast<std::uint32_t*>(to + row[1] - odd) = __byte_perm(lower, upper, 0x7632);
            }
        }
    }
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

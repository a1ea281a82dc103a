#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/warp_routing.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/detail/warp.cuh>
#include <penstock/dispatch/routing.hpp>

#include <nv/target>

#include <type_traits>

/// The choice of one token's experts by a warp: as `route_token` says and with the same bits, but for the common rules with all that is
/// compared held in registers.

namespace penstock::inline v0_1 {

/// The lanes of a warp, for `route_token`. @pre every lane of the warp takes part
struct warp_lanes {
    PENSTOCK_HD std::uint32_t rank() const noexcept { NV_IF_ELSE_TARGET(NV_IS_DEVICE, (return threadIdx.x % 32;), (return 0;)) }

    PENSTOCK_HD std::uint32_t size() const noexcept { return 32; }

    PENSTOCK_HD void sync() const noexcept { NV_IF_TARGET(NV_IS_DEVICE, (__syncwarp();)) }

    PENSTOCK_HD candidate best_of(candidate mine) const noexcept {
        NV_IF_TARGET(NV_IS_DEVICE, (for (int distance = 16; distance > 0; distance /= 2) {
                         const candidate other{__shfl_xor_sync(0xffffffffu, mine.value, distance),
                                               __shfl_xor_sync(0xffffffffu, mine.index, distance)};
                         mine = better(other, mine) ? other : mine;
                     }))
        return mine;
    }

    PENSTOCK_HD float sum(float mine) const noexcept {
        NV_IF_TARGET(NV_IS_DEVICE,
                     (for (int distance = 16; distance > 0; distance /= 2) { mine += __shfl_xor_sync(0xffffffffu, mine, distance); }))
        return mine;
    }
};

namespace detail {

/// An unsigned number that orders floats as their values do, both zeros alike, and is never 0. @pre value is not NaN
__device__ inline std::uint32_t key_of(float value) {
    const std::uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
    return bits ^ (static_cast<std::uint32_t>(static_cast<std::int32_t>(bits) >> 31) | 0x80000000u);
}

/// The float of a key; NaN for 0.
__device__ inline float value_of(std::uint32_t key) { return __uint_as_float(key >> 31 != 0 ? key ^ 0x80000000u : ~key); }

/// ((0 + mine of lane 0) + mine of lane 1) + ...: the order in which one lane would add them. @pre 0 on lanes from max_top_k on
__device__ inline float sum_by_lane(float mine) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < static_cast<int>(max_top_k); ++j) {
        sum += __shfl_sync(whole_warp, mine, j);
    }
    return sum;
}

/// A token's choice: lane j below top_k has the j-th; what other lanes have does not matter.
struct lane_choice {
    std::int32_t id = -1;
    float weight = 0.0f;
};

/// Whether `warp_router<PerLane>` with PerLane > 0 knows the rule, if it has no more than 32 * PerLane experts. Groups of 32 experts lie
/// across the lanes, one register deep.
inline bool fits_registers(const routing_rule& rule) noexcept {
    return !rule.sparse_mixer && (rule.groups == 1 || rule.experts == 32 * rule.groups);
}

/// Routes tokens with a warp; lane l has the experts l, l + 32, ..., in PerLane registers. @pre fits_registers(rule), experts <= 32 PerLane
template <int PerLane>
class warp_router {
public:
    /// Floats of shared memory that each warp needs.
    PENSTOCK_HD static constexpr std::uint32_t scratch_floats(std::uint32_t) noexcept { return 0; }

    /// A token's logits on their way to the registers.
    struct token_logits {
        const float* row;
        float mine[PerLane];  ///< NaN past the last expert
    };

    __device__ warp_router(const routing_rule& rule, const float* correction_bias, float*) : rule_(rule) {
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            bias_[j] = correction_bias != nullptr && expert(j) < rule.experts ? correction_bias[expert(j)] : 0.0f;
        }
    }

    /// @param row [experts]
    __device__ token_logits load(const float* row) const {
        token_logits l{row, {}};
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            l.mine[j] = expert(j) < rule_.experts ? row[expert(j)] : not_eligible;
        }
        return l;
    }

    __device__ lane_choice route(const token_logits& logits) const {
        scorer score{rule_.score, 0.0f, 1.0f};
        std::uint32_t key[PerLane];
        float scores[PerLane];
        if (rule_.score == score_function::softmax && !rule_.softmax_after_top_k) {
            score = softmax_of(logits.mine, scores);
        }
        if (rule_.softmax_after_top_k || rule_.scales_input) {
            make_keys(key, logits.mine, logits.mine);
        } else {
            switch (rule_.score) {  // once, rather than for every logit
                case score_function::softmax: divide_all(scores, score.total); break;
                case score_function::sigmoid: sigmoid_all(scores, logits.mine); break;
                case score_function::sqrt_softplus: score_all(scores, logits.mine, {score_function::sqrt_softplus, 0.0f, 1.0f}); break;
            }
            make_keys(key, logits.mine, scores);
        }
        if (rule_.groups > 1) {
            keep_best_groups(key);
        }
        lane_choice choice{choose(key), 0.0f};
        const bool one_of_them = lane() < rule_.top_k;
        const float logit = one_of_them ? __ldg(logits.row + choice.id) : not_eligible;
        if (rule_.softmax_after_top_k) {
            const float peak = value_of(__reduce_max_sync(whole_warp, key_of(nan_to_lowest(logit))));
            const float mine = is_nan(logit) ? 0.0f : exp_below(logit, peak);
            const float total = sum_by_lane(mine);
            choice.weight = total > 0.0f ? mine / total : 0.0f;
        } else {
            choice.weight = one_of_them ? score(logit) : 0.0f;
        }
        const float divisor = rule_.renormalise ? sum_by_lane(choice.weight) + rule_.epsilon : 1.0f;
        choice.weight = divisor > 0.0f ? choice.weight / divisor * rule_.scale : 0.0f;
        return choice;
    }

private:
    __device__ static std::uint32_t lane() { return threadIdx.x % 32; }
    __device__ static std::uint32_t expert(int j) { return lane() + 32 * static_cast<std::uint32_t>(j); }

    /// Also gives the terms of the sum, exp(logit - peak); 0 for NaN. They are computed beside one another, whether a logit is the peak or not.
    __device__ static scorer softmax_of(const float (&logits)[PerLane], float (&terms)[PerLane]) {
        std::uint32_t best = 0;
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            best = larger(best, is_nan(logits[j]) ? 0u : key_of(logits[j]));
        }
        best = __reduce_max_sync(whole_warp, best);
        scorer s{score_function::softmax, best != 0 ? value_of(best) : 0.0f, 1.0f};
        float mine = 0.0f;
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            const float below = ::expf(logits[j] - s.peak);
            terms[j] = is_nan(logits[j]) ? 0.0f : logits[j] == s.peak ? 1.0f : below;
        }
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            mine += terms[j];
        }
        s.total = warp_lanes{}.sum(mine);
        return s;
    }

    __device__ static void divide_all(float (&scores)[PerLane], float total) {
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            scores[j] = scores[j] / total;
        }
    }

    __device__ static void score_all(float (&scores)[PerLane], const float (&logits)[PerLane], const scorer& score) {
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            scores[j] = is_nan(logits[j]) ? logits[j] : score(logits[j]);
        }
    }

    /// The scorer's sigmoid; NaN stays. Where no reciprocal of the warp is subnormal, they are computed beside one another: the same
    /// estimate and correction by which a division is rounded right, without its branch to the rare cases.
    __device__ static void sigmoid_all(float (&scores)[PerLane], const float (&logits)[PerLane]) {
        bool plain = true;
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            scores[j] = 1.0f + ::expf(-logits[j]);
            plain = plain && !(scores[j] >= 0x1p126f);
        }
        if (__all_sync(whole_warp, plain)) {
#pragma unroll
            for (int j = 0; j < PerLane; ++j) {
                float estimate;
                asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(scores[j]));
                scores[j] = ::fmaf(estimate, -::fmaf(scores[j], estimate, -1.0f), estimate);
            }
        } else {
#pragma unroll
            for (int j = 0; j < PerLane; ++j) {
                scores[j] = 1.0f / scores[j];
            }
        }
    }

    __device__ void make_keys(std::uint32_t (&key)[PerLane], const float (&logits)[PerLane], const float (&choices)[PerLane]) const {
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            const float choice = (is_nan(logits[j]) ? logits[j] : choices[j]) + bias_[j];
            key[j] = expert(j) < rule_.experts ? key_of(nan_to_lowest(choice)) : 0;
        }
    }

    /// Group g's experts are register g of all lanes. At each halving a lane keeps one half of its groups, with the best two of each from
    /// itself and from the lane that keeps the other half; at last 32 / PerLane lanes in a row share a group. Groups that are not there
    /// rank behind all others.
    __device__ void keep_best_groups(std::uint32_t (&key)[PerLane]) const {
        constexpr std::uint32_t lanes_each = 32 / PerLane;
        std::uint32_t first[PerLane];
        std::uint32_t second[PerLane] = {};
#pragma unroll
        for (int g = 0; g < PerLane; ++g) {
            first[g] = key[g];
        }
        halve_groups<PerLane / 2>(first, second);
#pragma unroll
        for (unsigned distance = lanes_each / 2; distance > 0; distance /= 2) {
            const std::uint32_t others_first = __shfl_xor_sync(whole_warp, first[0], distance);
            merge_best_two(first[0], second[0], others_first, __shfl_xor_sync(whole_warp, second[0], distance));
        }
        const bool both = rule_.rank_groups_by == group_score::sum_of_two;
        const std::uint32_t mine = key_of(nan_to_lowest(both ? value_of(first[0]) + value_of(second[0]) : value_of(first[0])));
        const std::uint32_t group = lane() / lanes_each;
        std::uint32_t better_ones = 0;
#pragma unroll
        for (std::uint32_t g = 0; g < PerLane; ++g) {
            const std::uint32_t other = __shfl_sync(whole_warp, mine, static_cast<int>(g * lanes_each));
            better_ones += other + (g < group ? 1 : 0) > mine ? 1 : 0;  // of equal ones the earlier is better
        }
        const unsigned kept = __ballot_sync(whole_warp, better_ones < rule_.groups_kept && group < rule_.groups);
#pragma unroll
        for (int g = 0; g < PerLane; ++g) {
            key[g] = (kept >> (static_cast<unsigned>(g) * lanes_each) & 1u) != 0 ? key[g] : 0;
        }
    }

    /// One halving, to `Half` groups a lane, and those after it. At the first one no group has a second best yet.
    template <int Half>
    __device__ static void halve_groups(std::uint32_t (&first)[PerLane], std::uint32_t (&second)[PerLane]) {
        constexpr unsigned distance = 32 / PerLane * Half;
        const bool upper = (lane() & distance) != 0;
#pragma unroll
        for (int g = 0; g < Half; ++g) {
            const std::uint32_t others_first = __shfl_xor_sync(whole_warp, upper ? first[g] : first[g + Half], distance);
            std::uint32_t others_second = 0;
            if constexpr (Half != PerLane / 2) {
                others_second = __shfl_xor_sync(whole_warp, upper ? second[g] : second[g + Half], distance);
            }
            first[g] = upper ? first[g + Half] : first[g];
            second[g] = upper ? second[g + Half] : second[g];
            merge_best_two(first[g], second[g], others_first, others_second);
        }
        if constexpr (Half > 1) {
            halve_groups<Half / 2>(first, second);
        }
    }

    /// first, second = the best two of both pairs, each with its better one first.
    __device__ static void merge_best_two(std::uint32_t& first, std::uint32_t& second, std::uint32_t others_first,
                                          std::uint32_t others_second) {
        second = larger(smaller(first, others_first), larger(second, others_second));
        first = larger(first, others_first);
    }

    /// The ids of the largest keys: lane j gets the j-th, for j < top_k.
    __device__ std::int32_t choose(std::uint32_t (&key)[PerLane]) const {
        std::int32_t mine = 0;
        for (std::uint32_t n = 0; n < rule_.top_k; ++n) {
            std::uint32_t best = key[0];
#pragma unroll
            for (int j = 1; j < PerLane; ++j) {
                best = larger(best, key[j]);
            }
            best = __reduce_max_sync(whole_warp, best);
            std::uint32_t at = max_experts;
            std::uint32_t at_upper = max_experts;  // a chain of its own, beside the other
#pragma unroll
            for (int j = PerLane / 2 - 1; j >= 0; --j) {
                at = key[j] == best ? expert(j) : at;
                at_upper = key[j + PerLane / 2] == best ? expert(j + PerLane / 2) : at_upper;
            }
            at = __reduce_min_sync(whole_warp, smaller(at, at_upper));
#pragma unroll
            for (int j = 0; j < PerLane; ++j) {
                key[j] = at == expert(j) ? 0 : key[j];
            }
            mine = lane() == n ? static_cast<std::int32_t>(at) : mine;
        }
        return mine;
    }

    const routing_rule& rule_;
    float bias_[PerLane];
};

/// Any rule, through shared memory.
template <>
class warp_router<0> {
public:
    PENSTOCK_HD static constexpr std::uint32_t scratch_floats(std::uint32_t experts) noexcept { return experts + 2 * max_top_k; }

    struct token_logits {
        const float* row;
    };

    /// @param scratch the warp's own, scratch_floats(rule.experts)
    __device__ warp_router(const routing_rule& rule, const float* correction_bias, float* scratch)
        : rule_(rule), correction_bias_(correction_bias), scratch_(scratch) {}

    __device__ token_logits load(const float* row) const { return {row}; }

    __device__ lane_choice route(const token_logits& logits) const {
        const std::uint32_t lane = threadIdx.x % 32;
        float* weights = scratch_ + rule_.experts;
        auto* ids = reinterpret_cast<std::int32_t*>(weights + max_top_k);
        route_token(warp_lanes{}, rule_, logits.row, correction_bias_, scratch_, ids, weights);
        __syncwarp();
        const lane_choice choice = lane < rule_.top_k ? lane_choice{ids[lane], weights[lane]} : lane_choice{};
        __syncwarp();  // the scratch is used again
        return choice;
    }

private:
    const routing_rule& rule_;
    const float* correction_bias_;
    float* scratch_;
};

/// Calls `f` with the kernel's number of registers a lane for a rule, as a type whose value it is.
template <class F>
void visit_registers(const routing_rule& rule, F&& f) {
    if (!fits_registers(rule) || rule.experts > 512) {
        f(std::integral_constant<int, 0>{});
    } else if (rule.experts <= 128) {
        f(std::integral_constant<int, 4>{});
    } else if (rule.experts <= 256) {
        f(std::integral_constant<int, 8>{});
    } else {
        f(std::integral_constant<int, 16>{});
    }
}

}  // namespace detail
}  // namespace penstock::inline v0_1

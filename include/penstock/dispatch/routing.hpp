#pragma once

#include <penstock/error.hpp>
#include <penstock/model/routing_rule.hpp>
#include <penstock/units.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

/// From router logits to expert ids and weights, for every family, in float32. One algorithm, run by a group of lanes: the host's group
/// has one lane, a kernel's is a warp.

namespace penstock::inline v0_1 {

/// A value with the number of the expert or group that has it. `index` -1: none. The value is never NaN.
struct candidate {
    float value = 0.0f;
    std::int32_t index = -1;
};

/// The order in which experts and groups are chosen: the higher value, then the lower index; none comes last. Total and strict.
PENSTOCK_HD constexpr bool better(const candidate& a, const candidate& b) noexcept {
    if (a.index < 0 || b.index < 0) {
        return a.index >= 0 && b.index < 0;
    }
    return a.value > b.value || (a.value == b.value && a.index < b.index);
}

/// The group of lanes that routes one token on the host; it also shows what `route_token` asks of a group. All lanes call each member
/// together, from the same place.
struct lane_group_of_one {
    /// This lane's number, below size().
    PENSTOCK_HD constexpr std::uint32_t rank() const noexcept { return 0; }

    PENSTOCK_HD constexpr std::uint32_t size() const noexcept { return 1; }

    /// What any lane wrote to the scratch before is seen by every lane after.
    PENSTOCK_HD constexpr void sync() const noexcept {}

    /// The best by `better` among the lanes' candidates; the same on every lane.
    PENSTOCK_HD constexpr candidate best_of(candidate mine) const noexcept { return mine; }

    /// The sum over the lanes in a fixed order; the same bits on every lane.
    PENSTOCK_HD constexpr float sum(float mine) const noexcept { return mine; }
};

/// @throws configuration_error with the numbers, unless every token can be given top_k distinct experts under `rule`.
inline void validate(const routing_rule& rule) {
    const auto refuse = [](const std::string& why) { throw configuration_error("penstock: routing: " + why); };
    const auto text = [](auto n) { return std::to_string(n); };
    if (rule.experts == 0 || rule.experts > max_experts) {
        refuse(text(rule.experts) + " experts; 1 to " + text(max_experts) + " are served");
    }
    if (rule.top_k == 0 || rule.top_k > max_top_k) {
        refuse("top-" + text(rule.top_k) + "; 1 to " + text(max_top_k) + " are served");
    }
    if (rule.top_k > rule.experts) {
        refuse("top-" + text(rule.top_k) + " of " + text(rule.experts) + " experts");
    }
    if (rule.groups == 0 || rule.experts % rule.groups != 0) {
        refuse(text(rule.experts) + " experts do not divide into " + text(rule.groups) + " groups");
    }
    if (rule.groups_kept == 0 || rule.groups_kept > rule.groups) {
        refuse(text(rule.groups_kept) + " of " + text(rule.groups) + " groups kept");
    }
    const std::uint32_t candidates = rule.groups_kept * (rule.experts / rule.groups);
    if (rule.top_k > candidates) {
        refuse("top-" + text(rule.top_k) + ", but " + text(rule.groups_kept) + " of " + text(rule.groups) + " groups hold " +
               text(candidates) + " experts");
    }
    if (rule.sparse_mixer && (rule.groups > 1 || rule.softmax_after_top_k)) {
        refuse("the sparse mixer goes with neither groups nor softmax_after_top_k");
    }
    if (!(rule.epsilon >= 0) || !(rule.jitter >= 0) || !std::isfinite(rule.scale)) {
        refuse("epsilon " + text(rule.epsilon) + ", jitter " + text(rule.jitter) + ", scale " + text(rule.scale) +
               "; the first two must not be negative, the last must be finite");
    }
}

namespace detail {

inline constexpr float lowest_choice = -std::numeric_limits<float>::infinity();
inline constexpr float largest_float = std::numeric_limits<float>::max();
/// Marks, in the scratch, an expert that is taken or not eligible: NaN compares with nothing.
inline constexpr float not_eligible = std::numeric_limits<float>::quiet_NaN();

PENSTOCK_HD inline bool is_nan(float x) noexcept { return x != x; }

PENSTOCK_HD inline float nan_to_lowest(float x) noexcept { return is_nan(x) ? lowest_choice : x; }

/// exp(x - peak) for x <= peak, also where both are infinite.
PENSTOCK_HD inline float exp_below(float x, float peak) noexcept { return x == peak ? 1.0f : ::expf(x - peak); }

/// The best of the experts that are still eligible.
template <class Group>
PENSTOCK_HD candidate best_eligible(const Group& group, std::uint32_t experts, const float* scratch) {
    candidate mine;
    for (std::uint32_t i = group.rank(); i < experts; i += group.size()) {
        const candidate c{scratch[i], static_cast<std::int32_t>(i)};
        if (!is_nan(c.value) && better(c, mine)) {
            mine = c;
        }
    }
    return group.best_of(mine);
}

/// Only the lane that reads an expert writes it, so no sync is due.
template <class Group>
PENSTOCK_HD void take(const Group& group, candidate taken, float* scratch) {
    const auto i = static_cast<std::uint32_t>(taken.index);
    if (i % group.size() == group.rank()) {
        scratch[i] = not_eligible;
    }
}

/// Scores one logit. A NaN logit scores 0; every score is finite.
struct scorer {
    score_function kind;
    float peak;   ///< softmax: the largest logit
    float total;  ///< softmax: sum of exp(logit - peak)

    PENSTOCK_HD float operator()(float logit) const noexcept {
        if (is_nan(logit)) {
            return 0.0f;
        }
        switch (kind) {
            case score_function::softmax: return exp_below(logit, peak) / total;
            case score_function::sigmoid: return 1.0f / (1.0f + ::expf(-logit));
            case score_function::sqrt_softplus: break;
        }
        const float x = smaller(logit, largest_float);
        return ::sqrtf(larger(x, 0.0f) + ::log1pf(::expf(-::fabsf(x))));
    }
};

template <class Group>
PENSTOCK_HD scorer make_scorer(const Group& group, const routing_rule& rule, const float* logits) {
    scorer s{rule.score, 0.0f, 1.0f};
    if (rule.score == score_function::softmax && !rule.softmax_after_top_k) {
        s.peak = best_eligible(group, rule.experts, logits).value;
        float mine = 0.0f;
        for (std::uint32_t i = group.rank(); i < rule.experts; i += group.size()) {
            mine += is_nan(logits[i]) ? 0.0f : exp_below(logits[i], s.peak);
        }
        s.total = group.sum(mine);
    }
    return s;
}

/// A group's rank: the sum of its two best choices, or its best.
PENSTOCK_HD inline float group_value(const routing_rule& rule, std::uint32_t g, const float* choice) noexcept {
    const std::uint32_t members = rule.experts / rule.groups;
    float first = lowest_choice;
    float second = lowest_choice;
    for (std::uint32_t i = g * members; i < (g + 1) * members; ++i) {
        const float c = choice[i];
        if (c > first) {
            second = first;
            first = c;
        } else if (c > second) {
            second = c;
        }
    }
    const bool both = rule.rank_groups_by == group_score::sum_of_two && members > 1;
    return nan_to_lowest(both ? first + second : first);
}

/// Makes the experts outside the best groups not eligible. A group belongs to one lane, which alone touches its members.
template <class Group>
PENSTOCK_HD void keep_best_groups(const Group& group, const routing_rule& rule, float* scratch) {
    const std::uint32_t members = rule.experts / rule.groups;
    const std::uint32_t rank = group.rank();
    const float first_value = rank < rule.groups ? group_value(rule, rank, scratch) : 0.0f;
    candidate last;  // the worst group that is kept
    for (std::uint32_t n = 0; n < rule.groups_kept; ++n) {
        candidate mine;
        for (std::uint32_t g = rank; g < rule.groups; g += group.size()) {
            const candidate c{g == rank ? first_value : group_value(rule, g, scratch), static_cast<std::int32_t>(g)};
            if ((n == 0 || better(last, c)) && better(c, mine)) {
                mine = c;
            }
        }
        last = group.best_of(mine);
    }
    for (std::uint32_t g = rank; g < rule.groups; g += group.size()) {
        const candidate c{g == rank ? first_value : group_value(rule, g, scratch), static_cast<std::int32_t>(g)};
        if (better(last, c)) {
            for (std::uint32_t i = g * members; i < (g + 1) * members; ++i) {
                scratch[i] = not_eligible;
            }
        }
    }
}

/// weights[j] = softmax over the chosen logits. A NaN logit weighs 0.
PENSTOCK_HD inline void softmax_chosen(std::uint32_t k, const float* logits, const std::int32_t* ids, float* weights) noexcept {
    float peak = lowest_choice;
    for (std::uint32_t j = 0; j < k; ++j) {
        peak = larger(peak, nan_to_lowest(logits[ids[j]]));
    }
    float total = 0.0f;
    for (std::uint32_t j = 0; j < k; ++j) {
        const float logit = logits[ids[j]];
        weights[j] = is_nan(logit) ? 0.0f : exp_below(logit, peak);
        total += weights[j];
    }
    for (std::uint32_t j = 0; j < k; ++j) {
        weights[j] = total > 0.0f ? weights[j] / total : 0.0f;
    }
}

/// Renormalises and scales. The epsilon is added in float32; a sum of 0 leaves the weights 0 rather than 0 / 0.
PENSTOCK_HD inline void finish_weights(const routing_rule& rule, float* weights) noexcept {
    float divisor = 1.0f;
    if (rule.renormalise) {
        float sum = 0.0f;
        for (std::uint32_t j = 0; j < rule.top_k; ++j) {
            sum += weights[j];
        }
        divisor = sum + rule.epsilon;
    }
    for (std::uint32_t j = 0; j < rule.top_k; ++j) {
        weights[j] = divisor > 0.0f ? weights[j] / divisor * rule.scale : 0.0f;
    }
}

/// Phi-3.5-MoE in inference: each pick is the largest logit s left; its weight is its share in the softmax over those left that are not
/// masked, and s is masked where (largest - s) / max(|s|, largest) exceeds twice the jitter.
template <class Group>
PENSTOCK_HD void mix_sparsely(const Group& group, const routing_rule& rule, const float* logits, float* scratch, std::int32_t* ids,
                              float* weights) {
    for (std::uint32_t i = group.rank(); i < rule.experts; i += group.size()) {
        scratch[i] = nan_to_lowest(logits[i]);
    }
    for (std::uint32_t j = 0; j < rule.top_k; ++j) {
        const candidate pick = best_eligible(group, rule.experts, scratch);
        float mine = 0.0f;
        for (std::uint32_t i = group.rank(); i < rule.experts; i += group.size()) {
            const float s = scratch[i];
            const bool masked = (pick.value - s) / larger(::fabsf(s), pick.value) > 2.0f * rule.jitter;
            if (!is_nan(s) && !masked) {
                mine += exp_below(s, pick.value);
            }
        }
        const float total = group.sum(mine);
        if (group.rank() == 0) {
            ids[j] = pick.index;
            weights[j] = 1.0f / total;
        }
        take(group, pick, scratch);
    }
}

}  // namespace detail

/// Routes one token by `rule` (see its definition for the formula). The choice is made on the scores; on the logits themselves where
/// `softmax_after_top_k` or `scales_input` says that the score comes after it, so that a saturated score makes no tie.
/// Best first, ties to the lower id, ids always distinct and in range. NaN ranks lowest and weighs 0; rows of infinities give finite
/// weights too. With the sparse mixer the correction bias has no meaning and is not read.
/// All pointers are in memory that every lane reads and writes. @pre validate(rule) does not throw.
/// @param logits [experts]
/// @param correction_bias [experts], or null
/// @param scratch [experts], the group's own; what it holds before and after does not matter
/// @param ids [top_k], written by lane 0
/// @param weights [top_k], written by lane 0
template <class Group>
PENSTOCK_HD void route_token(const Group& group, const routing_rule& rule, const float* logits, const float* correction_bias,
                             float* scratch, std::int32_t* ids, float* weights) {
    if (rule.sparse_mixer) {
        detail::mix_sparsely(group, rule, logits, scratch, ids, weights);
    } else {
        const detail::scorer score = detail::make_scorer(group, rule, logits);
        const bool by_logit = rule.softmax_after_top_k || rule.scales_input;
        for (std::uint32_t i = group.rank(); i < rule.experts; i += group.size()) {
            const float logit = logits[i];
            float choice = by_logit || detail::is_nan(logit) ? logit : score(logit);
            choice += correction_bias != nullptr ? correction_bias[i] : 0.0f;
            scratch[i] = detail::nan_to_lowest(choice);
        }
        if (rule.groups > 1) {
            group.sync();
            detail::keep_best_groups(group, rule, scratch);
            group.sync();
        }
        for (std::uint32_t j = 0; j < rule.top_k; ++j) {
            const candidate pick = detail::best_eligible(group, rule.experts, scratch);
            detail::take(group, pick, scratch);
            if (group.rank() == 0) {
                ids[j] = pick.index;
                weights[j] = rule.softmax_after_top_k ? 0.0f : score(logits[pick.index]);
            }
        }
        if (rule.softmax_after_top_k && group.rank() == 0) {
            detail::softmax_chosen(rule.top_k, logits, ids, weights);
        }
    }
    if (group.rank() == 0) {
        detail::finish_weights(rule, weights);
    }
}

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/config.hpp>

#include <cstdint>

namespace penstock::inline v0_1 {

/// What turns a router logit into a score.
enum class score_function : std::uint8_t { softmax, sigmoid, sqrt_softplus };

/// How many of a group's best scores are summed to rank the group (DeepSeek-V3: 2; DeepSeek-V2: 1, the maximum).
enum class group_score : std::uint8_t { maximum, sum_of_two };

/// A family's routing as data. For each token, in float32:
/// logits = router_weight . x (+ router_bias); s = score(logits) over all experts; choice = s (+ correction_bias);
/// with groups > 1 only experts of the `groups_kept` best groups remain; ids = top_k of choice, ties to the lower id;
/// weight = s[id] without the correction bias; divided by (sum + epsilon) if `renormalise`; times `scale`.
struct routing_rule {
    std::uint32_t experts = 0;  ///< 1 to 1024
    std::uint32_t top_k = 0;    ///< 1 to 16
    score_function score = score_function::softmax;
    bool softmax_after_top_k = false;  ///< gpt-oss, Mixtral: top-k of the logits, then softmax over the chosen
    bool renormalise = false;
    float epsilon = 0.0f;  ///< added to the sum that renormalises
    float scale = 1.0f;
    std::uint32_t groups = 1;
    std::uint32_t groups_kept = 1;
    group_score rank_groups_by = group_score::sum_of_two;
    bool sparse_mixer = false;  ///< Phi-3.5-MoE: k picks, each weighted by a masked softmax of its own
    float jitter = 0.0f;        ///< the sparse mixer's threshold is 2 x this
    bool scales_input = false;  ///< Llama-4: the weight multiplies the expert's input, and its output counts once

    friend bool operator==(const routing_rule&, const routing_rule&) = default;
};

inline constexpr std::uint32_t max_top_k = 16;
inline constexpr std::uint32_t max_experts = 1024;

}  // namespace penstock::inline v0_1

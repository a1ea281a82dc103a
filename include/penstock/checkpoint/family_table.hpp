#pragma once

#include <penstock/model/record.hpp>
#include <penstock/model/routing_rule.hpp>

#include <string_view>

/// The Mixture-of-Experts families that `describe` knows, one row each.

namespace penstock::inline v0_1::families {

/// How a family's router turns logits into ids and weights.
enum class router : std::uint8_t {
    softmax,        ///< over all experts, then top-k
    top_k_softmax,  ///< top-k of the logits, then softmax over the chosen
    sigmoid,        ///< of each logit, then top-k
    sigmoid_input,  ///< sigmoid of the chosen logit, which multiplies the expert's input
    sparse_mixer    ///< k picks, each with a masked softmax of its own
};

/// Whether the chosen weights are divided by their sum: never, always, or as norm_topk_prob of config.json says; where it is silent, no or yes.
enum class renormalise : std::uint8_t { never, always, config_or_no, config_or_yes };

/// How groups of experts are ranked; by their best only where topk_method says group_limited_greedy.
enum class grouping : std::uint8_t { ungrouped, by_best, by_best_two };

/// Order of the two inner dimensions where all experts of a layer are stacked in one tensor.
enum class stacking : std::uint8_t {
    outputs_first,  ///< gate_up [E, 2I, H], gate rows then up rows; down [E, H, I]
    inputs_first,   ///< gate_up [E, H, 2I], gate columns then up columns; down [E, I, H]
    alternating     ///< inputs_first where dense, outputs_first where packed as mxfp4; even is gate, odd is up
};

/// What config.json or the checkpoint has to hold besides.
enum class extras : std::uint8_t {
    no_extras,
    correction_bias,  ///< e_score_correction_bias, in the router or beside it
    scale,            ///< routed_scaling_factor
    scale_and_correction_bias
};

/// Names of the gate, up and down projection.
struct projection_names {
    std::string_view gate, up, down;
};
inline constexpr projection_names proj{"gate_proj", "up_proj", "down_proj"}, w132{"w1", "w3", "w2"};

/// The module of the expert that every token visits, and of the gate that scales it; "" for none.
struct shared_names {
    std::string_view module, gate;
};
inline constexpr shared_names none{"", ""}, single{"shared_expert", ""}, gated{"shared_expert", "shared_expert_gate"},
    fused{"shared_experts", ""};

/// One family. Tensors are named PREFIX.layers.N.BLOCK.ROUTER.weight, PREFIX.layers.N.BLOCK.experts.E.GATE.weight and so on.
struct row {
    std::string_view model_type;  ///< of config.json
    std::string_view block;       ///< the layer's module; transformers 5 may call it mlp, which is tried too
    std::string_view router_name;
    projection_names names;
    shared_names shared;  ///< `fused` may be missing where n_shared_experts of config.json is 0
    stacking stacked;
    router route;
    renormalise norm;
    float epsilon;    ///< added to the sum that renormalises
    grouping groups;  ///< n_group and topk_group of config.json
    extras also;
    activation act = activation::swiglu;

    [[nodiscard]] constexpr bool scaled() const noexcept { return also == extras::scale || also == extras::scale_and_correction_bias; }
    [[nodiscard]] constexpr bool corrected() const noexcept {
        return also == extras::correction_bias || also == extras::scale_and_correction_bias;
    }
};

using enum router;
using enum renormalise;
using enum grouping;
using enum stacking;
using enum extras;

// clang-format off
inline constexpr row table[] = {
    // model_type   block               router    names shared  if stacked     routing        renormalise    epsilon groups       also
    {"mixtral",     "block_sparse_moe", "gate",   w132, none,   outputs_first, top_k_softmax, never,         0,      ungrouped,   no_extras},
    {"phimoe",      "block_sparse_moe", "gate",   w132, none,   outputs_first, sparse_mixer,  never,         0,      ungrouped,   no_extras},
    {"minimax_m2",  "block_sparse_moe", "gate",   w132, none,   outputs_first, sigmoid,       always,        1e-20f, ungrouped,   correction_bias},
    {"olmoe",       "mlp",              "gate",   proj, none,   outputs_first, softmax,       config_or_no,  0,      ungrouped,   no_extras},
    {"qwen2_moe",   "mlp",              "gate",   proj, gated,  outputs_first, softmax,       config_or_no,  0,      ungrouped,   no_extras},
    {"qwen3_moe",   "mlp",              "gate",   proj, none,   outputs_first, softmax,       config_or_yes, 0,      ungrouped,   no_extras},
    {"qwen3_next",  "mlp",              "gate",   proj, gated,  outputs_first, softmax,       config_or_yes, 0,      ungrouped,   no_extras},
    {"deepseek_v2", "mlp",              "gate",   proj, fused,  outputs_first, softmax,       config_or_no,  1e-20f, by_best,     scale},
    {"deepseek_v3", "mlp",              "gate",   proj, fused,  outputs_first, sigmoid,       config_or_yes, 1e-20f, by_best_two, scale_and_correction_bias},
    {"kimi_k2",     "mlp",              "gate",   proj, fused,  outputs_first, sigmoid,       config_or_yes, 1e-20f, by_best_two, scale_and_correction_bias},
    {"glm4_moe",    "mlp",              "gate",   proj, fused,  outputs_first, sigmoid,       config_or_yes, 1e-20f, by_best_two, scale_and_correction_bias},
    {"llama4",      "feed_forward",     "router", proj, single, inputs_first,  sigmoid_input, never,         0,      ungrouped,   no_extras},
    {"llama4_text", "feed_forward",     "router", proj, single, inputs_first,  sigmoid_input, never,         0,      ungrouped,   no_extras},
    {"gpt_oss",     "mlp",              "router", proj, none,   alternating,   top_k_softmax, never,         0,      ungrouped,   no_extras, activation::gpt_oss},
};
// clang-format on

/// What precedes the number of a layer: a language model alone, inside a multimodal one, without its head, and gpt-oss as first published.
inline constexpr std::string_view layer_prefixes[] = {"model.layers.", "language_model.model.layers.", "model.language_model.layers.",
                                                      "layers.", "block."};

}  // namespace penstock::inline v0_1::families

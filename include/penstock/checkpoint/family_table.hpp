#pragma once

#include <penstock/model/record.hpp>
#include <penstock/model/routing_rule.hpp>

#include <string_view>

/// The Mixture-of-Experts families that `describe` knows, one row each.

namespace penstock::inline v0_1::families {

/// How a family's router turns logits into ids and weights.
enum class router : std::uint8_t {
    softmax,         ///< over all experts, then top-k
    top_k_softmax,   ///< top-k of the logits, then softmax over the chosen
    sigmoid,         ///< of each logit, then top-k
    sigmoid_input,   ///< sigmoid of the chosen logit, which multiplies the expert's input
    sparse_mixer     ///< k picks, each with a masked softmax of its own
};

/// Whether the chosen weights are divided by their sum: always, never, or as config.json's norm_topk_prob says, with the value if it is silent.
enum class renormalise : std::uint8_t { never, always, config_else_no, config_else_yes };

/// How groups of experts are ranked; `maximum` only where topk_method says group_limited_greedy.
enum class grouping : std::uint8_t { none, maximum, sum_of_two };

/// Order of the two inner dimensions where all experts of a layer are stacked in one tensor.
enum class stacking : std::uint8_t {
    outputs_first,     ///< gate_up [E, 2I, H], gate rows then up rows; down [E, H, I]
    inputs_first,      ///< gate_up [E, H, 2I], gate columns then up columns; down [E, I, H]
    alternating        ///< inputs_first where dense, outputs_first where packed as mxfp4; even is gate, odd is up
};

/// Names of the gate, up and down projection.
struct projection_names {
    std::string_view gate, up, down;
};
inline constexpr projection_names proj{"gate_proj", "up_proj", "down_proj"};
inline constexpr projection_names w132{"w1", "w3", "w2"};

/// The module of the expert that every token visits, and of the gate that scales it; "" for none.
struct shared_names {
    std::string_view module, gate;
};
inline constexpr shared_names none{"", ""}, single{"shared_expert", ""}, gated{"shared_expert", "shared_expert_gate"}, fused{"shared_experts", ""};

/// One family. Tensors are named PREFIX.layers.N.BLOCK.ROUTER.weight, PREFIX.layers.N.BLOCK.experts.E.GATE.weight and so on.
struct row {
    std::string_view model_type;  ///< of config.json
    std::string_view block;       ///< the layer's module; transformers 5 may call it mlp, which is tried too
    std::string_view router_name;
    projection_names names;
    shared_names shared;          ///< `fused` may be missing where n_shared_experts of config.json is 0
    stacking stacked;
    router route;
    renormalise norm;
    float epsilon;         ///< added to the sum that renormalises
    grouping groups;       ///< n_group and topk_group of config.json
    bool scaled;           ///< times routed_scaling_factor of config.json
    bool correction_bias;  ///< e_score_correction_bias has to be there
    activation act;
};

// clang-format off
inline constexpr row table[] = {
//   model_type     block               router    names shared  stacked in one tensor    routing                norm                          epsilon groups              scaled bias   activation
    {"mixtral",     "block_sparse_moe", "gate",   w132, none,   stacking::outputs_first, router::top_k_softmax, renormalise::never,           0,      grouping::none,       false, false, activation::swiglu},
    {"phimoe",      "block_sparse_moe", "gate",   w132, none,   stacking::outputs_first, router::sparse_mixer,  renormalise::never,           0,      grouping::none,       false, false, activation::swiglu},
    {"minimax_m2",  "block_sparse_moe", "gate",   w132, none,   stacking::outputs_first, router::sigmoid,       renormalise::always,          1e-20f, grouping::none,       false, true,  activation::swiglu},
    {"olmoe",       "mlp",              "gate",   proj, none,   stacking::outputs_first, router::softmax,       renormalise::config_else_no,  0,      grouping::none,       false, false, activation::swiglu},
    {"qwen2_moe",   "mlp",              "gate",   proj, gated,  stacking::outputs_first, router::softmax,       renormalise::config_else_no,  0,      grouping::none,       false, false, activation::swiglu},
    {"qwen3_moe",   "mlp",              "gate",   proj, none,   stacking::outputs_first, router::softmax,       renormalise::config_else_yes, 0,      grouping::none,       false, false, activation::swiglu},
    {"qwen3_next",  "mlp",              "gate",   proj, gated,  stacking::outputs_first, router::softmax,       renormalise::config_else_yes, 0,      grouping::none,       false, false, activation::swiglu},
    {"deepseek_v2", "mlp",              "gate",   proj, fused,  stacking::outputs_first, router::softmax,       renormalise::config_else_no,  1e-20f, grouping::maximum,    true,  false, activation::swiglu},
    {"deepseek_v3", "mlp",              "gate",   proj, fused,  stacking::outputs_first, router::sigmoid,       renormalise::config_else_yes, 1e-20f, grouping::sum_of_two, true,  true,  activation::swiglu},
    {"kimi_k2",     "mlp",              "gate",   proj, fused,  stacking::outputs_first, router::sigmoid,       renormalise::config_else_yes, 1e-20f, grouping::sum_of_two, true,  true,  activation::swiglu},
    {"glm4_moe",    "mlp",              "gate",   proj, fused,  stacking::outputs_first, router::sigmoid,       renormalise::config_else_yes, 1e-20f, grouping::sum_of_two, true,  true,  activation::swiglu},
    {"llama4",      "feed_forward",     "router", proj, single, stacking::inputs_first,  router::sigmoid_input, renormalise::never,           0,      grouping::none,       false, false, activation::swiglu},
    {"llama4_text", "feed_forward",     "router", proj, single, stacking::inputs_first,  router::sigmoid_input, renormalise::never,           0,      grouping::none,       false, false, activation::swiglu},
    {"gpt_oss",     "mlp",              "router", proj, none,   stacking::alternating,   router::top_k_softmax, renormalise::never,           0,      grouping::none,       false, false, activation::gpt_oss},
};
// clang-format on

/// What precedes the number of a layer: a language model alone, inside a multimodal one, without its head, and gpt-oss as first published.
inline constexpr std::string_view layer_prefixes[] = {"model.layers.", "language_model.model.layers.", "model.language_model.layers.", "layers.",
                                                      "block."};

}  // namespace penstock::inline v0_1::families

#pragma once

#include <penstock/model/record.hpp>
#include <penstock/model/routing_rule.hpp>
#include <penstock/model/tensor.hpp>

#include <optional>

/// A plain description of a Mixture-of-Experts model: no JSON, no files opened. `checkpoint::describe` makes one; a user can fill it by hand.

namespace penstock::inline v0_1 {

/// A shared expert: every token visits it, weight 1, or sigmoid(gate . x) where it has a gate (Qwen3-Next).
struct shared_expert {
    expert_layout layout;
    expert_parts parts;
    std::optional<tensor_info> gate;  ///< [1, hidden]
};

/// One MoE layer: its shapes come from its tensors.
struct moe_layer_model {
    std::uint32_t layer = 0;
    std::string block;  ///< prefix of its tensors, "model.layers.7.mlp"
    std::uint32_t hidden = 0;
    std::uint32_t intermediate = 0;
    routing_rule routing;
    tensor_info router_weight;                   ///< [experts, hidden], f32, bf16 or f16
    std::optional<tensor_info> router_bias;      ///< [experts], added to the logits
    std::optional<tensor_info> correction_bias;  ///< [experts], for the choice alone
    expert_layout layout;
    std::vector<expert_parts> experts;
    std::optional<shared_expert> shared;
};

struct moe_model {
    std::string family;  ///< model_type of config.json, or the user's word
    std::vector<std::filesystem::path> files;
    std::vector<moe_layer_model> layers;

    /// Format of the first layer's experts. @pre not layers.empty()
    [[nodiscard]] weight_kind format() const noexcept { return layers.front().layout.kind; }

    /// Bytes of the largest record, to which slots are sized.
    [[nodiscard]] std::uint64_t record_bytes() const noexcept {
        std::uint64_t most = 0;
        for (const moe_layer_model& l : layers) {
            most = larger(most, l.layout.bytes);
        }
        return most;
    }

    /// Bytes of all records of all layers.
    [[nodiscard]] std::uint64_t expert_bytes() const noexcept {
        std::uint64_t sum = 0;
        for (const moe_layer_model& l : layers) {
            sum += l.layout.bytes * l.experts.size();
        }
        return sum;
    }
};

}  // namespace penstock::inline v0_1

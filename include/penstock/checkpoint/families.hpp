#pragma once

#include <penstock/checkpoint/expert_tensors.hpp>

/// From a checkpoint and its config.json to a `moe_model`.

namespace penstock::inline v0_1 {

struct describe_options {
    std::string family;         ///< read the checkpoint as this model_type; empty: what config.json says
    bool extra_layers = false;  ///< also layers past num_hidden_layers: multi-token prediction
};

namespace detail {

[[nodiscard]] inline const families::row* find_family(std::string_view model_type) {
    for (const families::row& row : families::table) {
        if (row.model_type == model_type) {
            return &row;
        }
    }
    return nullptr;
}

/// config.json as `describe` reads it: the language model's part of a multimodal file first.
class model_config {
public:
    model_config(const checkpoint& weights, const std::string& wanted)
        : weights_(weights), config_(weights.config().value_or(nlohmann::json::object())) {
        if (const auto it = config_.find("text_config"); it != config_.end() && it->is_object()) {
            text_ = *it;
        }
        if (!wanted.empty()) {
            family_ = find_family(wanted);
            refuse_unless_found(wanted);
            return;
        }
        const std::string outer = text(config_, "model_type"), inner = text(text_, "model_type");
        family_ = find_family(outer);
        if (family_ == nullptr) {
            family_ = find_family(inner);
        }
        if (family_ == nullptr && outer.empty() && weights.find("block.0.mlp.mlp1_weight.blocks") != nullptr) {
            family_ = find_family("gpt_oss");  // as first published, with a config.json that does not say what it is
        }
        refuse_unless_found(outer);
    }

    [[nodiscard]] const families::row& family() const noexcept { return *family_; }

    /// @throws configuration_error naming the first key if none of them is there.
    [[nodiscard]] double number(std::initializer_list<const char*> keys) const {
        for (const char* key : keys) {
            if (const nlohmann::json* value = find(key)) {
                if (!value->is_number()) {
                    fail(std::string(key) + " is " + value->type_name() + ", a number is wanted");
                }
                return value->get<double>();
            }
        }
        fail(std::string("has no ") + *keys.begin() + ", which the model type " + std::string(family_->model_type) + " needs");
    }

    [[nodiscard]] double number_or(const char* key, double silent) const { return find(key) != nullptr ? number({key}) : silent; }

    [[nodiscard]] std::uint32_t count(std::initializer_list<const char*> keys) const {
        const double value = number(keys);
        if (!(value >= 0 && value <= 1e6) || value != static_cast<double>(static_cast<std::uint32_t>(value))) {
            fail(std::string(*keys.begin()) + " is not a count");
        }
        return static_cast<std::uint32_t>(value);
    }

    [[nodiscard]] bool flag_or(const char* key, bool silent) const {
        const nlohmann::json* value = find(key);
        if (value != nullptr && !value->is_boolean()) {
            fail(std::string(key) + " is " + value->type_name() + ", a boolean is wanted");
        }
        return value != nullptr ? value->get<bool>() : silent;
    }

    [[nodiscard]] std::string text_or(const char* key, const char* silent) const {
        const nlohmann::json* value = find(key);
        return value != nullptr && value->is_string() ? value->get<std::string>() : silent;
    }

    /// The value of a key that is there and not null.
    [[nodiscard]] const nlohmann::json* find(const char* key) const {
        for (const nlohmann::json* part : {&text_, &config_}) {
            if (const auto it = part->find(key); it != part->end() && !it->is_null()) {
                return &*it;
            }
        }
        return nullptr;
    }

    [[noreturn]] void fail(const std::string& problem) const {
        throw configuration_error(weights_.path().string() + ": config.json " + problem);
    }

private:
    static std::string text(const nlohmann::json& part, const char* key) {
        const auto it = part.find(key);
        return it != part.end() && it->is_string() ? it->get<std::string>() : std::string();
    }

    void refuse_unless_found(const std::string& model_type) const {
        if (family_ == nullptr) {
            std::string known;
            for (const families::row& row : families::table) {
                known += (known.empty() ? "" : ", ") + std::string(row.model_type);
            }
            throw configuration_error(
                weights_.path().string() + ": " +
                (model_type.empty() ? "no config.json with a model_type" : "unknown model_type " + in_quotes(model_type)) + "; known are " +
                known);
        }
    }

    const checkpoint& weights_;
    nlohmann::json config_, text_ = nlohmann::json::object();
    const families::row* family_ = nullptr;
};

/// The routing rule of a layer with that many experts.
[[nodiscard]] inline routing_rule read_routing(const model_config& config, std::uint32_t experts) {
    using families::router;
    const families::row& family = config.family();
    routing_rule rule{.experts = experts, .top_k = config.count({"num_experts_per_tok", "experts_per_token"})};
    rule.score =
        family.route == router::sigmoid || family.route == router::sigmoid_input ? score_function::sigmoid : score_function::softmax;
    if (family.route == router::softmax || family.route == router::sigmoid) {
        const std::string scoring = config.text_or("scoring_func", rule.score == score_function::sigmoid ? "sigmoid" : "softmax");
        if (scoring != "softmax" && scoring != "sigmoid" && scoring != "sqrtsoftplus") {
            config.fail("has the unknown scoring_func " + in_quotes(scoring) + "; known are softmax, sigmoid, sqrtsoftplus");
        }
        rule.score = scoring == "softmax"   ? score_function::softmax
                     : scoring == "sigmoid" ? score_function::sigmoid
                                            : score_function::sqrt_softplus;
    }
    rule.softmax_after_top_k = family.route == router::top_k_softmax;
    rule.sparse_mixer = family.route == router::sparse_mixer;
    rule.scales_input = family.route == router::sigmoid_input;
    if (rule.sparse_mixer) {
        rule.jitter = static_cast<float>(config.number_or("router_jitter_noise", 0.01));
    }
    using families::renormalise;
    rule.renormalise = family.norm == renormalise::always ||
                       (family.norm != renormalise::never && config.flag_or("norm_topk_prob", family.norm == renormalise::config_or_yes));
    rule.epsilon = rule.renormalise ? family.epsilon : 0.0f;
    rule.scale = family.scaled() ? static_cast<float>(config.number({"routed_scaling_factor"})) : 1.0f;
    using families::grouping;
    if (family.groups == grouping::by_best_two ||
        (family.groups == grouping::by_best && config.text_or("topk_method", "greedy") == "group_limited_greedy")) {
        rule.groups = config.count({"n_group"});
        rule.groups_kept = config.count({"topk_group"});
        rule.rank_groups_by = family.groups == grouping::by_best ? group_score::maximum : group_score::sum_of_two;
    }
    const bool groups_fit = rule.groups != 0 && experts % rule.groups == 0 && rule.groups_kept != 0 && rule.groups_kept <= rule.groups;
    if (experts == 0 || experts > max_experts || rule.top_k == 0 || rule.top_k > max_top_k || !groups_fit ||
        rule.top_k > experts / rule.groups * rule.groups_kept) {
        config.fail("asks for top-" + std::to_string(rule.top_k) + " of " + std::to_string(experts) + " experts in " +
                    std::to_string(rule.groups) + " groups of which " + std::to_string(rule.groups_kept) + " are kept; at most top-" +
                    std::to_string(max_top_k) + " of " + std::to_string(max_experts) +
                    " is served, and each token must find enough experts");
    }
    return rule;
}

/// Block prefixes ("model.layers.7.mlp") by layer, of every layer that holds a router or routed experts.
[[nodiscard]] inline std::map<std::uint32_t, std::string> moe_blocks(const checkpoint& weights, const families::row& family) {
    std::map<std::uint32_t, std::string> blocks;
    const std::string router = std::string(family.router_name) + ".weight";
    for (const tensor_info& t : weights.all().tensors) {
        for (const std::string_view prefix : families::layer_prefixes) {
            if (!t.name.starts_with(prefix)) {
                continue;
            }
            const std::size_t after = t.name.find('.', prefix.size());
            const std::string digits = t.name.substr(prefix.size(), after - prefix.size());
            if (after == std::string::npos || digits.empty() || digits.size() > 6 ||
                digits.find_first_not_of("0123456789") != std::string::npos) {
                continue;
            }
            const std::string_view rest = std::string_view(t.name).substr(after + 1);
            for (const std::string_view block : {family.block, std::string_view("mlp")}) {
                if (!rest.starts_with(block) || !rest.substr(block.size()).starts_with('.')) {
                    continue;
                }
                const std::string_view member = rest.substr(block.size() + 1);
                if (member == router || member.starts_with("experts.") || member.starts_with("mlp1_weight.")) {
                    const auto layer = static_cast<std::uint32_t>(std::stoul(digits));
                    const std::string full = t.name.substr(0, after + 1 + block.size());
                    const auto [it, fresh] = blocks.emplace(layer, full);
                    if (!fresh && it->second != full) {
                        throw configuration_error(weights.path().string() + ": layer " + digits + " has experts under both " +
                                                  in_quotes(it->second) + " and " + in_quotes(full));
                    }
                }
            }
        }
    }
    return blocks;
}

/// Layout and parts of every routed expert of a layer, checked to be alike.
inline void read_experts(const expert_reader& reader, moe_layer_model& layer) {
    const std::uint32_t experts = layer.routing.experts;
    layer.experts.reserve(experts);
    described_expert first;
    if (reader.is_stacked(layer.block)) {
        first = reader.stacked(layer.block, experts, layer.hidden);
        for (std::uint32_t e = 0; e < experts; ++e) {
            layer.experts.push_back(expert_reader::slice(first, e));
        }
    } else {
        const std::string prefix = layer.block + ".experts.";
        for (std::uint32_t e = 0; e < experts; ++e) {
            described_expert one = reader.separate(prefix + std::to_string(e) + ".", layer.hidden);
            if (e == 0) {
                first = one;
            }
            for (std::size_t i = 0; i < larger(one.tensors.size(), first.tensors.size()); ++i) {
                if (one.tensors.size() != first.tensors.size() || one.tensors[i]->type != first.tensors[i]->type ||
                    one.tensors[i]->shape != first.tensors[i]->shape) {
                    const tensor_info& other = *one.tensors[smaller(i, one.tensors.size() - 1)];
                    reader.fail(kind_text(other) + ", but " + kind_text(*first.tensors[smaller(i, first.tensors.size() - 1)]) +
                                ": all experts of a layer must be alike");
                }
            }
            layer.experts.push_back(std::move(one.parts));
        }
    }
    layer.layout = first.layout;
    layer.intermediate = first.layout.intermediate();
}

/// False where the family has none, or config.json counts none and none is there.
[[nodiscard]] inline bool has_shared_expert(const expert_reader& reader, const model_config& config, const std::string& module) {
    const families::row& family = config.family();
    const bool counted = family.shared.module != families::fused.module || config.number_or("n_shared_experts", 0) > 0;
    return !family.shared.module.empty() && (counted || reader.find(module + "." + std::string(family.names.gate) + ".weight") != nullptr);
}

[[nodiscard]] inline moe_layer_model read_layer(const expert_reader& reader, const model_config& config, std::uint32_t number,
                                                const std::string& block) {
    const families::row& family = config.family();
    moe_layer_model layer;
    layer.layer = number;
    layer.block = block;
    const bool first_published = block.starts_with("block.");  // gpt-oss: the router is called gate there
    const std::string router = block + "." + (first_published ? "gate" : std::string(family.router_name));
    layer.router_weight = reader.need(router + ".weight");
    if (layer.router_weight.shape.size() != 2) {
        reader.fail(kind_text(layer.router_weight) + ", [experts, hidden] is wanted");
    }
    const std::uint32_t experts = reader.narrow(layer.router_weight.shape[0]);
    layer.hidden = reader.narrow(layer.router_weight.shape[1]);
    const auto float_tensor = [&](const tensor_info* t) -> std::optional<tensor_info> {
        if (t == nullptr) {
            return std::nullopt;
        }
        reader.need_shape(*t, {experts});
        return *t;
    };
    layer.router_bias = float_tensor(family.act == activation::gpt_oss ? &reader.need(router + ".bias") : reader.find(router + ".bias"));
    const std::string correction = ".e_score_correction_bias";
    layer.correction_bias =
        float_tensor(reader.find(router + correction) ? reader.find(router + correction) : reader.find(block + correction));
    if (!layer.correction_bias && family.corrected() && config.flag_or("use_routing_bias", true)) {
        reader.fail("neither " + in_quotes(router + correction) + " nor " + in_quotes(block + correction) + " is there");
    }
    for (const std::optional<tensor_info>& t : {std::optional(layer.router_weight), layer.router_bias, layer.correction_bias}) {
        if (t && t->type != dtype::f32 && t->type != dtype::bf16 && t->type != dtype::f16) {
            reader.fail(kind_text(*t) + ", F32, BF16 or F16 is wanted for a router");
        }
    }
    layer.routing = read_routing(config, experts);
    read_experts(reader, layer);
    if (reader.find(block + ".experts." + std::to_string(experts) + "." + std::string(family.names.gate) + ".weight") != nullptr) {
        reader.fail(kind_text(layer.router_weight) + ", but there is an expert " + std::to_string(experts));
    }
    if (const std::string module = block + "." + std::string(family.shared.module); has_shared_expert(reader, config, module)) {
        described_expert one = reader.separate(module + ".", layer.hidden);
        layer.shared = shared_expert{one.layout, std::move(one.parts), std::nullopt};
        if (!family.shared.gate.empty()) {
            layer.shared->gate = reader.need(block + "." + std::string(family.shared.gate) + ".weight");
            reader.need_shape(*layer.shared->gate, {1, layer.hidden});
        }
    }
    if (family.act == activation::gpt_oss) {
        layer.layout.limit = static_cast<float>(config.number_or("swiglu_limit", 7.0));
    }
    return layer;
}

[[nodiscard]] inline moe_model describe_with(const checkpoint& weights, const describe_options& options, expert_reader::next_part next) {
    const model_config config(weights, options.family);
    const families::row& family = config.family();
    const std::string act = config.text_or("hidden_act", "silu");
    if (act != "silu" && act != "swish") {
        config.fail("has the hidden_act " + in_quotes(act) + ", silu is served");
    }
    const expert_reader reader(weights, family, next);
    moe_model model{.family = std::string(family.model_type), .files = weights.all().files, .layers = {}};
    for (const auto& [number, block] : moe_blocks(weights, family)) {
        if (options.extra_layers || number < config.number_or("num_hidden_layers", 1e9)) {
            model.layers.push_back(read_layer(reader, config, number, block));
        }
    }
    if (model.layers.empty()) {
        const std::string under = "*.layers.N." + std::string(family.block) + ".";
        reader.fail("no layer of a " + model.family + " with experts; looked for " + under + std::string(family.router_name) + ".weight, " +
                    under + "experts.E." + std::string(family.names.gate) + ".weight and " + under + "experts.gate_up_proj among " +
                    std::to_string(weights.all().tensors.size()) + " tensors");
    }
    for (const moe_layer_model& layer : model.layers) {
        const nlohmann::json* quantisation = config.find("quantization_config");
        if (layer.layout.kind == weight_kind::fp8_block128 && quantisation != nullptr && quantisation->is_object()) {
            const nlohmann::json block = quantisation->value("weight_block_size", nlohmann::json());
            if (!block.is_null() && block != nlohmann::json::array({128, 128})) {
                config.fail("has the weight_block_size " + block.dump() + ", [128,128] is served");
            }
        }
    }
    return model;
}

}  // namespace detail

/// Describes the MoE layers of a checkpoint: shapes, types and places from its tensors, the routing rule from config.json and the family's
/// row in `families::table`. Experts may be tensors of their own or stacked. Nothing but headers and config.json is read.
/// `Layout` says where a part of a record may start; a part is a matrix (gate and up are one where they share a tensor), scales or a bias.
/// @throws configuration_error for an unknown family (listing the known ones), a missing tensor or key, or shapes and types that do not
/// fit together, naming the tensor; format_error for a broken config.json.
template <class Layout = layout::expert_major>
[[nodiscard]] moe_model describe(const checkpoint& weights, const describe_options& options = {}) {
    return detail::describe_with(weights, options, &Layout::next);
}

}  // namespace penstock::inline v0_1

#include "checkpoint_files.hpp"

using namespace files;
using penstock::activation;
using penstock::checkpoint;
using penstock::describe;
using penstock::dtype;
using penstock::group_score;
using penstock::matrix_layout;
using penstock::moe_layer_model;
using penstock::moe_model;
using penstock::routing_rule;
using penstock::score_function;
using penstock::weight_kind;

namespace {

checkpoint open_fixture(const std::string& family) { return checkpoint::open(std::filesystem::path(PENSTOCK_FIXTURES) / family); }

std::uint64_t bytes_of_parts(const penstock::expert_parts& parts) {
    std::uint64_t sum = 0;
    for (const penstock::record_part& part : parts) {
        sum += part.bytes;
    }
    return sum;
}

/// Parts lie one after another on multiples of `alignment`, inside the record, and inside their files.
void check_parts(const moe_model& model, const penstock::expert_layout& layout, const penstock::expert_parts& parts,
                 std::uint64_t alignment = 16) {
    std::uint64_t reached = 0;
    for (const penstock::record_part& part : parts) {
        CHECK(part.record_offset == penstock::round_up(reached, alignment));
        CHECK(part.bytes > 0);
        CHECK(part.offset + part.bytes <= std::filesystem::file_size(model.files.at(part.file)));
        reached = part.record_offset + part.bytes;
    }
    CHECK(layout.bytes == penstock::round_up(reached, alignment));
}

/// The bytes of an expert's record, gathered part by part.
std::string record_of(const moe_model& model, const penstock::expert_layout& layout, const penstock::expert_parts& parts) {
    std::string record(layout.bytes, '\xee');
    for (const penstock::record_part& part : parts) {
        penstock::tensor_info range;
        range.offset = part.offset;
        range.bytes = part.bytes;
        record.replace(part.record_offset, part.bytes, bytes_of(model.files[part.file], range));
    }
    return record;
}

/// Element `i` of two bytes from `base`.
std::uint16_t half_at(const std::string& data, std::uint64_t base, std::uint64_t i) {
    std::uint16_t value = 0;
    REQUIRE(base + 2 * i + 2 <= data.size());
    std::memcpy(&value, data.data() + base + 2 * i, 2);
    return value;
}

std::uint16_t weight(const std::string& record, const matrix_layout& m, std::uint64_t r, std::uint64_t c) {
    return half_at(record, m.offset, r * m.row_stride + c * m.col_stride);
}

std::uint16_t bias(const std::string& record, const matrix_layout& m, std::uint64_t r) {
    return half_at(record, m.bias_offset, r * m.bias_stride);
}

/// A model directory whose tensors have their true sizes and no data.
class made {
public:
    explicit made(const std::string& config) { dir_.write("config.json", config); }

    made& add(const std::string& name, dtype type, std::vector<std::uint64_t> shape) {
        tensors_.push_back(shaped(name, type, std::move(shape)));
        return *this;
    }

    /// An expert of three matrices; `ending` goes between name and shape: ".weight".
    made& expert(const std::string& prefix, dtype type, std::uint64_t hidden, std::uint64_t intermediate,
                 const std::string& ending = ".weight", std::array<const char*, 3> names = {"gate_proj", "up_proj", "down_proj"}) {
        add(prefix + names[0] + ending, type, {intermediate, hidden});
        add(prefix + names[1] + ending, type, {intermediate, hidden});
        return add(prefix + names[2] + ending, type, {hidden, intermediate});
    }

    /// The same with block scales.
    made& fp8_expert(const std::string& prefix, std::uint64_t hidden, std::uint64_t intermediate,
                     std::array<const char*, 3> names = {"gate_proj", "up_proj", "down_proj"}) {
        expert(prefix, dtype::f8_e4m3, hidden, intermediate, ".weight", names);
        return expert(prefix, dtype::f32, penstock::ceil_div(hidden, 128), penstock::ceil_div(intermediate, 128), ".weight_scale_inv",
                      names);
    }

    checkpoint open() const {
        write_sparse(dir_ / "model.safetensors", tensors_);
        return checkpoint::open(dir_.path());
    }

    moe_model described(const penstock::describe_options& options = {}) const { return describe(open(), options); }

    std::string refused() const {
        const std::string text = refusal<penstock::configuration_error>([&] { return described(); });
        CHECK(says(text, {dir_.path().c_str()}));
        return text;
    }

    std::vector<penstock::tensor_to_write>& tensors() { return tensors_; }

private:
    temporary_directory dir_;
    std::vector<penstock::tensor_to_write> tensors_;
};

constexpr const char* qwen3 = R"({"model_type":"qwen3_moe","num_experts_per_tok":2,"norm_topk_prob":true,"num_hidden_layers":2})";
constexpr const char* deepseek =
    R"({"model_type":"deepseek_v3","num_experts_per_tok":8,"norm_topk_prob":true,"num_hidden_layers":61,"n_group":8,
    "topk_group":4,"routed_scaling_factor":2.5,"n_shared_experts":1,"scoring_func":"sigmoid","topk_method":"noaux_tc",
    "quantization_config":{"quant_method":"fp8","weight_block_size":[128,128]}})";

/// A small Qwen3 layer of 4 experts, 64 / 32.
void small_qwen3(made& model, const std::string& layer = "model.layers.0.") {
    model.add(layer + "mlp.gate.weight", dtype::bf16, {4, 64});
    for (int e = 0; e < 4; ++e) {
        model.expert(layer + "mlp.experts." + std::to_string(e) + ".", dtype::bf16, 64, 32);
    }
}

}  // namespace

TEST_CASE("describe: the golden checkpoints of every family") {
    struct expectation {
        const char* fixture;
        const char* family;
        std::vector<std::uint32_t> layers;
        std::uint32_t hidden, intermediate;
        weight_kind kind;
        std::size_t parts;
        std::uint64_t bytes;                ///< of the parts of an expert
        std::uint32_t shared_intermediate;  ///< 0: none
        bool router_bias, correction_bias;
        routing_rule rule;
    };
    constexpr auto bf16 = weight_kind::bf16;
    constexpr auto sigmoid = score_function::sigmoid;
    const expectation wanted[] = {
        {"mixtral", "mixtral", {0, 1}, 128, 192, bf16, 3, 147456, 0, false, false, {.experts = 8, .top_k = 2, .softmax_after_top_k = true}},
        {"phimoe",
         "phimoe",
         {0, 1},
         128,
         192,
         bf16,
         3,
         147456,
         0,
         false,
         false,
         {.experts = 8, .top_k = 2, .sparse_mixer = true, .jitter = 0.15f}},
        {"minimax_m2",
         "minimax_m2",
         {0, 1},
         128,
         64,
         bf16,
         3,
         49152,
         0,
         false,
         true,
         {.experts = 16, .top_k = 4, .score = sigmoid, .renormalise = true, .epsilon = 1e-20f}},
        {"olmoe", "olmoe", {0, 1}, 128, 64, bf16, 3, 49152, 0, false, false, {.experts = 16, .top_k = 4}},
        {"qwen3_moe", "qwen3_moe", {0, 1}, 128, 64, bf16, 3, 49152, 0, false, false, {.experts = 16, .top_k = 4, .renormalise = true}},
        {"qwen3_next", "qwen3_next", {0, 1}, 128, 64, bf16, 3, 49152, 64, false, false, {.experts = 16, .top_k = 4, .renormalise = true}},
        {"deepseek_v2", "deepseek_v2", {1}, 128, 64, bf16, 3, 49152, 128, false, false, {.experts = 16, .top_k = 6}},
        {"deepseek_v3",
         "deepseek_v3",
         {1},
         128,
         128,
         bf16,
         3,
         98304,
         128,
         false,
         true,
         {.experts = 16,
          .top_k = 4,
          .score = sigmoid,
          .renormalise = true,
          .epsilon = 1e-20f,
          .scale = 2.5f,
          .groups = 4,
          .groups_kept = 2}},
        {"deepseek_v3_fp8",
         "deepseek_v3",
         {1},
         128,
         128,
         weight_kind::fp8_block128,
         6,
         49152 + 12,
         128,
         false,
         true,
         {.experts = 16,
          .top_k = 4,
          .score = sigmoid,
          .renormalise = true,
          .epsilon = 1e-20f,
          .scale = 2.5f,
          .groups = 4,
          .groups_kept = 2}},
        {"deepseek_v3_fp8_odd",
         "deepseek_v3",
         {1},
         320,
         192,
         weight_kind::fp8_block128,
         6,
         3 * 61440 + 3 * 24,
         192,
         false,
         true,
         {.experts = 8,
          .top_k = 3,
          .score = sigmoid,
          .renormalise = true,
          .epsilon = 1e-20f,
          .scale = 2.5f,
          .groups = 2,
          .groups_kept = 1}},
        {"glm4_moe",
         "glm4_moe",
         {1},
         128,
         64,
         bf16,
         3,
         49152,
         64,
         false,
         true,
         {.experts = 16, .top_k = 4, .score = sigmoid, .renormalise = true, .epsilon = 1e-20f}},
        {"llama4_text",
         "llama4_text",
         {0, 1},
         128,
         64,
         bf16,
         2,
         49152,
         64,
         false,
         false,
         {.experts = 8, .top_k = 1, .score = sigmoid, .scales_input = true}},
        {"gpt_oss",
         "gpt_oss",
         {0, 1},
         128,
         96,
         bf16,
         4,
         73728 + 640,
         0,
         true,
         false,
         {.experts = 8, .top_k = 4, .softmax_after_top_k = true}},
        {"gpt_oss_mxfp4",
         "gpt_oss",
         {0, 1},
         128,
         96,
         weight_kind::mxfp4,
         6,
         18432 + 1152 + 640,
         0,
         true,
         false,
         {.experts = 8, .top_k = 4, .softmax_after_top_k = true}},
    };
    for (const expectation& want : wanted) {
        CAPTURE(std::string(want.fixture));
        const moe_model model = describe(open_fixture(want.fixture));
        CHECK(model.family == want.family);
        CHECK(model.format() == want.kind);
        REQUIRE(model.layers.size() == want.layers.size());
        for (std::size_t i = 0; i < model.layers.size(); ++i) {
            const moe_layer_model& layer = model.layers[i];
            CHECK(layer.layer == want.layers[i]);
            CHECK(layer.hidden == want.hidden);
            CHECK(layer.intermediate == want.intermediate);
            CHECK(layer.layout.hidden() == want.hidden);
            CHECK(layer.layout.intermediate() == want.intermediate);
            CHECK(layer.layout.down.rows == want.hidden);
            CHECK(layer.layout.down.cols == want.intermediate);
            CHECK(layer.layout.kind == want.kind);
            CHECK(layer.routing == want.rule);
            CHECK(layer.router_weight.name.starts_with(layer.block));
            CHECK(layer.router_weight.shape == std::vector<std::uint64_t>{want.rule.experts, want.hidden});
            CHECK(layer.router_bias.has_value() == want.router_bias);
            CHECK(layer.correction_bias.has_value() == want.correction_bias);
            REQUIRE(layer.experts.size() == want.rule.experts);
            for (const penstock::expert_parts& parts : layer.experts) {
                REQUIRE(parts.size() == want.parts);
                CHECK(bytes_of_parts(parts) == want.bytes);
                check_parts(model, layer.layout, parts);
            }
            REQUIRE(layer.shared.has_value() == (want.shared_intermediate != 0));
            if (layer.shared) {
                CHECK(layer.shared->layout.intermediate() == want.shared_intermediate);
                CHECK(layer.shared->layout.hidden() == want.hidden);
                check_parts(model, layer.shared->layout, layer.shared->parts);
                CHECK(layer.shared->gate.has_value() == (model.family == "qwen3_next"));
            }
            CHECK((layer.layout.act == activation::gpt_oss) == (model.family == "gpt_oss"));
        }
        CHECK(model.expert_bytes() == model.layers.size() * want.rule.experts * model.record_bytes());
    }
}

TEST_CASE("describe: no byte of an expert belongs to another") {
    for (const char* family : {"qwen3_moe", "gpt_oss", "gpt_oss_mxfp4", "deepseek_v3_fp8_odd", "llama4_text"}) {
        CAPTURE(std::string(family));
        const moe_model model = describe(open_fixture(family));
        std::map<std::pair<std::uint32_t, std::uint64_t>, std::uint64_t> ranges;
        for (const moe_layer_model& layer : model.layers) {
            for (const penstock::expert_parts& parts : layer.experts) {
                for (const penstock::record_part& part : parts) {
                    CHECK(ranges.emplace(std::pair(part.file, part.offset), part.offset + part.bytes).second);
                }
            }
        }
        std::pair<std::uint32_t, std::uint64_t> before{~0u, 0};
        for (const auto& [where, end] : ranges) {
            CHECK((where.first != before.first || before.second <= where.second));
            before = {where.first, end};
        }
    }
}

TEST_CASE("describe: a weight of separate experts is found in its record") {
    const checkpoint weights = open_fixture("mixtral");
    const moe_model model = describe(weights);
    const moe_layer_model& layer = model.layers[1];
    const std::string record = record_of(model, layer.layout, layer.experts[5]);
    const auto tensor = [&](const char* name) {
        const penstock::tensor_info& t = *weights.find("model.layers.1.block_sparse_moe.experts.5." + std::string(name) + ".weight");
        return bytes_of(weights.all().files[t.file], t);
    };
    const std::string gate = tensor("w1"), up = tensor("w3"), down = tensor("w2");
    for (const auto& [r, c] : {std::pair(0, 0), {0, 127}, {191, 0}, {77, 33}}) {
        CHECK(weight(record, layer.layout.gate, r, c) == half_at(gate, 0, r * 128 + c));
        CHECK(weight(record, layer.layout.up, r, c) == half_at(up, 0, r * 128 + c));
        CHECK(weight(record, layer.layout.down, c, r) == half_at(down, 0, c * 192 + r));
    }
    CHECK(layer.experts[5][0].row_bytes == 256);
    CHECK(layer.experts[5][2].row_bytes == 384);
}

TEST_CASE("describe: Llama-4 stacks inputs first, gpt-oss alternates gate and up") {
    for (const bool alternating : {false, true}) {
        const checkpoint weights = open_fixture(alternating ? "gpt_oss" : "llama4_text");
        const moe_model model = describe(weights);
        const moe_layer_model& layer = model.layers[1];
        const std::uint64_t hidden = 128, inter = layer.intermediate, e = 6;
        const auto tensor = [&](const std::string& name) {
            const penstock::tensor_info& t = *weights.find(layer.block + ".experts." + name);
            return bytes_of(weights.all().files[t.file], t);
        };
        const std::string gate_up = tensor("gate_up_proj"), down = tensor("down_proj");
        const std::string record = record_of(model, layer.layout, layer.experts[e]);
        for (const auto& [r, c] : {std::pair<std::uint64_t, std::uint64_t>(0, 0), {0, 127}, {inter - 1, 0}, {17, 33}, {inter - 1, 127}}) {
            const std::uint64_t row = (e * hidden + c) * 2 * inter;
            CHECK(weight(record, layer.layout.gate, r, c) == half_at(gate_up, 0, row + (alternating ? 2 * r : r)));
            CHECK(weight(record, layer.layout.up, r, c) == half_at(gate_up, 0, row + (alternating ? 2 * r + 1 : inter + r)));
            CHECK(weight(record, layer.layout.down, c, r) == half_at(down, 0, (e * inter + r) * hidden + c));
            if (alternating) {
                const std::string gate_up_bias = tensor("gate_up_proj_bias"), down_bias = tensor("down_proj_bias");
                CHECK(bias(record, layer.layout.gate, r) == half_at(gate_up_bias, 0, e * 2 * inter + 2 * r));
                CHECK(bias(record, layer.layout.up, r) == half_at(gate_up_bias, 0, e * 2 * inter + 2 * r + 1));
                CHECK(bias(record, layer.layout.down, c) == half_at(down_bias, 0, e * hidden + c));
            }
        }
    }
}

TEST_CASE("describe: mxfp4 weights and their scales") {
    const checkpoint weights = open_fixture("gpt_oss_mxfp4");
    const moe_model model = describe(weights);
    const moe_layer_model& layer = model.layers[0];
    const auto tensor = [&](const std::string& name) {
        const penstock::tensor_info& t = *weights.find(layer.block + ".experts." + name);
        return bytes_of(weights.all().files[t.file], t);
    };
    const std::uint64_t hidden = 128, inter = 96, e = 3;
    const std::string blocks = tensor("gate_up_proj_blocks"), scales = tensor("gate_up_proj_scales"),
                      down_scales = tensor("down_proj_scales");
    const std::string record = record_of(model, layer.layout, layer.experts[e]);
    for (const auto& [r, c] : {std::pair<std::uint64_t, std::uint64_t>(0, 0), {95, 127}, {17, 64}}) {
        for (const bool up : {false, true}) {
            const matrix_layout& m = up ? layer.layout.up : layer.layout.gate;
            const std::uint64_t row = e * 2 * inter + 2 * r + up;
            const std::uint64_t element = r * m.row_stride + c * m.col_stride;
            CHECK(record[m.offset + element / 2] == blocks[(row * hidden + c) / 2]);
            CHECK(record[m.scale_offset + (r * m.scale_row_step + m.scale_row0) * m.scale_row_stride + c / 32] == scales[row * 4 + c / 32]);
        }
        const matrix_layout& m = layer.layout.down;
        CHECK(record[m.scale_offset + (c * m.scale_row_step + m.scale_row0) * m.scale_row_stride + r / 32] ==
              down_scales[(e * hidden + c) * 3 + r / 32]);
    }
    CHECK(layer.layout.alpha == 1.702f);
    CHECK(layer.layout.limit == 7.0f);
}

TEST_CASE("describe: shapes come from the tensors where config.json contradicts them") {
    made model(R"({"model_type":"qwen3_moe","num_experts_per_tok":2,"num_experts":64,"hidden_size":999,"moe_intermediate_size":1})");
    small_qwen3(model);
    const moe_model described = model.described();
    CHECK(described.layers.at(0).routing.experts == 4);
    CHECK(described.layers[0].hidden == 64);
    CHECK(described.layers[0].intermediate == 32);
}

TEST_CASE("describe: transformers 5 stacks gate and up, outputs first, under mlp whatever the family") {
    for (const char* family : {"qwen3_moe", "mixtral", "olmoe"}) {
        made model(R"({"model_type":")" + std::string(family) + R"(","num_experts_per_tok":2})");
        model.add("model.layers.3.mlp.gate.weight", dtype::f32, {4, 64});
        model.add("model.layers.3.mlp.experts.gate_up_proj", dtype::f16, {4, 96, 64})
            .add("model.layers.3.mlp.experts.down_proj", dtype::f16, {4, 64, 48});
        const moe_model described = model.described();
        const moe_layer_model& layer = described.layers.at(0);
        CHECK(layer.layer == 3);
        CHECK(layer.layout.kind == weight_kind::f16);
        CHECK(layer.intermediate == 48);
        CHECK(layer.layout.gate.row_stride == 64);
        CHECK(layer.layout.gate.col_stride == 1);
        CHECK(layer.layout.up.offset == layer.layout.gate.offset + 48 * 64 * 2);
        CHECK(layer.layout.down.row_stride == 48);
        CHECK(layer.experts[2][0].offset - layer.experts[1][0].offset == 96 * 64 * 2);
        CHECK(layer.experts[0].size() == 2);
        CHECK(layer.experts[0][0].row_bytes == 128);
    }
}

TEST_CASE("describe: fp8 scales of stacked experts, where a scale row straddles gate and up") {
    made model(deepseek);
    model.add("model.layers.3.mlp.gate.weight", dtype::bf16, {16, 320})
        .add("model.layers.3.mlp.gate.e_score_correction_bias", dtype::f32, {16});
    model.add("model.layers.3.mlp.experts.gate_up_proj", dtype::f8_e4m3, {16, 384, 320})
        .add("model.layers.3.mlp.experts.gate_up_proj_scale_inv", dtype::f32, {16, 3, 3});
    model.add("model.layers.3.mlp.experts.down_proj", dtype::f8_e4m3, {16, 320, 192})
        .add("model.layers.3.mlp.experts.down_proj_scale_inv", dtype::f32, {16, 3, 2});
    model.expert("model.layers.3.mlp.shared_experts.", dtype::bf16, 320, 192);
    const moe_layer_model layer = model.described().layers.at(0);
    CHECK(layer.layout.kind == weight_kind::fp8_block128);
    CHECK(layer.layout.gate.scale_offset == layer.layout.up.scale_offset);
    CHECK(layer.layout.up.scale_row0 == 192);
    CHECK(layer.layout.up.scale_row_step == 1);
    CHECK(layer.layout.up.scale_row_stride == 3);
    CHECK(layer.layout.down.scale_row_stride == 2);
    CHECK(layer.experts[1].size() == 4);
    CHECK(layer.experts[1][2].bytes == 36);
    CHECK(layer.shared->layout.kind == weight_kind::bf16);
}

TEST_CASE("describe: DeepSeek-V3 as published, without the layer that predicts more tokens") {
    made model(deepseek);
    for (const std::string& layer : {std::string("model.layers.3.mlp."), std::string("model.layers.61.mlp.")}) {
        model.add(layer + "gate.weight", dtype::bf16, {256, 7168}).add(layer + "gate.e_score_correction_bias", dtype::f32, {256});
        model.fp8_expert(layer + "shared_experts.", 7168, 2048);
        for (int e = 0; e < 256; ++e) {
            model.fp8_expert(layer + "experts." + std::to_string(e) + ".", 7168, 2048);
        }
    }
    model.expert("model.layers.0.mlp.", dtype::bf16, 7168, 18432);
    const moe_model described = model.described();
    REQUIRE(described.layers.size() == 1);
    CHECK(described.layers[0].layer == 3);
    CHECK(described.record_bytes() == 44'050'944);
    CHECK(described.layers[0].layout.gate.scale_row_stride == 56);
    CHECK(described.layers[0].layout.down.scale_row_stride == 16);
    CHECK(described.layers[0].routing == routing_rule{.experts = 256,
                                                      .top_k = 8,
                                                      .score = score_function::sigmoid,
                                                      .renormalise = true,
                                                      .epsilon = 1e-20f,
                                                      .scale = 2.5f,
                                                      .groups = 8,
                                                      .groups_kept = 4});
    CHECK(model.described({.family = "", .extra_layers = true}).layers.size() == 2);
}

TEST_CASE("describe: the published shapes of other families") {
    SUBCASE("Qwen3-30B-A3B") {
        made model(R"({"model_type":"qwen3_moe","num_experts_per_tok":8,"norm_topk_prob":true})");
        model.add("model.layers.0.mlp.gate.weight", dtype::bf16, {128, 2048});
        for (int e = 0; e < 128; ++e) {
            model.expert("model.layers.0.mlp.experts." + std::to_string(e) + ".", dtype::bf16, 2048, 768);
        }
        CHECK(model.described().record_bytes() == 9u << 20);
    }
    SUBCASE("gpt-oss-20b") {
        for (const bool first_published : {false, true}) {
            made model(first_published ? R"({"num_hidden_layers":24,"experts_per_token":4,"swiglu_limit":7.0})"
                                       : R"({"model_type":"gpt_oss","num_experts_per_tok":4,"swiglu_limit":7.0})");
            const std::string block = first_published ? "block.0.mlp." : "model.layers.0.mlp.",
                              router = block + (first_published ? "gate." : "router.");
            const std::string w1 = block + (first_published ? "mlp1_weight." : "experts.gate_up_proj_"),
                              w2 = block + (first_published ? "mlp2_weight." : "experts.down_proj_");
            model.add(router + "weight", dtype::bf16, {32, 2880}).add(router + "bias", dtype::bf16, {32});
            model.add(w1 + "blocks", dtype::u8, {32, 5760, 90, 16}).add(w1 + "scales", dtype::u8, {32, 5760, 90});
            model.add(w2 + "blocks", dtype::u8, {32, 2880, 90, 16}).add(w2 + "scales", dtype::u8, {32, 2880, 90});
            model.add(block + (first_published ? "mlp1_bias" : "experts.gate_up_proj_bias"), dtype::bf16, {32, 5760});
            model.add(block + (first_published ? "mlp2_bias" : "experts.down_proj_bias"), dtype::bf16, {32, 2880});
            const moe_model described = model.described();
            CHECK(described.family == "gpt_oss");
            CHECK(described.record_bytes() == 13'236'480);
            CHECK(described.layers[0].layout.up.offset - described.layers[0].layout.gate.offset == 1440);
            CHECK(described.layers[0].layout.gate.row_stride == 5760);
            CHECK(described.layers[0].layout.gate.bias_stride == 2);
            CHECK(described.layers[0].routing.top_k == 4);
        }
    }
    SUBCASE("Llama-4 Scout, inside a multimodal model") {
        made model(
            R"({"model_type":"llama4","text_config":{"model_type":"llama4_text","num_experts_per_tok":1,"num_hidden_layers":48,"hidden_act":"silu"}})");
        const std::string block = "language_model.model.layers.1.feed_forward.";
        model.add(block + "router.weight", dtype::bf16, {16, 5120}).add(block + "experts.gate_up_proj", dtype::bf16, {16, 5120, 16384});
        model.add(block + "experts.down_proj", dtype::bf16, {16, 8192, 5120}).expert(block + "shared_expert.", dtype::bf16, 5120, 8192);
        model.expert("language_model.model.layers.0.feed_forward.", dtype::bf16, 5120, 16384);
        const moe_model described = model.described();
        REQUIRE(described.layers.size() == 1);
        CHECK(described.record_bytes() == 240u << 20);
        CHECK(described.layers[0].block == "language_model.model.layers.1.feed_forward");
        CHECK(described.layers[0].layout.down.col_stride == 5120);
        CHECK(described.layers[0].routing.scales_input);
        CHECK(!described.layers[0].shared->gate);
    }
    SUBCASE("MiniMax-M2, its bias in the router or beside it") {
        for (const char* place : {"e_score_correction_bias", "gate.e_score_correction_bias"}) {
            made model(R"({"model_type":"minimax_m2","num_experts_per_tok":8,"scoring_func":"sigmoid","use_routing_bias":true})");
            const std::string block = "model.layers.0.block_sparse_moe.";
            model.add(block + "gate.weight", dtype::f32, {256, 3072}).add(block + place, dtype::f32, {256});
            for (int e = 0; e < 256; ++e) {
                model.fp8_expert(block + "experts." + std::to_string(e) + ".", 3072, 1536, {"w1", "w3", "w2"});
            }
            const moe_layer_model layer = model.described().layers.at(0);
            CHECK(layer.layout.bytes == 3 * (3072 * 1536 + 24 * 12 * 4));
            CHECK(layer.correction_bias->name == block + place);
        }
    }
    SUBCASE("Kimi-K2-Thinking, int4 in groups of 32") {
        made model(
            R"({"model_type":"kimi_k2","num_experts_per_tok":8,"n_group":1,"topk_group":1,"norm_topk_prob":true,"routed_scaling_factor":2.827,"n_shared_experts":1})");
        const std::string block = "model.layers.1.mlp.";
        model.add(block + "gate.weight", dtype::bf16, {384, 7168}).add(block + "gate.e_score_correction_bias", dtype::f32, {384});
        model.expert(block + "shared_experts.", dtype::bf16, 7168, 2048);
        for (int e = 0; e < 384; ++e) {
            const std::string expert = block + "experts." + std::to_string(e) + ".";
            for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
                const bool down = std::string_view(name) == "down_proj";
                const std::uint64_t rows = down ? 7168 : 2048, cols = down ? 2048 : 7168;
                model.add(expert + name + ".weight_packed", dtype::i32, {rows, cols / 8})
                    .add(expert + name + ".weight_scale", dtype::bf16, {rows, cols / 32});
                model.add(expert + name + ".weight_shape", dtype::i64, {2});
            }
        }
        const moe_model described = model.described();
        CHECK(described.format() == weight_kind::int4_group);
        CHECK(described.record_bytes() == 24'772'608);
        CHECK(described.layers[0].layout.down.cols == 2048);
        CHECK(described.layers[0].layout.down.scale_row_stride == 64);
        CHECK(described.layers[0].routing.scale == 2.827f);
        CHECK(described.layers[0].routing.groups == 1);
        CHECK(described.layers[0].experts[0].size() == 6);
        CHECK_THROWS_AS(penstock::visit(described.format(), [](auto) {}), penstock::configuration_error);
    }
    SUBCASE("DeepSeek-V2 (236B), groups ranked by their best") {
        made model(
            R"({"model_type":"deepseek_v2","num_experts_per_tok":6,"n_group":8,"topk_group":3,"topk_method":"group_limited_greedy","norm_topk_prob":false,
            "routed_scaling_factor":16.0,"n_shared_experts":2,"scoring_func":"softmax"})");
        const std::string block = "model.layers.1.mlp.";
        model.add(block + "gate.weight", dtype::bf16, {160, 5120}).expert(block + "shared_experts.", dtype::bf16, 5120, 3072);
        for (int e = 0; e < 160; ++e) {
            model.expert(block + "experts." + std::to_string(e) + ".", dtype::bf16, 5120, 1536);
        }
        CHECK(model.described().layers.at(0).routing ==
              routing_rule{
                  .experts = 160, .top_k = 6, .scale = 16.0f, .groups = 8, .groups_kept = 3, .rank_groups_by = group_score::maximum});
    }
}

TEST_CASE("describe: what config.json says of the routing is followed") {
    const auto rule = [](const std::string& config) {
        made model(config);
        small_qwen3(model);
        return model.described().layers.at(0).routing;
    };
    CHECK(rule(R"({"model_type":"qwen3_moe","num_experts_per_tok":2})").renormalise);
    CHECK(!rule(R"({"model_type":"qwen3_moe","num_experts_per_tok":2,"norm_topk_prob":false})").renormalise);
    CHECK(!rule(R"({"model_type":"olmoe","num_experts_per_tok":2})").renormalise);
    CHECK(rule(R"({"model_type":"olmoe","num_experts_per_tok":2,"norm_topk_prob":true})").renormalise);
    CHECK(rule(R"({"model_type":"olmoe","num_experts_per_tok":2,"scoring_func":"sqrtsoftplus"})").score == score_function::sqrt_softplus);
}

TEST_CASE("describe: the parts follow the layout type") {
    struct page_wise {
        static std::uint64_t next(std::uint64_t offset) { return penstock::round_up(offset, 4096); }
    };
    const moe_model model = describe<page_wise>(open_fixture("deepseek_v3_fp8_odd"));
    CHECK(model.record_bytes() % 4096 == 0);
    check_parts(model, model.layers[0].layout, model.layers[0].experts[2], 4096);
    CHECK(model.layers[0].layout.up.offset == 61440);
    CHECK(model.layers[0].layout.gate.scale_offset == 3 * 61440);
    CHECK(model.layers[0].layout.up.scale_offset == 3 * 61440 + 4096);
}

TEST_CASE("describe: what cannot be read is refused by name") {
    SUBCASE("an unknown model") {
        made model(R"({"model_type":"nosuch_moe","num_experts_per_tok":2})");
        small_qwen3(model);
        CHECK(says(model.refused(), {"\"nosuch_moe\"", "mixtral", "deepseek_v3", "gpt_oss"}));
        CHECK_THROWS_AS(static_cast<void>(model.described({.family = "", .extra_layers = true})), penstock::configuration_error);
        CHECK(model.described({.family = "qwen3_moe", .extra_layers = false}).family == "qwen3_moe");
    }
    SUBCASE("no config.json") {
        const temporary_directory dir;
        dir.write("model.safetensors", st("{}"));
        CHECK(says(refusal<penstock::configuration_error>([&] { return describe(checkpoint::open(dir.path())); }),
                   {"no config.json", "qwen3_moe"}));
    }
    SUBCASE("a known model without experts") {
        made model(qwen3);
        model.expert("model.layers.0.mlp.", dtype::bf16, 64, 32);
        CHECK(says(model.refused(), {"looked for", "mlp.gate.weight", "experts.E.gate_proj.weight", "experts.gate_up_proj", "3 tensors"}));
    }
    SUBCASE("experts without a router") {
        made model(qwen3);
        small_qwen3(model);
        model.tensors().erase(model.tensors().begin());
        CHECK(says(model.refused(), {"\"model.layers.0.mlp.gate.weight\"", "missing"}));
    }
    SUBCASE("an expert that is missing") {
        made model(qwen3);
        small_qwen3(model);
        model.tensors().resize(model.tensors().size() - 3);
        CHECK(says(model.refused(), {"\"model.layers.0.mlp.experts.3.gate_proj.weight\""}));
    }
    SUBCASE("an expert more than the router knows") {
        made model(qwen3);
        small_qwen3(model);
        model.expert("model.layers.0.mlp.experts.4.", dtype::bf16, 64, 32);
        CHECK(says(model.refused(), {"[4, 64]", "expert 4"}));
    }
    SUBCASE("mixed types inside an expert") {
        made model(qwen3);
        small_qwen3(model);
        model.tensors()[3].type = dtype::f16;
        CHECK(says(model.refused(), {"experts.0.down_proj.weight", "F16", "BF16", "one type"}));
    }
    SUBCASE("experts of one layer that differ") {
        made model(qwen3);
        small_qwen3(model);
        for (std::size_t i = 4; i < 7; ++i) {
            model.tensors()[i].type = dtype::f32;
        }
        CHECK(says(model.refused(), {"experts.1.gate_proj.weight", "F32", "BF16", "alike"}));
    }
    SUBCASE("a matrix of another shape") {
        made model(qwen3);
        small_qwen3(model);
        model.tensors()[3].shape = {32, 64};
        CHECK(says(model.refused(), {"experts.0.down_proj.weight", "[32, 64]", "[64, 32] is wanted"}));
    }
    SUBCASE("integer weights, fp8 without block scales, scales of another type") {
        made model(qwen3);
        small_qwen3(model);
        for (auto& t : model.tensors()) {
            t.type = t.name.ends_with("gate.weight") ? t.type : dtype::i8;
        }
        CHECK(says(model.refused(), {"I8", "F8_E4M3"}));
        for (auto& t : model.tensors()) {
            t.type = t.name.ends_with("gate.weight") ? t.type : dtype::f8_e4m3;
        }
        CHECK(says(model.refused(), {"\"model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv\"", "missing"}));
        model.add("model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv", dtype::bf16, {1, 1});
        CHECK(says(model.refused(), {"weight_scale_inv", "BF16", "F32 is wanted"}));
    }
    SUBCASE("blocks of another size") {
        made model(R"({"model_type":"qwen3_moe","num_experts_per_tok":2,"quantization_config":{"weight_block_size":[64,128]}})");
        model.add("model.layers.0.mlp.gate.weight", dtype::bf16, {2, 128})
            .fp8_expert("model.layers.0.mlp.experts.0.", 128, 128)
            .fp8_expert("model.layers.0.mlp.experts.1.", 128, 128);
        CHECK(says(model.refused(), {"weight_block_size [64,128]", "[128,128]"}));
    }
    SUBCASE("keys that are missing or of another kind") {
        for (const auto& [config, word] : {std::pair(R"({"model_type":"qwen3_moe"})", "num_experts_per_tok"),
                                           {R"({"model_type":"qwen3_moe","num_experts_per_tok":"2"})", "num_experts_per_tok is string"},
                                           {R"({"model_type":"qwen3_moe","num_experts_per_tok":2.5})", "not a count"},
                                           {R"({"model_type":"qwen3_moe","num_experts_per_tok":-1})", "not a count"},
                                           {R"({"model_type":"qwen3_moe","num_experts_per_tok":0})", "top-0 of 4"},
                                           {R"({"model_type":"qwen3_moe","num_experts_per_tok":5})", "top-5 of 4"},
                                           {R"({"model_type":"qwen3_moe","num_experts_per_tok":2,"norm_topk_prob":1})", "norm_topk_prob"},
                                           {R"({"model_type":"qwen3_moe","num_experts_per_tok":2,"hidden_act":"gelu"})", "\"gelu\""},
                                           {R"({"model_type":"qwen3_moe","num_experts_per_tok":2,"scoring_func":"tanh"})", "\"tanh\""}}) {
            made model(config);
            small_qwen3(model);
            CHECK(says(model.refused(), {word}));
        }
    }
    SUBCASE("a group rule, a correction bias or a shared expert that is missing") {
        made model(deepseek);
        const std::string block = "model.layers.3.mlp.";
        model.add(block + "gate.weight", dtype::bf16, {16, 128});
        for (int e = 0; e < 16; ++e) {
            model.fp8_expert(block + "experts." + std::to_string(e) + ".", 128, 128);
        }
        CHECK(says(model.refused(), {"gate.e_score_correction_bias", "mlp.e_score_correction_bias"}));
        model.add(block + "e_score_correction_bias", dtype::f32, {16});
        CHECK(says(model.refused(), {"shared_experts.gate_proj.weight"}));
        made none(R"({"model_type":"deepseek_v3","num_experts_per_tok":2,"n_group":3,"topk_group":1,"routed_scaling_factor":1.0})");
        none.tensors() = model.tensors();
        CHECK(says(none.refused(), {"16 experts in 3 groups"}));
        made fewer(R"({"model_type":"deepseek_v3","num_experts_per_tok":5,"n_group":4,"topk_group":1,"routed_scaling_factor":1.0})");
        fewer.tensors() = model.tensors();
        CHECK(says(fewer.refused(), {"top-5 of 16 experts in 4 groups of which 1"}));
        made silent(R"({"model_type":"deepseek_v3","num_experts_per_tok":5,"n_group":4,"topk_group":2})");
        silent.tensors() = model.tensors();
        CHECK(says(silent.refused(), {"routed_scaling_factor"}));
        made without_shared(
            R"({"model_type":"deepseek_v3","num_experts_per_tok":2,"n_group":4,"topk_group":1,"routed_scaling_factor":1.0,"n_shared_experts":0})");
        without_shared.tensors() = model.tensors();
        CHECK(!without_shared.described().layers.at(0).shared);
    }
}

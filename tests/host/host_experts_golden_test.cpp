#include "host_experts_records.hpp"

#include <penstock/checkpoint/checkpoint.hpp>

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

namespace ps = penstock;

namespace {

std::vector<std::byte> read_bytes(const std::filesystem::path& file, std::uint64_t offset, std::uint64_t bytes) {
    std::ifstream in(file, std::ios::binary);
    std::vector<std::byte> result(bytes);
    in.seekg(static_cast<std::streamoff>(offset));
    in.read(reinterpret_cast<char*>(result.data()), static_cast<std::streamsize>(bytes));
    REQUIRE(in.good());
    return result;
}

std::vector<std::byte> read_tensor(const std::vector<std::filesystem::path>& files, const ps::tensor_info& t) {
    return read_bytes(files.at(t.file), t.offset, t.bytes);
}

std::vector<float> widened(const std::vector<std::byte>& bytes, ps::dtype type) {
    std::vector<float> result(bytes.size() * 8 / ps::bits(type));
    for (std::size_t i = 0; i < result.size(); ++i) {
        result[i] = ps::load_element(bytes.data(), type, i);
    }
    return result;
}

/// The answers of another implementation for the last layer's block.
class answers {
public:
    explicit answers(const std::filesystem::path& folder) : file_(ps::checkpoint::open(folder / "reference.safetensors")) {}

    std::optional<std::vector<float>> floats(const std::string& name) const {
        const ps::tensor_info* t = file_.find(name);
        return t == nullptr ? std::nullopt : std::optional(widened(read_tensor(file_.all().files, *t), t->type));
    }

    /// The first of the names that the file has.
    std::vector<float> floats(const std::vector<std::string>& names) const {
        for (const std::string& name : names) {
            if (auto found = floats(name)) {
                return *found;
            }
        }
        FAIL(names.front());
        return {};
    }

    std::vector<std::int64_t> integers(const std::vector<std::string>& names) const {
        for (const std::string& name : names) {
            if (const ps::tensor_info* t = file_.find(name)) {
                const std::vector<std::byte> bytes = read_tensor(file_.all().files, *t);
                std::vector<std::int64_t> result(bytes.size() / 8);
                std::memcpy(result.data(), bytes.data(), bytes.size());
                return result;
            }
        }
        FAIL(names.front());
        return {};
    }

private:
    ps::checkpoint file_;
};

std::vector<std::byte> read_record(const std::vector<std::filesystem::path>& files, const ps::expert_layout& layout,
                                   const ps::expert_parts& parts) {
    std::vector<std::byte> record(layout.bytes);
    for (const ps::record_part& part : parts) {
        const std::vector<std::byte> bytes = read_bytes(files.at(part.file), part.offset, part.bytes);
        std::copy(bytes.begin(), bytes.end(), record.begin() + static_cast<std::ptrdiff_t>(part.record_offset));
    }
    return record;
}

/// Llama-4's answer holds a score in the chosen column and zeros; the others hold ids and weights. Either way: weight by expert.
std::vector<std::map<std::int64_t, float>> chosen_weights(const answers& right, const ps::routing_rule& rule, std::size_t tokens) {
    std::vector<std::map<std::int64_t, float>> result(tokens);
    if (rule.scales_input) {
        const std::vector<float> scores = right.floats(std::vector<std::string>{"child.router.out.0"});
        for (std::size_t i = 0; i < scores.size(); ++i) {
            if (scores[i] != 0) {
                result[i / rule.experts][static_cast<std::int64_t>(i % rule.experts)] = scores[i];
            }
        }
        return result;
    }
    const auto ids = right.integers({"child.gate.out.2", "child.router.out.2"});
    const auto weights = right.floats(std::vector<std::string>{"child.gate.out.1", "child.router.out.1"});
    for (std::size_t p = 0; p < ids.size(); ++p) {
        result[p / rule.top_k][ids[p]] = weights[p];
    }
    return result;
}

void check_family(const std::string& family, const ps::executor::host& host) {
    const std::filesystem::path folder = std::filesystem::path(PENSTOCK_FIXTURES) / family;
    const ps::checkpoint weights = ps::checkpoint::open(folder);
    const ps::moe_model model = ps::describe(weights);
    const ps::moe_layer_model& layer = model.layers.back();
    const ps::routing_rule& rule = layer.routing;
    const answers right(folder);
    const std::uint32_t k = rule.top_k, h = layer.hidden, n = rule.experts;

    const std::vector<float> x = right.floats(std::vector<std::string>{"input"});
    const auto tokens = static_cast<std::uint32_t>(x.size() / h);
    const std::uint32_t pairs = tokens * k;

    const std::vector<std::byte> router_weight = read_tensor(model.files, layer.router_weight);
    ps::router_ref router{router_weight.data(), layer.router_weight.type, n, h};
    std::vector<std::byte> bias;
    if (layer.router_bias) {
        bias = read_tensor(model.files, *layer.router_bias);
        router.bias = bias.data();
        router.bias_type = layer.router_bias->type;
    }
    std::vector<float> correction;
    if (layer.correction_bias) {
        correction = widened(read_tensor(model.files, *layer.correction_bias), layer.correction_bias->type);
        router.correction_bias = correction.data();
    }
    std::vector<float> logits(tokens * n, records::no_number), routing_weights(pairs);
    host.logits(router, x.data(), tokens, logits.data());
    if (!rule.scales_input) {
        const auto wanted = right.floats(std::vector<std::string>{"child.gate.out.0", "child.router.out.0"});
        const double error = records::relative_error(logits.data(), wanted, logits.size());
        INFO("router logits: ", error);
        CHECK(error < 1e-5);
    }

    std::vector<std::int32_t> ids(pairs);
    host.route(rule, router, logits.data(), tokens, nullptr, ids.data(), routing_weights.data());
    const auto chosen = chosen_weights(right, rule, tokens);
    double routing_error = 0;
    for (std::uint32_t p = 0; p < pairs; ++p) {
        const auto it = chosen[p / k].find(ids[p]);
        REQUIRE(it != chosen[p / k].end());
        routing_error = std::max(routing_error, static_cast<double>(std::abs(it->second - routing_weights[p])));
    }
    INFO("routing weights: ", routing_error);
    CHECK(routing_error < 1e-5);

    std::vector<std::vector<std::byte>> record;
    std::vector<const std::byte*> where;
    for (const ps::expert_parts& parts : layer.experts) {
        record.push_back(read_record(model.files, layer.layout, parts));
        where.push_back(record.back().data());
    }
    const float* input_scale = rule.scales_input ? routing_weights.data() : nullptr;
    const float* output_scale = rule.scales_input ? nullptr : routing_weights.data();
    const records::result routed = records::run_experts(host, layer.layout, where, ids, k, x, input_scale);
    std::vector<float> out(x.size(), records::no_number);
    host.combine(routed.partial.data(), ids.data(), output_scale, k, nullptr, {out.data(), ps::dtype::f32, tokens, h});
    std::vector<float> wanted_routed = right.floats(std::vector<std::string>{"child.experts.out.0"});
    if (rule.scales_input) {  // expert by expert there: [experts, tokens, hidden], to be summed
        std::vector<float> sum(x.size(), 0.0f);
        for (std::size_t i = 0; i < wanted_routed.size(); ++i) {
            sum[i % sum.size()] += wanted_routed[i];
        }
        wanted_routed = sum;
    }
    const double routed_error = records::relative_error(out.data(), wanted_routed, out.size());
    INFO("routed experts: ", routed_error);
    CHECK(routed_error < 1e-5);

    std::vector<float> shared;
    double shared_error = 0;
    if (layer.shared) {
        const std::vector<std::byte> shared_record = read_record(model.files, layer.shared->layout, layer.shared->parts);
        const std::vector<std::int32_t> everyone(tokens, 0);
        shared = records::run_experts(host, layer.shared->layout, {shared_record.data()}, everyone, 1, x).partial;
        const auto wanted = right.floats(std::vector<std::string>{"child.shared_experts.out.0", "child.shared_expert.out.0"});
        shared_error = records::relative_error(shared.data(), wanted, shared.size());
        if (layer.shared->gate) {
            const std::vector<std::byte> gate = read_tensor(model.files, *layer.shared->gate);
            host.shared_gate(gate.data(), layer.shared->gate->type, x.data(), tokens, h, shared.data());
        }
    }
    INFO("shared expert: ", shared_error);
    CHECK(shared_error < 1e-5);

    host.combine(routed.partial.data(), ids.data(), output_scale, k, shared.empty() ? nullptr : shared.data(),
                 {out.data(), ps::dtype::f32, tokens, h});
    const double error = records::relative_error(out.data(), right.floats(std::vector<std::string>{"block.out.0"}), out.size());
    INFO("block: ", error);
    CHECK(error < 1e-5);
}

}  // namespace

TEST_CASE("golden blocks of every family") {
    for (ps::host_isa isa : records::isas()) {
        const ps::executor::host host{2, isa};
        for (const char* family :
             {"mixtral", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "deepseek_v3_fp8", "deepseek_v3_fp8_odd", "glm4_moe",
              "minimax_m2", "olmoe", "phimoe", "llama4_text", "gpt_oss", "gpt_oss_mxfp4"}) {
            CAPTURE(std::string(family));
            CAPTURE(std::string(ps::name(isa)));
            check_family(family, host);
        }
    }
}

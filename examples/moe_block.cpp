/// moe_block MODEL_DIR --layer N --input IN.safetensors --output OUT.safetensors
/// One MoE block of any supported model under memory budgets: reads `input` [tokens, hidden], writes `output`, `ids` and `weights`.

#include "support/mirrored.hpp"
#include "support/with_store.hpp"

#include <penstock/checkpoint/checkpoint.hpp>

#include <nlohmann/json.hpp>

#include <iostream>
#include <vector>

namespace ps = penstock;

namespace {

/// A view: `values` must live until it is written.
template <class T>
ps::tensor_to_write tensor(const char* name, ps::dtype type, std::uint64_t rows, std::uint64_t cols, const std::vector<T>& values) {
    return {.name = name, .type = type, .shape = {rows, cols}, .data = std::as_bytes(std::span(values)), .generate = {}};
}

}  // namespace

int main(int argc, char** argv) {
    return example::guarded("moe_block", [&] {
        CLI::App app{"One MoE block of a checkpoint, its experts streamed under memory budgets"};
        example::store_words words;
        std::string directory, input_path, output_path;
        std::uint32_t layer = 0;
        bool json = false;
        app.add_option("MODEL_DIR", directory)->required();
        app.add_option("--layer", layer)->required();
        app.add_option("--input", input_path, "safetensors file with `input` [tokens, hidden], F32, BF16 or F16")->required();
        app.add_option("--output", output_path)->required();
        app.add_flag("--json", json, "print counters and peaks as JSON");
        words.add_to(app);
        CLI11_PARSE(app, argc, argv);

        ps::moe_model model = ps::describe(ps::checkpoint::open(directory));
        std::erase_if(model.layers, [&](const ps::moe_layer_model& l) { return l.layer != layer; });
        if (model.layers.empty()) {
            throw ps::configuration_error(directory + ": layer " + std::to_string(layer) + " is no MoE layer of this model");
        }
        const ps::tensor_list input_file = ps::checkpoint::open(input_path).all();
        const auto input = std::ranges::find(input_file.tensors, "input", &ps::tensor_info::name);
        if (input == input_file.tensors.end() || input->shape.size() != 2) {
            throw ps::format_error(input_path + ": a tensor `input` of shape [tokens, hidden] is wanted");
        }
        const auto tokens = static_cast<std::uint32_t>(input->shape[0]);
        const auto hidden = static_cast<std::uint32_t>(input->shape[1]);

        example::with_store(words, model, words.budgets(model.expert_bytes()), [&](auto& store) {
            ps::weight_stream<> loader;
            const auto loaded = loader.load(input_file, store.compute());
            const auto x = loaded["input"];
            example::mirrored<float> output(std::size_t{tokens} * hidden, store.compute());
            example::with_layers(store, tokens, [&](auto& layers) {
                example::forward(layers[0], {x.data, x.type, tokens, hidden}, {output.data(), ps::dtype::f32, tokens, hidden});
                const std::uint32_t k = model.layers[0].routing.top_k;
                const ps::choices chosen = layers[0].last_choices();
                const std::vector<std::int32_t> narrow = example::fetch(chosen.ids, std::size_t{tokens} * k, store.compute());
                const std::vector<std::int64_t> ids(narrow.begin(), narrow.end());
                const std::vector<float> weights = example::fetch(chosen.weights, std::size_t{tokens} * k, store.compute());
                const std::vector<float> values = output.fetch();
                const std::vector<ps::tensor_to_write> result{tensor("output", ps::dtype::f32, tokens, hidden, values),
                                                              tensor("ids", ps::dtype::i64, tokens, k, ids),
                                                              tensor("weights", ps::dtype::f32, tokens, k, weights)};
                ps::write_safetensors(output_path, result);
                const ps::store_report r = store.report();
                if (json) {
                    std::cout << nlohmann::json{{"device_peak_bytes", r.device_peak_bytes},
                                                {"workspace_bytes", layers.workspace_size()},
                                                {"dense_bytes", layers.dense().bytes()},
                                                {"host_peak_bytes", r.host_peak_bytes},
                                                {"hits", r.hits},
                                                {"misses", r.misses},
                                                {"evictions", r.evictions},
                                                {"overflow", r.overflow},
                                                {"waves", r.waves}}
                              << "\n";
                } else {
                    std::cout << r;
                }
            });
        });
        return 0;
    });
}

/// moe_stream [MODEL_DIR]: the main job. Opens a Mixture-of-Experts checkpoint whose experts are larger than the memory given to them, streams
/// experts in on demand, computes the layers (a) with everything resident, (b) naively, (c) with penstock, and holds the answers against each other.

#include "moe_stream/random_checkpoint.hpp"
#include "moe_stream/session.hpp"
#include "support/temporary_directory.hpp"

namespace ps = penstock;

int main(int argc, char** argv) {
    return example::guarded("moe_stream", [&] {
        CLI::App app{"Streams a Mixture-of-Experts model through less memory than its experts need, and proves the result"};
        example::store_words words;
        words.device_budget = "25%";
        example::session s;
        std::string directory, json;
        std::uint32_t layers = 0;
        app.add_option("MODEL_DIR", directory, "a directory with a supported model; without it one in Qwen3-30B's layout is written first");
        app.add_option("--layers", layers, "MoE layers to use (default: all; written are 2 for the host, 16 for a GPU)");
        app.add_option("--tokens", s.tokens)->check(CLI::Range(1u, 4096u))->capture_default_str();
        app.add_option("--steps", s.steps)->check(CLI::Range(1u, 1u << 20))->capture_default_str();
        app.add_option("--reuse", s.reuse_wanted, "share of experts that the next step uses again")
            ->check(CLI::Range(0.0, 1.0))
            ->capture_default_str();
        app.add_option("--memory", words.memory, "of the host tier and staging")
            ->check(CLI::IsMember({"pinned", "pageable"}))
            ->capture_default_str();
        app.add_option("--json", json, "file for the figures");
        words.add_to(app);
        CLI11_PARSE(app, argc, argv);

        const bool on_host = words.place().on_host();
        const example::temporary_directory written("penstock-moe-stream");
        if (directory.empty()) {
            directory = written.path.string();
            layers = layers != 0 ? layers : on_host ? 2 : 16;
            std::printf("writing %u layers in Qwen3-30B's layout (%.2f GiB) to %s\n", layers, layers * 1.125, directory.c_str());
            std::fflush(stdout);
            example::write_random_checkpoint(written.path, layers);
        }
        ps::moe_model model = ps::describe(ps::checkpoint::open(directory));
        if (layers != 0 && layers < model.layers.size()) {
            model.layers.resize(layers);
        }
        s.model = model.family;
        s.executor = on_host ? "host" : "cuda";
        s.layers = model.layers.size();
        s.record_bytes = model.record_bytes();
        s.expert_bytes = model.expert_bytes();
        s.top_k = model.layers.at(0).routing.top_k;
        for (const ps::moe_layer_model& l : model.layers) {
            s.experts += l.experts.size();
        }
        example::run_all(s, model, words);
        example::print_table(s);
        if (!json.empty()) {
            example::write_json(s, json);
        }
        const double allowed = on_host ? 1e-5 : 1e-2;
        const bool right = s.error <= allowed && s.run_error <= allowed && s.same_bits && s.within_budget;
        std::printf("%s\n", right ? "all answers right, budgets kept" : "WRONG: see above");
        return right ? 0 : 1;
    });
}

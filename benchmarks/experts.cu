// One layer's routed experts at decode sizes, from bf16 hidden states and expert ids to the bf16 output, in the shapes of real models:
// microseconds, against a plain read of as many bytes in the same run. Figures are medians over replays of CUDA graphs that go through
// different ids and weights, so that no weights are found in the L2 cache; candidate and read take turns. The first call of each shape is
// compared with the float32 kernels. Usage: benchmark_experts [--only NAME,...] [--json FILE]. Exit status 77 without a GPU, 1 where a result is
// wrong.

#include "expert_layer.cuh"
#include "load/measure.hpp"
#include "replay.hpp"

#include <penstock/dispatch/expert_decode.cuh>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

namespace ps = penstock;
using namespace layer_of_experts;

namespace {

constexpr int rounds = 15;

struct measured_shape : shape {
    double at_one_token, at_eight_tokens;  ///< time over that of the read that must not be exceeded; 0: none is asked
};

/// Time over that of the read that a call must not exceed; 0: none is asked.
double wanted_over_read(const measured_shape& s, std::uint32_t tokens, bool same_experts, std::uint64_t read_bytes) {
    if (same_experts) {
        return tokens >= 8 && tokens <= 32 ? 1.15 : 0;
    }
    if (tokens >= 8 && read_bytes >= 1'000'000'000) {
        return 1.06;
    }
    return tokens == 1 ? s.at_one_token : tokens == 8 ? s.at_eight_tokens : 0;
}

/// @returns whether every output was right
template <class Format>
bool measure(const measured_shape& s, const std::vector<std::uint32_t>& token_counts, bool same_experts, nlohmann::json& table) {
    using load_benchmark::median, load_benchmark::spread;
    const ps::expert_layout layout = layout_of(s);
    const std::uint64_t stride = ps::round_up(layout.bytes, 256);
    const std::uint32_t most_tokens = *std::max_element(token_counts.begin(), token_counts.end());
    ps::stream stream;
    ps::buffer<std::byte, ps::memory::device> records(stride * s.experts);
    std::vector<const std::byte*> addresses(s.experts);
    for (std::uint32_t e = 0; e < s.experts; ++e) {
        addresses[e] = records.data() + e * stride;
    }
    const auto device_addresses = to_device(addresses);
    ps::buffer<std::uint16_t, ps::memory::device> hidden(std::size_t{most_tokens} * s.hidden);
    ps::buffer<std::uint16_t, ps::memory::device> out(std::size_t{most_tokens} * s.hidden);
    ps::buffer<std::uint32_t, ps::memory::device> sink(1);
    ps::launch(fill, 2048, 256, 0, stream.get(), records.data(), stride, s.experts, layout);
    ps::launch(fill_inputs, 64, 256, 0, stream.get(), hidden.data(), std::uint64_t{most_tokens} * s.hidden);
    stream.synchronize();
    std::mt19937 random(3);
    bool right = true;
    for (const std::uint32_t tokens : token_counts) {
        const ps::expert_decode<Format> decode(layout, s.experts, tokens, s.k);
        ps::buffer<std::byte, ps::memory::device> workspace(decode.workspace_bytes());
        ps::check(cudaMemset(workspace.data(), 0xff, workspace.size()), "cudaMemset");
        ps::check(cudaMemset(workspace.data(), 0, decode.counter_bytes()), "cudaMemset");
        const std::uint32_t calls = std::max(3u, std::min(10u, s.experts / s.k));
        const routed_calls routed = route(s, calls, tokens, same_experts, random);
        const std::uint64_t read_bytes = routed.visited * layout.bytes / calls;
        const auto ids = to_device(routed.ids);
        std::vector<float> some_weights(routed.ids.size());
        std::uniform_real_distribution<float> weight(0.05f, 0.25f);
        std::generate(some_weights.begin(), some_weights.end(), [&] { return weight(random); });
        const auto weights = to_device(some_weights);
        const auto step = [&](std::uint32_t call) {
            const std::size_t first = std::size_t{call} * tokens * s.k;
            return ps::expert_step{.records = device_addresses.data(),
                                   .hidden = {hidden.data(), ps::dtype::bf16, tokens, s.hidden},
                                   .ids = ids.data() + first,
                                   .weights = weights.data() + first,
                                   .out = {out.data(), ps::dtype::bf16, tokens, s.hidden}};
        };
        const auto enqueue = [&](std::uint32_t call) { decode.enqueue(step(call), {workspace.data(), workspace.size()}, stream.get()); };

        const std::vector<float> want = exact_output<Format>(s, layout, step(0), routed.ids, addresses, stream.get());
        ps::check(cudaMemset(out.data(), 0xff, out.size() * 2), "cudaMemset");
        enqueue(0);
        enqueue(0);  // the counters are as before
        stream.synchronize();
        std::vector<std::uint16_t> got(want.size());
        ps::check(cudaMemcpy(got.data(), out.data(), got.size() * 2, cudaMemcpyDefault), "cudaMemcpy");
        const double error = relative_error(got, want);
        right = right && error < 1e-2;

        // The first graph is ours, the others are reads by so many blocks.
        constexpr unsigned grids[] = {528, 1056, 2112, 4224, 8448};
        std::vector<graph_of_calls> graphs;
        graphs.emplace_back(stream.get(), calls, enqueue);
        const std::uint64_t room = stride * s.experts > read_bytes ? stride * s.experts - read_bytes : 0;
        for (const unsigned blocks : grids) {
            graphs.emplace_back(stream.get(), calls, [&](std::uint32_t call) {
                const std::uint64_t from = room * call / (calls - 1) / 256 * 256;
                ps::launch(read_all, blocks, 256, 0, stream.get(), reinterpret_cast<const uint4*>(records.data() + from), read_bytes / 16,
                           sink.data());
            });
        }
        std::vector<std::vector<double>> times(graphs.size());
        for (int round = -2; round < rounds; ++round) {
            for (std::size_t i = 0; i < graphs.size(); ++i) {
                const double us = graphs[i].microseconds();
                if (round >= 0) {
                    times[i].push_back(us);
                }
            }
        }
        const std::vector<double>& read =
            *std::min_element(times.begin() + 1, times.end(), [](const auto& a, const auto& b) { return median(a) < median(b); });
        const double us = median(times[0]);
        const double read_us = median(read);
        std::vector<double> ratios;
        for (std::size_t i = 0; i < read.size(); ++i) {
            ratios.push_back(times[0][i] / read[i]);
        }
        const double kilobytes = static_cast<double>(read_bytes) / 1e3;
        const char* routing = same_experts ? "same" : "uniform";
        std::printf("%-12s %-8s %5u %7.1f %13llu %9.2f %6.2f %7.0f %9.2f %6.2f %7.0f %6.3f %9.1e %6u", s.name, routing, tokens,
                    static_cast<double>(routed.visited) / calls, static_cast<unsigned long long>(read_bytes), us, spread(times[0]),
                    kilobytes / us, read_us, spread(read), kilobytes / read_us, us / read_us, error, decode.blocks(tokens));
        nlohmann::json row{{"shape", s.name},
                           {"routing", routing},
                           {"tokens", tokens},
                           {"bytes", read_bytes},
                           {"us", us},
                           {"spread", spread(times[0])},
                           {"read_us", read_us},
                           {"read_spread", spread(read)},
                           {"over_read", us / read_us},
                           {"error", error}};
        if (const double wanted = wanted_over_read(s, tokens, same_experts, read_bytes); wanted > 0) {
            const load_benchmark::requirement must{
                .what = "over the read", .value = us / read_us, .wanted = wanted, .spread = spread(ratios), .at_most = true};
            std::printf("  <= %.2f: %s", wanted, must.verdict().c_str());
            row["at_most"] = wanted;
            row["verdict"] = must.verdict();
        }
        std::printf("%s\n", error < 1e-2 ? "" : "  WRONG");
        std::fflush(stdout);
        table.push_back(std::move(row));
    }
    return right;
}

}  // namespace

int main(int argc, char** argv) try {
    std::string only;
    std::string json;
    for (int i = 1; i < argc; i += 2) {
        const std::string option = argv[i];
        if (i + 1 == argc || (option != "--only" && option != "--json")) {
            throw ps::configuration_error("benchmark_experts takes --only NAME,... and --json FILE, not " + option);
        }
        (option == "--only" ? only : json) = argv[i + 1];
    }
    if (ps::device_count() == 0) {
        std::puts("SKIPPED: this benchmark needs a GPU");
        return 77;
    }
    using ps::activation;
    using ps::weight_kind;
    const measured_shape deepseek{{"deepseek-v3", weight_kind::fp8_block128, 7168, 2048, 256, 8, activation::swiglu}, 1.12, 0};
    const measured_shape qwen235{{"qwen3-235b", weight_kind::bf16, 4096, 1536, 128, 8, activation::swiglu}, 1.12, 0};
    const measured_shape mixtral{{"mixtral", weight_kind::bf16, 4096, 14336, 8, 2, activation::swiglu}, 1.08, 0};
    const measured_shape gpt_oss{{"gpt-oss-120b", weight_kind::mxfp4, 2880, 2880, 128, 4, activation::gpt_oss}, 0, 1.15};
    const measured_shape qwen30{{"qwen3-30b", weight_kind::bf16, 2048, 768, 128, 8, activation::swiglu}, 1.30, 1.12};
    const auto wanted = [&](const measured_shape& s) {
        return only.empty() || ("," + only + ",").find("," + std::string(s.name) + ",") != std::string::npos;
    };
    cudaDeviceProp device{};
    int driver = 0;
    ps::check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    ps::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    std::printf("%s, runtime %d, driver for %d\n%-12s %-8s %5s %7s %13s %9s %6s %7s %9s %6s %7s %6s %9s %6s\n", device.name, CUDART_VERSION,
                driver, "shape", "routing", "T", "experts", "bytes", "us", "+-", "GB/s", "read us", "+-", "GB/s", "ratio", "error",
                "blocks");
    nlohmann::json table = nlohmann::json::array();
    bool right = true;
    const auto run = [&]<class Format>(Format, const measured_shape& s, bool same_experts) {
        const std::vector<std::uint32_t> tokens =
            same_experts ? std::vector<std::uint32_t>{8, 16, 32, 64, 128} : std::vector<std::uint32_t>{1, 2, 4, 8, 16, 32, 64, 128};
        right = (!wanted(s) || measure<Format>(s, tokens, same_experts, table)) && right;
    };
    run(ps::format::fp8_block128{}, deepseek, false);
    for (const measured_shape& s : {qwen235, mixtral, qwen30}) {
        run(ps::format::bf16{}, s, false);
    }
    run(ps::format::mxfp4{}, gpt_oss, false);
    run(ps::format::fp8_block128{}, deepseek, true);
    run(ps::format::bf16{}, qwen235, true);
    if (!json.empty()) {
        std::ofstream(json) << nlohmann::json{{"gpu", device.name}, {"rounds", rounds}, {"rows", table}}.dump(2) << "\n";
    }
    return right ? 0 : 1;
} catch (const std::exception& e) {
    std::fprintf(stderr, "benchmark_experts: %s\n", e.what());
    return 2;
}

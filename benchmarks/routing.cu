// From router logits to the sorted work list: microseconds of route_to_work, and of route and permute, in whose place it stands. A figure
// is the median over rounds of what one call costs in a CUDA graph of many, which go in turn through several sets of random logits; the
// launch is part of it, and what an empty kernel costs in such a graph stands beside it. The candidates take turns, and the results of both
// ways are compared. Usage: benchmark_routing [--rounds N] [--json FILE]. Exit status 77 without a GPU, 1 where the results differ.

#include "load/measure.hpp"
#include "replay.hpp"

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/cuda_experts.cuh>
#include <penstock/policy/memory.hpp>

#include <nlohmann/json.hpp>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace ps = penstock;

namespace {

using executor = ps::executor::cuda<ps::format::f32>;

constexpr std::uint32_t calls = 96;  ///< in a graph
constexpr std::uint32_t sets = 24;   ///< of logits

struct router_case {
    const char* name;
    ps::routing_rule rule;
    bool corrected;
    /// Microseconds that a number of tokens must not exceed; 0: none is asked.
    double (*wanted)(std::uint32_t tokens);
};

double deepseek_v3_wanted(std::uint32_t tokens) { return tokens == 1 ? 4 : tokens == 128 ? 10 : 0; }
double none_wanted(std::uint32_t) { return 0; }

template <class T>
using device_buffer = ps::buffer<T, ps::memory::device>;

template <class T>
std::vector<T> from_device(const T* data, std::size_t count) {
    std::vector<T> values(count);
    ps::check(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
    return values;
}

/// Normal numbers in device memory.
void fill(device_buffer<float>& to, std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& v : values) {
        v = normal(random);
    }
    ps::check(cudaMemcpy(to.data(), values.data(), count * sizeof(float), cudaMemcpyDefault), "cudaMemcpy");
}

/// Where a call writes.
struct work_list {
    work_list(std::uint32_t pairs, std::uint32_t experts)
        : pairs(pairs), experts(experts), ids(pairs), rows(pairs), weights(pairs), offsets(experts + std::size_t{1}) {}

    bool operator==(const work_list& other) const {
        return from_device(ids.data(), pairs) == from_device(other.ids.data(), pairs) &&
               from_device(rows.data(), pairs) == from_device(other.rows.data(), pairs) &&
               from_device(weights.data(), pairs) == from_device(other.weights.data(), pairs) &&
               from_device(offsets.data(), experts + std::size_t{1}) == from_device(other.offsets.data(), experts + std::size_t{1});
    }

    std::uint32_t pairs, experts;
    device_buffer<std::int32_t> ids, rows;
    device_buffer<float> weights;
    device_buffer<std::uint32_t> offsets;
};

/// Microseconds of each graph by round; two rounds before the first one do not count.
std::vector<std::vector<double>> run_rounds(std::vector<graph_of_calls*> graphs, int rounds) {
    std::vector<std::vector<double>> times(graphs.size());
    for (int round = -2; round < rounds; ++round) {
        for (std::size_t i = 0; i < graphs.size(); ++i) {
            const double us = graphs[i]->microseconds(true);
            if (round >= 0) {
                times[i].push_back(us);
            }
        }
    }
    return times;
}

__global__ void nothing() {}

/// Tokens 1 to 256 by doubling. @return whether one launch and two gave the same
bool measure(const router_case& c, int rounds, nlohmann::json& rows) {
    constexpr std::uint32_t most_tokens = 256;
    const ps::stream stream;
    const executor run(stream.get());
    device_buffer<float> correction(c.rule.experts);
    fill(correction, c.rule.experts, 1);
    const std::size_t set_size = std::size_t{most_tokens} * c.rule.experts;
    device_buffer<float> logits(set_size * sets);
    fill(logits, set_size * sets, 2);
    ps::router_ref router;
    router.experts = c.rule.experts;
    router.correction_bias = c.corrected ? correction.data() : nullptr;
    bool right = true;
    for (std::uint32_t tokens = 1; tokens <= most_tokens; tokens *= 2) {
        const std::uint32_t pairs = tokens * c.rule.top_k;
        work_list one(pairs, c.rule.experts), two(pairs, c.rule.experts);
        device_buffer<std::byte> scratch_memory(executor::route_to_work_scratch_bytes(tokens, c.rule.top_k, c.rule.experts));
        const std::span<std::byte> scratch(scratch_memory.data(), scratch_memory.size());
        graph_of_calls one_launch(stream.get(), calls, [&](std::uint32_t call) {
            const std::uint32_t set = call % sets;
            run.route_to_work(c.rule, router, logits.data() + set * set_size, tokens, nullptr, one.ids.data(), one.weights.data(),
                              one.rows.data(), one.offsets.data(), scratch);
        });
        graph_of_calls two_launches(stream.get(), calls, [&](std::uint32_t call) {
            const std::uint32_t set = call % sets;
            run.route(c.rule, router, logits.data() + set * set_size, tokens, nullptr, two.ids.data(), two.weights.data());
            run.permute(two.ids.data(), pairs, c.rule.experts, two.rows.data(), two.offsets.data(), scratch);
        });
        graph_of_calls route_alone(stream.get(), calls, [&](std::uint32_t call) {
            const std::uint32_t set = call % sets;
            run.route(c.rule, router, logits.data() + set * set_size, tokens, nullptr, two.ids.data(), two.weights.data());
        });
        graph_of_calls empty(stream.get(), calls, [&](std::uint32_t) { ps::launch(nothing, dim3(1), dim3(32), 0, stream.get()); });
        const auto times = run_rounds({&one_launch, &two_launches, &route_alone, &empty}, rounds);
        const bool same = one == two;
        right = right && same;

        using load_benchmark::median, load_benchmark::spread;
        const double us = median(times[0]);
        std::printf("%-12s %6u %10.2f %6.2f %10.2f %6.2f %10.2f %10.2f", c.name, tokens, us, spread(times[0]), median(times[1]),
                    spread(times[1]), median(times[2]), median(times[3]));
        nlohmann::json row{{"router", c.name},
                           {"experts", c.rule.experts},
                           {"top_k", c.rule.top_k},
                           {"tokens", tokens},
                           {"us", us},
                           {"spread", spread(times[0])},
                           {"two_launches_us", median(times[1])},
                           {"two_launches_spread", spread(times[1])},
                           {"route_us", median(times[2])},
                           {"empty_launch_us", median(times[3])},
                           {"same_results", same}};
        if (const double wanted = c.wanted(tokens); wanted > 0) {
            const load_benchmark::requirement must{
                .what = "us", .value = us, .wanted = wanted, .spread = spread(times[0]), .at_most = true};
            std::printf("   <= %4.1f: %s", wanted, must.verdict().c_str());
            row["at_most"] = wanted;
            row["verdict"] = must.verdict();
        }
        std::printf("%s\n", same ? "" : "   THE RESULTS DIFFER");
        std::fflush(stdout);
        rows.push_back(std::move(row));
    }
    return right;
}

}  // namespace

int main(int argc, char** argv) try {
    int rounds = 31;
    std::string json;
    for (int i = 1; i < argc; i += 2) {
        const std::string option = argv[i];
        if (i + 1 == argc || (option != "--rounds" && option != "--json")) {
            throw ps::configuration_error("benchmark_routing takes --rounds N and --json FILE, not " + option);
        }
        if (option == "--json") {
            json = argv[i + 1];
        } else if (rounds = std::atoi(argv[i + 1]); rounds < 1) {
            throw ps::configuration_error("--rounds wants a number of at least 1");
        }
    }
    if (ps::device_count() == 0) {
        std::puts("SKIPPED: this benchmark needs a GPU");
        return 77;
    }
    cudaDeviceProp about{};
    ps::check(cudaGetDeviceProperties(&about, 0), "cudaGetDeviceProperties");
    std::printf("%s, %d rounds of %u calls\n%-12s %6s %10s %6s %10s %6s %10s %10s\n", about.name, rounds, calls, "router", "tokens",
                "to work us", "+-", "2 steps us", "+-", "route us", "empty us");
    const router_case cases[] = {{"deepseek-v3",
                                  {.experts = 256,
                                   .top_k = 8,
                                   .score = ps::score_function::sigmoid,
                                   .renormalise = true,
                                   .epsilon = 1e-20f,
                                   .scale = 2.5f,
                                   .groups = 8,
                                   .groups_kept = 4},
                                  true,
                                  deepseek_v3_wanted},
                                 {"qwen3", {.experts = 128, .top_k = 8, .renormalise = true}, false, none_wanted}};
    nlohmann::json rows = nlohmann::json::array();
    bool right = true;
    for (const router_case& c : cases) {
        right = measure(c, rounds, rows) && right;
    }
    if (!json.empty()) {
        std::ofstream(json) << nlohmann::json{{"gpu", about.name}, {"rounds", rounds}, {"calls", calls}, {"rows", rows}}.dump(2) << "\n";
    }
    return right ? 0 : 1;
} catch (const std::exception& problem) {
    std::fprintf(stderr, "benchmark_routing: %s\n", problem.what());
    return 2;
}

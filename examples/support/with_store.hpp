#pragma once

#include <penstock/moe_layer.hpp>

#include <CLI/CLI.hpp>

#ifdef PENSTOCK_EXAMPLE_HAS_CUDA
#include <penstock/dispatch/cuda_experts.hpp>
#endif

#include <cstdlib>
#include <string>

/// From the words of a command line to types: the examples' own `visit` for policies.
namespace example {

namespace ps = penstock;

/// "25%" of `whole`, "8MiB", "64KB", "123456"; empty means the library's choice.
inline ps::bytes parse_bytes(const std::string& text, std::uint64_t whole) {
    if (text.empty()) {
        return ps::automatic;
    }
    std::size_t end = 0;
    double value = -1;
    try {
        value = std::stod(text, &end);
    } catch (const std::exception&) {
    }
    const std::string unit = text.substr(end);
    double scale = -1;
    for (const auto& [name, factor] : {std::pair{"", 1.0},
                                       {"B", 1.0},
                                       {"KB", 1e3},
                                       {"MB", 1e6},
                                       {"GB", 1e9},
                                       {"KiB", 0x1p10},
                                       {"MiB", 0x1p20},
                                       {"GiB", 0x1p30},
                                       {"%", static_cast<double>(whole) / 100}}) {
        scale = unit == name ? factor : scale;
    }
    if (!(value >= 0) || scale < 0 || value * scale >= 0x1p63) {
        throw ps::configuration_error("'" + text + "' is no size: a number with B, KiB, MiB, GiB, KB, MB, GB or % is wanted");
    }
    return {static_cast<std::uint64_t>(value * scale)};
}

struct store_words {
    std::string executor = "auto", memory = "pinned", scheduler = "priority";
    std::string device_budget, host_budget, chunk = "8MiB";
    std::uint32_t depth = 24;
    int readers = 0;

    void add_to(CLI::App& app) {
        app.add_option("--executor", executor, "where the experts are computed")
            ->check(CLI::IsMember({"auto", "cuda", "host"}))
            ->capture_default_str();
        app.add_option("--device-budget", device_budget, "memory for experts that are ready to compute, e.g. 4GiB or 25%");
        app.add_option("--host-budget", host_budget, "host memory between files and that");
        app.add_option("--chunk", chunk, "bytes of a read, a copy, a step of progress")->capture_default_str();
        app.add_option("--depth", depth, "chunks in flight")->check(CLI::Range(1u, 4096u))->capture_default_str();
        app.add_option("--scheduler", scheduler, "whose chunk is next")
            ->check(CLI::IsMember({"fifo", "round-robin", "priority"}))
            ->capture_default_str();
    }

    [[nodiscard]] ps::place place() const {
#ifdef PENSTOCK_EXAMPLE_HAS_CUDA
        if (executor == "cuda" || (executor == "auto" && ps::device_count() > 0)) {
            ps::require_device(0, "--executor cuda");
            return ps::on_device(0);
        }
#else
        if (executor == "cuda") {
            throw ps::configuration_error("--executor cuda: this program was built without nvcc, for the host alone");
        }
#endif
        return ps::on_host();
    }

    [[nodiscard]] ps::budgets budgets(std::uint64_t expert_bytes) const {
        return {parse_bytes(device_budget, expert_bytes), parse_bytes(host_budget, expert_bytes)};
    }
};

/// Calls f(store) with a store of the policies that the words name.
template <class F>
auto with_store(const store_words& words, const ps::moe_model& model, ps::budgets limits, F f) {
    const auto build = [&](auto memory, auto scheduler) {
        using store_t = ps::expert_store<decltype(memory), decltype(scheduler), ps::chunking::run_time, ps::prefetch::run_time>;
        store_t store(model, limits, words.place(), {}, {.readers = words.readers}, ps::chunking::run_time{parse_bytes(words.chunk, 0)},
                      ps::prefetch::run_time{words.depth});
        return f(store);
    };
    const auto pick_scheduler = [&](auto memory) {
        if (words.scheduler == "fifo") {
            return build(memory, ps::scheduler::fifo{});
        }
        return words.scheduler == "round-robin" ? build(memory, ps::scheduler::round_robin{}) : build(memory, ps::scheduler::priority<3>{});
    };
    return words.memory == "pageable" ? pick_scheduler(ps::memory::pageable{}) : pick_scheduler(ps::memory::pinned{});
}

/// Calls f(layers) with the store's layers on the executor that fits the place it computes in.
template <class Store, class F>
auto with_layers(Store& store, std::uint32_t max_tokens, F f) {
#ifdef PENSTOCK_EXAMPLE_HAS_CUDA
    if (!store.compute().on_host()) {
        auto layers = ps::make_moe_layers<ps::executor::cuda<>>(store, {.max_tokens = max_tokens});
        return f(layers);
    }
#endif
    auto layers = ps::make_moe_layers<ps::executor::host>(store, {.max_tokens = max_tokens});
    return f(layers);
}

/// Runs `program` and turns an exception into a message and exit code 2.
template <class F>
int guarded(const char* name, F program) {
    try {
        return program();
    } catch (const std::exception& problem) {
        std::fprintf(stderr, "%s: %s\n", name, problem.what());
        return 2;
    }
}

}  // namespace example

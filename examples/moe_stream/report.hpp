#pragma once

#include "run.hpp"

#include <nlohmann/json.hpp>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

/// The closing table of moe_stream, on the terminal and as JSON.
namespace example {

struct load_figures {
    std::string what;
    double seconds = 0;
    std::uint64_t bytes = 0;
    bool in_page_cache = false;

    [[nodiscard]] double rate() const { return seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0; }
};

struct session {
    std::string model, executor;
    std::uint64_t layers = 0, experts = 0, expert_bytes = 0, record_bytes = 0;
    std::uint32_t top_k = 0, tokens = 1, steps = 64;
    ps::budgets limits;
    ceilings machine;
    std::vector<load_figures> loads;
    std::vector<run_result> runs;  ///< (a) where it fits, (b), (c)
    double reuse_wanted = 0.6, reuse_measured = 0;
    double error = 0;      ///< against plain reads and the host executor, one step, every layer
    double run_error = 0;  ///< largest over steps, of (b) and (c) against the first run
    bool same_bits = true;
    bool within_budget = true;
};

inline std::string percent_of(std::uint64_t part, std::uint64_t whole) {
    char text[64];
    std::snprintf(text, sizeof text, "%s (%.0f %%)", ps::to_string(ps::bytes{part}).c_str(),
                  100.0 * static_cast<double>(part) / static_cast<double>(std::max<std::uint64_t>(whole, 1)));
    return text;
}

inline void print_run(const session& s, const run_result& r, const run_result& naive) {
    const double steps = static_cast<double>(r.step_seconds.size());
    const double rate = static_cast<double>(r.moved()) / r.total() / 1e9;
    const double transfer = static_cast<double>(r.moved()) / s.machine.link / 1e9;
    std::printf("%-24s %9.2f %9.2f %6.1f %% %10s %7.2f %6.0f %% %10.1f %9.1f %7.2f\n", r.name.c_str(), 1e3 * r.median(), 1e3 * r.p99(),
                100 * r.report.hit_rate(), ps::to_string(ps::bytes{r.moved()}).c_str(), rate, 100 * rate / s.machine.link,
                1e6 * std::max(0.0, r.total() - transfer) / static_cast<double>(r.layer_calls), s.tokens * steps / r.total(),
                naive.median() / r.median());
}

inline void print_table(const session& s) {
    std::printf("machine        %s, executor %s\n", s.machine.machine.c_str(), s.executor.c_str());
    std::printf("model          %s: %llu MoE layers, %llu experts of %s in all %s, top-%u\n", s.model.c_str(),
                static_cast<unsigned long long>(s.layers), static_cast<unsigned long long>(s.experts),
                ps::to_string(ps::bytes{s.record_bytes}).c_str(), ps::to_string(ps::bytes{s.expert_bytes}).c_str(), s.top_k);
    std::printf("steps          %u of %u token(s); experts reused from step to step: %.2f wanted, %.2f measured\n", s.steps, s.tokens,
                s.reuse_wanted, s.reuse_measured);
    std::printf("ceilings       %s %.1f GB/s, ", s.machine.link_name.c_str(), s.machine.link);
    if (s.machine.zero_copy > 0) {
        std::printf("zero-copy read %.1f GB/s, ", s.machine.zero_copy);
    }
    std::printf("%s %.1f GB/s\n", s.machine.read_name.c_str(), s.machine.read);
    for (const load_figures& l : s.loads) {
        std::printf("load           %-34s %7.2f s  %6.2f GB/s  %4.0f %% of the ceiling  %s\n", l.what.c_str(), l.seconds, l.rate(),
                    100 * l.rate() / s.machine.link, l.in_page_cache ? "(files in the page cache)" : "(files not in the page cache)");
    }
    std::printf("\n%-24s %9s %9s %8s %10s %7s %8s %10s %9s %7s\n", "", "ms/step", "p99", "hits", "moved", "GB/s", "of link", "us/layer*",
                "tokens/s", "x of b");
    const run_result& naive = s.runs[s.runs.size() - 2];
    for (const run_result& r : s.runs) {
        print_run(s, r, naive);
    }
    std::printf("* outside the transfer: (time - bytes at the link's ceiling) a layer\n\n");
    const run_result& ours = s.runs.back();
    const double steps = static_cast<double>(ours.step_seconds.size());
    const double transfer = static_cast<double>(ours.moved()) / s.machine.link / 1e9;
    std::printf(
        "where (c)'s time went, ms a step: %.2f bytes at the link's ceiling, %.2f the rest (%.2f is all of (a)); the host waited %.2f for "
        "bytes\n",
        1e3 * transfer / steps, 1e3 * (ours.total() - transfer) / steps, s.runs.size() > 2 ? 1e3 * s.runs[0].median() : 0.0,
        1e3 * ours.report.wait_seconds / steps);
    std::printf(
        "peak           compute tier %s of budget %s; host tier and staging %s; %llu evictions, %llu computed in place, %llu further "
        "waves\n",
        percent_of(ours.report.device_peak_bytes, s.expert_bytes).c_str(),
        s.limits.device == ps::automatic ? "automatic" : percent_of(s.limits.device, s.expert_bytes).c_str(),
        percent_of(ours.report.host_peak_bytes, s.expert_bytes).c_str(), static_cast<unsigned long long>(ours.report.evictions),
        static_cast<unsigned long long>(ours.report.overflow), static_cast<unsigned long long>(ours.report.waves));
    std::printf(
        "answers        largest relative error against plain reads on the host executor %.1e; of (b) and (c) against %s %.1e, bits %s\n",
        s.error, s.runs.size() > 2 ? "(a)" : "(b), as (a) does not fit,", s.run_error, s.same_bits ? "the same" : "DIFFERENT");
    std::printf(
        "floor          %.2f ms a step (for each layer the longer of its bytes over the link and over memory); (c) takes %.2f times that\n",
        1e3 * ours.floor_seconds / steps, ours.total() / ours.floor_seconds);
}

inline void write_json(const session& s, const std::string& path) {
    nlohmann::json runs = nlohmann::json::array();
    for (const run_result& r : s.runs) {
        runs.push_back({{"name", r.name},
                        {"ms_per_step", 1e3 * r.median()},
                        {"p99_ms", 1e3 * r.p99()},
                        {"hit_rate", r.report.hit_rate()},
                        {"bytes", r.moved()},
                        {"gb_per_s", static_cast<double>(r.moved()) / r.total() / 1e9},
                        {"tokens_per_s", s.tokens * static_cast<double>(r.step_seconds.size()) / r.total()},
                        {"floor_ms_per_step", 1e3 * r.floor_seconds / static_cast<double>(r.step_seconds.size())},
                        {"factor_over_floor", r.total() / r.floor_seconds},
                        {"hits", r.report.hits},
                        {"misses", r.report.misses},
                        {"evictions", r.report.evictions},
                        {"overflow", r.report.overflow},
                        {"waves", r.report.waves},
                        {"device_peak_bytes", r.report.device_peak_bytes},
                        {"host_peak_bytes", r.report.host_peak_bytes}});
    }
    nlohmann::json loads = nlohmann::json::array();
    for (const load_figures& l : s.loads) {
        loads.push_back(
            {{"what", l.what}, {"seconds", l.seconds}, {"bytes", l.bytes}, {"gb_per_s", l.rate()}, {"in_page_cache", l.in_page_cache}});
    }
    std::ofstream(path) << nlohmann::json{{"machine", s.machine.machine},
                                          {"executor", s.executor},
                                          {"model", s.model},
                                          {"expert_bytes", s.expert_bytes},
                                          {"link_gb_per_s", s.machine.link},
                                          {"zero_copy_gb_per_s", s.machine.zero_copy},
                                          {"read_gb_per_s", s.machine.read},
                                          {"loads", loads},
                                          {"runs", runs},
                                          {"reuse_measured", s.reuse_measured},
                                          {"error", s.error},
                                          {"run_error", s.run_error},
                                          {"same_bits", s.same_bits},
                                          {"within_budget", s.within_budget}}
                               .dump(2)
                        << "\n";
}

}  // namespace example

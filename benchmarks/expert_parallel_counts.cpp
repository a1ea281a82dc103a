// What expert parallelism moves in worlds of 8, 64 and 256 ranks: rows, bytes, buffers and imbalance, counted from the plans of every rank
// and held against the formula; the same worlds as threads over the loopback transport, whose reports must agree; balance by measured loads;
// and a model of time from measured parts, which docs/scaling.md explains. One DeepSeek-V3 layer: hidden 7168, 256 experts, top-8.
// Usage: benchmark_expert_parallel_counts [--json FILE]. Needs no GPU. Exit status 1 where the world and the plans disagree.

#include <penstock/parallel/balance.hpp>
#include <penstock/parallel/expert_parallel.hpp>
#include <penstock/parallel/loopback.hpp>
#include <penstock/parallel/rebalance.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace ps = penstock;

constexpr std::uint32_t hidden = 7168, experts = 256, top_k = 8, ranks_per_node = 8;
constexpr double expert_bytes = 44'050'944;

// Measured on H200s, two of one host: docs/scaling.md says how.
constexpr double exchange_floor_us = 10, nvlink_gb_per_s = 294, hbm_gb_per_s = 4500;
// Published, of a 400 Gb/s adapter a GPU: the wire, without latency and protocol.
constexpr double network_gb_per_s = 50;

/// Draws top_k distinct experts, expert number i of a shuffled order with a chance that falls as 1 / (i + 1)^exponent.
class router {
public:
    explicit router(double exponent) {
        std::vector<std::uint32_t> order(experts);
        std::iota(order.begin(), order.end(), 0u);
        std::mt19937 random{7};
        std::shuffle(order.begin(), order.end(), random);
        std::vector<double> chance(experts);
        for (std::uint32_t i = 0; i < experts; ++i) {
            chance[order[i]] = 1 / std::pow(i + 1.0, exponent);
        }
        chances_ = std::discrete_distribution<int>(chance.begin(), chance.end());
    }

    [[nodiscard]] std::vector<std::int32_t> ids(std::uint32_t tokens, std::uint32_t seed) {
        std::mt19937 random{seed};
        std::vector<std::int32_t> list;
        for (std::uint32_t t = 0; t < tokens; ++t) {
            const std::size_t first = list.size();
            while (list.size() < first + top_k) {
                const std::int32_t e = chances_(random);
                if (std::find(list.begin() + static_cast<std::ptrdiff_t>(first), list.end(), e) == list.end()) {
                    list.push_back(e);
                }
            }
        }
        return list;
    }

private:
    std::discrete_distribution<int> chances_;
};

struct totals {
    std::vector<std::uint64_t> sent, received, pairs, crossing, in_node, off_node, experts_used;  ///< by rank
    std::vector<double> loads;                                                                    ///< by expert
};

std::uint32_t seed_of(std::uint32_t rank, std::uint32_t batch) { return 1000 * batch + rank; }

totals count(const ps::expert_placement& placement, router route, std::uint32_t tokens, std::uint32_t batch) {
    const std::uint32_t ranks = placement.ranks();
    totals n{std::vector<std::uint64_t>(ranks), std::vector<std::uint64_t>(ranks), std::vector<std::uint64_t>(ranks),
             std::vector<std::uint64_t>(ranks), std::vector<std::uint64_t>(ranks), std::vector<std::uint64_t>(ranks),
             std::vector<std::uint64_t>(ranks), std::vector<double>(experts, 0)};
    std::vector<std::vector<char>> used(ranks, std::vector<char>(experts, 0));
    ps::dispatch_plan plan;
    for (std::uint32_t s = 0; s < ranks; ++s) {
        const std::vector<std::int32_t> ids = route.ids(tokens, seed_of(s, batch));
        for (const std::int32_t id : ids) {
            ++n.loads[static_cast<std::size_t>(id)];
        }
        plan.make<ps::replica::spread>(placement, s, ids, top_k);
        n.sent[s] = plan.rows();
        for (std::uint32_t d = 0; d < ranks; ++d) {
            const bool same_node = d / ranks_per_node == s / ranks_per_node;
            n.received[d] += plan.rows_to(d);
            n.crossing[s] += d != s ? plan.rows_to(d) : 0;
            n.in_node[s] += d != s && same_node ? plan.rows_to(d) : 0;
            n.off_node[s] += same_node ? 0 : plan.rows_to(d);
            for (std::size_t i = std::size_t{plan.to()[d]} * top_k; i < std::size_t{plan.to()[d + 1]} * top_k; ++i) {
                if (plan.local_ids()[i] >= 0) {
                    ++n.pairs[d];
                    used[d][static_cast<std::size_t>(plan.local_ids()[i])] = 1;
                }
            }
        }
    }
    for (std::uint32_t d = 0; d < ranks; ++d) {
        n.experts_used[d] = static_cast<std::uint64_t>(std::count(used[d].begin(), used[d].end(), 1));
    }
    return n;
}

double mean(const std::vector<std::uint64_t>& v) {
    return static_cast<double>(std::accumulate(v.begin(), v.end(), std::uint64_t{0})) / static_cast<double>(v.size());
}

double most(const std::vector<std::uint64_t>& v) { return static_cast<double>(*std::max_element(v.begin(), v.end())); }

double over_mean(const std::vector<std::uint64_t>& v) { return mean(v) > 0 ? most(v) / mean(v) : 1; }

/// Ranks that a token visits in the mean, routed evenly: each rank with E / P of the experts is missed by all k with C(E - E/P, k) / C(E, k).
double expected_rows(std::uint32_t ranks) {
    double missed = 1;
    for (std::uint32_t j = 0; j < top_k; ++j) {
        missed *= (experts - static_cast<double>(experts) / ranks - j) / (experts - j);
    }
    return ranks * (1 - missed);
}

ps::expert_placement one_each(std::uint32_t ranks) {
    std::vector<std::vector<std::uint32_t>> owners(experts);
    for (std::uint32_t e = 0; e < experts; ++e) {
        owners[e] = {static_cast<std::uint32_t>(std::uint64_t{e} * ranks / experts)};
    }
    return {ranks, owners};
}

/// Bytes of all buffers of a rank with capacity::fixed for that many rows each way.
std::uint64_t buffer_bytes(const ps::row_format& f, std::uint64_t sent, std::uint64_t received) {
    const std::uint64_t meta = f.scales() * 4 + std::uint64_t{f.top_k} * 8;
    return sent * (ps::larger(f.row_bytes(), f.sum_bytes()) + meta) + received * (f.row_bytes() + meta + 4 * f.top_k + f.sum_bytes());
}

/// The world as threads, with short rows. @return the ranks whose reports or buffers are not what the plans say
std::uint32_t play(const ps::expert_placement& placement, const router& route, std::uint32_t tokens, const totals& wanted) {
    const std::uint32_t ranks = placement.ranks();
    std::vector<ps::transport::loopback> world = ps::transport::loopback::world(ranks, std::chrono::minutes(5));
    std::atomic<std::uint32_t> wrong{0};
    std::vector<std::thread> threads;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        threads.emplace_back([&, r, endpoint = std::move(world[r])]() mutable {
            try {
                const ps::expert_parallel_options options{.hidden = 8, .top_k = top_k};
                ps::expert_parallel<ps::transport::loopback> layer(std::move(endpoint), options);
                router own = route;
                const std::vector<std::int32_t> ids = own.ids(tokens, seed_of(r, 0));
                const std::vector<std::uint16_t> x(std::size_t{tokens} * 8, ps::encode_bf16(1.0f));
                std::vector<std::uint16_t> out(x.size());
                layer.run(
                    placement, {{x.data(), ps::dtype::bf16, tokens, 8}, ids.data()},
                    [](const ps::expert_rows& rows, ps::activations_out sums) {  // every expert gives 1: a row's sum is its experts here
                        const std::vector<float> ones(std::size_t{rows.rows} * rows.top_k * rows.width, 1.0f);
                        ps::weigh(rows, ones.data(), sums);
                    },
                    {out.data(), ps::dtype::bf16, tokens, 8});
                const ps::exchange_report& said = layer.report();
                const std::uint64_t offsets = 4 * (placement.experts_of(r).size() + 1);
                const bool right = said.rows_sent == wanted.sent[r] && said.rows_received == wanted.received[r] &&
                                   said.pairs_received == wanted.pairs[r] && said.rows_crossing == wanted.crossing[r] &&
                                   layer.bytes_held() == buffer_bytes(options.format(), said.rows_sent, said.rows_received) + offsets &&
                                   std::count(out.begin(), out.end(), ps::encode_bf16(8.0f)) == static_cast<std::ptrdiff_t>(out.size());
                wrong += right ? 0 : 1;
            } catch (const std::exception& e) {
                std::fprintf(stderr, "rank %u: %s\n", r, e.what());
                ++wrong;
            }
        });
    }
    for (std::thread& t : threads) {
        t.join();
    }
    return wrong;
}

/// One way of an exchange: what crosses inside a node and what leaves it go at the same time. The busiest rank is what counts.
double way_us(double in_node_bytes, double off_node_bytes) {
    return exchange_floor_us + std::max(in_node_bytes / nvlink_gb_per_s, off_node_bytes / network_gb_per_s) / 1e3;
}

}  // namespace

int main(int argc, char** argv) {
    std::string json;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (std::strcmp(argv[i], "--json") == 0) {
            json = argv[i + 1];
        }
    }
    nlohmann::json rows = nlohmann::json::array(), balance = nlohmann::json::array();
    std::uint32_t wrong = 0;
    const ps::row_format bf16{hidden, top_k, ps::dtype::bf16, ps::dtype::bf16}, fp8{hidden, top_k, ps::dtype::f8_e4m3, ps::dtype::bf16};
    std::printf("one row: %llu bytes out in bf16, %llu in fp8 (%.3f), %llu back\n\n",
                static_cast<unsigned long long>(bf16.dispatch_bytes()), static_cast<unsigned long long>(fp8.dispatch_bytes()),
                static_cast<double>(fp8.dispatch_bytes()) / static_cast<double>(bf16.dispatch_bytes()),
                static_cast<unsigned long long>(bf16.sum_bytes()));
    std::printf("routed evenly, one copy an expert; times are modelled\n%5s %6s %9s %9s %9s %8s %9s %8s %9s %9s %9s %9s %s\n", "ranks",
                "tokens", "rows/tok", "formula", "off node", "max/mean", "buffers", "experts", "out fp8", "back", "read", "layer",
                "loopback");
    for (const std::uint32_t ranks : {8u, 64u, 256u}) {
        const ps::expert_placement placement = one_each(ranks);
        for (const std::uint32_t tokens : {1u, 8u, 32u, 128u, 4096u}) {
            router even(0);
            const totals n = count(placement, even, tokens, 0);
            const double rows_a_token = mean(n.sent) / tokens, off = mean(n.off_node) / tokens;
            const bool played = tokens <= 128;
            const std::uint32_t bad = played ? play(placement, even, tokens, n) : 0;
            wrong += bad;
            const double in_node = most(n.in_node), off_node = most(n.off_node);
            const auto out_bytes = static_cast<double>(fp8.dispatch_bytes()), back_bytes = static_cast<double>(bf16.sum_bytes());
            const double out_us = way_us(in_node * out_bytes, off_node * out_bytes),
                         back_us = way_us(in_node * back_bytes, off_node * back_bytes);
            const double read_us = most(n.experts_used) * expert_bytes / hbm_gb_per_s / 1e3;
            const auto held = static_cast<double>(
                buffer_bytes(fp8, static_cast<std::uint64_t>(most(n.sent)), static_cast<std::uint64_t>(most(n.received))));
            std::printf("%5u %6u %9.3f %9.3f %9.3f %8.3f %8.1fM %8.1f %9.1f %9.1f %9.1f %9.1f %s\n", ranks, tokens, rows_a_token,
                        expected_rows(ranks), off, over_mean(n.pairs), held / 1e6, mean(n.experts_used), out_us, back_us, read_us,
                        out_us + back_us + read_us,
                        !played    ? "-"
                        : bad == 0 ? "agrees"
                                   : "DISAGREES");
            std::fflush(stdout);
            rows.push_back({{"ranks", ranks},
                            {"tokens", tokens},
                            {"rows_per_token", rows_a_token},
                            {"rows_per_token_formula", expected_rows(ranks)},
                            {"rows_off_node_per_token", off},
                            {"pairs_max_over_mean", over_mean(n.pairs)},
                            {"rows_received_most", most(n.received)},
                            {"buffer_bytes_most", held},
                            {"experts_used_mean", mean(n.experts_used)},
                            {"experts_used_most", most(n.experts_used)},
                            {"modelled_dispatch_us", out_us},
                            {"modelled_combine_us", back_us},
                            {"modelled_expert_read_us", read_us},
                            {"loopback_ranks_that_disagree", played ? nlohmann::json(bad) : nlohmann::json()}});
        }
    }
    std::printf("\nbalance: loads of one batch of 128 tokens a rank, held against the next batch (pairs a rank computes, max over mean)\n");
    for (const double exponent : {0.3, 0.6, 1.0}) {
        for (const std::uint32_t ranks : {8u, 64u, 256u}) {
            router skewed(exponent);
            const ps::expert_placement before = one_each(ranks);
            const std::vector<double> loads = count(before, skewed, 128, 1).loads;
            const std::uint32_t slots = experts / ranks + std::max(1u, 32 / ranks);
            const ps::expert_placement greedy = ps::balance_greedy(loads, ranks, slots);
            const ps::rank_topology nodes{ranks / ranks_per_node, ranks_per_node};
            const ps::expert_placement by_node = ps::balance_by_node(loads, nodes, 32, slots);
            const double next_before = over_mean(count(before, skewed, 128, 2).pairs);
            const double next_greedy = over_mean(count(greedy, skewed, 128, 2).pairs);
            const double next_by_node = over_mean(count(by_node, skewed, 128, 2).pairs);
            const ps::expert_placement near = ps::rebalance(before, loads, slots, ranks);
            const double next_near = over_mean(count(near, skewed, 128, 2).pairs);
            std::printf("\nchance ~ 1 / rank^%.1f, %u ranks, %u slots each: next batch %.3f, greedy %.3f, by node %.3f, %zu fetched %.3f\n",
                        exponent, ranks, slots, next_before, next_greedy, next_by_node, ps::arrivals(before, near).size(), next_near);
            ps::print_balance(std::cout, before, greedy, loads);
            balance.push_back({{"exponent", exponent},
                               {"ranks", ranks},
                               {"slots", slots},
                               {"measured_before", ps::imbalance(before, loads)},
                               {"measured_greedy", ps::imbalance(greedy, loads)},
                               {"measured_by_node", ps::imbalance(by_node, loads)},
                               {"next_before", next_before},
                               {"next_greedy", next_greedy},
                               {"next_by_node", next_by_node},
                               {"next_rebalanced", next_near},
                               {"arrivals_rebalanced", ps::arrivals(before, near).size()},
                               {"arrivals", ps::arrivals(before, greedy).size()}});
        }
    }
    if (!json.empty()) {
        std::ofstream(json) << nlohmann::json{{"model",
                                               {{"exchange_floor_us", exchange_floor_us},
                                                {"nvlink_gb_per_s", nvlink_gb_per_s},
                                                {"network_gb_per_s", network_gb_per_s},
                                                {"hbm_gb_per_s", hbm_gb_per_s}}},
                                              {"even", rows},
                                              {"balance", balance}}
                                   .dump(2)
                            << "\n";
    }
    return wrong == 0 ? 0 : 1;
}

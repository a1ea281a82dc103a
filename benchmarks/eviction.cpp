/// Hit rates of eviction rules, beside the best static set and the best there is, for each number of slots. No GPU is needed: the rules decide here
/// by the code that kernels run. Traces are generated with a stated skew and reuse, or read from files that a store recorded:
///     benchmark_eviction [--json FILE] [--layers N] [--experts N] [--top-k N] [--steps N] [TRACE...]

#include <penstock/residency/simulate.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <random>
#include <string>

namespace ps = penstock;
namespace eviction = ps::eviction;
namespace sharing = ps::sharing;

namespace {

struct model_shape {
    std::uint32_t layers = 24;
    std::uint32_t experts = 128;
    std::uint32_t top_k = 8;
    std::uint32_t steps = 1000;
};

/// How tokens choose experts. The popularity of a layer's experts follows Zipf's law, 1 / rank^zipf, in an order of its own; each expert that a
/// token has is kept for the next step with probability `reuse`, the others are drawn anew.
struct habit {
    double zipf = 0;
    double reuse = 0;
    std::uint32_t tokens = 1;
    std::uint32_t phase = 0;  ///< every so many steps all popularities change; 0: never
};

class popularity {
public:
    popularity(std::uint32_t experts, double zipf, std::mt19937& random) : order_(experts), sum_(experts) {
        double sum = 0;
        for (std::uint32_t rank = 0; rank < experts; ++rank) {
            order_[rank] = static_cast<std::int32_t>(rank);
            sum_[rank] = sum += std::pow(rank + 1.0, -zipf);
        }
        std::ranges::shuffle(order_, random);
    }

    std::int32_t draw(std::mt19937& random) const {
        const double at = std::uniform_real_distribution<>(0, sum_.back())(random);
        return order_[static_cast<std::size_t>(std::ranges::upper_bound(sum_, at) - sum_.begin()) % order_.size()];
    }

private:
    std::vector<std::int32_t> order_;
    std::vector<double> sum_;
};

ps::expert_trace generate(const model_shape& shape, const habit& h) {
    std::mt19937 random(2026);
    ps::expert_trace trace(std::vector<std::uint32_t>(shape.layers, shape.experts));
    std::vector<popularity> layers;
    std::vector<std::vector<std::int32_t>> held(std::size_t{shape.layers} * h.tokens);
    for (std::uint32_t step = 0; step < shape.steps; ++step) {
        if (step == 0 || (h.phase > 0 && step % h.phase == 0)) {
            layers.clear();
            for (std::uint32_t l = 0; l < shape.layers; ++l) {
                layers.emplace_back(shape.experts, h.zipf, random);
            }
        }
        for (std::uint32_t l = 0; l < shape.layers; ++l) {
            std::vector<std::int32_t> needed;
            for (std::uint32_t t = 0; t < h.tokens; ++t) {
                std::vector<std::int32_t>& mine = held[std::size_t{l} * h.tokens + t];
                std::erase_if(mine, [&](std::int32_t) { return std::uniform_real_distribution<>()(random) >= h.reuse; });
                while (mine.size() < shape.top_k) {
                    const std::int32_t e = layers[l].draw(random);
                    if (std::ranges::find(mine, e) == mine.end()) {
                        mine.push_back(e);
                    }
                }
                needed.insert(needed.end(), mine.begin(), mine.end());
            }
            trace.add(l, needed);
        }
    }
    return trace;
}

/// The share of a call's experts that the call before of the same layer had.
double reuse_of(const ps::expert_trace& trace) {
    std::vector<std::vector<std::int32_t>> before(trace.experts().size());
    std::uint64_t again = 0, all = 0;
    for (std::size_t c = 0; c < trace.calls(); ++c) {
        std::vector<std::int32_t>& last = before[trace.layer(c)];
        const auto needed = trace.needed(c);
        if (!last.empty()) {
            all += needed.size();
            again += static_cast<std::uint64_t>(
                std::ranges::count_if(needed, [&](std::int32_t e) { return std::ranges::binary_search(last, e); }));
        }
        last.assign(needed.begin(), needed.end());
    }
    return all == 0 ? 0 : static_cast<double>(again) / static_cast<double>(all);
}

ps::expert_trace part(const ps::expert_trace& trace, std::size_t first, std::size_t end) {
    ps::expert_trace out(trace.experts());
    for (std::size_t c = first; c < end; ++c) {
        out.add(trace.layer(c), trace.needed(c));
    }
    return out;
}

/// Hits of the set of `slots` experts that is best for this very trace.
template <class Sharing>
double best_static(const ps::expert_trace& counted, std::uint32_t slots) {
    const std::vector<std::uint64_t> uses = ps::profile(counted);
    std::uint64_t hits = 0;
    for (const std::uint32_t key : ps::hottest<Sharing>(counted, slots)) {
        hits += uses[key];
    }
    return static_cast<double>(hits) / static_cast<double>(counted.requests());
}

/// Examples of rules of the user's own.
struct second_chance {  // clock without a hand: first in, first out, but what was used lately after its fill is passed over
    using policy_axis = ps::axis::eviction;
    PENSTOCK_HD static constexpr double score(const ps::residency_entry& e, std::uint64_t step) noexcept {
        return static_cast<double>(e.filled + (e.last_used > e.filled && step - e.last_used < 64 ? 64 : 0));
    }
};

struct at_random {
    using policy_axis = ps::axis::eviction;
    PENSTOCK_HD static constexpr double score(const ps::residency_entry& e, std::uint64_t step) noexcept {
        std::uint64_t x = step ^ (e.last_used * 0x9e3779b97f4a7c15ull) ^ (e.uses * 0xd1b54a32d192ed03ull) ^ (e.filled << 32);
        x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ull;
        return static_cast<double>((x ^ (x >> 29)) >> 11);
    }
};

const std::vector<std::string> columns{"random",    "clock",     "lru", "lfru 16", "lfru 64", "lfru 256",
                                       "selective", "last step", "hot", "hot 3/4", "static",  "best"};
constexpr std::size_t lru_column = 2, lfru_column = 4, best_column = 11;

template <class Sharing>
std::vector<double> rates(const ps::expert_trace& trace, std::uint32_t slots) {
    const std::size_t warm_up = trace.calls() / 4;
    const ps::expert_trace first = part(trace, 0, warm_up);
    const auto share = [](const auto& c) {
        return static_cast<double>(c.hits) / static_cast<double>(std::max<std::uint64_t>(c.hits + c.misses, 1));
    };
    const auto rate = [&]<class E>(E, std::span<const std::uint32_t> hot = {}) {
        return share(ps::simulate<E, Sharing>(trace, slots, hot, warm_up));
    };
    return {rate(at_random{}),
            rate(second_chance{}),
            rate(eviction::lru{}),
            rate(eviction::lfru<16>{}),
            rate(eviction::lfru<64>{}),
            rate(eviction::lfru<256>{}),
            rate(eviction::selective<eviction::lfru<64>>{}),
            rate(eviction::last_step_first<eviction::lfru<64>>{}),
            rate(eviction::hot_set<>{}, ps::hottest<Sharing>(first, slots)),
            rate(eviction::hot_set<>{}, ps::hottest<Sharing>(first, slots, 0.75)),
            best_static<Sharing>(part(trace, warm_up, trace.calls()), slots),
            share(ps::simulate_best<Sharing>(trace, slots, warm_up))};
}

void show(const std::string& name, const ps::expert_trace& trace, nlohmann::json& rows) {
    const std::uint32_t keys = std::accumulate(trace.experts().begin(), trace.experts().end(), 0u);
    const double a_call = static_cast<double>(trace.requests()) / static_cast<double>(std::max<std::size_t>(trace.calls(), 1));
    std::printf("\n%s: %zu calls of %zu layers, %.1f experts each, reuse %.2f\n%-9s %5s", name.c_str(), trace.calls(),
                trace.experts().size(), a_call, reuse_of(trace), "slots", "%");
    for (const std::string& c : columns) {
        std::printf(" %9s", c.c_str());
    }
    std::printf(" %9s\n", "closed");
    for (const std::uint32_t percent : {10u, 25u, 50u}) {
        for (const bool apart : {false, true}) {
            const std::uint32_t slots = keys * percent / 100;
            const std::vector<double> r = apart ? rates<sharing::per_layer>(trace, slots) : rates<sharing::all_layers>(trace, slots);
            nlohmann::json row{{"trace", name},
                               {"reuse", reuse_of(trace)},
                               {"slots", slots},
                               {"percent", percent},
                               {"sharing", apart ? "per_layer" : "all_layers"}};
            std::printf("%-9s %5u", apart ? "per layer" : "shared", percent);
            for (std::size_t i = 0; i < r.size(); ++i) {
                std::printf(" %9.1f", 100 * r[i]);
                row[columns[i]] = r[i];
            }
            const double gap = r[best_column] - r[lru_column];
            std::printf(" %9.2f\n", gap > 0 ? (r[lfru_column] - r[lru_column]) / gap : 0.0);
            std::fflush(stdout);
            rows.push_back(std::move(row));
        }
    }
}

std::uint32_t number(const std::string& option, const std::string& text) {
    if (text.empty() || text.size() > 6 || text.find_first_not_of("0123456789") != std::string::npos || std::stoul(text) == 0) {
        throw ps::configuration_error(option + " wants a number of at least 1, not \"" + text + "\"");
    }
    return static_cast<std::uint32_t>(std::stoul(text));
}

void run(const std::vector<std::string>& words) {
    model_shape shape;
    std::string json;
    std::vector<std::string> files;
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string& word = words[i];
        if (!word.starts_with("--")) {
            files.push_back(word);
            continue;
        }
        if (++i == words.size()) {
            throw ps::configuration_error(word + ": a value is missing");
        }
        if (word == "--json") {
            json = words[i];
        } else if (word == "--layers") {
            shape.layers = number(word, words[i]);
        } else if (word == "--experts") {
            shape.experts = number(word, words[i]);
        } else if (word == "--top-k") {
            shape.top_k = number(word, words[i]);
        } else if (word == "--steps") {
            shape.steps = number(word, words[i]);
        } else {
            throw ps::configuration_error("unknown option " + word);
        }
    }
    if (shape.top_k > shape.experts) {
        throw ps::configuration_error("--top-k is larger than --experts");
    }
    std::printf(
        "Hits in %% of what was asked for, after a quarter of the trace, whose most used experts are the hot ones.\n"
        "lfru N: half-life of N steps; selective and last step: with lfru 64; hot 3/4: lru in the other slots. static: the best static set "
        "for\n"
        "the counted part; best: no rule can have more. closed: how much of the gap between lru and best lfru 64 closes.\n");
    nlohmann::json rows = nlohmann::json::array();
    for (const std::string& file : files) {
        show(file, ps::read_trace(std::filesystem::path(file)), rows);
    }
    const habit habits[] = {{0.6, 0},   {1, 0},   {0, 0.5},         {0.6, 0.5},  {1, 0.5},
                            {0.6, 0.8}, {1, 0.8}, {1, 0.5, 1, 250}, {1, 0.5, 4}, {1, 0, 16}};
    for (const habit& h : habits) {
        if (!files.empty()) {
            break;
        }
        char name[120];
        std::snprintf(name, sizeof name, "Zipf %.1f, %.1f kept, %u token%s", h.zipf, h.reuse, h.tokens, h.tokens > 1 ? "s" : "");
        show(name + (h.phase > 0 ? ", other popularities every " + std::to_string(h.phase) + " steps" : std::string{}), generate(shape, h),
             rows);
    }
    if (!json.empty()) {
        std::ofstream out(json);
        out << rows.dump(1) << std::endl;
        if (!out) {
            throw ps::io_error("cannot write " + json);
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    try {
        run({argv + 1, argv + argc});
        return 0;
    } catch (const std::exception& problem) {
        std::fprintf(stderr, "benchmark_eviction: %s\n", problem.what());
        return 2;
    }
}

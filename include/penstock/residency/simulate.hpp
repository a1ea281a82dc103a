#pragma once

#include <penstock/residency/expert_trace.hpp>
#include <penstock/residency/slot_table.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <utility>
#include <vector>

/// What a number of slots would have saved of a trace: under an eviction rule, decided by the same code as in a kernel, and at best.

namespace penstock::inline v0_1 {

namespace detail {

inline std::vector<std::uint32_t> first_keys(const expert_trace& trace) {
    std::vector<std::uint32_t> first(trace.experts().size() + 1);
    std::partial_sum(trace.experts().begin(), trace.experts().end(), first.begin() + 1);
    return first;
}

}  // namespace detail

/// Plays a trace from empty slots. A model step ends where the layer does not go up from one call to the next.
/// @param hot keys of the experts that a profile chose. @param warm_up calls that are played and not counted.
template <eviction_policy Eviction, slot_sharing Sharing = sharing::all_layers>
[[nodiscard]] residency_counters simulate(const expert_trace& trace, std::uint32_t slots, std::span<const std::uint32_t> hot = {},
                                          std::size_t warm_up = 0) {
    slot_table<Eviction, Sharing> table(trace.experts(), slots);
    table.mark_hot(hot);
    std::uint64_t step = 1;
    for (std::size_t c = 0; c < trace.calls(); ++c) {
        if (c == warm_up) {
            table.reset_counters();
        }
        step += c > 0 && trace.layer(c) <= trace.layer(c - 1);
        static_cast<void>(table.resolve(trace.layer(c), step, trace.needed(c)));
        table.commit();
    }
    return warm_up < trace.calls() ? table.counters() : residency_counters{};
}

struct hits_and_misses {
    std::uint64_t hits = 0;
    std::uint64_t misses = 0;
};

/// No rule can have more hits: knowing the whole trace, of what is resident and what a call needs, those stay after it that are needed again
/// soonest (L. A. Belady, 1966, for calls of several experts). Nobody leaves during a call; a rule also keeps its hits beyond it, this does not.
template <slot_sharing Sharing = sharing::all_layers>
[[nodiscard]] hits_and_misses simulate_best(const expert_trace& trace, std::uint32_t slots, std::size_t warm_up = 0) {
    constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();
    const std::vector<std::uint32_t> first = detail::first_keys(trace);
    std::vector<std::uint64_t> next_call(first.back(), never);
    std::vector<std::vector<std::uint64_t>> next(trace.calls());  // of each expert of each call: the call that needs it again
    for (std::size_t c = trace.calls(); c-- > 0;) {
        for (const std::int32_t id : trace.needed(c)) {
            std::uint64_t& at = next_call[first[trace.layer(c)] + static_cast<std::uint32_t>(id)];
            next[c].push_back(std::exchange(at, c));
        }
    }
    const auto layers = static_cast<std::uint32_t>(trace.experts().size());
    using waiting = std::pair<std::uint64_t, std::uint32_t>;  // the call that needs it again, key
    struct group {                                            // layers that share slots
        std::uint32_t room = 0;
        std::set<waiting> residents;
        void trim() {
            while (residents.size() > room) {
                residents.erase(std::prev(residents.end()));
            }
        }
    };
    std::map<std::uint32_t, group> groups;  // by the end of their slots
    hits_and_misses counted;
    for (std::size_t c = 0; c < trace.calls(); ++c) {
        if (c == warm_up) {
            counted = {};
            for (auto& [end, g] : groups) {
                g.trim();
            }
        }
        const slot_range range = Sharing::range(trace.layer(c), layers, slots);
        if (range.first == range.end) {
            counted.misses += next[c].size();
            continue;
        }
        group& mine = groups[range.end];
        mine.room = range.end - range.first;
        std::set<waiting>& here = mine.residents;
        for (std::size_t i = 0; i < next[c].size(); ++i) {
            const waiting again{next[c][i], first[trace.layer(c)] + static_cast<std::uint32_t>(trace.needed(c)[i])};
            const bool hit = here.erase({c, again.second}) > 0;
            counted.hits += hit;
            counted.misses += !hit;
            here.insert(again);
        }
        if (c >= warm_up) {  // before, what will be needed first could have been kept at the cost of hits that do not count
            mine.trim();
        }
    }
    return warm_up < trace.calls() ? counted : hits_and_misses{};
}

/// How many calls need each expert, by key.
[[nodiscard]] inline std::vector<std::uint64_t> profile(const expert_trace& trace) {
    const std::vector<std::uint32_t> first = detail::first_keys(trace);
    std::vector<std::uint64_t> uses(first.back());
    for (std::size_t c = 0; c < trace.calls(); ++c) {
        for (const std::int32_t id : trace.needed(c)) {
            ++uses[first[trace.layer(c)] + static_cast<std::uint32_t>(id)];
        }
    }
    return uses;
}

/// The keys that a trace makes hot: the most used, as many as that part (0 to 1) of the slots they may lie in; ties to the lower key.
template <slot_sharing Sharing = sharing::all_layers>
[[nodiscard]] std::vector<std::uint32_t> hottest(const expert_trace& trace, std::uint32_t slots, double part = 1) {
    const std::vector<std::uint32_t> first = detail::first_keys(trace);
    const std::vector<std::uint64_t> uses = profile(trace);
    const auto layers = static_cast<std::uint32_t>(trace.experts().size());
    std::map<std::uint32_t, std::vector<std::uint32_t>> sharers;  // keys by the end of their layer's slots
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
        const slot_range range = Sharing::range(layer, layers, slots);
        for (std::uint32_t key = first[layer]; range.first < range.end && key < first[layer + 1]; ++key) {
            sharers[range.end].push_back(key);
        }
    }
    std::vector<std::uint32_t> hot;
    std::uint32_t begin = 0;
    for (auto& [end, keys] : sharers) {
        std::ranges::stable_sort(keys, [&](std::uint32_t a, std::uint32_t b) { return uses[a] > uses[b]; });
        const auto room = static_cast<std::size_t>(part * (end - std::exchange(begin, end)));
        keys.resize(std::min(room, keys.size()));
        hot.insert(hot.end(), keys.begin(), keys.end());
    }
    return hot;
}

}  // namespace penstock::inline v0_1

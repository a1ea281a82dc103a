#pragma once

#include <penstock/error.hpp>
#include <penstock/parallel/placement.hpp>
#include <penstock/units.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// From measured load to a placement with replicas of hot experts, for one layer. Pure functions: the same loads give the same placement on
/// every rank. A load is what was counted for an expert: tokens, or anything that grows with the work; its copies share it evenly.

namespace penstock::inline v0_1 {

/// Ranks as they sit in nodes: rank r is in node r / ranks_per_node.
struct rank_topology {
    std::uint32_t nodes = 1;
    std::uint32_t ranks_per_node = 1;

    [[nodiscard]] constexpr std::uint32_t ranks() const noexcept { return nodes * ranks_per_node; }
};

/// The load of each rank. @throws configuration_error for loads that do not fit the placement
[[nodiscard]] inline std::vector<double> rank_loads(const expert_placement& placement, std::span<const double> loads) {
    if (loads.size() != placement.experts()) {
        throw configuration_error("penstock: loads of " + std::to_string(loads.size()) + " experts for a placement of " +
                                  std::to_string(placement.experts()));
    }
    std::vector<double> sums(placement.ranks(), 0);
    for (std::uint32_t e = 0; e < placement.experts(); ++e) {
        for (const expert_placement::copy& c : placement.copies(e)) {
            sums[c.rank] += loads[e] / static_cast<double>(placement.copies(e).size());
        }
    }
    return sums;
}

/// Load of the busiest rank over the mean: 1 is even, ranks() is all on one; 1 where there is no load.
[[nodiscard]] inline double imbalance(const expert_placement& placement, std::span<const double> loads) {
    const std::vector<double> sums = rank_loads(placement, loads);
    const double all = std::accumulate(sums.begin(), sums.end(), 0.0);
    return all > 0 ? *std::max_element(sums.begin(), sums.end()) * placement.ranks() / all : 1;
}

namespace detail {

/// Indices of `values`, the largest value first, ties to the lower index.
[[nodiscard]] inline std::vector<std::uint32_t> largest_first(std::span<const double> values) {
    std::vector<std::uint32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return values[a] > values[b]; });
    return order;
}

inline void check_loads(std::span<const double> loads) {
    for (std::size_t e = 0; e < loads.size(); ++e) {
        if (!std::isfinite(loads[e]) || loads[e] < 0) {
            throw configuration_error("penstock: expert " + std::to_string(e) + ": a load of " + std::to_string(loads[e]) + " was given");
        }
    }
}

/// Copies for each expert, one at least: each further one goes to the expert whose copies bear most (ties to the lower id), as long as there
/// are slots left and an expert whose further copy would lessen anything.
[[nodiscard]] inline std::vector<std::uint32_t> count_copies(std::span<const double> loads, std::uint64_t slots, std::uint32_t ranks) {
    std::vector<std::uint32_t> copies(loads.size(), 1);
    const auto share = [&](std::uint32_t e) { return copies[e] < ranks ? loads[e] / copies[e] : 0.0; };
    std::vector<std::uint32_t> heap(loads.size());
    std::iota(heap.begin(), heap.end(), 0u);
    const auto below = [&](std::uint32_t a, std::uint32_t b) { return share(a) < share(b) || (share(a) == share(b) && a > b); };
    std::make_heap(heap.begin(), heap.end(), below);
    for (std::uint64_t used = loads.size(); used < slots && !heap.empty(); ++used) {
        std::pop_heap(heap.begin(), heap.end(), below);
        if (share(heap.back()) <= 0) {
            break;
        }
        ++copies[heap.back()];
        std::push_heap(heap.begin(), heap.end(), below);
    }
    return copies;
}

/// Copies onto ranks [first, first + ranks), at most `slots` each: the heaviest first, each to the least loaded rank that has room and lacks
/// the expert (then the one with fewer experts, then the lower number). A replica for which there is no such rank is left out; a first copy
/// always finds one. @param owners written for each of `experts`
inline void pack_copies(std::span<const double> loads, std::span<const std::uint32_t> experts, std::uint32_t first, std::uint32_t ranks,
                        std::uint32_t slots, std::vector<std::vector<std::uint32_t>>& owners) {
    std::vector<double> own;
    for (const std::uint32_t e : experts) {
        own.push_back(loads[e]);
    }
    const std::vector<std::uint32_t> copies = count_copies(own, std::uint64_t{ranks} * slots, ranks);
    std::vector<double> share(experts.size());
    for (std::size_t i = 0; i < experts.size(); ++i) {
        share[i] = own[i] / copies[i];
    }
    std::vector<double> load(ranks, 0);
    std::vector<std::uint32_t> held(ranks, 0);
    std::uint64_t unplaced = experts.size();  // experts without a copy yet: room is kept for them
    std::uint64_t room = std::uint64_t{ranks} * slots;
    for (const std::uint32_t i : largest_first(share)) {
        std::vector<std::uint32_t>& to = owners[experts[i]];
        for (std::uint32_t c = 0; c < copies[i] && (c == 0 || room > unplaced); ++c) {
            std::uint32_t best = ranks;
            for (std::uint32_t r = 0; r < ranks; ++r) {
                const bool fits = held[r] < slots && std::find(to.begin(), to.end(), first + r) == to.end();
                if (fits && (best == ranks || std::pair(load[r], held[r]) < std::pair(load[best], held[best]))) {
                    best = r;
                }
            }
            if (best == ranks) {
                break;
            }
            to.push_back(first + best);
            load[best] += share[i];
            ++held[best];
            --room;
            unplaced -= c == 0 ? 1 : 0;
        }
    }
}

inline void check_room(std::uint64_t experts, std::uint64_t ranks, std::uint32_t slots, const char* where) {
    if (ranks == 0 || ranks * slots < experts) {
        throw configuration_error("penstock: " + std::to_string(experts) + " experts do not fit " + std::to_string(ranks) + " ranks with " +
                                  std::to_string(slots) + " slots each" + where);
    }
}

}  // namespace detail

/// Greedy: slots beyond one an expert become replicas of whichever expert's copies bear most, then the heaviest copies are placed first, each
/// on the least loaded rank. Slots may stay empty where a further replica would not lessen anything.
/// @param loads by expert. @param slots experts that a rank has memory for
/// @throws configuration_error where the experts do not fit; for a load that is negative or no number
[[nodiscard]] inline expert_placement balance_greedy(std::span<const double> loads, std::uint32_t ranks, std::uint32_t slots) {
    detail::check_loads(loads);
    detail::check_room(loads.size(), ranks, slots, "");
    std::vector<std::vector<std::uint32_t>> owners(loads.size());
    std::vector<std::uint32_t> all(loads.size());
    std::iota(all.begin(), all.end(), 0u);
    detail::pack_copies(loads, all, 0, ranks, slots, owners);
    return {ranks, owners};
}

/// By node, for routers that choose groups of experts first: a group and all copies of its experts stay in one node, so that a token enters
/// few nodes. The heaviest groups go first, each to the least loaded node that has room for it; within a node as balance_greedy.
/// @param groups of neighbouring experts, which divide their number: routing_rule::groups
/// @throws configuration_error as balance_greedy; where the groups do not divide the experts or do not fit the nodes
[[nodiscard]] inline expert_placement balance_by_node(std::span<const double> loads, const rank_topology& topology, std::uint32_t groups,
                                                      std::uint32_t slots) {
    detail::check_loads(loads);
    detail::check_room(loads.size(), topology.ranks(), slots, "");
    if (groups == 0 || loads.size() % groups != 0) {
        throw configuration_error("penstock: " + std::to_string(loads.size()) + " experts do not divide into " + std::to_string(groups) +
                                  " groups");
    }
    const std::size_t members = loads.size() / groups;
    std::vector<double> weight(groups, 0);
    for (std::size_t e = 0; e < loads.size(); ++e) {
        weight[e / members] += loads[e];
    }
    // The same number of groups in each node, give or take one: memory for experts is even, too.
    const auto most = static_cast<std::uint32_t>(ceil_div(groups, topology.nodes));
    detail::check_room(most * members, topology.ranks_per_node, slots, " of a node: its groups are kept together");
    std::vector<double> load(topology.nodes, 0);
    std::vector<std::vector<std::uint32_t>> inside(topology.nodes);
    for (const std::uint32_t g : detail::largest_first(weight)) {
        std::uint32_t best = topology.nodes;
        for (std::uint32_t n = 0; n < topology.nodes; ++n) {
            const bool fits = inside[n].size() < most * members;
            if (fits && (best == topology.nodes || std::pair(load[n], inside[n].size()) < std::pair(load[best], inside[best].size()))) {
                best = n;
            }
        }
        for (std::size_t e = g * members; e < (g + std::size_t{1}) * members; ++e) {
            inside[best].push_back(static_cast<std::uint32_t>(e));
        }
        load[best] += weight[g];
    }
    std::vector<std::vector<std::uint32_t>> owners(loads.size());
    for (std::uint32_t n = 0; n < topology.nodes; ++n) {
        detail::pack_copies(loads, inside[n], n * topology.ranks_per_node, topology.ranks_per_node, slots, owners);
    }
    return {topology.ranks(), owners};
}

/// An expert that a rank has to fetch before a placement can be used: what the weight streams bring in the background.
struct expert_arrival {
    std::uint32_t rank = 0;
    std::uint32_t expert = 0;

    friend bool operator==(const expert_arrival&, const expert_arrival&) = default;
};

/// What changes from one placement to another, by rank, then by expert. @throws configuration_error unless both have the same ranks and experts
[[nodiscard]] inline std::vector<expert_arrival> arrivals(const expert_placement& before, const expert_placement& after) {
    if (before.ranks() != after.ranks() || before.experts() != after.experts()) {
        throw configuration_error("penstock: a placement of " + std::to_string(before.experts()) + " experts on " +
                                  std::to_string(before.ranks()) + " ranks does not turn into one of " + std::to_string(after.experts()) +
                                  " on " + std::to_string(after.ranks()));
    }
    std::vector<expert_arrival> list;
    for (std::uint32_t r = 0; r < after.ranks(); ++r) {
        for (const std::uint32_t e : after.experts_of(r)) {
            if (!before.holds(r, e)) {
                list.push_back({r, e});
            }
        }
    }
    return list;
}

/// Two placements under the same loads, before and after: imbalance, the busiest rank and the idlest, copies, most experts on a rank; then
/// how many experts have to move.
inline void print_balance(std::ostream& out, const expert_placement& before, const expert_placement& after, std::span<const double> loads) {
    const auto line = [&](const char* name, const expert_placement& p) {
        const std::vector<double> sums = rank_loads(p, loads);
        const double all = std::accumulate(sums.begin(), sums.end(), 0.0);
        const auto [low, high] = std::minmax_element(sums.begin(), sums.end());
        std::size_t copies = 0, most = 0, replicated = 0;
        for (std::uint32_t r = 0; r < p.ranks(); ++r) {
            copies += p.experts_of(r).size();
            most = larger(most, p.experts_of(r).size());
        }
        for (std::uint32_t e = 0; e < p.experts(); ++e) {
            replicated += p.copies(e).size() > 1 ? 1 : 0;
        }
        char text[240];
        std::snprintf(
            text, sizeof text,
            "%-7s imbalance (max over mean) %6.3f   rank %u has %5.2f %% of the load, rank %u %5.2f %%   %zu copies of %u experts, "
            "%zu replicated, at most %zu on a rank\n",
            name, imbalance(p, loads), static_cast<unsigned>(high - sums.begin()), all > 0 ? *high / all * 100 : 0.0,
            static_cast<unsigned>(low - sums.begin()), all > 0 ? *low / all * 100 : 0.0, copies, p.experts(), replicated, most);
        out << text;
    };
    line("before", before);
    line("after", after);
    out << arrivals(before, after).size() << " experts to fetch\n";
}

}  // namespace penstock::inline v0_1

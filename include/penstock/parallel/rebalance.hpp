#pragma once

#include <penstock/parallel/balance.hpp>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

namespace penstock::inline v0_1 {

namespace detail {

/// A placement while it is changed step by step.
class placement_in_change {
public:
    placement_in_change(const expert_placement& before, std::span<const double> loads, std::uint32_t slots)
        : loads_(loads), slots_(slots), owners_(before.experts()), held_(before.ranks()), load_(rank_loads(before, loads)) {
        for (std::uint32_t e = 0; e < before.experts(); ++e) {
            for (const expert_placement::copy& c : before.copies(e)) {
                owners_[e].push_back(c.rank);
                held_[c.rank].push_back(e);
            }
        }
    }

    [[nodiscard]] const std::vector<std::vector<std::uint32_t>>& owners() const noexcept { return owners_; }

    /// Makes the one change that most lowers the busiest rank's load without putting another above what is reached: a copy of one of its experts
    /// goes to a rank that lacks it, as a further copy or in place of the busiest's own; where that rank is full, an expert with other copies
    /// makes room there, or one comes back in exchange. @return whether there was one; experts fetched are added to `fetched`
    bool step(std::uint32_t& fetched, std::uint32_t most_fetched) {
        const auto from = static_cast<std::uint32_t>(std::max_element(load_.begin(), load_.end()) - load_.begin());
        change best;
        best.reached = load_[from] * (1 - 1e-9);
        for (const std::uint32_t e : held_[from]) {
            const auto copies = static_cast<double>(owners_[e].size());
            for (std::uint32_t to = 0; to < load_.size(); ++to) {
                if (to == from || contains(owners_[e], to)) {
                    continue;
                }
                const double moved = loads_[e] / copies, shared = loads_[e] / (copies + 1);
                if (held_[to].size() < slots_) {
                    consider(best, {larger(load_[from] - (moved - shared), load_[to] + shared), e, to, true, none, false});
                    consider(best, {larger(load_[from] - moved, load_[to] + moved), e, to, false, none, false});
                    continue;
                }
                for (const std::uint32_t f : held_[to]) {
                    const auto others = static_cast<double>(owners_[f].size()) - 1;
                    if (others > 0) {  // f leaves; its other copies, which may be the busiest's, bear more
                        const double less = loads_[f] / (others + 1), more = loads_[f] / others - less;
                        double reached =
                            larger(load_[from] - (moved - shared) + (contains(owners_[f], from) ? more : 0.0), load_[to] - less + shared);
                        for (const std::uint32_t r : owners_[f]) {
                            reached = r == to || r == from ? reached : larger(reached, load_[r] + more);
                        }
                        consider(best, {reached, e, to, true, f, false});
                    }
                    if (!contains(owners_[f], from) && fetched + 2 <= most_fetched) {
                        const double back = loads_[f] / (others + 1);
                        consider(best, {larger(load_[from] - moved + back, load_[to] + moved - back), e, to, false, f, true});
                    }
                }
            }
        }
        if (best.expert == none || fetched + 1 > most_fetched) {
            return false;
        }
        fetched += best.exchange ? 2 : 1;
        apply(best, from);
        return true;
    }

private:
    static constexpr std::uint32_t none = ~0u;

    struct change {
        double reached = 0;           ///< the larger load of the ranks that are touched
        std::uint32_t expert = none;  ///< of the busiest rank
        std::uint32_t to = 0;
        bool keeps = false;           ///< the busiest rank keeps its copy
        std::uint32_t leaves = none;  ///< an expert that leaves `to`
        bool exchange = false;        ///< and goes to the busiest rank
    };

    [[nodiscard]] static bool contains(const std::vector<std::uint32_t>& list, std::uint32_t value) noexcept {
        return std::find(list.begin(), list.end(), value) != list.end();
    }

    static void consider(change& best, const change& other) noexcept { best = other.reached < best.reached ? other : best; }

    void apply(const change& c, std::uint32_t from) {
        if (c.leaves != none) {
            remove(c.leaves, c.to);
            if (c.exchange) {
                owners_[c.leaves].push_back(from);
                held_[from].push_back(c.leaves);
            }
        }
        if (!c.keeps) {
            remove(c.expert, from);
        }
        owners_[c.expert].push_back(c.to);
        held_[c.to].push_back(c.expert);
        std::fill(load_.begin(), load_.end(), 0.0);
        for (std::uint32_t e = 0; e < owners_.size(); ++e) {
            for (const std::uint32_t r : owners_[e]) {
                load_[r] += loads_[e] / static_cast<double>(owners_[e].size());
            }
        }
    }

    void remove(std::uint32_t expert, std::uint32_t rank) {
        std::erase(owners_[expert], rank);
        std::erase(held_[rank], expert);
    }

    std::span<const double> loads_;
    std::uint32_t slots_;
    std::vector<std::vector<std::uint32_t>> owners_;  ///< by expert
    std::vector<std::vector<std::uint32_t>> held_;    ///< by rank
    std::vector<double> load_;                        ///< by rank
};

}  // namespace detail

/// A more even placement that is near the one in use: what weight streams can bring in the background while it serves. Changes are made one
/// after another, each the one that most relieves the busiest rank, until none does or `most_fetched` experts have been fetched.
/// @param loads by expert. @param slots experts that a rank has memory for
/// @throws configuration_error where the placement in use does not fit the slots or the loads; for a load that is negative or no number
[[nodiscard]] inline expert_placement rebalance(const expert_placement& before, std::span<const double> loads, std::uint32_t slots,
                                                std::uint32_t most_fetched) {
    detail::check_loads(loads);
    for (std::uint32_t r = 0; r < before.ranks(); ++r) {
        detail::check_room(before.experts_of(r).size(), 1, slots, ", as they are placed now");
    }
    detail::placement_in_change now(before, loads, slots);
    std::uint32_t fetched = 0;
    while (now.step(fetched, most_fetched)) {
    }
    return {before.ranks(), now.owners()};
}

}  // namespace penstock::inline v0_1

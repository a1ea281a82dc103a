#pragma once

#include <penstock/error.hpp>
#include <penstock/model/shard_plan.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace penstock::inline v0_1 {

/// Which ranks hold which experts of one layer: plain data, the same on every rank. An expert has one owner or several (replicas); a rank
/// may hold none. Its local id on a rank is its position among that rank's experts, which are in ascending order.
class expert_placement {
public:
    struct copy {
        std::uint32_t rank = 0;
        std::uint32_t local = 0;  ///< the expert's local id there

        friend bool operator==(const copy&, const copy&) = default;
    };

    /// @param owners [experts]: the ranks that hold each, in the order in which replicas are numbered
    /// @throws configuration_error for no ranks, an expert without owner, with one that is not there or twice the same
    expert_placement(std::uint32_t ranks, const std::vector<std::vector<std::uint32_t>>& owners) : held_(ranks) {
        if (ranks == 0) {
            throw configuration_error("penstock: a placement on 0 ranks was asked for");
        }
        first_.reserve(owners.size() + 1);
        first_.push_back(0);
        for (std::uint32_t e = 0; e < owners.size(); ++e) {
            if (owners[e].empty()) {
                throw configuration_error("penstock: placement: expert " + std::to_string(e) + " has no owner");
            }
            for (const std::uint32_t r : owners[e]) {
                if (r >= ranks || (!held_[r].empty() && held_[r].back() == e)) {
                    throw configuration_error("penstock: placement: expert " + std::to_string(e) + " was given to rank " +
                                              std::to_string(r) + (r >= ranks ? " of " + std::to_string(ranks) : " twice"));
                }
                copies_.push_back({r, static_cast<std::uint32_t>(held_[r].size())});
                held_[r].push_back(e);
            }
            first_.push_back(copies_.size());
        }
    }

    /// One layer of a plan for whole experts. @throws configuration_error for a plan by slice: its tokens visit every GPU
    explicit expert_placement(const shard_plan& plan, std::uint32_t layer = 0) : expert_placement(plan.gpus(), owners_in(plan, layer)) {}

    [[nodiscard]] std::uint32_t ranks() const noexcept { return static_cast<std::uint32_t>(held_.size()); }
    [[nodiscard]] std::uint32_t experts() const noexcept { return static_cast<std::uint32_t>(first_.size() - 1); }

    /// Where an expert's copies are, at least one. @pre expert < experts()
    [[nodiscard]] std::span<const copy> copies(std::uint32_t expert) const noexcept {
        return {copies_.data() + first_[expert], first_[expert + 1] - first_[expert]};
    }

    /// Global ids of a rank's experts, ascending. @pre rank < ranks()
    [[nodiscard]] std::span<const std::uint32_t> experts_of(std::uint32_t rank) const noexcept { return held_[rank]; }

    [[nodiscard]] bool holds(std::uint32_t rank, std::uint32_t expert) const noexcept {
        return std::binary_search(held_[rank].begin(), held_[rank].end(), expert);
    }

    friend bool operator==(const expert_placement&, const expert_placement&) = default;

private:
    [[nodiscard]] static std::vector<std::vector<std::uint32_t>> owners_in(const shard_plan& plan, std::uint32_t layer) {
        if (plan.sliced()) {
            throw configuration_error("penstock: expert parallelism places whole experts, this shard_plan is by slice");
        }
        std::vector<std::vector<std::uint32_t>> owners(plan.experts(layer));
        for (std::uint32_t e = 0; e < owners.size(); ++e) {
            const auto own = plan.owners(layer, e);
            owners[e].assign(own.begin(), own.end());
        }
        return owners;
    }

    std::vector<std::vector<std::uint32_t>> held_;  ///< by rank
    std::vector<std::size_t> first_;                ///< [experts + 1], into copies_
    std::vector<copy> copies_;
};

namespace axis {

/// Which of an expert's copies a token visits.
struct replica {};

}  // namespace axis

/// Policies that choose among the copies of an expert: pure functions, so that every run chooses the same.
namespace replica {

/// In turn: the copies of an expert get the same number of a rank's tokens, give or take one.
struct spread {
    using policy_axis = axis::replica;

    /// @param nth how many of this rank's tokens chose the expert before
    /// @param visited [ranks], whether the token goes to a rank already
    [[nodiscard]] static std::size_t choose(std::span<const expert_placement::copy> copies, std::uint32_t source, std::uint32_t nth,
                                            std::span<const char>) noexcept {
        return (std::size_t{source} + nth) % copies.size();
    }
};

/// The copy on the token's own rank, else one on a rank that it visits already, else in turn: fewest crossings, less even.
struct nearest {
    using policy_axis = axis::replica;

    [[nodiscard]] static std::size_t choose(std::span<const expert_placement::copy> copies, std::uint32_t source, std::uint32_t nth,
                                            std::span<const char> visited) noexcept {
        std::size_t chosen = copies.size();
        for (std::size_t i = copies.size(); i-- > 0;) {
            if (copies[i].rank == source) {
                return i;
            }
            chosen = visited[copies[i].rank] != 0 ? i : chosen;
        }
        return chosen < copies.size() ? chosen : spread::choose(copies, source, nth, visited);
    }
};

}  // namespace replica

}  // namespace penstock::inline v0_1

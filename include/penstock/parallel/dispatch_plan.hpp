#pragma once

#include <penstock/error.hpp>
#include <penstock/parallel/placement.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace penstock::inline v0_1 {

/// Which rows one rank sends where, and which rows come back for which token. A *row* is a token at one of the ranks that it visits: however
/// many of its experts are there, it crosses once. Rows go by ascending rank, then by ascending token. Making a plan again takes no memory
/// unless it is larger than all before.
class dispatch_plan {
public:
    /// @param source the rank whose tokens they are
    /// @param ids [tokens, top_k] global ids; negative: no expert. @throws configuration_error for an id that the placement lacks, or a rank
    template <class Replica>
    void make(const expert_placement& placement, std::uint32_t source, std::span<const std::int32_t> ids, std::uint32_t top_k) {
        if (top_k == 0 || ids.size() % top_k != 0) {
            throw configuration_error("penstock: " + std::to_string(ids.size()) + " ids are no whole number of tokens with " +
                                      std::to_string(top_k) + " each");
        }
        if (source >= placement.ranks()) {
            throw configuration_error("penstock: rank " + std::to_string(source) + " of a placement on " +
                                      std::to_string(placement.ranks()) + " ranks");
        }
        const auto tokens = static_cast<std::uint32_t>(ids.size() / top_k);
        top_k_ = top_k;
        to_.assign(placement.ranks() + std::size_t{1}, 0);
        rows_before_.assign(tokens + std::size_t{1}, 0);
        seen_.assign(placement.experts(), 0);
        visited_.assign(placement.ranks(), 0);
        chosen_.assign(ids.size(), nullptr);
        for (std::uint32_t t = 0; t < tokens; ++t) {
            for (std::size_t p = std::size_t{t} * top_k; p < (t + std::size_t{1}) * top_k; ++p) {
                choose<Replica>(placement, source, ids[p], p);
            }
            std::uint32_t visits = 0;
            for (std::size_t p = std::size_t{t} * top_k; p < (t + std::size_t{1}) * top_k; ++p) {
                if (chosen_[p] != nullptr && visited_[chosen_[p]->rank] != 0) {
                    visited_[chosen_[p]->rank] = 0;
                    ++to_[chosen_[p]->rank + std::size_t{1}];
                    ++visits;
                }
            }
            rows_before_[t + std::size_t{1}] = rows_before_[t] + visits;
        }
        for (std::uint32_t d = 0; d < placement.ranks(); ++d) {
            to_[d + std::size_t{1}] += to_[d];
        }
        place_rows(tokens);
    }

    [[nodiscard]] std::uint32_t top_k() const noexcept { return top_k_; }
    [[nodiscard]] std::uint32_t ranks() const noexcept { return static_cast<std::uint32_t>(to_.size() - 1); }
    [[nodiscard]] std::uint32_t tokens() const noexcept { return static_cast<std::uint32_t>(rows_before_.size() - 1); }
    [[nodiscard]] std::uint32_t rows() const noexcept { return to_.back(); }

    /// [ranks + 1]: the rows for rank d are [to()[d], to()[d + 1]).
    [[nodiscard]] std::span<const std::uint32_t> to() const noexcept { return to_; }

    [[nodiscard]] std::uint32_t rows_to(std::uint32_t rank) const noexcept { return to_[rank + std::size_t{1}] - to_[rank]; }

    /// [rows]: the token of each row.
    [[nodiscard]] std::span<const std::uint32_t> token_of() const noexcept { return token_of_; }

    /// [rows, top_k]: for each choice of the token, the expert's local id on the row's rank; -1 where it is elsewhere or nowhere.
    [[nodiscard]] std::span<const std::int32_t> local_ids() const noexcept { return local_ids_; }

    /// The rows of a token, by ascending rank: the order in which they are added up.
    [[nodiscard]] std::span<const std::uint32_t> rows_of(std::uint32_t token) const noexcept {
        return std::span(rows_of_).subspan(rows_before_[token], rows_before_[token + std::size_t{1}] - rows_before_[token]);
    }

private:
    template <class Replica>
    void choose(const expert_placement& placement, std::uint32_t source, std::int32_t id, std::size_t pair) {
        if (id < 0) {
            return;
        }
        if (static_cast<std::uint32_t>(id) >= placement.experts()) {
            throw configuration_error("penstock: token " + std::to_string(pair / top_k_) + " of rank " + std::to_string(source) +
                                      " asks for expert " + std::to_string(id) + " of " + std::to_string(placement.experts()));
        }
        const auto copies = placement.copies(static_cast<std::uint32_t>(id));
        const std::size_t which = copies.size() == 1 ? 0 : Replica::choose(copies, source, seen_[id], visited_);
        ++seen_[id];
        chosen_[pair] = &copies[which];
        visited_[chosen_[pair]->rank] = 1;
    }

    /// Rows in their order, from where each choice goes.
    void place_rows(std::uint32_t tokens) {
        token_of_.resize(rows());
        rows_of_.resize(rows());
        local_ids_.assign(std::size_t{rows()} * top_k_, -1);
        next_.assign(to_.begin(), to_.end() - 1);
        for (std::uint32_t t = 0; t < tokens; ++t) {
            const std::uint32_t first = rows_before_[t];
            std::uint32_t end = first;
            for (std::uint32_t j = 0; j < top_k_; ++j) {
                const expert_placement::copy* at = chosen_[std::size_t{t} * top_k_ + j];
                if (at == nullptr) {
                    continue;
                }
                std::uint32_t& next = next_[at->rank];
                const bool begun = next > to_[at->rank] && token_of_[next - std::size_t{1}] == t;
                if (!begun) {
                    token_of_[next] = t;
                    rows_of_[end++] = next++;
                }
                local_ids_[(next - std::size_t{1}) * top_k_ + j] = static_cast<std::int32_t>(at->local);
            }
            std::sort(rows_of_.begin() + first, rows_of_.begin() + end);
        }
    }

    std::uint32_t top_k_ = 1;
    std::vector<std::uint32_t> to_{0};
    std::vector<std::uint32_t> token_of_;
    std::vector<std::int32_t> local_ids_;
    std::vector<std::uint32_t> rows_before_{0};  ///< [tokens + 1], into rows_of_
    std::vector<std::uint32_t> rows_of_;

    // While a plan is made.
    std::vector<std::uint32_t> seen_;                    ///< by expert: tokens that chose it so far
    std::vector<char> visited_;                          ///< by rank: the token goes there
    std::vector<const expert_placement::copy*> chosen_;  ///< by pair
    std::vector<std::uint32_t> next_;                    ///< by rank: its next row
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/error.hpp>
#include <penstock/residency/slot_table_ref.hpp>

#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace penstock::inline v0_1 {

/// The arrays of a `slot_table_ref` in host memory, and its calls by vectors. Not thread-safe.
template <eviction_policy Eviction, slot_sharing Sharing = sharing::all_layers>
class slot_table {
public:
    /// @param experts of each layer. @param record_bytes of an expert of each layer, for the counters; empty counts no bytes.
    /// @throws configuration_error when experts are more than 32 bits count, or the two lists differ in length.
    slot_table(std::span<const std::uint32_t> experts, std::uint32_t slots, std::span<const std::uint64_t> record_bytes = {})
        : record_bytes_(record_bytes.begin(), record_bytes.end()), slots_(slots), counters_(experts.size()) {
        if (!record_bytes.empty() && record_bytes.size() != experts.size()) {
            throw configuration_error("penstock: a slot_table of " + std::to_string(experts.size()) +
                                      " layers was given the record bytes of " + std::to_string(record_bytes.size()));
        }
        record_bytes_.resize(experts.size());
        std::uint64_t keys = 0;
        std::uint32_t most = 0;
        for (const std::uint32_t n : experts) {
            first_key_.push_back(static_cast<std::uint32_t>(keys));
            keys += n;
            most = larger(most, n);
        }
        if (keys >= no_slot) {
            throw configuration_error("penstock: a slot_table counts experts in 32 bits; " + std::to_string(keys) + " were given");
        }
        first_key_.push_back(static_cast<std::uint32_t>(keys));
        experts_.resize(keys);
        newcomers_.resize(most);
        victims_.resize(larger(most, 1u));
        list_.resize(most);
    }

    [[nodiscard]] slot_table_ref<Eviction, Sharing> ref() noexcept {
        return {.layers = static_cast<std::uint32_t>(counters_.size()),
                .slots = static_cast<std::uint32_t>(slots_.size()),
                .first_key = first_key_.data(),
                .record_bytes = record_bytes_.data(),
                .slot_at = slots_.data(),
                .expert_at = experts_.data(),
                .counters = counters_.data(),
                .newcomers = newcomers_.data(),
                .victims = victims_.data(),
                .calls = &calls_};
    }

    /// What `slot_table_ref::resolve` says, valid until the next call. `commit` is about the same list.
    std::span<const resolution> resolve(std::uint32_t layer, std::uint64_t step, std::span<const std::int32_t> ids) {
        const std::uint32_t n = ref().resolve(layer, step, ids.data(), static_cast<std::uint32_t>(ids.size()), list_.data());
        resolved_ = n;
        return {list_.data(), n};
    }

    void commit() { ref().commit(list_.data(), resolved_); }

    /// Marks the experts that a profile chose, for `eviction::hot_set`, by their keys.
    void mark_hot(std::span<const std::uint32_t> keys) {
        for (const std::uint32_t key : keys) {
            experts_.at(key).seen.hot = 1;
        }
    }

    [[nodiscard]] std::uint32_t key(std::uint32_t layer, std::uint32_t expert) const { return first_key_[layer] + expert; }
    [[nodiscard]] const std::vector<slot_entry>& slots() const noexcept { return slots_; }
    [[nodiscard]] const residency_counters& counters(std::uint32_t layer) const { return counters_[layer]; }

    /// Over all layers.
    [[nodiscard]] residency_counters counters() const noexcept {
        residency_counters sum;
        for (const residency_counters& c : counters_) {
            sum.hits += c.hits;
            sum.misses += c.misses;
            sum.overflow += c.overflow;
            sum.evictions += c.evictions;
            sum.bytes += c.bytes;
        }
        return sum;
    }

    void reset_counters() { std::ranges::fill(counters_, residency_counters{}); }

private:
    std::vector<std::uint32_t> first_key_;
    std::vector<std::uint64_t> record_bytes_;
    std::vector<slot_entry> slots_;
    std::vector<expert_entry> experts_;
    std::vector<residency_counters> counters_;
    std::vector<scored> newcomers_;
    std::vector<scored> victims_;
    std::uint64_t calls_ = 0;
    std::vector<resolution> list_;
    std::uint32_t resolved_ = 0;
};

}  // namespace penstock::inline v0_1

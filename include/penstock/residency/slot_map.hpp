#pragma once

#include <penstock/error.hpp>
#include <penstock/policy/eviction.hpp>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace penstock::inline v0_1 {

/// Which expert lies in which slot of one tier. Keys are chosen by the owner (layer * experts + expert).
/// A slot is free, filling (reserved, its bytes not there yet: never found), or resident; pinned slots are never victims.
/// Not thread-safe: a store is one order of execution.
class slot_map {
public:
    explicit slot_map(std::uint32_t slots) : slots_(slots) {
        for (std::uint32_t s = slots; s > 0; --s) {
            free_.push_back(s - 1);
        }
        slot_of_.reserve(slots);
    }

    [[nodiscard]] std::uint32_t slots() const noexcept { return static_cast<std::uint32_t>(slots_.size()); }
    [[nodiscard]] std::uint32_t residents() const noexcept { return residents_; }

    /// The slot where the key is resident; a filling one does not count.
    [[nodiscard]] std::optional<std::uint32_t> find(std::uint32_t key) const {
        const auto at = slot_of_.find(key);
        if (at == slot_of_.end() || slots_[at->second].state != state::resident) {
            return std::nullopt;
        }
        return at->second;
    }

    /// Whether the key has a slot, be it filling.
    [[nodiscard]] bool holds(std::uint32_t key) const { return slot_of_.contains(key); }

    struct reservation {
        std::uint32_t slot = 0;
        bool evicted = false;  ///< another expert had to leave
    };

    /// A slot for `key`, filling and pinned: a free one, else the unpinned resident with the lowest score, ties to the lower slot.
    /// Nothing when every slot is pinned, or in use by what leaves only if it was last used before step `used_before`.
    /// @pre the key is not resident or filling.
    template <eviction_policy Eviction>
    [[nodiscard]] std::optional<reservation> reserve(std::uint32_t key, std::uint64_t step, std::uint64_t used_before = ~std::uint64_t{0}) {
        reservation r;
        if (!free_.empty()) {
            r.slot = free_.back();
            free_.pop_back();
        } else if (const std::optional<std::uint32_t> v = victim<Eviction>(step, used_before)) {
            r = {*v, true};
            slot_of_.erase(slots_[r.slot].key);
            --residents_;
        } else {
            return std::nullopt;
        }
        slots_[r.slot] = {key, 1, state::filling, {step, 0, step}};
        slot_of_.emplace(key, r.slot);
        return r;
    }

    /// The bytes of a filling slot are there, or will be before anything that reads them in the store's order.
    void publish(std::uint32_t slot) noexcept {
        slots_[slot].state = state::resident;
        ++residents_;
    }

    /// The fill failed: the slot is free again and its key absent.
    void abandon(std::uint32_t slot) noexcept {
        slot_of_.erase(slots_[slot].key);
        if (slots_[slot].state == state::resident) {
            --residents_;
        }
        slots_[slot] = {};
        free_.push_back(slot);
    }

    template <eviction_policy Eviction>
    void touch(std::uint32_t slot, std::uint64_t step) noexcept {
        note_use<Eviction>(slots_[slot].seen, step);
    }

    void pin(std::uint32_t slot) noexcept { ++slots_[slot].pins; }
    void unpin(std::uint32_t slot) noexcept { --slots_[slot].pins; }
    [[nodiscard]] std::uint32_t pins(std::uint32_t slot) const noexcept { return slots_[slot].pins; }

    /// The resident keys by slot, for reports.
    [[nodiscard]] std::vector<std::uint32_t> resident_keys() const {
        std::vector<std::uint32_t> keys;
        for (const entry& e : slots_) {
            if (e.state == state::resident) {
                keys.push_back(e.key);
            }
        }
        return keys;
    }

private:
    enum class state : std::uint8_t { free, filling, resident };

    struct entry {
        std::uint32_t key = 0;
        std::uint32_t pins = 0;
        slot_map::state state = state::free;
        residency_entry seen;
    };

    template <eviction_policy Eviction>
    [[nodiscard]] std::optional<std::uint32_t> victim(std::uint64_t step, std::uint64_t used_before) const {
        std::optional<std::uint32_t> best;
        double lowest = 0;
        for (std::uint32_t s = 0; s < slots_.size(); ++s) {
            if (slots_[s].state == state::resident && slots_[s].pins == 0 && slots_[s].seen.last_used < used_before) {
                const double score = Eviction::score(slots_[s].seen, step);
                if (!best || score < lowest) {
                    best = s;
                    lowest = score;
                }
            }
        }
        return best;
    }

    std::vector<entry> slots_;
    std::vector<std::uint32_t> free_;  ///< taken from the back; never grows past its first size
    std::unordered_map<std::uint32_t, std::uint32_t> slot_of_;
    std::uint32_t residents_ = 0;
};

}  // namespace penstock::inline v0_1

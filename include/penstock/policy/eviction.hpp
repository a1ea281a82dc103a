#pragma once

#include <penstock/policy/axis.hpp>

#include <concepts>
#include <cstdint>

/// The eviction axis of the expert store: a score, so that the same code decides on the host, in a kernel and in a simulator.

namespace penstock::inline v0_1 {

/// What is known of a resident expert when a victim is sought. Steps count layer calls of the store.
struct residency_entry {
    std::uint64_t last_used = 0;
    std::uint64_t uses = 0;
    std::uint64_t filled = 0;
};

/// `E::score(entry, step)`: the resident with the lowest score leaves first; ties go to the lower slot.
template <class E>
concept eviction_policy = policy_for<E, axis::eviction> && requires(residency_entry entry, std::uint64_t step) {
    { E::score(entry, step) } -> std::convertible_to<double>;
};

namespace eviction {

/// Least recently used.
struct lru {
    using policy_axis = axis::eviction;

    PENSTOCK_HD static constexpr double score(const residency_entry& entry, std::uint64_t) noexcept {
        return static_cast<double>(entry.last_used);
    }
};

}  // namespace eviction
}  // namespace penstock::inline v0_1

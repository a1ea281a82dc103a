#pragma once

#include <penstock/policy/eviction.hpp>

/// Eviction rules as a user might write them.
namespace tests {

namespace ps = penstock;

/// Plain frequency, without ageing: what was hot once stays.
struct least_used {
    using policy_axis = ps::axis::eviction;
    PENSTOCK_HD static constexpr double score(const ps::residency_entry& e, std::uint64_t) noexcept { return static_cast<double>(e.uses); }
};

/// Clock, without a hand: the first to come leaves first, but one used within the last round after its fill is passed over once.
struct second_chance {
    using policy_axis = ps::axis::eviction;
    static constexpr std::uint64_t round = 64;  ///< steps
    PENSTOCK_HD static constexpr double score(const ps::residency_entry& e, std::uint64_t step) noexcept {
        const bool used_again = e.last_used > e.filled && step - e.last_used < round;
        return static_cast<double>(e.filled + (used_again ? round : 0));
    }
};

/// Anyone: a hash of what is known of the entry, so that a replay evicts the same.
struct at_random {
    using policy_axis = ps::axis::eviction;
    PENSTOCK_HD static constexpr double score(const ps::residency_entry& e, std::uint64_t step) noexcept {
        std::uint64_t x = step ^ (e.last_used * 0x9e3779b97f4a7c15ull) ^ (e.uses * 0xd1b54a32d192ed03ull) ^ (e.filled << 32);
        x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 29)) * 0x94d049bb133111ebull;
        return static_cast<double>(x >> 11);
    }
};

}  // namespace tests

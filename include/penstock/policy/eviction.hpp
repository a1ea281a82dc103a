#pragma once

#include <penstock/policy/axis.hpp>

#include <concepts>
#include <cstdint>

/// The eviction axis of the expert store: a score, so that the same code decides on the host, in a kernel and in a simulator.
/// The rules here reckon in integers, so that host and device agree on every bit.

namespace penstock::inline v0_1 {

/// What is known of an expert when a victim is sought. It is kept while the expert is away. Steps are the model's: all layers once
/// (in an `expert_store`, layer calls).
struct residency_entry {
    std::uint64_t last_used = 0;  ///< step of the last use
    std::uint64_t uses = 0;       ///< layer calls that asked for it; a rule with `note_use` counts in a unit of its own
    std::uint64_t filled = 0;     ///< step in which it last got a slot
    std::uint32_t hot = 0;        ///< 1 for the experts that a profile chose, else 0
};

/// `E::score(entry, step)`: the resident with the lowest score leaves first; ties go to the lower slot.
template <class E>
concept eviction_policy = policy_for<E, axis::eviction> && requires(residency_entry entry, std::uint64_t step) {
    { E::score(entry, step) } -> std::convertible_to<double>;
};

/// Whether a newcomer that scores below all who could leave for it gets no slot and is computed where its bytes lie: `E::refuses`, optional.
template <class E>
inline constexpr bool refuses_newcomers = requires {
    requires E::refuses;
};

/// An expert is used in `step`: counts it, by `E::note_use(entry, step)` where the rule has one.
template <eviction_policy E>
PENSTOCK_HD constexpr void note_use(residency_entry& entry, std::uint64_t step) noexcept {
    if constexpr (requires { E::note_use(entry, step); }) {
        E::note_use(entry, step);
    } else {
        entry.last_used = step;
        ++entry.uses;
    }
}

namespace eviction {

/// Least recently used.
struct lru {
    using policy_axis = axis::eviction;

    PENSTOCK_HD static constexpr double score(const residency_entry& entry, std::uint64_t) noexcept {
        return static_cast<double>(entry.last_used);
    }
};

/// Least frequently and recently used: every use counts 1, and half of that `HalfLife` steps later, half of the rest after as many again (between,
/// linearly). A short half-life is nearly `lru`, a long one counts frequency. Uses from before an eviction count too.
template <std::uint32_t HalfLife>
struct lfru {
    static_assert(HalfLife > 0 && HalfLife <= (1u << 20), "penstock: the half-life of eviction::lfru is 1 to 2^20 steps");
    using policy_axis = axis::eviction;

    static constexpr std::uint64_t one_use = 1024;  ///< unit of `uses` under this rule

    /// In powers of two, so that all entries age alike and the order of two changes only when one of them is used:
    /// (step of the last use) + HalfLife x log2(uses at that step), in 1/1024 step.
    PENSTOCK_HD static constexpr double score(const residency_entry& entry, std::uint64_t) noexcept {
        return static_cast<double>(1024 * entry.last_used + HalfLife * log2_in_1024ths(entry.uses));
    }

    PENSTOCK_HD static constexpr void note_use(residency_entry& entry, std::uint64_t step) noexcept {
        entry.uses = aged(entry.uses, step - entry.last_used) + one_use;
        entry.last_used = step;
    }

private:
    PENSTOCK_HD static constexpr std::uint64_t aged(std::uint64_t uses, std::uint64_t steps) noexcept {
        const std::uint64_t halvings = steps / HalfLife;
        if (halvings >= 64) {
            return 0;
        }
        const std::uint64_t halved = uses >> halvings;
        return halved - halved * (steps % HalfLife) / (2 * HalfLife);
    }

    /// Linear between powers of two; 0 for 0.
    PENSTOCK_HD static constexpr std::uint64_t log2_in_1024ths(std::uint64_t x) noexcept {
        std::uint32_t whole = 0;
        for (std::uint32_t bits = 32; bits > 0; bits /= 2) {
            if ((x >> (whole + bits)) != 0) {
                whole += bits;
            }
        }
        const std::uint64_t mantissa = whole >= 10 ? x >> (whole - 10) : x << (10 - whole);
        return std::uint64_t{1024} * whole + mantissa % 1024;
    }
};

/// The experts that a profile chose (`residency_entry::hot`) stay, and `Remainder` decides about the slots that are left. Once here, hot ones
/// leave for nobody: when all slots hold hot experts, others get none.
template <eviction_policy Remainder = lru>
struct hot_set {
    using policy_axis = axis::eviction;

    static constexpr bool refuses = true;

    PENSTOCK_HD static constexpr double score(const residency_entry& entry, std::uint64_t step) noexcept {
        return entry.hot != 0 ? 0x1p60 : static_cast<double>(Remainder::score(entry, step));
    }

    PENSTOCK_HD static constexpr void note_use(residency_entry& entry, std::uint64_t step) noexcept {
        penstock::note_use<Remainder>(entry, step);
    }
};

/// What this step or the one before used leaves after all else; `E` decides among the rest. For slots that all layers share, where otherwise the
/// misses of the layers to come displace a newcomer before its layer's next call.
template <eviction_policy E>
struct last_step_first : E {
    using policy_axis = axis::eviction;

    PENSTOCK_HD static constexpr double score(const residency_entry& entry, std::uint64_t step) noexcept {
        return static_cast<double>(E::score(entry, step)) + (step - entry.last_used <= 1 ? 0x1p52 : 0);
    }
};

/// `E`, but a newcomer must score no less than who leaves for it; one that does not is computed where its bytes lie. So what is used
/// once does not displace what is used often.
template <eviction_policy E>
struct selective : E {
    using policy_axis = axis::eviction;

    static constexpr bool refuses = true;
};

}  // namespace eviction
}  // namespace penstock::inline v0_1

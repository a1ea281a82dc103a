#pragma once

#include <penstock/policy/axis.hpp>
#include <penstock/units.hpp>

#include <concepts>

/// The prefetch axis: slots of a ring, chunks read ahead over all readers of a stream, stages of a kernel's pipeline.

namespace penstock::inline v0_1 {

/// `p.chunks_ahead(chunk_bytes)` is the number of chunks in flight over all readers, at least 1.
template <class P>
concept prefetch_policy = policy_for<P, axis::prefetch> && std::copyable<P> && requires(const P p, std::uint64_t n) {
    { p.chunks_ahead(n) } -> std::convertible_to<std::uint32_t>;
};

namespace prefetch {

/// One chunk at a time: the next is read when the last has arrived.
struct none {
    using policy_axis = axis::prefetch;

    PENSTOCK_HD constexpr std::uint32_t chunks_ahead(std::uint64_t) const noexcept { return 1; }
};

/// `N` chunks in flight.
template <std::uint32_t N>
struct depth {
    static_assert(N > 0, "penstock: prefetch::depth needs at least one slot (prefetch::none is depth 1)");
    using policy_axis = axis::prefetch;

    PENSTOCK_HD constexpr std::uint32_t chunks_ahead(std::uint64_t) const noexcept { return N; }
};

/// As many chunks as fit in `Budget`, at least one.
template <bytes Budget>
struct budget {
    static_assert(Budget > 0, "penstock: prefetch::budget needs more than zero bytes");
    using policy_axis = axis::prefetch;

    PENSTOCK_HD constexpr std::uint32_t chunks_ahead(std::uint64_t chunk_bytes) const noexcept {
        return static_cast<std::uint32_t>(
            larger<std::uint64_t>(1, smaller<std::uint64_t>(Budget.count / larger<std::uint64_t>(chunk_bytes, 1), 1u << 20)));
    }
};

/// As `depth`, with the number known at run time only. Not for kernels.
struct run_time {
    using policy_axis = axis::prefetch;
    std::uint32_t chunks = 24;

    constexpr std::uint32_t chunks_ahead(std::uint64_t) const noexcept { return larger(chunks, 1u); }
};

}  // namespace prefetch
}  // namespace penstock::inline v0_1

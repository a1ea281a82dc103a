#pragma once

#include <penstock/error.hpp>
#include <penstock/policy/memory.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

/// What `expert_parallel` asks of the way by which ranks reach each other. Ranks are counted from 0; each has an endpoint of its own.

namespace penstock::inline v0_1 {

/// A rank of the world has failed or gone, and so the world has: every call of every rank throws this from then on, with the same rank and
/// reason. A new world is needed to go on.
class rank_failed : public error {
public:
    rank_failed(std::uint32_t rank, const std::string& reason)
        : error("penstock: rank " + std::to_string(rank) + " failed: " + reason), rank_(rank) {}

    /// The rank that failed first, not one of those that waited for it.
    [[nodiscard]] std::uint32_t rank() const noexcept { return rank_; }

private:
    std::uint32_t rank_;
};

/// Bytes for a rank, in the transport's memory.
struct send_block {
    std::uint32_t rank = 0;
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
};

/// Room for bytes from a rank, in the transport's memory.
struct receive_block {
    std::uint32_t rank = 0;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
};

/// The endpoint of one rank. All ranks make the same calls in the same order, also those that have nothing to send or to receive.
///
/// - `on_device`, `memory`: where the blocks lie, and the kind that buffers for them are taken from.
/// - `row_steps`: how rows are gathered, grouped and summed in that memory; see host_rows for the members.
/// - `exchange_counts(to, from)`: to[d] goes to rank d, from[s] comes from rank s, ranks() numbers each in host memory. Returns when `from`
///   is there.
/// - `begin_exchange(sends, receives)`: every block goes out, grouped. The blocks for one rank arrive in their order; the receiver's blocks
///   from that rank have the same sizes. A rank may send to itself. Does not wait for other ranks where the transport can help it.
/// - `finish_exchange()`: returns when the received blocks may be used, and those sent be written, in the order of the transport (at once
///   in host memory, on its stream on a device). Every begin has a finish before the next begin.
/// - `fail(rank, reason)`: tells all ranks that `rank` failed. The first report counts.
///
/// A call that waits throws rank_failed within the time limit of the transport when a rank fails, goes, or does not come; it never hangs.
template <class T>
concept expert_transport = allocating_memory<typename T::memory> && std::move_constructible<T> &&
    requires(T& t, const T& c, std::span<const std::uint32_t> to, std::span<std::uint32_t> from, std::span<const send_block> sends,
             std::span<const receive_block> receives, std::uint32_t rank, const std::string& reason) {
    typename T::row_steps;
    requires std::default_initializable<typename T::row_steps>;
    { T::on_device } -> std::convertible_to<bool>;
    { c.rank() } -> std::same_as<std::uint32_t>;
    { c.ranks() } -> std::same_as<std::uint32_t>;
    t.exchange_counts(to, from);
    t.begin_exchange(sends, receives);
    t.finish_exchange();
    { t.fail(rank, reason) }
    noexcept;
};

}  // namespace penstock::inline v0_1

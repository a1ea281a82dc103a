#pragma once

#include <penstock/buffer/copies_in_flight.hpp>
#include <penstock/buffer/ring_state.hpp>
#include <penstock/policy/chunking.hpp>
#include <penstock/policy/memory.hpp>
#include <penstock/policy/prefetch.hpp>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace penstock::inline v0_1 {

namespace detail {

/// What a ring and its slots share.
struct ring_slots {
    struct entry {
        std::byte* data = nullptr;
        bool taken = false;
        copies_in_flight copies;
    };

    std::mutex mutex;
    std::condition_variable changed;  ///< a slot came back, or the ring was closed
    std::deque<entry> entries;
    std::size_t slot_bytes = 0;
    ring_state next;
    bool closed = false;
};

}  // namespace detail

/// A slot of a ring in the hands of one thread. Its destructor returns it; the ring hands it out again when the copies out of it are over.
/// Move-only. A slot of a closed ring is false.
class ring_slot {
public:
    ring_slot() = default;
    ring_slot(detail::ring_slots* ring, detail::ring_slots::entry* entry) noexcept : ring_(ring), entry_(entry) {}

    ring_slot(ring_slot&& other) noexcept : ring_(std::exchange(other.ring_, nullptr)), entry_(std::exchange(other.entry_, nullptr)) {}
    ring_slot& operator=(ring_slot&& other) noexcept {
        ring_slot taken(std::move(other));
        std::swap(ring_, taken.ring_);
        std::swap(entry_, taken.entry_);
        return *this;
    }
    ~ring_slot() {
        if (ring_ != nullptr) {
            const std::lock_guard lock(ring_->mutex);
            entry_->taken = false;
            ring_->changed.notify_all();
        }
    }

    explicit operator bool() const noexcept { return ring_ != nullptr; }

    /// The slot's memory, to be filled. @pre the slot is true, here and below
    [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {entry_->data, ring_->slot_bytes}; }

    /// Enqueues a copy of the first `size` bytes to `destination`, in device or host memory, on `stream`. Asynchronous where the ring is pinned.
    /// @pre size <= bytes().size() @throws cuda_error
    void copy_async(void* destination, cudaStream_t stream, std::size_t size) {
        if (size > 0) {
            check(cudaMemcpyAsync(destination, entry_->data, size, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
            entry_->copies.remember(stream);
        }
    }
    void copy_async(void* destination, cudaStream_t stream) { copy_async(destination, stream, ring_->slot_bytes); }

    /// Copies the first `size` bytes to host memory. Returns when they are there; needs no GPU.
    void copy_to(void* destination, std::size_t size) const noexcept {
        if (size > 0) {
            std::memcpy(destination, entry_->data, size);
        }
    }
    void copy_to(void* destination) const noexcept { copy_to(destination, ring_->slot_bytes); }

private:
    detail::ring_slots* ring_ = nullptr;
    detail::ring_slots::entry* entry_ = nullptr;
};

/// Host memory in equal slots that are filled and copied in turn: first in, first out. Any number of threads may take slots; they get them
/// in the order of the ring, each when it is back and the copies out of it are over. The destructor waits for those copies.
/// @pre no slot outlives its ring.
template <class Memory, class Chunking, class Prefetch>
class basic_ring {
    static_assert(memory_policy<Memory>, "penstock: ring's memory kind lacks host_accessible, device_accessible or page_aligned");
    static_assert(
        Memory::host_accessible,
        "penstock: ring hands out host memory to be filled; memory::device, memory::peer and what contains them are destinations");
    static_assert(chunking_policy<Chunking>, "penstock: ring's chunking offers bytes_per_chunk(row_bytes, total_bytes)");
    static_assert(!std::is_same_v<Chunking, chunking::whole>, "penstock: ring has slots of one size, which chunking::whole does not name");
    static_assert(prefetch_policy<Prefetch>, "penstock: ring's prefetch depth offers chunks_ahead(chunk_bytes)");

public:
    using memory = Memory;
    using chunking = Chunking;
    using prefetch = Prefetch;
    using slot = ring_slot;

    /// Host memory that a ring takes. @param row_bytes of the matrix whose rows are kept whole; 0: no rows.
    [[nodiscard]] static constexpr bytes bytes_needed(std::uint64_t row_bytes = 0, Chunking chunking = {},
                                                      Prefetch prefetch = {}) noexcept {
        const std::uint64_t size = slot_size(row_bytes, chunking);
        return {round_up(size, penstock::memory::page_bytes) * prefetch.chunks_ahead(size)};
    }

    /// @throws out_of_memory, cuda_error; configuration_error for chunking::rows without row_bytes
    explicit basic_ring(std::uint64_t row_bytes = 0, Chunking chunking = {}, Prefetch prefetch = {}) requires allocating_memory<Memory> {
        const std::uint64_t size = checked_slot_size(row_bytes, chunking);
        owned_bytes_ = bytes_needed(row_bytes, chunking, prefetch);
        owned_ = static_cast<std::byte*>(Memory::allocate(owned_bytes_));
        try {
            cut(owned_, size, prefetch.chunks_ahead(size));
        } catch (...) {
            Memory::deallocate(owned_, owned_bytes_);
            throw;
        }
    }

    /// Over memory of the caller's, which outlives the ring. @throws configuration_error if it is smaller than bytes_needed()
    explicit basic_ring(std::span<std::byte> memory, std::uint64_t row_bytes = 0, Chunking chunking = {}, Prefetch prefetch = {}) {
        const std::uint64_t size = checked_slot_size(row_bytes, chunking);
        if (const bytes needed = bytes_needed(row_bytes, chunking, prefetch); memory.size() < needed) {
            throw configuration_error("penstock: this ring needs " + std::to_string(needed) + " bytes, " + std::to_string(memory.size()) +
                                      " were given");
        }
        cut(memory.data(), size, prefetch.chunks_ahead(size));
    }

    basic_ring(const basic_ring&) = delete;
    basic_ring& operator=(const basic_ring&) = delete;

    ~basic_ring() {
        for (detail::ring_slots::entry& e : state_.entries) {
            e.copies.wait_quietly();
        }
        if constexpr (allocating_memory<Memory>) {
            if (owned_ != nullptr) {
                Memory::deallocate(owned_, owned_bytes_);
            }
        }
    }

    [[nodiscard]] std::size_t slot_bytes() const noexcept { return state_.slot_bytes; }
    [[nodiscard]] std::uint32_t slots() const noexcept { return static_cast<std::uint32_t>(state_.entries.size()); }

    /// The slot that was filled longest ago. Waits until its holder has returned it and its copies are over. False once the ring is closed.
    /// @throws cuda_error with the error of such a copy
    [[nodiscard]] slot acquire() {
        std::unique_lock lock(state_.mutex);
        const auto next = [&]() -> detail::ring_slots::entry& { return state_.entries[state_.next.index]; };
        state_.changed.wait(lock, [&] { return state_.closed || !next().taken; });
        if (state_.closed) {
            return {};
        }
        detail::ring_slots::entry& mine = next();
        mine.taken = true;
        state_.next.advance(slots());
        lock.unlock();
        slot s(&state_, &mine);  // returns the slot if a copy out of it has failed
        mine.copies.wait();
        return s;
    }

    /// No slot is handed out any more; threads that wait for one get a false slot. Slots that are out stay good.
    void close() {
        const std::lock_guard lock(state_.mutex);
        state_.closed = true;
        state_.changed.notify_all();
    }

private:
    static constexpr std::uint64_t slot_size(std::uint64_t row_bytes, const Chunking& chunking) noexcept {
        return larger<std::uint64_t>(chunking.bytes_per_chunk(row_bytes, 0), 1);
    }

    static std::uint64_t checked_slot_size(std::uint64_t row_bytes, const Chunking& chunking) {
        if (row_bytes == 0 && chunking.bytes_per_chunk(0, 2) != chunking.bytes_per_chunk(0, 4)) {
            throw configuration_error("penstock: a ring whose chunks are whole rows needs to know how many bytes a row has");
        }
        return slot_size(row_bytes, chunking);
    }

    void cut(std::byte* data, std::uint64_t size, std::uint32_t count) {
        state_.slot_bytes = size;
        for (std::uint32_t i = 0; i < count; ++i) {
            state_.entries.emplace_back().data = data + i * round_up(size, penstock::memory::page_bytes);
        }
    }

    std::byte* owned_ = nullptr;
    std::size_t owned_bytes_ = 0;
    detail::ring_slots state_;
};

namespace detail {

template <class... Ps>
struct make_ring {
    PENSTOCK_CHECK_POLICIES("ring", Ps...);
    static_assert(axis_count<axis::scheduling, Ps...> == 0, "penstock: ring is first in, first out, so it takes no scheduler");
    static_assert(axis_count<axis::eviction, Ps...> == 0, "penstock: ring keeps nothing, so it takes no eviction rule");
    using type =
        basic_ring<pick_policy<axis::memory, memory::pinned, Ps...>, pick_policy<axis::chunking, chunking::fixed<bytes{8u << 20}>, Ps...>,
                   pick_policy<axis::prefetch, prefetch::depth<3>, Ps...>>;
};

}  // namespace detail

/// A ring from policies in any order. Defaults: pinned memory, slots of 8 MiB, three of them.
template <class... Ps>
using ring = typename detail::make_ring<Ps...>::type;

}  // namespace penstock::inline v0_1

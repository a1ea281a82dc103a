#pragma once

#include <penstock/buffer/free_list.hpp>
#include <penstock/buffer/host_region.hpp>

#include <memory>
#include <mutex>
#include <optional>
#include <span>

namespace penstock::inline v0_1 {

namespace detail {

/// What an arena and its leases share: the memory goes when the last of them does.
template <class Pinning>
struct arena_state {
    arena_state(std::size_t size, const arena_options& options, Pinning pinning)
        : region(size, options, std::move(pinning)), data(region.data()), size(size), free(size) {}
    explicit arena_state(std::span<std::byte> memory) : data(memory.data()), size(memory.size()), free(memory.size()) {}

    host_region<Pinning> region;  ///< empty over the caller's memory
    std::byte* data;
    std::size_t size;
    std::mutex mutex;
    free_list free;
};

}  // namespace detail

/// A part of an arena, returned to it by the destructor. Move-only. It may outlive the arena, whose memory then lives as long as it.
template <class Pinning>
class basic_lease {
public:
    basic_lease() = default;
    basic_lease(basic_lease&& other) noexcept { swap(other); }
    basic_lease& operator=(basic_lease&& other) noexcept {
        basic_lease taken(std::move(other));
        swap(taken);
        return *this;
    }
    ~basic_lease() {
        if (from_ != nullptr) {
            const std::lock_guard lock(from_->mutex);
            from_->free.give_back(static_cast<std::uint64_t>(data_ - from_->data), size_);
        }
    }

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data_, size_}; }

private:
    template <class>
    friend class basic_arena;

    basic_lease(std::shared_ptr<detail::arena_state<Pinning>> from, std::byte* data, std::size_t size)
        : from_(std::move(from)), data_(data), size_(size) {}

    void swap(basic_lease& other) noexcept {
        std::swap(from_, other.from_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }

    std::shared_ptr<detail::arena_state<Pinning>> from_;
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

/// One region of host memory, given out in parts. Pinned when a device is named: by the fastest way that works (huge pages, first touch by
/// several threads, on the NUMA node of the GPU, registered), stepping down to smaller pieces, to cudaHostAlloc and to pageable memory;
/// `how()` says which way was taken. Parts are found first fit and may be taken and returned by several threads. Move-only.
template <class Pinning>
class basic_arena {
public:
    using lease_type = basic_lease<Pinning>;

    /// Host memory that an arena of this size takes: whole pages.
    [[nodiscard]] static constexpr std::size_t bytes_needed(std::size_t size) noexcept { return round_up(size, 4096); }

    /// @throws out_of_memory when not even pageable memory is left
    explicit basic_arena(std::size_t size, arena_options options = {}, Pinning pinning = {})
        : state_(std::make_shared<detail::arena_state<Pinning>>(size, options, std::move(pinning))) {}

    /// Over memory of the caller's, which outlives the arena and its leases. @pre 256-byte aligned
    explicit basic_arena(std::span<std::byte> memory) : state_(std::make_shared<detail::arena_state<Pinning>>(memory)) {}

    [[nodiscard]] std::byte* data() const noexcept { return state_->data; }
    [[nodiscard]] std::size_t size() const noexcept { return state_->size; }
    [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {state_->data, state_->size}; }

    /// Whether the arena pinned its memory; false over the caller's.
    [[nodiscard]] bool pinned() const noexcept { return state_->region.pinned(); }

    /// "huge pages, registered", "cudaHostAlloc (why not registered)", "pages of 4 KiB, pageable (why not pinned)", "memory of the caller".
    [[nodiscard]] std::string how() const {
        return state_->region.data() == nullptr && size() > 0 ? "memory of the caller" : state_->region.how();
    }

    [[nodiscard]] std::size_t free_bytes() const {
        const std::lock_guard lock(state_->mutex);
        return state_->free.free_bytes();
    }

    /// A part of `size` bytes at a multiple of `alignment`. Zero bytes give an empty lease. @throws out_of_memory
    [[nodiscard]] lease_type take(std::size_t size, std::size_t alignment = placement_alignment) {
        if (std::optional<lease_type> part = try_take(size, alignment)) {
            return std::move(*part);
        }
        const std::lock_guard lock(state_->mutex);
        throw out_of_memory("penstock: an arena of " + to_string(penstock::bytes{this->size()}) + " has no " +
                            to_string(penstock::bytes{size}) + " in one piece: " + to_string(penstock::bytes{state_->free.free_bytes()}) +
                            " are free, " + to_string(penstock::bytes{state_->free.longest()}) + " of them together");
    }

    /// As take(), with nothing instead of an exception.
    [[nodiscard]] std::optional<lease_type> try_take(std::size_t size, std::size_t alignment = placement_alignment) {
        if (size == 0) {
            return lease_type();
        }
        const std::lock_guard lock(state_->mutex);
        const std::optional<std::uint64_t> at = state_->free.take(size, alignment);
        return at ? std::optional<lease_type>(lease_type(state_, state_->data + *at, size)) : std::nullopt;
    }

private:
    std::shared_ptr<detail::arena_state<Pinning>> state_;
};

using arena = basic_arena<detail::cuda_pinning>;
using lease = basic_lease<detail::cuda_pinning>;

}  // namespace penstock::inline v0_1

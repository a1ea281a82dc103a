#pragma once

#include <penstock/buffer/arena.hpp>
#include <penstock/buffer/free_list.hpp>
#include <penstock/buffer/host_memory.hpp>
#include <penstock/cuda/event.hpp>
#include <penstock/policy/memory.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace penstock::inline v0_1::detail {

/// A part of staging memory that a chunk, or a part of one, passes through.
template <class Marker>
struct staging_slot {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    Marker copied{waiting::sleep};  ///< the last copy out of it: until that is over, its memory must not be filled
    cudaStream_t stream = nullptr;  ///< of that copy
    int device = -1;                ///< of that stream

    [[nodiscard]] bool goes_with(const staging_slot& other) const noexcept { return stream == other.stream && device == other.device; }
};

/// The host memory through which bytes reach a device: room for `slots` slots, each of which may be cut to what is needed, so that of small
/// chunks there are more. The last slots are kept for what is on demand, so that what waits for its turn on the link never has them all. The
/// lowest free memory goes first, which a cache, or a virtual disk's host, still has. Pinned memory comes from
/// an arena. If not all can be had, it makes do with fewer slots, then with smaller ones; if none can be pinned, with pageable ones. Does
/// not lock: its owner does. The destructor waits for the copies.
/// @tparam Marker an event or a test's stand-in: record(), over(), synchronize(), synchronize_quietly()
template <class Memory, class Pinning = cuda_pinning, class Marker = event>
class staging {
public:
    using slot = staging_slot<Marker>;

    [[nodiscard]] static constexpr std::size_t bytes_needed(std::size_t slot_bytes, std::uint32_t slots) noexcept {
        return slot_stride(slot_bytes) * slots;
    }

    /// A slot's bytes may begin anywhere in its first page: see phase_of().
    [[nodiscard]] static constexpr std::size_t slot_stride(std::size_t slot_bytes) noexcept {
        return round_up(slot_bytes, memory::page_bytes) + memory::page_bytes;
    }

    /// @param kept slots for what is on demand, of those that there are; at least one is for all
    explicit staging(std::uint32_t kept = 0) : kept_slots_(kept) {}
    staging(const staging&) = delete;
    staging& operator=(const staging&) = delete;

    ~staging() {
        for (const slot& s : all_) {
            s.copied.synchronize_quietly();
        }
        if constexpr (!in_arena) {
            Memory::deallocate(data_, bytes_);
        }
    }

    /// Takes at most half of the host memory that the machine, or a container, has left. @throws out_of_memory, cuda_error; it then holds
    /// nothing. @pre nothing was allocated before
    void allocate(std::size_t slot_bytes, std::uint32_t slots, int device, Pinning pinning = {},
                  std::uint64_t memory_left = available_host_memory()) {
        slots = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(memory_left / 2 / slot_stride(slot_bytes), 1, slots));
        if constexpr (in_arena) {
            std::uint32_t count = slots;
            std::size_t size = slot_bytes;
            arena_.emplace(bytes_needed(size, count), arena_options{.device = device}, pinning);
            while (!arena_->pinned() && (count > 1 || size > least_slot_bytes)) {
                count > 1 ? count /= 2 : size = larger(least_slot_bytes, size / 2);
                arena_.reset();
                arena_.emplace(bytes_needed(size, count), arena_options{.device = device}, pinning);
            }
            how_ = arena_->how();
            if (!arena_->pinned() && bytes_needed(size, count) < bytes_needed(slot_bytes, slots)) {
                count = slots;
                size = slot_bytes;
                arena_.reset();
                arena_.emplace(bytes_needed(size, count), arena_options{}, pinning);
            }
            divide(arena_->data(), size, count);
        } else {
            for (std::uint32_t count = slots;; count /= 2) {
                try {
                    data_ = static_cast<std::byte*>(Memory::allocate(bytes_needed(slot_bytes, count)));
                    divide(data_, slot_bytes, count);
                    how_ = "allocated";
                    break;
                } catch (const out_of_memory&) {
                    if (count == 1) {
                        throw;
                    }
                }
            }
        }
    }

    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] std::size_t slot_bytes() const noexcept { return slot_bytes_; }  ///< of a whole one
    [[nodiscard]] std::size_t slots() const noexcept { return bytes_ / larger<std::size_t>(slot_stride(slot_bytes_), 1); }
    [[nodiscard]] const std::string& how() const noexcept { return how_; }

    /// Whether take() gives a slot now, or may when copies are over.
    [[nodiscard]] bool available(bool on_demand) const noexcept {
        return free_->longest() >= slot_stride(slot_bytes_) || !copying_.empty() ||
               (on_demand && kept_->longest() >= slot_stride(slot_bytes_));
    }

    /// A whole slot, if there is memory for it or copies are over whose memory it can have.
    [[nodiscard]] slot* take(bool on_demand) {
        const bool several = std::any_of(copying_.begin(), copying_.end(), [&](const slot* s) { return !s->goes_with(*copying_.front()); });
        for (auto at = copying_.begin(); at != copying_.end();) {
            if ((*at)->copied.over()) {
                put_back(**at);
                at = copying_.erase(at);
            } else if (several) {
                ++at;
            } else {
                break;  // those behind it are not over either
            }
        }
        std::optional<std::uint64_t> at = free_->take(slot_stride(slot_bytes_), memory::page_bytes);
        if (!at && on_demand) {
            at = kept_->take(slot_stride(slot_bytes_), memory::page_bytes);
            at = at ? std::optional(*at + kept_from_) : at;
        }
        if (!at) {
            return nullptr;
        }
        if (idle_.empty()) {
            idle_.push_back(&all_.emplace_back());
        }
        slot* fresh = idle_.back();
        idle_.pop_back();
        fresh->data = base_ + *at;
        fresh->bytes = slot_stride(slot_bytes_);
        return fresh;
    }

    /// Makes a whole slot, which nothing was put in yet, one of `bytes` bytes, in the lowest memory there is for that.
    void cut(slot& s, std::size_t bytes) {
        bytes = round_up(bytes, memory::page_bytes);
        if (bytes < s.bytes) {
            const bool kept = is_kept(s);
            give_back_memory(s);
            s.data = base_ + (kept ? kept_from_ + *kept_->take(bytes, memory::page_bytes)
                                   : *free_->take(bytes, memory::page_bytes));  // at least where it was
            s.bytes = bytes;
        }
    }

    /// Returns a slot from which a copy was enqueued, or begun to be.
    void give_back(slot* used) { copying_.push_back(used); }

    /// Returns a slot that was not used.
    void give_back_unused(slot* fresh) { put_back(*fresh); }

private:
    /// Chunks that are larger than a slot go through it slot by slot: pinned slots of this size are better than large ones that are not.
    static constexpr std::size_t least_slot_bytes = std::size_t{1} << 20;

    static constexpr bool in_arena = std::is_same_v<Memory, memory::pinned>;

    void divide(std::byte* data, std::size_t slot_bytes, std::uint32_t count) {
        base_ = data;
        slot_bytes_ = slot_bytes;
        bytes_ = bytes_needed(slot_bytes, count);
        kept_from_ = (count - smaller(kept_slots_, count - 1)) * slot_stride(slot_bytes);
        free_.emplace(kept_from_);
        kept_.emplace(bytes_ - kept_from_);
    }

    [[nodiscard]] bool is_kept(const slot& s) const noexcept { return s.data >= base_ + kept_from_; }

    void give_back_memory(const slot& s) {
        const auto at = static_cast<std::uint64_t>(s.data - base_);
        is_kept(s) ? kept_->give_back(at - kept_from_, s.bytes) : free_->give_back(at, s.bytes);
    }

    void put_back(slot& s) {
        give_back_memory(s);
        idle_.push_back(&s);
    }

    std::optional<basic_arena<Pinning>> arena_;
    std::byte* data_ = nullptr;  ///< of a memory kind that no arena serves
    std::byte* base_ = nullptr;
    std::size_t bytes_ = 0;
    std::size_t slot_bytes_ = 0;
    std::uint32_t kept_slots_;
    std::uint64_t kept_from_ = 0;
    std::optional<free_list> free_;
    std::optional<free_list> kept_;  ///< from kept_from_ on
    std::deque<slot> all_;           ///< ever made: their events are used again
    std::vector<slot*> idle_;        ///< without memory
    std::deque<slot*> copying_;      ///< a copy out of them may run, the oldest first
    std::string how_;
};

}  // namespace penstock::inline v0_1::detail

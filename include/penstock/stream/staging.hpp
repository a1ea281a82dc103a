#pragma once

#include <penstock/buffer/arena.hpp>
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

/// A slot of staging memory and the event of the last copy out of it: until that has passed, the slot must not be filled.
template <class Marker>
struct staging_slot {
    std::byte* data = nullptr;
    Marker copied{waiting::sleep};
    cudaStream_t stream = nullptr;  ///< of that copy
};

/// The host memory through which bytes reach a device: equal slots, each filled with one chunk, or a part of one, at a time. Pinned slots come from an arena. If not all can be had, it makes do with fewer, then with smaller ones;
/// if none can be pinned, with pageable ones. Does not lock: its owner does. The destructor waits for the copies.
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

    staging() = default;
    staging(const staging&) = delete;
    staging& operator=(const staging&) = delete;

    ~staging() {
        for (const slot& s : slots_) {
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
            cut(arena_->data(), size, count);
        } else {
            for (std::uint32_t count = slots;; count /= 2) {
                try {
                    data_ = static_cast<std::byte*>(Memory::allocate(bytes_needed(slot_bytes, count)));
                    cut(data_, slot_bytes, count);
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

    [[nodiscard]] bool allocated() const noexcept { return !slots_.empty(); }
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] std::size_t slot_bytes() const noexcept { return slot_bytes_; }
    [[nodiscard]] std::size_t slots() const noexcept { return slots_.size(); }
    [[nodiscard]] const std::string& how() const noexcept { return how_; }

    [[nodiscard]] bool available() const noexcept { return !free_.empty(); }

    /// Where the readers are the slower ones, the slot whose copy was over last: the cache still has it. Where the link is, the one that was
    /// returned longest ago; its copy may still run. Where copies of several streams run, one whose copy is over, or nothing: any may be
    /// the next to end, and who waits for one of a stream that is held up would wait in vain. @pre available()
    [[nodiscard]] slot* take() {
        auto at = free_.begin();
        const auto elsewhere = [&](const slot* s) { return s->stream != free_.front()->stream; };
        if (std::any_of(free_.begin(), free_.end(), elsewhere)) {
            at = std::find_if(free_.begin(), free_.end(), [](const slot* s) { return s->copied.over(); });
            if (at == free_.end()) {
                return nullptr;
            }
        } else if (free_.front()->copied.over()) {
            at = std::prev(std::find_if(free_.rbegin(), free_.rend(), [](const slot* s) { return s->copied.over(); }).base());
        }
        slot* next = *at;
        free_.erase(at);
        return next;
    }

    /// Returns a slot from which a copy was enqueued.
    void give_back(slot* used) { free_.push_back(used); }

    /// Returns a slot that was not used: it is the next to be taken.
    void give_back_unused(slot* fresh) { free_.push_front(fresh); }

private:
    /// Chunks that are larger than a slot go through it slot by slot: pinned slots of this size are better than large ones that are not.
    static constexpr std::size_t least_slot_bytes = std::size_t{1} << 20;

    static constexpr bool in_arena = std::is_same_v<Memory, memory::pinned>;

    void cut(std::byte* data, std::size_t slot_bytes, std::uint32_t count) {
        slot_bytes_ = slot_bytes;
        bytes_ = bytes_needed(slot_bytes, count);
        slots_.resize(count);
        for (std::uint32_t i = 0; i < count; ++i) {
            slots_[i].data = data + i * slot_stride(slot_bytes);
            free_.push_back(&slots_[i]);
        }
    }

    std::optional<basic_arena<Pinning>> arena_;
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
    std::size_t slot_bytes_ = 0;
    std::vector<slot> slots_;
    std::deque<slot*> free_;
    std::string how_;
};

}  // namespace penstock::inline v0_1::detail

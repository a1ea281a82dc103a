#pragma once

#include <penstock/cuda/event.hpp>
#include <penstock/stream/ticket.hpp>

#include <cstdint>
#include <vector>

namespace penstock::inline v0_1 {

/// A guess that a layer is going to need an expert.
struct expert_hint {
    std::uint32_t layer = 0;
    std::uint32_t expert = 0;
    float confidence = 1;  ///< of several guesses the surest are brought first
};

/// What a store does with guesses.
struct hint_limits {
    float least_confidence = 0;     ///< below it a guess is not taken
    std::uint32_t on_the_way = 8;   ///< experts at a time, at most
    std::uint64_t stale_after = 0;  ///< steps after which an expert that is still on its way is dropped; 0: those of a pass over all layers
};

namespace detail {

/// An expert that is brought because of a guess. Its slot is filling until all of it is there, or it has been dropped.
struct hinted_fill {
    std::uint32_t key = 0;
    std::uint32_t slot = 0;
    std::int64_t host_slot = -1;  ///< where it comes from, pinned meanwhile; negative: from the files
    float confidence = 0;
    std::uint64_t step = 0;  ///< in which it was guessed
    std::uint64_t bytes = 0;
    bool dropped = false;
    ticket load{};
    event copied{waiting::spin};  ///< on a device: behind its copies, once all of them are enqueued
    bool marked = false;

    /// Whether nothing of it is on its way any more. @param way the stream of its copies, null on the host
    [[nodiscard]] bool over(cudaStream_t way) {
        if (!load.done()) {
            return false;
        }
        if (way != nullptr && !marked) {
            copied.record(way);
            marked = true;
        }
        return copied.ready();
    }
};

}  // namespace detail
}  // namespace penstock::inline v0_1

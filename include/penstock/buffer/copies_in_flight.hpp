#pragma once

#include <penstock/cuda/event.hpp>
#include <penstock/cuda/stream.hpp>

#include <algorithm>
#include <vector>

namespace penstock::inline v0_1 {

/// The copies that may still read or write a piece of memory, so that it can outlive them. Not thread-safe: its owner locks.
/// A copy that is captured into a graph is not counted: it runs whenever the graph does, and the memory must outlive the graph.
class copies_in_flight {
public:
    copies_in_flight() = default;
    copies_in_flight(copies_in_flight&&) noexcept = default;
    copies_in_flight& operator=(copies_in_flight&&) noexcept = default;

    /// Remembers what was enqueued on `stream` so far. If that cannot be done, waits for it instead. @throws cuda_error
    void remember(cudaStream_t stream) {
        if (is_capturing(stream)) {
            return;
        }
        try {
            const auto done = std::find_if(events_.begin(), events_.end(), [](const event& e) { return e.ready(); });
            event& last = done != events_.end() ? *done : events_.emplace_back(waiting::sleep);
            last.record(stream);
        } catch (const error&) {
            check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
            throw;
        }
    }

    /// Returns when all of them are done. @throws cuda_error
    void wait() {
        for (const event& e : events_) {
            e.synchronize();
        }
        events_.clear();
    }

    /// For destructors.
    void wait_quietly() noexcept {
        for (const event& e : events_) {
            e.synchronize_quietly();
        }
    }

private:
    std::vector<event> events_;
};

}  // namespace penstock::inline v0_1

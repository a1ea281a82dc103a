#pragma once

#include <penstock/cuda/event.hpp>
#include <penstock/stream/load_queue.hpp>

#include <deque>

namespace penstock::inline v0_1::detail {

/// Copies to one device that are not on demand and wait for room on its copy engine, on which only a few of them may be at a time, so that
/// an urgent copy does not stand behind a whole load. One thread at a time serves a window: it waits for room, chooses the most urgent copy
/// and enqueues it; others leave their chunks here and go on. Does not lock: its owner does, save for the markers, which are the server's.
template <class Marker, class Slot>
class issue_window {
public:
    /// A chunk that is ready to be copied.
    struct entry {
        chunk_job what;
        Slot* slot = nullptr;  ///< holds the bytes; null: they are taken from where they lie
        std::uint64_t reads = 0;
    };

    explicit issue_window(std::uint32_t copies) {
        for (std::uint32_t i = 0; i < copies; ++i) {
            copied_.emplace_back(waiting::sleep);
        }
    }

    /// Whether the caller has to serve the window now; it then goes on until take() or take_failed() leaves it empty.
    [[nodiscard]] bool push(entry e) {
        entries_.push_back(std::move(e));
        return !std::exchange(served_, true);
    }

    /// Takes an entry of a load that has failed, if there is one: it is not copied.
    [[nodiscard]] std::optional<entry> take_failed() {
        return take(std::find_if(entries_.begin(), entries_.end(), [](const entry& e) { return e.what.load->error != nullptr; }));
    }

    /// Takes the most urgent entry, of several the one that came first.
    [[nodiscard]] std::optional<entry> take_most_urgent() {
        return take(std::min_element(entries_.begin(), entries_.end(), [](const entry& a, const entry& b) { return level(a) < level(b); }));
    }

    /// Whether anything is left; if not, the server is released.
    [[nodiscard]] bool go_on() { return served_ = !entries_.empty(); }

    /// For the server: stands for the copy after which there is room for one more, and is recorded behind that one.
    [[nodiscard]] Marker& oldest_copy() noexcept { return copied_.front(); }
    void became_newest() {
        copied_.push_back(std::move(copied_.front()));
        copied_.pop_front();
    }

private:
    using iterator = typename std::deque<entry>::iterator;

    static urgency level(const entry& e) {
        const load_state& load = *e.what.load;
        return load.requests[load.chunks[e.what.chunk].request].what.level;
    }

    std::optional<entry> take(iterator at) {
        if (at == entries_.end()) {
            return std::nullopt;
        }
        std::optional<entry> taken(std::move(*at));
        entries_.erase(at);
        return taken;
    }

    std::deque<entry> entries_;
    bool served_ = false;
    std::deque<Marker> copied_;  ///< of the last copies, the oldest first
};

}  // namespace penstock::inline v0_1::detail

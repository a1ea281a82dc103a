#pragma once

#include <penstock/cuda/event.hpp>
#include <penstock/stream/filling.hpp>

#include <algorithm>
#include <deque>
#include <optional>

namespace penstock::inline v0_1::detail {

/// Copies to one device that are not on demand and wait for room on its copy engine, on which only a few of them may be at a time, so that
/// an urgent copy does not stand behind a whole load. One thread at a time serves a window: it waits for room, chooses the most urgent copy
/// and enqueues it; others leave their chunks here and go on. Does not lock: its owner does, save for the markers, which are the server's.
/// @tparam Filling a shared filling that is ready to be copied
template <class Marker, class Filling>
class issue_window {
public:
    explicit issue_window(std::uint32_t copies) {
        for (std::uint32_t i = 0; i < copies; ++i) {
            copied_.emplace_back(waiting::sleep);
        }
    }

    /// Whether the caller has to serve the window now; it then goes on until take() or take_failed() leaves it empty.
    [[nodiscard]] bool push(Filling e) {
        entries_.push_back(std::move(e));
        return !std::exchange(served_, true);
    }

    /// Takes an entry of a load that has failed, if there is one: it is not copied.
    [[nodiscard]] std::optional<Filling> take_failed() {
        return take(std::find_if(entries_.begin(), entries_.end(), [](const Filling& e) { return e->load().error != nullptr; }));
    }

    /// Takes the most urgent entry, of several the one that came first.
    [[nodiscard]] std::optional<Filling> take_most_urgent() {
        return take(
            std::min_element(entries_.begin(), entries_.end(), [](const Filling& a, const Filling& b) { return level(a) < level(b); }));
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
    using iterator = typename std::deque<Filling>::iterator;

    static urgency level(const Filling& e) { return e->load().requests[e->plan().request].what.level; }

    std::optional<Filling> take(iterator at) {
        if (at == entries_.end()) {
            return std::nullopt;
        }
        std::optional<Filling> taken(std::move(*at));
        entries_.erase(at);
        return taken;
    }

    std::deque<Filling> entries_;
    bool served_ = false;
    std::deque<Marker> copied_;  ///< of the last copies, the oldest first
};

}  // namespace penstock::inline v0_1::detail

#pragma once

#include <penstock/cuda/event.hpp>
#include <penstock/policy/governor.hpp>

#include <algorithm>
#include <chrono>
#include <deque>
#include <optional>
#include <utility>

namespace penstock::inline v0_1::detail {

/// Chunks that are ready to be copied to one device and wait for room on its copy engine, on which only a few of them may be at a time, so
/// that an urgent copy does not stand behind a whole load. One thread at a time serves a window: it waits for room, takes whose turn it is and
/// enqueues it; others leave their chunks here and go on. What goes on the engine without waiting here is told to it, and passes what is not
/// on demand. Has no clock and does not lock: its owner does, save for the marker of oldest_copy(), which is the server's.
/// @tparam Entry points to what has wanted() (the request as it is now), bytes(), failed() and as_it_lies()
template <class Scheduler, class Marker, class Entry>
class issue_window {
public:
    using time = std::chrono::nanoseconds;

    explicit issue_window(std::uint32_t copies) : on_engine_(copies) {}

    // ---- entries

    void push(Entry e) { entries_.push_back(std::move(e)); }

    /// Whether the caller is now the one that serves the window.
    [[nodiscard]] bool serve() noexcept { return !std::exchange(served_, true); }
    [[nodiscard]] bool unserved() const noexcept { return !served_ && !entries_.empty(); }

    /// The server goes, though entries are left, since none may go yet: before `again` nobody has to look.
    void leave(time again) noexcept {
        served_ = false;
        not_before_ = again;
    }
    [[nodiscard]] time not_before() const noexcept { return not_before_; }

    /// Whether anything is left; if not, the server is released.
    [[nodiscard]] bool go_on() noexcept { return served_ = !entries_.empty(); }

    /// Takes an entry of a load that has failed, if there is one: it is not copied.
    [[nodiscard]] std::optional<Entry> take_failed() {
        return taken(std::find_if(entries_.begin(), entries_.end(), [](const Entry& e) { return e->failed(); }));
    }

    /// Takes whose turn it is: of those that may go now the first by the scheduler's precedence, of equal ones the first that came. Nothing
    /// where none may go; `again` is then when to ask again, if nothing happens before.
    [[nodiscard]] std::optional<Entry> take(time now, const link_sight& sight, time& again) {
        look(now, sight);
        again = urgent_beside() ? time::max() : governor_.may_go(now);
        const bool all_may = again <= now;
        auto best = entries_.end();
        for (auto e = entries_.begin(); e != entries_.end(); ++e) {
            if ((all_may || on_demand(*e)) && (best == entries_.end() || before(*e, *best))) {
                best = e;
            }
        }
        if (best != entries_.end() && !on_demand(*best)) {
            governor_.went(now, (*best)->bytes());
        }
        return taken(best);
    }

    /// Tells the governor what is seen.
    void look(time now, link_sight sight) {
        sight.on_demand += urgent_beside() ? 1u : 0u;
        for (const Entry& e : entries_) {
            sight.on_demand += on_demand(e) ? 1u : 0u;
        }
        governor_.look(now, sight);
    }

    /// Whether one more chunk that is copied as it lies, and takes no slot, should be chosen: the next one only, so that what comes later and
    /// is more urgent can still be chosen before the rest.
    [[nodiscard]] bool wants_one(bool urgent) const noexcept {
        return std::none_of(entries_.begin(), entries_.end(), [&](const Entry& e) { return e->as_it_lies() && (!urgent || on_demand(e)); });
    }

    // ---- copies on the engine, for the server

    struct copy {
        Marker copied{waiting::spin};  // one that can be slept on costs the engine an interrupt a copy
        std::uint64_t bytes = 0;       ///< 0: nothing, or seen by the governor
        time enqueued{0};
    };

    /// After which there is room for one more.
    [[nodiscard]] copy& oldest_copy() noexcept { return on_engine_.front(); }
    [[nodiscard]] copy& newest_copy() noexcept { return on_engine_.back(); }

    /// oldest_copy() has been recorded behind a new one.
    void became_newest(std::uint64_t bytes, time enqueued) {
        on_engine_.push_back(std::move(on_engine_.front()));
        on_engine_.pop_front();
        newest_copy().bytes = bytes;
        newest_copy().enqueued = enqueued;
    }

    /// After a look(), so that what slowed it down is known: a copy was seen to end at `now`; without a time it has ended, but nobody saw when.
    void ended(copy& c, std::optional<time> now) noexcept {
        if (const std::uint64_t size = std::exchange(c.bytes, 0); size > 0 && now && last_end_) {
            const bool alone = *last_end_ <= c.enqueued;
            governor_.arrived(*now, size, *now - (alone ? c.enqueued : *last_end_), alone);
        }
        last_end_ = now;
    }

    // ---- copies on demand that do not wait here

    /// Some are about to be enqueued. @return what is to be recorded behind them
    [[nodiscard]] Marker begin_urgent() {
        ++enqueuing_;
        if (spare_.empty()) {
            return Marker(waiting::spin);
        }
        Marker m = std::move(spare_.back());
        spare_.pop_back();
        return m;
    }
    void end_urgent(Marker m) {
        --enqueuing_;
        urgent_.push_back(std::move(m));
    }

private:
    using iterator = typename std::deque<Entry>::iterator;

    static bool on_demand(const Entry& e) noexcept { return e->wanted().level == urgency::on_demand; }

    static bool before([[maybe_unused]] const Entry& a, [[maybe_unused]] const Entry& b) noexcept {
        if constexpr (ranked_scheduler<Scheduler>) {
            return Scheduler::precedence_of(a->wanted()) < Scheduler::precedence_of(b->wanted());
        } else {
            return false;
        }
    }

    [[nodiscard]] bool urgent_beside() {
        while (!urgent_.empty() && urgent_.front().over()) {
            spare_.push_back(std::move(urgent_.front()));
            urgent_.pop_front();
        }
        return enqueuing_ > 0 || !urgent_.empty();
    }

    std::optional<Entry> taken(iterator at) {
        if (at == entries_.end()) {
            return std::nullopt;
        }
        std::optional<Entry> one(std::move(*at));
        entries_.erase(at);
        return one;
    }

    std::deque<Entry> entries_;
    bool served_ = false;
    time not_before_ = time::min();
    std::deque<copy> on_engine_;    ///< the last ones, the oldest first
    std::optional<time> last_end_;  ///< of a copy, if it was seen
    std::uint32_t enqueuing_ = 0;
    std::deque<Marker> urgent_;
    std::deque<Marker> spare_;
    typename governor_of<Scheduler>::type governor_;
};

}  // namespace penstock::inline v0_1::detail

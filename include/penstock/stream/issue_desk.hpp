#pragma once

#include <penstock/stream/filling.hpp>
#include <penstock/stream/issue_window.hpp>
#include <penstock/stream/link_watch.hpp>
#include <penstock/stream/load_book.hpp>
#include <penstock/stream/timeline.hpp>

#include <atomic>
#include <map>
#include <thread>

namespace penstock::inline v0_1::detail {

/// What decides beside the scheduler where chunks to a device go.
struct engine_options {
    std::uint32_t slots_kept = 1;       ///< staging slots for what is on demand, where the scheduler puts that first
    bool on_demand_waits = false;       ///< for its turn on the copy engine, as all else does
    const link_watch* watch = nullptr;  ///< what else is on the link
    timeline* kept = nullptr;           ///< of what happens, where that is wanted
};

/// Where the copies of an engine go on the link: a window for each device. Readers serve the windows when they have nothing to read.
/// @tparam Slot of staging @tparam Link see cuda_link
template <class Scheduler, class Link, class Slot>
class issue_desk : public load_book<Scheduler> {
public:
    using load_engine::mutex;

protected:
    using typename load_book<Scheduler>::locked;
    using load_book<Scheduler>::attempt;
    using load_book<Scheduler>::queue_;
    using load_book<Scheduler>::work_;

    using filling_ptr = std::shared_ptr<filling<Slot>>;
    using window_type = issue_window<Scheduler, typename Link::marker, filling_ptr>;
    using time = typename window_type::time;

    /// @param copies on one device's copy engine at a time, at most
    issue_desk(std::uint32_t copies, const engine_options& how) : how_(how), copies_(larger(copies, 1u)) {}

    /// Enqueues the copies of a filling.
    virtual void send(filling<Slot>& f) = 0;
    /// After a filling: it has been copied, or not.
    virtual void settle(const filling_ptr& f, std::exception_ptr error) = 0;
    /// Whether a reader has something better to do than to wait for a turn.
    virtual bool something_to_read() noexcept = 0;

    /// The time, where a timeline is kept.
    [[nodiscard]] time stamp() const noexcept { return how_.kept == nullptr ? time(0) : now(); }

    /// Enqueues copies of a chunk, and notes it.
    template <class Copy>
    void noted(const load_state& load, std::uint32_t chunk, std::uint64_t bytes, time chosen, Copy&& copy) {
        if (how_.kept == nullptr) {
            return copy();
        }
        std::unique_ptr<copy_clock> clock;
        if constexpr (requires { Link::clock(load.where); }) {
            clock = Link::clock(load.where);
            clock->begin();
        }
        const time start = now();
        copy();
        if (clock != nullptr) {
            clock->end();
        }
        note(load, chunk, bytes, chosen, start, std::move(clock));
    }

    void put_on_link(filling<Slot>& f) {
        noted(f.load(), f.chunk->what.chunk, f.bytes(), f.chunk->chosen, [&] { send(f); });
    }

    /// Notes a chunk that ends now.
    void note(const load_state& load, std::uint32_t chunk, std::uint64_t bytes, time chosen, time start,
              std::unique_ptr<copy_clock> clock = nullptr) {
        const planned_chunk& c = load.chunks[chunk];
        request what;
        {
            const std::lock_guard lock(mutex);
            what = load.requests[c.request].what;
        }
        how_.kept->note({what.id, what.level, c.index, bytes, load.where.device, load.started.time_since_epoch(), chosen, start, now()},
                        std::move(clock));
    }

    /// Leaves a filling to the window of its device. Under the lock, by a reader: the window is its next work, unless somebody serves it.
    void leave_to_window(filling_ptr ready) {
        const int device = ready->load().where.device;
        window_of(device).push(std::move(ready));
        ++news_;
        turns_.notify_all();
        if (something_to_read()) {
            work_.notify_one();
        }
    }

    /// Enqueues copies that wait for no turn: what is not on demand waits until they are over. The first window of a device is made by what
    /// has to wait; copies that were enqueued before it are not known to it.
    template <class Work>
    std::exception_ptr pass_by(const place& where, Work&& enqueue) {
        window_type* window = nullptr;
        std::optional<typename Link::marker> copied;
        {
            const std::lock_guard lock(mutex);
            if (const auto at = windows_.find(where.device); at != windows_.end()) {
                window = &at->second;
                copied.emplace(window->begin_urgent());
            }
        }
        std::exception_ptr error = attempt(enqueue);
        if (window != nullptr) {
            std::exception_ptr lost = attempt([&] { copied->record(where.stream); });
            error = error ? error : lost;
            const std::lock_guard lock(mutex);
            window->end_urgent(std::move(*copied));
        }
        return error;
    }

    /// A window that has entries, and no server. @param at by then it is worth while to look
    [[nodiscard]] window_type* unserved(time at) noexcept {
        const auto found = std::find_if(windows_.begin(), windows_.end(),
                                        [&](const auto& w) { return w.second.unserved() && w.second.not_before() <= at; });
        return found == windows_.end() ? nullptr : &found->second;
    }

    [[nodiscard]] static time now() noexcept { return std::chrono::steady_clock::now().time_since_epoch(); }

    /// Whether a chunk that is copied as it lies should be chosen for one of the devices that have such.
    [[nodiscard]] bool window_wants_one() {
        const auto& devices = queue_.as_they_lie();
        return std::any_of(devices.begin(), devices.end(), [&](const auto& d) { return window_of(d.first).wants_one(queue_.on_demand()); });
    }

    [[nodiscard]] filling_ptr take_failed() {
        for (auto& [device, window] : windows_) {
            if (std::optional<filling_ptr> f = window.take_failed()) {
                return *f;
            }
        }
        return nullptr;
    }

    /// Serves a window, unless somebody does, until it is empty, or until a reader has something to read while nothing may go.
    void serve(locked& lock, window_type& window) {
        if (!window.serve()) {
            return;
        }
        std::exception_ptr error;  // of a copy that somebody else waits for: its slot is free, and the next load reports it
        while (window.go_on()) {
            if (std::optional<filling_ptr> failed = window.take_failed()) {
                lock.unlock();
                settle(*failed, (*failed)->load().error);
                failed.reset();  // the last owner of a load may be this one, and its destructor needs no lock
                lock.lock();
                continue;
            }
            error = await(lock, window, window.oldest_copy());
            time again{};
            std::optional<filling_ptr> next = window.take(now(), sight(), again);
            if (!next) {
                if (something_to_read()) {
                    window.leave(std::min<time>(again, now() + between_looks));
                    return work_.notify_one();
                }
                if (!look_for_end(lock, window)) {
                    turns_.wait_for(lock, std::max(time(0), std::min<time>(again - now(), between_looks)));
                }
                continue;
            }
            lock.unlock();
            if (!error) {
                error = attempt([&] {
                    const time enqueued = now();
                    put_on_link(**next);
                    window.oldest_copy().copied.record((*next)->load().where.stream);
                    window.became_newest((*next)->bytes(), enqueued);
                });
            }
            settle(*next, std::exchange(error, nullptr));
            next.reset();
            lock.lock();
        }
    }

    std::condition_variable turns_;  ///< something happened at a window
    const engine_options how_;

private:
    static constexpr std::chrono::microseconds between_looks{20};  ///< at what a governor watches
    static constexpr std::chrono::microseconds between_polls{2};   ///< of a copy that is about to end
    static constexpr std::chrono::microseconds looking{200};       ///< for the end of a copy, before its server sleeps

    [[nodiscard]] link_sight sight() const noexcept { return how_.watch == nullptr ? link_sight{} : how_.watch->sight(); }

    [[nodiscard]] window_type& window_of(int device) { return windows_.try_emplace(device, copies_).first->second; }

    /// Looks for the end of a copy for a while, or until `enough`. Whether it is over.
    template <class Enough>
    static bool look(const typename Link::marker& copied, Enough&& enough) {
        for (const time until = now() + looking; now() < until && !enough();) {
            if (copied.over()) {
                return true;
            }
            for (const time next = now() + between_polls; now() < next;) {
                std::this_thread::yield();  // each poll keeps others from the driver
            }
        }
        return copied.over();
    }

    /// Returns when a copy is over. A thread that is woken is late by a small chunk, so it looks for it first, and sleeps where that takes long.
    std::exception_ptr await(locked& lock, window_type& window, typename window_type::copy& c) {
        lock.unlock();
        const bool runs = !c.copied.over();
        while (runs && !look(c.copied, [] { return false; })) {
            std::this_thread::sleep_for(between_looks);
        }
        const time end = now();
        std::exception_ptr error = attempt([&] { c.copied.synchronize(); });
        lock.lock();
        window.look(end, sight());
        window.ended(c, runs ? std::optional(end) : std::nullopt);
        return error;
    }

    /// While nothing may go: looks for the end of the newest copy, so that the governor knows how long it took. Whether it runs.
    bool look_for_end(locked& lock, window_type& window) {
        auto& c = window.newest_copy();
        if (std::is_same_v<typename governor_of<Scheduler>::type, governor::none> || c.bytes == 0) {
            return false;
        }
        const std::uint32_t news = news_;
        lock.unlock();
        const bool runs = !c.copied.over();
        const bool over = !runs || look(c.copied, [&] { return news_ != news; });
        const time end = now();
        lock.lock();
        if (over) {
            window.look(end, sight());
            window.ended(c, runs ? std::optional(end) : std::nullopt);
        }
        return !over;
    }

    const std::uint32_t copies_;
    std::map<int, window_type> windows_;  ///< by device
    std::atomic<std::uint32_t> news_{0};  ///< entries that came while somebody served
};

}  // namespace penstock::inline v0_1::detail

#pragma once

#include <penstock/stream/ticket.hpp>

#include <algorithm>
#include <optional>
#include <utility>

namespace penstock::inline v0_1::detail {

/// A chunk in the hands of a thread; without a load, none.
struct chunk_job {
    std::shared_ptr<load_state> load;
    std::uint32_t chunk = 0;
    bool urgent = true;  ///< on demand when it was taken
};

/// The chunks of running loads that nobody has taken, and the scheduler queue that says whose turn it is. Does not lock: its owner does.
///
/// The scheduler is told of a request once, and again when it is promoted; it answers with chunks. An answer for a chunk that is already
/// taken, or of a load that is over, is passed over. So a queue needs no more than push() and next(): where it has change() and cancel(),
/// which spare it such answers, they are used as long as no two loads share the request's number.
template <class Scheduler>
class load_queue {
public:
    /// Puts in the chunks that are not brought by the caller. @throws what the scheduler throws; the load has then failed
    void push(const std::shared_ptr<load_state>& load) {
        for (std::uint32_t i = 0; i < load->chunks.size(); ++i) {
            if (load->routes[i] == route::by_caller) {
                load->taken[i] = 1;
                continue;
            }
            ++load->untaken;
            ++load->untaken_left[load->chunks[i].request];
            load->untaken_staged += load->routes[i] == route::staged ? 1 : 0;
        }
        untaken_ += load->untaken;
        untaken_staged_ += load->untaken_staged;
        try {
            for (std::uint32_t r = 0; r < load->requests.size(); ++r) {
                if (load->untaken_left[r] > 0) {
                    live_[load->requests[r].what.id].push_back({load, r});
                    queue_.push(load->requests[r].what);
                }
            }
        } catch (...) {
            fail(*load, std::current_exception());
            throw;
        }
    }

    /// Makes a request as urgent as can be. Whether that changed anything.
    bool promote(load_state& load, std::uint32_t r) {
        const request& now = load.requests[r].what;
        return change(load, r, urgency::on_demand, now.deadline, now.weight);
    }

    /// Gives what is left of a request another level, deadline and weight. Whether that changed anything. A queue without change() hears
    /// only of what became more urgent, by another push().
    bool change(load_state& load, std::uint32_t r, urgency level, std::uint64_t deadline, std::uint32_t weight) {
        request& now = load.requests[r].what;
        if (load.error || (now.level == level && now.deadline == deadline && now.weight == weight)) {
            return false;
        }
        const request before = std::exchange(now, request{now.id, now.chunks, level, deadline, weight, now.chunk_bytes});
        if (load.untaken_left[r] > 0 && !tell(now) && sooner(now, before)) {
            queue_.push(now);
        }
        return true;
    }

    /// Leaves out the chunks of a request that nobody has taken. Whether there were any.
    bool drop(load_state& load, std::uint32_t r) {
        if (load.error || load.untaken_left[r] == 0) {
            return false;
        }
        const planned_request& q = load.requests[r];
        for (std::uint32_t i = q.first_chunk; i < q.first_chunk + q.what.chunks; ++i) {
            if (load.taken[i] == 0) {
                load.taken[i] = 1;
                load.untaken_staged -= load.routes[i] == route::staged ? 1 : 0;
                untaken_staged_ -= load.routes[i] == route::staged ? 1 : 0;
                load.bytes -= load.chunks[i].bytes;
            }
        }
        const std::uint32_t dropped = std::exchange(load.untaken_left[r], 0);
        load.untaken -= dropped;
        untaken_ -= dropped;
        load.left[r] -= dropped;
        load.chunks_left -= dropped;
        load.dropped[r] = 1;
        if (load.chunks_left == 0) {
            load.seconds = load.elapsed();
        }
        forget(load, r);
        cancel(q.what.id);
        return true;
    }

    void fail(load_state& load, std::exception_ptr why) {
        if (!load.error) {
            load.error = std::move(why);
            load.seconds = load.elapsed();
        }
        untaken_ -= load.untaken;
        untaken_staged_ -= load.untaken_staged;
        load.untaken = load.untaken_staged = 0;
        for (std::uint32_t r = 0; r < load.requests.size(); ++r) {
            if (load.untaken_left[r] > 0) {
                load.untaken_left[r] = 0;
                forget(load, r);
                cancel(load.requests[r].what.id);
            }
        }
    }

    void fail_all(const std::exception_ptr& why) {
        while (!live_.empty()) {
            const std::shared_ptr<load_state> load = live_.begin()->second.front().load;
            fail(*load, why);
        }
    }

    /// The scheduler's next chunk that is still wanted. Nothing where there is none; a scheduler that lost chunks fails all loads.
    [[nodiscard]] chunk_job next() {
        while (untaken_ > 0) {
            std::optional<chunk> answer;
            std::exception_ptr lost;
            try {
                answer = queue_.next();
            } catch (...) {
                lost = std::current_exception();
            }
            if (!answer) {
                fail_all(lost ? lost : std::make_exception_ptr(configuration_error(no_next_chunk)));
                return {};
            }
            if (chunk_job j = take(*answer); j.load != nullptr) {
                return j;
            }
        }
        return {};
    }

    [[nodiscard]] bool empty() const noexcept { return untaken_ == 0; }
    [[nodiscard]] bool needs_slot() const noexcept { return untaken_staged_ > 0; }

    static constexpr const char* no_next_chunk = "penstock: the scheduler names no next chunk, but not all of its requests are done";

private:
    /// A request that has chunks which nobody has taken.
    struct live_request {
        std::shared_ptr<load_state> load;
        std::uint32_t number;
    };

    /// Whether the queue knows now what it is to know of a request. Of requests with the same number it cannot change one.
    bool tell([[maybe_unused]] const request& r) {
        if constexpr (changeable_queue<typename Scheduler::queue>) {
            const auto same = live_.find(r.id);
            return same != live_.end() && same->second.size() == 1 && queue_.change(r);
        }
        return false;
    }

    /// The queue names no more chunks of a request that nobody wants any more.
    void cancel([[maybe_unused]] std::uint64_t id) noexcept {
        if constexpr (cancellable_queue<typename Scheduler::queue>) {
            if (!live_.contains(id)) {
                try {
                    queue_.cancel(id);
                } catch (...) {  // what it still names is passed over
                }
            }
        }
    }

    void forget(const load_state& load, std::uint32_t number) {
        const auto same = live_.find(load.requests[number].what.id);
        if (same == live_.end()) {
            return;
        }
        std::erase_if(same->second, [&](const live_request& l) { return l.load.get() == &load && l.number == number; });
        if (same->second.empty()) {
            live_.erase(same);
        }
    }

    [[nodiscard]] static bool sooner(const request& a, const request& b) noexcept {
        return a.level != b.level ? a.level < b.level : a.deadline < b.deadline;
    }

    /// Loads may share a request number; then the most urgent that lacks this chunk gets it.
    [[nodiscard]] chunk_job take(const chunk& answer) {
        const auto same = live_.find(answer.request);
        if (same == live_.end()) {
            return {};
        }
        const live_request* best = nullptr;
        for (const live_request& l : same->second) {
            const planned_request& q = l.load->requests[l.number];
            if (answer.index < q.what.chunks && l.load->taken[q.first_chunk + answer.index] == 0 &&
                (best == nullptr || sooner(q.what, best->load->requests[best->number].what))) {
                best = &l;
            }
        }
        if (best == nullptr) {
            return {};
        }
        const std::uint32_t number = best->number;
        const planned_request& q = best->load->requests[number];
        chunk_job j{best->load, q.first_chunk + answer.index, q.what.level == urgency::on_demand};
        load_state& load = *j.load;
        load.taken[j.chunk] = 1;
        --load.untaken;
        --untaken_;
        if (load.routes[j.chunk] == route::staged) {
            --load.untaken_staged;
            --untaken_staged_;
        }
        if (--load.untaken_left[number] == 0) {
            forget(load, number);
        }
        ++load.in_flight;
        return j;
    }

    typename Scheduler::queue queue_;
    std::unordered_map<std::uint64_t, std::vector<live_request>> live_;  ///< by the caller's number
    std::uint64_t untaken_ = 0;                                          ///< chunks of all loads that nobody has taken
    std::uint64_t untaken_staged_ = 0;                                   ///< of these, how many need a staging slot
};

}  // namespace penstock::inline v0_1::detail

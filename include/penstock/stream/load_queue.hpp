#pragma once

#include <penstock/stream/ticket.hpp>

#include <algorithm>
#include <map>
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
            } else {
                load->untaken[load->chunks[i].request].add(load->routes[i], 1);
            }
        }
        for (std::uint32_t r = 0; r < load->requests.size(); ++r) {
            count(*load, r, load->untaken[r], 1);
        }
        try {
            for (std::uint32_t r = 0; r < load->requests.size(); ++r) {
                if (load->untaken[r].all > 0) {
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
        const request before = now;
        count(load, r, load.untaken[r], -1);
        now = {now.id, now.chunks, level, deadline, weight, now.chunk_bytes};
        count(load, r, load.untaken[r], 1);
        if (load.untaken[r].all > 0 && !tell(now) && sooner(now, before)) {
            queue_.push(now);
        }
        return true;
    }

    /// Leaves out the chunks of a request that nobody has taken. Whether there were any.
    bool drop(load_state& load, std::uint32_t r) {
        if (load.error || load.untaken[r].all == 0) {
            return false;
        }
        const planned_request& q = load.requests[r];
        for (std::uint32_t i = q.first_chunk; i < q.first_chunk + q.what.chunks; ++i) {
            if (load.taken[i] == 0) {
                load.taken[i] = 1;
                load.bytes -= load.chunks[i].bytes;
            }
        }
        const auto dropped = static_cast<std::uint32_t>(load.untaken[r].all);
        give_up(load, r);
        load.left[r] -= dropped;
        load.chunks_left -= dropped;
        load.dropped[r] = 1;
        if (load.chunks_left == 0) {
            load.seconds = load.elapsed();
        }
        return true;
    }

    void fail(load_state& load, std::exception_ptr why) {
        if (!load.error) {
            load.error = std::move(why);
            load.seconds = load.elapsed();
        }
        for (std::uint32_t r = 0; r < load.requests.size(); ++r) {
            if (load.untaken[r].all > 0) {
                give_up(load, r);
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
        while (!empty()) {
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

    [[nodiscard]] bool empty() const noexcept { return untaken_.all == 0; }
    [[nodiscard]] bool needs_slot() const noexcept { return untaken_.staged > 0; }
    [[nodiscard]] bool on_demand() const noexcept { return on_demand_.all > 0; }
    [[nodiscard]] bool on_demand_needs_slot() const noexcept { return on_demand_.staged > 0; }

    /// Chunks that take no slot and wait for no window.
    [[nodiscard]] bool to_host() const noexcept { return untaken_.all > untaken_.staged + untaken_.as_it_lies; }

    /// Devices that have chunks which are copied as they lie, and how many.
    [[nodiscard]] const std::map<int, std::int64_t>& as_they_lie() const noexcept { return as_they_lie_; }

    static constexpr const char* no_next_chunk = "penstock: the scheduler names no next chunk, but not all of its requests are done";

private:
    /// A request that has chunks which nobody has taken.
    struct live_request {
        std::shared_ptr<load_state> load;
        std::uint32_t number;
    };

    /// Adds what nobody has taken of a request, `times` 1, or takes it away, -1.
    void count(const load_state& load, std::uint32_t r, const untaken_chunks& n, std::int64_t times) {
        untaken_.add(n, times);
        if (load.requests[r].what.level == urgency::on_demand) {
            on_demand_.add(n, times);
        }
        if (n.as_it_lies > 0 && (as_they_lie_[load.where.device] += times * n.as_it_lies) == 0) {
            as_they_lie_.erase(load.where.device);
        }
    }

    /// Nobody will take the rest of a request.
    void give_up(load_state& load, std::uint32_t r) {
        count(load, r, std::exchange(load.untaken[r], {}), -1);
        forget(load, r);
        cancel(load.requests[r].what.id);
    }

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
        untaken_chunks one;
        one.add(load.routes[j.chunk], 1);
        count(load, number, one, -1);
        load.untaken[number].add(one, -1);
        if (load.untaken[number].all == 0) {
            forget(load, number);
        }
        ++load.in_flight;
        return j;
    }

    typename Scheduler::queue queue_;
    std::unordered_map<std::uint64_t, std::vector<live_request>> live_;  ///< by the caller's number
    untaken_chunks untaken_;                                             ///< of all loads
    untaken_chunks on_demand_;                                           ///< of these, on demand
    std::map<int, std::int64_t> as_they_lie_;                            ///< of these, by device
};

}  // namespace penstock::inline v0_1::detail

#pragma once

#include <penstock/stream/load_queue.hpp>

namespace penstock::inline v0_1::detail {

/// What an engine keeps of its loads: the queue of their chunks, what has arrived, who is to be called. Its functions lock.
template <class Scheduler>
class load_book : public load_engine {
public:
    void promote(load_state& load, std::uint32_t request) override {
        tell_workers([&] { return queue_.promote(load, request); });
    }

    void change(load_state& load, std::uint32_t request, urgency level, std::uint64_t deadline, std::uint32_t weight) override {
        tell_workers([&] { return queue_.change(load, request, level, deadline, weight); });
    }

    void drop(load_state& load, std::uint32_t request) override {
        tell_workers([&] { return queue_.drop(load, request); });
        arrived.notify_all();  // those left out may have been the last that someone waited for
    }

protected:
    using locked = std::unique_lock<std::mutex>;

    template <class Work>
    static std::exception_ptr attempt(Work&& work) noexcept {
        try {
            work();
            return nullptr;
        } catch (...) {
            return std::current_exception();
        }
    }

    /// Brings the `wanted` chunks that need no reader, in the order that a scheduler of this kind gives them: `copy(numbers)` enqueues up to
    /// `together` of them and returns calls of the source.
    template <class Copy>
    void bring_here(load_state& load, std::uint64_t wanted, std::size_t together, Copy&& copy) {
        try {
            typename Scheduler::queue order;
            for (const planned_request& q : load.requests) {
                order.push(q.what);
            }
            std::vector<bool> taken(load.chunks.size());
            std::vector<std::uint32_t> next_ones;
            while (wanted > 0) {
                const std::optional<chunk> next = order.next();
                if (!next) {
                    throw configuration_error(load_queue<Scheduler>::no_next_chunk);
                }
                const planned_request& q = load.requests[load.number_of.at(next->request)];
                const std::uint32_t number = q.first_chunk + next->index;
                if (next->index >= q.what.chunks || taken[number] || load.routes[number] != route::by_caller) {
                    continue;
                }
                taken[number] = true;
                next_ones.push_back(number);
                if (--wanted > 0 && next_ones.size() < together) {
                    continue;
                }
                if (load.stop.stop_requested()) {
                    throw cancelled("penstock: the load was cancelled");
                }
                if (failed(load)) {
                    return;
                }
                const std::uint64_t reads = copy(std::span<const std::uint32_t>(next_ones));
                arrive(load, next_ones, reads, nullptr);
                next_ones.clear();
            }
        } catch (...) {
            fail(load, std::current_exception());
        }
    }

    [[nodiscard]] bool failed(const load_state& load) {
        const std::lock_guard lock(mutex);
        return load.error != nullptr;
    }

    /// Counts chunks that have arrived, or ends the load with the error that kept them from arriving.
    void arrive(load_state& load, std::span<const std::uint32_t> chunks, std::uint64_t reads, std::exception_ptr error) {
        const bool failed = error != nullptr;
        bool last = false;
        bool awaited = failed;  // by ticket::wait(), perhaps: who is woken for each chunk keeps the lock from who copies the next
        {
            const std::lock_guard lock(mutex);
            load.reads += reads;
            if (failed) {
                queue_.fail(load, std::move(error));
            } else {
                for (const std::uint32_t n : chunks) {
                    load.bytes_done += load.chunks[n].bytes;
                    awaited = --load.left[load.chunks[n].request] == 0 || awaited;
                }
                last = (load.chunks_left -= chunks.size()) == 0;
                if (last) {
                    load.seconds = load.elapsed();
                } else if (load.stop.stop_requested()) {
                    queue_.fail(load, std::make_exception_ptr(cancelled("penstock: the load was cancelled")));
                    awaited = true;
                }
            }
        }
        if (awaited) {
            arrived.notify_all();
        }
        if (failed) {
            work_.notify_all();
        } else {
            call_back(load, last);
        }
    }

    /// One thread at a time, with growing numbers. Who finds another thread calling back goes on with its work, except with the last
    /// number.
    void call_back(load_state& load, bool last) {
        if (!load.callback) {
            return;
        }
        std::unique_lock turn(load.in_callback, std::defer_lock);
        if (last) {
            turn.lock();
        } else if (!turn.try_lock()) {
            return;
        }
        progress now;
        {
            const std::lock_guard lock(mutex);
            now = {load.bytes_done, load.bytes, load.elapsed()};
            if (load.error || (now.bytes == now.total && !last)) {
                return;  // the thread that brought the last chunk says so
            }
        }
        try {
            load.callback(now);
        } catch (...) {
            {
                const std::lock_guard lock(mutex);
                if (!load.error) {
                    queue_.fail(load, std::current_exception());
                }
            }
            work_.notify_all();
        }
    }

    void leave(load_state& load) {
        bool over = false;
        {
            const std::lock_guard lock(mutex);
            --load.in_flight;
            over = load.over();
        }
        if (over) {
            arrived.notify_all();
        }
    }

    load_queue<Scheduler> queue_;
    std::condition_variable work_;  ///< there is something for a reader to do: see the engine

private:
    /// @param change whether the queue now says something else
    template <class Change>
    void tell_workers(Change&& change) {
        {
            const std::lock_guard lock(mutex);
            if (!change()) {
                return;
            }
        }
        work_.notify_all();
    }
};

}  // namespace penstock::inline v0_1::detail

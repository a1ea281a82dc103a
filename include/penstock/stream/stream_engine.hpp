#pragma once

#include <penstock/stream/link.hpp>
#include <penstock/stream/staging.hpp>
#include <penstock/stream/ticket.hpp>

#include <algorithm>
#include <cstring>
#include <thread>

namespace penstock::inline v0_1::detail {

/// The readers of a weight stream, the scheduler queue that all its loads share, and its staging. One mutex guards the queue, the loads and
/// the staging slots; reading, copying, waiting for an event and calling back happen outside of it.
///
/// The queue is told of a request once, and again when it is promoted; it answers with chunks. An answer for a chunk that is already taken,
/// or of a load that is over, is passed over. So nothing is ever removed from a queue, and its interface needs no such function.
template <class Memory, class Scheduler, class Link = cuda_link>
class stream_engine final : public load_engine {
public:
    /// Copies to a device go through `slots` slots of `slot_bytes`.
    /// @param near the GPU next to which staging should lie; negative: the first that needs it
    stream_engine(int readers, std::size_t slot_bytes, std::uint32_t slots, int near) : slot_bytes_(slot_bytes), slots_(slots), near_(near) {
        threads_.reserve(static_cast<std::size_t>(readers));
        try {
            for (int i = 0; i < readers; ++i) {
                threads_.emplace_back([this] { read_chunks(); });
            }
        } catch (...) {
            stop();
            throw;
        }
    }

    ~stream_engine() override { stop(); }

    /// Ends all loads and joins the readers.
    void stop() noexcept {
        {
            const std::lock_guard lock(mutex);
            stopping_ = true;
            fail_all(std::make_exception_ptr(cancelled("penstock: the weight stream of the load was destroyed")));
        }
        work_.notify_all();
        for (std::thread& t : threads_) {
            if (t.get_id() == std::this_thread::get_id()) {
                t.detach();  // exit() in a callback: the program ends in this reader
            } else {
                t.join();
            }
        }
        threads_.clear();
    }

    /// Allocates the staging unless that has been done.
    void reserve_staging(int near) {
        const std::lock_guard one_at_a_time(reserving_);
        {
            const std::lock_guard lock(mutex);
            if (staging_ != nullptr) {
                return;
            }
        }
        const typename Link::guard on(near);
        auto fresh = std::make_unique<staging_type>();
        fresh->allocate(slot_bytes_, slots_, near);
        const std::lock_guard lock(mutex);
        staging_ = std::move(fresh);
    }

    [[nodiscard]] std::uint64_t staging_bytes() {
        const std::lock_guard lock(mutex);
        return staging_ == nullptr ? 0 : staging_->bytes();
    }

    [[nodiscard]] std::string staging_how() {
        const std::lock_guard lock(mutex);
        return staging_ == nullptr ? "not allocated" : staging_->how();
    }

    /// Hands a load to the readers, then brings here, in the calling thread, what needs no reader.
    /// @throws out_of_memory, cuda_error where staging cannot be had, and what the scheduler throws; errors of the load itself are its ticket's
    void start(const std::shared_ptr<load_state>& load) {
        std::uint64_t here = 0;
        for (const planned_chunk& c : load->chunks) {
            here += brought_by_caller(*load, c) ? 1 : 0;
        }
        if (needs_slot(*load) && here < load->chunks.size()) {
            reserve_staging(near_ >= 0 ? near_ : load->where.device);
        }
        enqueue(load);
        if (here > 0) {
            copy_here(*load, here);
        }
        if (load->chunks.empty()) {
            call_back(*load, true);
        }
        leave(*load);
    }

    void fail(load_state& load, std::exception_ptr why) override {
        {
            const std::lock_guard lock(mutex);
            if (load.chunks_left == 0) {
                return;
            }
            fail_locked(load, std::move(why));
        }
        arrived.notify_all();
    }

    void promote(load_state& load, std::uint64_t request) override {
        {
            const std::lock_guard lock(mutex);
            const std::uint32_t r = load.number_of.at(request);
            if (load.error || load.untaken_left[r] == 0 || load.requests[r].what.level == urgency::on_demand) {
                return;
            }
            load.requests[r].what.level = urgency::on_demand;
            queue_.push(load.requests[r].what);
        }
        work_.notify_all();
    }

private:
    using staging_type = staging<Memory, cuda_pinning, typename Link::marker>;
    using slot_type = typename staging_type::slot;

    /// A request that has chunks which nobody has taken.
    struct live_request {
        std::shared_ptr<load_state> load;
        std::uint32_t number;
    };

    /// A chunk in the hands of a reader; without a load, none.
    struct job {
        std::shared_ptr<load_state> load;
        std::uint32_t chunk = 0;
    };

    /// Whether copies run by themselves after they are enqueued; from pageable memory they are made one at a time, the naive way.
    static constexpr bool copies_run_on = Memory::device_accessible;

    static constexpr const char* no_next_chunk = "penstock: the scheduler names no next chunk, but not all of its requests are done";

    static bool needs_slot(const load_state& load) noexcept { return !load.where.on_host(); }

    /// Memory that a copy can be enqueued from as it lies needs no reader.
    static bool brought_by_caller(const load_state& load, const planned_chunk& c) noexcept {
        return !load.where.on_host() && c.memory != nullptr && (c.memory_is_pinned || !copies_run_on);
    }

    void enqueue(const std::shared_ptr<load_state>& load) {
        {
            const std::lock_guard lock(mutex);
            load->in_flight = 1;  // the calling thread: nobody may see the load as over before it is done
            for (std::uint32_t i = 0; i < load->chunks.size(); ++i) {
                const planned_chunk& c = load->chunks[i];
                if (brought_by_caller(*load, c)) {
                    load->taken[i] = 1;
                } else {
                    ++load->untaken;
                    ++load->untaken_left[c.request];
                }
            }
            load->untaken_staged = needs_slot(*load) ? load->untaken : 0;
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
                fail_locked(*load, std::current_exception());
                throw;
            }
            if (load->chunks.empty()) {
                load->seconds = load->elapsed();
            }
            if (load->stop.stop_requested() && !load->chunks.empty()) {
                fail_locked(*load, std::make_exception_ptr(cancelled("penstock: the load was cancelled before it began")));
            }
        }
        work_.notify_all();
    }

    // ---- with the mutex held ----

    void fail_locked(load_state& load, std::exception_ptr why) {
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

    /// The scheduler's next chunk that is still wanted. Nothing where there is none.
    [[nodiscard]] job next_job() {
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
            if (job j = take(*answer); j.load != nullptr) {
                return j;
            }
        }
        return {};
    }

    void fail_all(const std::exception_ptr& why) {
        while (!live_.empty()) {
            const std::shared_ptr<load_state> load = live_.begin()->second.front().load;
            fail_locked(*load, why);
        }
        arrived.notify_all();
    }

    /// Loads may share a request number; then the most urgent that lacks this chunk gets it.
    [[nodiscard]] job take(const chunk& answer) {
        const auto same = live_.find(answer.request);
        if (same == live_.end()) {
            return {};
        }
        const live_request* best = nullptr;
        for (const live_request& l : same->second) {
            const planned_request& q = l.load->requests[l.number];
            if (answer.index < q.what.chunks && l.load->taken[q.first_chunk + answer.index] == 0 &&
                (best == nullptr || q.what.level < best->load->requests[best->number].what.level)) {
                best = &l;
            }
        }
        if (best == nullptr) {
            return {};
        }
        const std::uint32_t number = best->number;
        job j{best->load, best->load->requests[number].first_chunk + answer.index};
        load_state& load = *j.load;
        load.taken[j.chunk] = 1;
        --load.untaken;
        --untaken_;
        if (needs_slot(load)) {
            --load.untaken_staged;
            --untaken_staged_;
        }
        if (--load.untaken_left[number] == 0) {
            forget(load, number);
        }
        ++load.in_flight;
        return j;
    }

    // ---- without the mutex ----

    void read_chunks() {
        std::unique_lock lock(mutex);
        for (;;) {
            work_.wait(lock, [&] { return stopping_ || (untaken_ > 0 && (untaken_staged_ == 0 || staging_->available())); });
            if (stopping_) {
                return;
            }
            // The slot comes first and the chunk is chosen when the slot is free, so that the most urgent gets the next free slot.
            slot_type* slot = nullptr;
            std::exception_ptr slot_error;
            if (untaken_staged_ > 0) {
                slot = staging_->take();
                lock.unlock();
                slot_error = await(*slot);
                lock.lock();
            }
            job j = next_job();
            if (slot != nullptr && (j.load == nullptr || !needs_slot(*j.load))) {
                give_back_unused(std::exchange(slot, nullptr));
            }
            if (j.load != nullptr) {
                lock.unlock();
                bring(*j.load, j.chunk, slot, std::move(slot_error));
                j.load.reset();  // the last owner of a load may be this one, and its destructor needs no lock
                lock.lock();
            }
        }
    }

    /// Waits for the copy out of a slot. A copy that failed has left the slot free, and its error is the next load's to report.
    static std::exception_ptr await(slot_type& slot) noexcept {
        try {
            slot.copied.synchronize();
            return nullptr;
        } catch (...) {
            return std::current_exception();
        }
    }

    void give_back_unused(slot_type* slot) {
        staging_->give_back_unused(slot);
        work_.notify_one();
    }

    void bring(load_state& load, std::uint32_t number, slot_type* slot, std::exception_ptr error) {
        const planned_chunk& c = load.chunks[number];
        std::uint64_t reads = 0;
        if (!error) {
            try {
                if (load.where.on_host()) {
                    fetch(load, c, 0, {c.destination, c.bytes}, reads);
                } else {
                    through_staging(load, c, slot, reads);
                }
            } catch (...) {
                error = std::current_exception();
            }
        }
        if (slot != nullptr) {
            {
                const std::lock_guard lock(mutex);
                staging_->give_back(slot);
            }
            work_.notify_one();
        }
        arrive(load, c, reads, std::move(error));
        leave(load);
    }

    static void fetch(load_state& load, const planned_chunk& c, std::uint64_t from, std::span<std::byte> into, std::uint64_t& reads) {
        if (c.memory != nullptr) {
            std::memcpy(into.data(), c.memory + from, into.size());
        } else {
            load.source->read(c.file, c.offset + from, into);
            ++reads;
        }
    }

    /// A chunk larger than a slot goes slot by slot: `slot` is exchanged for the next free one on the way.
    void through_staging(load_state& load, const planned_chunk& c, slot_type*& slot, std::uint64_t& reads) {
        const typename Link::guard on(load.where.device);
        for (std::uint64_t done = 0; done < c.bytes;) {
            if (done > 0) {
                exchange(slot);
                slot->copied.synchronize();
            }
            const std::uint64_t size = smaller<std::uint64_t>(slot_bytes_, c.bytes - done);
            fetch(load, c, done, std::span<std::byte>(slot->data, size), reads);
            copy(load.where, c.destination + done, slot->data, size, &slot->copied);
            done += size;
        }
    }

    void exchange(slot_type*& slot) {
        std::unique_lock lock(mutex);
        staging_->give_back(slot);
        slot = staging_->take();  // there is one: the one just given back, if no other
    }

    /// @param done recorded behind a copy that runs on by itself
    static void copy(const place& where, std::byte* to, const std::byte* from, std::uint64_t size, typename Link::marker* done) {
        Link::copy(where, to, from, size);
        if constexpr (!copies_run_on) {
            Link::finish(where);
        } else if (done != nullptr) {
            try {
                done->record(where.stream);
            } catch (...) {  // the slot must not be filled while the copy reads it
                Link::finish(where);
                throw;
            }
        }
    }

    /// Enqueues the `wanted` chunks that need no reader, in the order that a scheduler of this kind gives them.
    void copy_here(load_state& load, std::uint64_t wanted) {
        try {
            const typename Link::guard on(load.where.device);
            typename Scheduler::queue order;
            for (const planned_request& q : load.requests) {
                order.push(q.what);
            }
            std::vector<bool> done(load.chunks.size());
            while (wanted > 0) {
                const std::optional<chunk> next = order.next();
                if (!next) {
                    throw configuration_error(no_next_chunk);
                }
                const planned_request& q = load.requests[load.number_of.at(next->request)];
                const std::uint32_t number = q.first_chunk + next->index;
                if (next->index >= q.what.chunks || done[number] || !brought_by_caller(load, load.chunks[number])) {
                    continue;
                }
                if (load.stop.stop_requested()) {
                    throw cancelled("penstock: the load was cancelled");
                }
                {
                    const std::lock_guard lock(mutex);
                    if (load.error) {
                        return;
                    }
                }
                const planned_chunk& c = load.chunks[number];
                copy(load.where, c.destination, c.memory, c.bytes, nullptr);
                done[number] = true;
                --wanted;
                arrive(load, c, 0, nullptr);
            }
        } catch (...) {
            fail(load, std::current_exception());
        }
    }

    /// Counts a chunk that has arrived, or ends the load with the error that kept it from arriving.
    void arrive(load_state& load, const planned_chunk& c, std::uint64_t reads, std::exception_ptr error) {
        const bool failed = error != nullptr;
        bool last = false;
        {
            const std::lock_guard lock(mutex);
            load.reads += reads;
            if (failed) {
                fail_locked(load, std::move(error));
            } else {
                load.bytes_done += c.bytes;
                --load.left[c.request];
                last = --load.chunks_left == 0;
                if (last) {
                    load.seconds = load.elapsed();
                } else if (load.stop.stop_requested()) {
                    fail_locked(load, std::make_exception_ptr(cancelled("penstock: the load was cancelled")));
                }
            }
        }
        arrived.notify_all();
        if (!failed) {
            call_back(load, last);
        }
    }

    /// One thread at a time, with growing numbers. Who finds another thread calling back goes on with its work, except with the last number.
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
            const std::lock_guard lock(mutex);
            if (!load.error) {
                fail_locked(load, std::current_exception());
            }
        }
    }

    void leave(load_state& load) {
        {
            const std::lock_guard lock(mutex);
            --load.in_flight;
        }
        arrived.notify_all();
    }

    const std::size_t slot_bytes_;
    const std::uint32_t slots_;
    const int near_;
    std::mutex reserving_;
    std::condition_variable work_;  ///< a request came, a slot came back, the end

    typename Scheduler::queue queue_;
    std::unordered_map<std::uint64_t, std::vector<live_request>> live_;  ///< by the caller's number
    std::uint64_t untaken_ = 0;                                         ///< chunks of all loads that nobody has taken
    std::uint64_t untaken_staged_ = 0;
    std::unique_ptr<staging_type> staging_;
    bool stopping_ = false;
    std::vector<std::thread> threads_;  // last: it uses everything above
};

}  // namespace penstock::inline v0_1::detail

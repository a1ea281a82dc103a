#pragma once

#include <penstock/stream/issue_window.hpp>
#include <penstock/stream/link.hpp>
#include <penstock/stream/load_queue.hpp>
#include <penstock/stream/staging.hpp>
#include <penstock/stream/ticket.hpp>

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

namespace penstock::inline v0_1::detail {

/// The readers of a weight stream, the scheduler queue that all its loads share, and its staging. One mutex guards the queue, the loads,
/// the staging slots and the issue windows; reading, copying, waiting for an event and calling back happen outside of it.
template <class Memory, class Scheduler, class Link = cuda_link>
class stream_engine final : public load_engine {
public:
    /// Copies to a device go through `slots` slots of `slot_bytes`.
    /// @param near the GPU next to which staging should lie; negative: the first that needs it
    /// @param window copies that are not on demand on one device's copy engine at a time, at most
    stream_engine(int readers, std::size_t slot_bytes, std::uint32_t slots, int near, std::uint32_t window = 2)
        : slot_bytes_(slot_bytes), slots_(slots), near_(near), window_(larger(window, 1u)) {
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
            queue_.fail_all(std::make_exception_ptr(cancelled("penstock: the weight stream of the load was destroyed")));
        }
        arrived.notify_all();
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
    /// @throws out_of_memory, cuda_error where staging cannot be had, and what the scheduler throws; errors of the load itself are its
    /// ticket's
    void start(const std::shared_ptr<load_state>& load) {
        std::uint64_t here = 0;
        bool staged = false;
        for (std::uint32_t i = 0; i < load->chunks.size(); ++i) {
            const route way = load->routes[i] = route_of(*load, load->chunks[i]);
            here += way == route::by_caller ? 1 : 0;
            staged = staged || way == route::staged;
        }
        if (staged) {
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
            queue_.fail(load, std::move(why));
        }
        arrived.notify_all();
        settle_failed();
    }

    void promote(load_state& load, std::uint64_t request) override {
        {
            const std::lock_guard lock(mutex);
            if (!queue_.promote(load, load.number_of.at(request))) {
                return;
            }
        }
        work_.notify_all();
    }

private:
    using staging_type = staging<Memory, cuda_pinning, typename Link::marker>;
    using slot_type = typename staging_type::slot;

    using window_type = issue_window<typename Link::marker, slot_type>;

    /// Whether copies run by themselves after they are enqueued; from pageable memory they are made one at a time, the naive way.
    static constexpr bool copies_run_on = Memory::device_accessible;

    /// A slot of less is filled before a copy in parts would gain anything.
    static constexpr std::uint64_t worth_parts = std::uint64_t{1} << 20;

    /// Memory that a copy can be enqueued from as it lies needs no staging; what is on demand is enqueued without a change of thread.
    static route route_of(const load_state& load, const planned_chunk& c) noexcept {
        if (load.where.on_host()) {
            return route::to_host;
        }
        if (c.memory == nullptr || (!c.memory_is_pinned && copies_run_on)) {
            return route::staged;
        }
        return !copies_run_on || load.requests[c.request].what.level == urgency::on_demand ? route::by_caller : route::as_it_lies;
    }

    void enqueue(const std::shared_ptr<load_state>& load) {
        {
            const std::lock_guard lock(mutex);
            load->early_chunks = static_cast<std::uint32_t>(threads_.size());
            load->in_flight = 1;  // the calling thread: nobody may see the load as over before it is done
            queue_.push(load);
            if (load->chunks.empty()) {
                load->seconds = load->elapsed();
            }
            if (load->stop.stop_requested() && !load->chunks.empty()) {
                queue_.fail(*load, std::make_exception_ptr(cancelled("penstock: the load was cancelled before it began")));
            }
        }
        work_.notify_all();
    }

    // ---- the readers ----

    void read_chunks() {
        std::optional<typename Link::guard> on;  // a reader stays on the device that it served last
        int device = -1;
        std::unique_lock lock(mutex);
        for (;;) {
            work_.wait(lock, [&] { return stopping_ || (!queue_.empty() && (!queue_.needs_slot() || staging_->available())); });
            if (stopping_) {
                return;
            }
            // The slot comes first and the chunk is chosen when the slot is free, so that the most urgent gets the next free slot.
            slot_type* slot = nullptr;
            std::exception_ptr error;
            if (queue_.needs_slot()) {
                slot = staging_->take();
                lock.unlock();
                error = await(slot->copied);
                lock.lock();
            }
            chunk_job j = queue_.next();
            if (j.load == nullptr) {
                arrived.notify_all();  // a scheduler that lost chunks has failed their loads
            }
            if (slot != nullptr && (j.load == nullptr || j.load->routes[j.chunk] != route::staged)) {
                staging_->give_back_unused(std::exchange(slot, nullptr));
                error = nullptr;
                work_.notify_one();
            }
            if (j.load != nullptr) {
                lock.unlock();
                if (const int wanted = j.load->where.device; wanted >= 0 && wanted != device && !error) {
                    device = -1;
                    error = attempt([&] { on.emplace(wanted); });
                    device = error ? -1 : wanted;
                }
                bring(std::move(j), slot, std::move(error));
                lock.lock();
            }
        }
    }

    template <class Work>
    static std::exception_ptr attempt(Work&& work) noexcept {
        try {
            work();
            return nullptr;
        } catch (...) {
            return std::current_exception();
        }
    }

    /// Waits for a copy. One that failed has left its slot free, and its error is the next load's to report.
    static std::exception_ptr await(const typename Link::marker& copied) noexcept {
        return attempt([&] { copied.synchronize(); });
    }

    void bring(chunk_job j, slot_type* slot, std::exception_ptr error) {
        load_state& load = *j.load;
        const planned_chunk& c = load.chunks[j.chunk];
        const bool windowed = copies_run_on && !j.urgent && !load.where.on_host() && (slot == nullptr || c.bytes <= slot_bytes_);
        std::uint64_t reads = 0;
        if (!error) {
            error = attempt([&] {
                if (load.where.on_host()) {
                    fetch(load, c, 0, std::span<std::byte>(c.destination, c.bytes), reads);
                } else if (slot == nullptr) {
                    if (!windowed) {
                        copy_as_it_lies(load, c, reads);
                    }
                } else if (windowed) {
                    fetch(load, c, 0, std::span<std::byte>(slot->data, c.bytes), reads);
                } else {
                    through_staging(load, c, slot, j.early, reads);
                }
            });
        }
        if (windowed && !error) {
            issue({std::move(j), slot, reads});
        } else {
            settle({std::move(j), slot, reads}, std::move(error));
        }
    }

    /// After a chunk: the slot goes back, the load counts.
    void settle(typename window_type::entry e, std::exception_ptr error) {
        if (e.slot != nullptr) {
            {
                const std::lock_guard lock(mutex);
                staging_->give_back(e.slot);
            }
            work_.notify_one();
        }
        load_state& load = *e.what.load;
        arrive(load, load.chunks[e.what.chunk], e.reads, std::move(error));
        leave(load);
    }

    /// Leaves a chunk to the window of its device, and serves the window if nobody does.
    void issue(typename window_type::entry ready) {
        const int device = ready.what.load->where.device;
        std::unique_lock lock(mutex);
        window_type& window = windows_.try_emplace(device, window_).first->second;
        if (!window.push(std::move(ready))) {
            return;
        }
        while (window.go_on()) {
            std::optional<typename window_type::entry> next = window.take_failed();
            std::exception_ptr error;
            if (next) {
                error = next->what.load->error;
                lock.unlock();
            } else {
                lock.unlock();
                error = await(window.oldest_copy());
                lock.lock();
                next = window.take_most_urgent();
                if (!next) {
                    continue;  // its load has failed meanwhile
                }
                lock.unlock();
                if (!error) {
                    error = attempt([&] { copy_from(*next, window); });
                }
            }
            settle(std::move(*next), std::move(error));
            next.reset();  // the last owner of a load may be this one, and its destructor needs no lock
            lock.lock();
        }
    }

    /// Ends what waits for room of loads that have failed, so that a held-up device does not hold up who cancels.
    void settle_failed() {
        for (;;) {
            std::optional<typename window_type::entry> failed;
            {
                const std::lock_guard lock(mutex);
                for (auto w = windows_.begin(); w != windows_.end() && !failed; ++w) {
                    failed = w->second.take_failed();
                }
            }
            if (!failed) {
                return;
            }
            settle(std::move(*failed), std::make_exception_ptr(cancelled("penstock: the load has failed")));  // behind the first error
        }
    }

    void copy_from(typename window_type::entry& e, window_type& window) {
        load_state& load = *e.what.load;
        const planned_chunk& c = load.chunks[e.what.chunk];
        if (e.slot != nullptr) {
            copy(load.where, c.destination, e.slot->data, c.bytes, &e.slot->copied);
        } else {
            copy_as_it_lies(load, c, e.reads);
        }
        window.oldest_copy().record(load.where.stream);
        window.became_newest();
    }

    static void fetch(load_state& load, const planned_chunk& c, std::uint64_t from, std::span<std::byte> into, std::uint64_t& reads) {
        if (c.memory != nullptr) {
            std::memcpy(into.data(), c.memory + from, into.size());
        } else {
            load.source->read(c.file, c.offset + from, into);
            ++reads;
        }
    }

    /// Bytes of a source that the device does not take from where they lie are read instead, and the source told so.
    void copy_as_it_lies(load_state& load, const planned_chunk& c, std::uint64_t& reads) {
        try {
            copy(load.where, c.destination, c.memory, c.bytes, nullptr);
        } catch (const cuda_error& refusal) {
            if (!c.of_source || loses_device(refusal.code())) {
                throw;
            }
            load.source->refuse_in_place(c.file, refusal.what());
            std::vector<std::byte> aside(smaller<std::uint64_t>(c.bytes, slot_bytes_));
            for (std::uint64_t at = 0; at < c.bytes;) {
                const std::span<std::byte> part(aside.data(), smaller<std::uint64_t>(aside.size(), c.bytes - at));
                load.source->read(c.file, c.offset + at, part);
                ++reads;
                Link::copy(load.where, c.destination + at, part.data(), part.size());
                Link::finish(load.where);
                at += part.size();
            }
        }
    }

    /// A chunk larger than a slot goes slot by slot: `slot` is exchanged for the next free one on the way. Readers that begin a load fill
    /// their first slots at the same time, while the link is idle; so such a slot is copied by growing parts, the first after an eighth.
    void through_staging(load_state& load, const planned_chunk& c, slot_type*& slot, bool early, std::uint64_t& reads) {
        for (std::uint64_t done = 0; done < c.bytes;) {
            if (done > 0) {
                exchange(slot);
                slot->copied.synchronize();
            }
            const std::uint64_t size = smaller<std::uint64_t>(slot_bytes_, c.bytes - done);
            if (early && done == 0 && size >= worth_parts) {
                for (const std::uint64_t part : {size / 8, size / 8, size / 4}) {
                    fetch(load, c, done, std::span<std::byte>(slot->data + done, part), reads);
                    copy(load.where, c.destination + done, slot->data + done, part, &slot->copied);
                    done += part;
                }
            }
            const std::uint64_t in_slot = done % slot_bytes_;
            const std::uint64_t rest = size - in_slot;
            fetch(load, c, done, std::span<std::byte>(slot->data + in_slot, rest), reads);
            copy(load.where, c.destination + done, slot->data + in_slot, rest, &slot->copied);
            done += rest;
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
                    throw configuration_error(load_queue<Scheduler>::no_next_chunk);
                }
                const planned_request& q = load.requests[load.number_of.at(next->request)];
                const std::uint32_t number = q.first_chunk + next->index;
                if (next->index >= q.what.chunks || done[number] || load.routes[number] != route::by_caller) {
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
                std::uint64_t reads = 0;
                copy_as_it_lies(load, c, reads);
                done[number] = true;
                --wanted;
                arrive(load, c, reads, nullptr);
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
                queue_.fail(load, std::move(error));
            } else {
                load.bytes_done += c.bytes;
                --load.left[c.request];
                last = --load.chunks_left == 0;
                if (last) {
                    load.seconds = load.elapsed();
                } else if (load.stop.stop_requested()) {
                    queue_.fail(load, std::make_exception_ptr(cancelled("penstock: the load was cancelled")));
                }
            }
        }
        arrived.notify_all();
        if (!failed) {
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
            const std::lock_guard lock(mutex);
            if (!load.error) {
                queue_.fail(load, std::current_exception());
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
    const std::uint32_t window_;
    std::mutex reserving_;
    std::condition_variable work_;  ///< a request came, a slot came back, the end

    load_queue<Scheduler> queue_;
    std::unique_ptr<staging_type> staging_;
    std::map<int, window_type> windows_;  ///< by device
    bool stopping_ = false;
    std::vector<std::thread> threads_;  // last: it uses everything above
};

}  // namespace penstock::inline v0_1::detail

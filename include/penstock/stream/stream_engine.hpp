#pragma once

#include <penstock/stream/issue_desk.hpp>
#include <penstock/stream/move_filling.hpp>
#include <penstock/stream/reader.hpp>
#include <penstock/stream/staging.hpp>

#include <deque>
#include <thread>

namespace penstock::inline v0_1::detail {

/// The readers of a weight stream, the scheduler queue that all its loads share, and its staging. One mutex guards the queue, the loads,
/// the staging slots and the issue windows; reading, copying, waiting for an event and calling back happen outside of it.
///
/// Readers fill a chunk together: one of them opens it, with a free slot where it needs one, and each that has nothing else to do reads the
/// next part of it. So a copy is large, which the link needs, while few chunks are under way, which keeps the ring in the last cache and
/// the first copy early. Who brings the last part enqueues the copy.
template <class Memory, class Scheduler, class Link = cuda_link>
class stream_engine final : public issue_desk<Scheduler, Link, staging_slot<typename Link::marker>> {
public:
    using load_engine::arrived;
    using load_engine::mutex;

    /// Copies to a device go through `slots` slots of `slot_bytes`.
    /// @param near the GPU next to which staging should lie; negative: the first that needs it
    /// @param window copies that wait for their turn on one device's copy engine at a time, at most
    /// @param part_bytes what a reader brings before it looks around again
    stream_engine(int readers, std::size_t slot_bytes, std::uint32_t slots, int near, std::uint32_t window = 2,
                  std::uint64_t part_bytes = default_part_bytes, engine_options how = {})
        : desk(window, how),
          slot_bytes_(slot_bytes),
          slots_(slots),
          near_(near),
          part_bytes_(larger<std::uint64_t>(part_bytes, 1)),
          readers_(static_cast<std::size_t>(readers)) {
        threads_.reserve(readers_);
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

    static constexpr std::chrono::microseconds between_looks{50};  ///< at running copies, for one that is over
    static constexpr std::size_t most_open =
        4;  ///< chunks with parts to be handed out: a further one where those before have their readers
    static constexpr std::size_t chunks_a_call = 4;  ///< copies of pinned memory that are enqueued together
    static constexpr std::uint64_t default_part_bytes = std::uint64_t{1} << 20;

    /// Ends all loads and joins the readers.
    void stop() noexcept {
        {
            const std::lock_guard lock(mutex);
            stopping_ = true;
            const auto why = std::make_exception_ptr(cancelled("penstock: the weight stream of the load was destroyed"));
            queue_.fail_all(why);
            for (const auto& f : open_) {
                queue_.fail(f->load(), why);
            }
            for (const auto& c : unopened_) {
                queue_.fail(*c->what.load, why);
            }
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
        auto fresh = std::make_unique<staging_type>(ranked_scheduler<Scheduler> ? how_.slots_kept : 0);
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
            const std::exception_ptr lost = pass_by(load->where, [&] {
                const typename Link::guard on(load->where.device);
                this->bring_here(*load, here, copies_run_on && how_.kept == nullptr ? chunks_a_call : 1,
                                 [&](std::span<const std::uint32_t> chunks) {
                                     std::uint64_t reads = 0;
                                     this->noted(*load, chunks.front(), load->chunks[chunks.front()].bytes, this->stamp(), [&] {
                                         reads = copy_as_they_lie<Link>(*load, chunks, slot_bytes_);
                                         if constexpr (!copies_run_on) {
                                             Link::finish(load->where);
                                         }
                                     });
                                     return reads;
                                 });
            });
            if (lost) {
                fail(*load, lost);
            }
        }
        if (load->chunks.empty()) {
            call_back(*load, true);
        }
        leave(*load);
    }

    void fail(load_state& load, std::exception_ptr why) final {
        {
            const std::lock_guard lock(mutex);
            if (load.chunks_left == 0) {
                return;
            }
            queue_.fail(load, std::move(why));
        }
        arrived.notify_all();
        work_.notify_all();
        settle_failed();
    }

private:
    using desk = issue_desk<Scheduler, Link, staging_slot<typename Link::marker>>;
    using desk::arrive;
    using desk::attempt;
    using desk::call_back;
    using desk::how_;
    using desk::leave;
    using desk::now;
    using desk::pass_by;
    using desk::queue_;
    using desk::unserved;
    using desk::work_;
    using typename desk::filling_ptr;
    using typename desk::locked;

    using staging_type = staging<Memory, cuda_pinning, typename Link::marker>;
    using slot_type = typename staging_type::slot;
    using filling_type = filling<slot_type>;

    /// Whether copies run by themselves after they are enqueued; from pageable memory they are made one at a time, the naive way.
    static constexpr bool copies_run_on = Memory::device_accessible;

    /// Memory that a copy can be enqueued from as it lies needs no staging; what is on demand is enqueued without a change of thread.
    route route_of(const load_state& load, const planned_chunk& c) const noexcept {
        if (load.where.on_host()) {
            return route::to_host;
        }
        if (c.from == bytes_from::file || (c.from == bytes_from::memory && copies_run_on)) {
            return route::staged;
        }
        return !copies_run_on || at_once(load.requests[c.request].what.level == urgency::on_demand) ? route::by_caller : route::as_it_lies;
    }

    [[nodiscard]] bool at_once(bool on_demand) const noexcept { return on_demand && !how_.on_demand_waits; }

    void enqueue(const std::shared_ptr<load_state>& load) {
        {
            const std::lock_guard lock(mutex);
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
        reader_place me;
        me.stay_near(near_, readers_);
        locked lock(mutex);
        for (;;) {
            work_.wait(lock, [&] { return something_to_do() || (stopping_ && open_.empty()); });
            if (auto* due = unserved(now()); due != nullptr) {
                this->serve(lock, *due);
            } else if (const auto next = next_open(); next != open_.end()) {
                bring_part(lock, me, next);
            } else if (failed_rest() != unopened_.end()) {
                drop_failed_rest(lock);
            } else if (stopping_ && open_.empty()) {
                return;
            } else if (can_open()) {
                open(lock);
            } else if (auto* held = unserved(desk::time::max()); held != nullptr) {
                this->serve(lock, *held);
            }
        }
    }

    bool something_to_read() noexcept override { return next_open() != open_.end() || can_open() || failed_rest() != unopened_.end(); }
    [[nodiscard]] bool something_to_do() noexcept { return something_to_read() || unserved(desk::time::max()) != nullptr; }

    /// Each reader that is about to be busy wakes the next one, as long as there is something for it.
    void wake_another() noexcept {
        if (something_to_do()) {
            work_.notify_one();
        }
    }

    /// The first open chunk that one more reader helps: a disk may be the faster with fewer. Of a load that has failed parts are only dropped.
    [[nodiscard]] auto next_open() noexcept {
        return std::find_if(open_.begin(), open_.end(), [](const filling_ptr& f) {
            const load_state& load = f->load();
            return f->plan().from != bytes_from::file || load.error != nullptr || f->error != nullptr ||
                   load.reading < larger(1u, load.source->reads_at_a_time(f->plan().file));
        });
    }

    /// Whether the next chunk may need a slot. A ranked scheduler names what is on demand first.
    [[nodiscard]] bool needs_slot() const noexcept {
        if (ranked_scheduler<Scheduler> && queue_.on_demand()) {
            return for_on_demand();
        }
        return !unopened_.empty() || queue_.needs_slot();
    }

    /// Whether the next slot is for what is on demand, for which slots are kept.
    [[nodiscard]] bool for_on_demand() const noexcept {
        return queue_.on_demand_needs_slot() || (!unopened_.empty() && unopened_.front()->what.urgent);
    }

    /// Asked where no open chunk wants a reader.
    [[nodiscard]] bool can_open() {
        if (stopping_ || opening_ || open_.size() >= most_open) {
            return false;
        }
        return needs_slot() ? staging_->available(for_on_demand()) : queue_.to_host() || this->window_wants_one();
    }

    [[nodiscard]] auto failed_rest() noexcept {
        return std::find_if(unopened_.begin(), unopened_.end(), [](const auto& c) { return c->what.load->error != nullptr; });
    }

    /// Ends the rest of a chunk whose load has failed. @pre there is one
    void drop_failed_rest(locked& lock) {
        const auto failed = failed_rest();
        const std::shared_ptr<moving_chunk> c = *failed;
        unopened_.erase(failed);
        const std::uint64_t rest = c->span() - std::exchange(c->opened, c->span());
        settle(lock, *c, rest, c->what.load->error);
    }

    /// Opens the next chunk for all readers, or the next slotful of one that is larger than a slot. The slot comes first and the chunk is
    /// chosen when the slot is free, so that the most urgent gets the next free slot. Running copies are looked at from time to time, and
    /// none is waited for: a device that is held up must not hold up what goes elsewhere, or who cancels.
    void open(locked& lock) {
        slot_type* slot = nullptr;
        if (needs_slot()) {
            opening_ = true;
            while (!stopping_ && needs_slot() && staging_->available(for_on_demand()) &&
                   (slot = staging_->take(for_on_demand())) == nullptr) {
                slot_came_.wait_for(lock, between_looks);
            }
            opening_ = false;
            if (slot == nullptr) {
                return wake_another();  // readers hold the rest of the memory, or nobody needs it any more
            }
        }
        const std::shared_ptr<moving_chunk> c = next_chunk();
        const route way = c == nullptr ? route::to_host : c->what.load->routes[c->what.chunk];
        if (slot != nullptr && way != route::staged) {
            staging_->give_back_unused(std::exchange(slot, nullptr));
        }
        if (way == route::staged && slot == nullptr) {  // the scheduler was not told of a change
            unopened_.push_front(c);
            return wake_another();
        }
        if (c == nullptr) {
            arrived.notify_all();  // a scheduler that lost chunks has failed their loads
            return wake_another();
        }
        const std::uint64_t end = slot == nullptr ? c->span() : smaller<std::uint64_t>(c->span(), c->opened + staging_->slot_bytes());
        const auto f = std::make_shared<filling_type>(c, slot, end);
        if (slot != nullptr) {
            staging_->cut(*slot, memory::page_bytes + (f->end - f->begin));
        }
        if (end < c->span()) {
            unopened_.push_back(c);
        }
        if (way == route::as_it_lies) {  // in its window before another is chosen
            f->next = f->end;
            this->leave_to_window(f);
        } else {
            open_.push_back(f);
            wake_another();
        }
    }

    /// What the scheduler names, and in turn with it the rest of a chunk that is larger than a slot. Nothing where there is neither.
    [[nodiscard]] std::shared_ptr<moving_chunk> next_chunk() {
        const bool rest_waits = !unopened_.empty() && queue_.on_demand() && !unopened_.front()->what.urgent;
        if (!unopened_.empty() && (queue_.empty() || (rest_next_ && !rest_waits))) {
            rest_next_ = false;
            const std::shared_ptr<moving_chunk> c = unopened_.front();
            unopened_.pop_front();
            return c;
        }
        rest_next_ = true;
        chunk_job j = queue_.next();
        return j.load == nullptr ? nullptr : std::make_shared<moving_chunk>(std::move(j), this->stamp());
    }

    /// Takes the next part of an open chunk. Of a chunk that will not arrive nothing more is brought.
    void bring_part(locked& lock, reader_place& me, typename std::deque<filling_ptr>::iterator at) {
        const filling_ptr f = *at;
        load_state& load = f->load();
        const planned_chunk& c = f->plan();
        const std::uint64_t from = f->next;
        const bool in_vain = load.error != nullptr || f->error != nullptr;
        f->next = in_vain ? f->end : part_end(*f, part_bytes_);
        const std::uint64_t to = f->next;
        if (f->handed_out()) {
            open_.erase(at);
        }
        if (!in_vain) {
            const std::uint32_t of_file = c.from == bytes_from::file ? 1 : 0;
            ++f->busy;
            load.reading += of_file;
            wake_another();
            lock.unlock();
            std::uint64_t reads = 0;
            std::byte* const base = f->slot == nullptr ? nullptr : base_of(*f);
            std::exception_ptr error = attempt([&] { fetch(load, c, from, to, base, reads); });
            lock.lock();
            --f->busy;
            load.reading -= of_file;
            f->reads += reads;
            if (error && !f->error) {
                f->error = std::move(error);
            }
        }
        if (f->over()) {
            wake_another();  // this one may be held up: it copies, serves a window, calls back
            finish(lock, me, f);
        }
    }

    /// All parts of a filling are in the slot, or in vain: on to the device with it.
    void finish(locked& lock, reader_place& me, const filling_ptr& f) {
        load_state& load = f->load();
        const bool to_device = !load.where.on_host() && f->error == nullptr && load.error == nullptr;
        const bool windowed = copies_run_on && !at_once(f->chunk->what.urgent);
        lock.unlock();
        std::exception_ptr error = f->error;
        if (to_device) {
            me.stay_near(load.where.device, readers_);
        }
        if (to_device && windowed) {
            lock.lock();
            if (!f->failed()) {
                return this->leave_to_window(f);
            }
            error = load.error;  // meanwhile: nobody would look for it in the window
            lock.unlock();
        } else if (to_device) {
            error = pass_by(load.where, [&] { this->put_on_link(*f); });
        }
        settle(f, std::move(error));
        lock.lock();
    }

    void send(filling_type& f) override {
        const typename Link::guard on(f.load().where.device);
        copy_filling<Link, copies_run_on>(f, slot_bytes_);
    }

    /// The slot goes back, and with the last of a chunk the load counts.
    void settle(const filling_ptr& f, std::exception_ptr error) override {
        locked lock(mutex);
        if (f->slot != nullptr) {
            f->copied ? staging_->give_back(f->slot) : staging_->give_back_unused(f->slot);
            slot_came_.notify_one();
            wake_another();
        }
        f->chunk->reads += f->reads;
        settle(lock, *f->chunk, f->end - f->begin, std::move(error));
    }

    void settle(locked& lock, moving_chunk& c, std::uint64_t span, std::exception_ptr error) {
        c.unsettled -= span;
        if (error && !c.error) {
            c.error = std::move(error);
        }
        load_state& load = *c.what.load;
        if (c.unsettled > 0) {
            if (c.error) {
                queue_.fail(load, c.error);
                work_.notify_all();
            }
            return;
        }
        if (!c.error) {
            c.error = load.error;  // a chunk of a load that has failed has not arrived
        }
        lock.unlock();
        if (how_.kept != nullptr && load.where.on_host() && !c.error) {
            this->note(load, c.what.chunk, c.chunk().bytes, c.chosen, c.chosen);
        }
        arrive(load, std::span(&c.what.chunk, 1), c.reads, c.error);
        leave(load);
        lock.lock();
    }

    /// Ends what waits of loads that have failed, for room in a window, for a slot or for a reader, so that a held-up device does not hold
    /// up who cancels.
    void settle_failed() {
        for (locked lock(mutex);;) {
            if (failed_rest() != unopened_.end()) {
                drop_failed_rest(lock);
                continue;
            }
            filling_ptr failed;
            for (auto f = open_.begin(); f != open_.end() && failed == nullptr;) {
                if ((*f)->load().error == nullptr) {
                    ++f;
                    continue;
                }
                (*f)->next = (*f)->end;
                failed = (*f)->busy == 0 ? *f : nullptr;  // else the last of its readers ends it
                f = open_.erase(f);
            }
            if (failed == nullptr) {
                failed = this->take_failed();
            }
            if (failed == nullptr) {
                return wake_another();
            }
            lock.unlock();
            settle(failed, std::make_exception_ptr(cancelled("penstock: the load has failed")));  // behind the first error
            failed.reset();
            lock.lock();
        }
    }

    const std::size_t slot_bytes_;
    const std::uint32_t slots_;
    const int near_;
    const std::uint64_t part_bytes_;
    const std::size_t readers_;
    std::mutex reserving_;
    std::condition_variable slot_came_;  ///< for the reader that opens a chunk

    std::unique_ptr<staging_type> staging_;
    std::deque<filling_ptr> open_;                        ///< parts of them are to be handed out
    std::deque<std::shared_ptr<moving_chunk>> unopened_;  ///< of chunks larger than a slot the rest, which waits for one
    bool rest_next_ = false;                              ///< of such a chunk comes before what the scheduler names
    bool opening_ = false;                                ///< a reader waits for the slot of the next chunk
    bool stopping_ = false;
    std::vector<std::thread> threads_;  // last: it uses everything above
};

}  // namespace penstock::inline v0_1::detail

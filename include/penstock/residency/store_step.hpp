#pragma once

#include <penstock/residency/expert_store.hpp>

namespace penstock::inline v0_1 {

/// One layer call of a store. Use:
///
///     auto step = store.begin(layer, offsets, stream);
///     while (auto ready = step.next(); !ready.empty()) { compute with `ready`, on `stream` }
///     step.finish();
///
/// The first `next()` starts the fetches and returns what is resident, so that the copies run under that computation; later ones return
/// misses as they arrive, on a device ordered by events and not by waiting. Records may be overwritten from the following call on, so
/// what reads them must be done by then, on a device: enqueued on the consumer. Where slots are too few, those of finished misses serve again
/// (a further wave), and a device computes what is left straight from a mapped host tier if few tokens need it.
template <class Memory, class Chunking, class Prefetch, class Scheduler, class Eviction>
class basic_expert_store<Memory, Chunking, Prefetch, Scheduler, Eviction>::step {
public:
    step(const step&) = delete;
    step& operator=(const step&) = delete;

    ~step() { close(); }

    /// Experts that can be computed now; empty when all have been handed out.
    /// @throws what reading the files throws; the step is then void, its fetched slots are free again, and the store can be used on.
    [[nodiscard]] std::span<const expert_work> next() {
        ready_.clear();
        if (!begun_) {
            begun_ = true;
            fetch();
            for (const item& hit : hits_) {
                ready_.push_back(work(hit, store_.compute_slot(hit.slot)));
            }
        }
        while (ready_.empty() && !(flying_.empty() && missing_.empty())) {
            if (flying_.empty()) {
                begin_wave();
                fetch();
            } else {
                land();
            }
        }
        return ready_;
    }

    /// Ends the call: from here on its experts may be evicted, once the consumer has run what is enqueued on it.
    void finish() { close(); }

private:
    friend class basic_expert_store;

    struct item {
        std::uint32_t key = 0;
        std::uint32_t expert = 0;
        std::uint32_t first = 0;
        std::uint32_t count = 0;
        std::uint32_t slot = 0;
        std::int64_t host_slot = -1;
        std::int64_t ticket = -1;   ///< of the read from files, if there is one
        std::int64_t hint = -1;     ///< of the guesses that this step waits for
        std::int64_t arrival = -1;  ///< number of the event that says that its copy to the device is done
    };

    step(basic_expert_store& store, std::uint32_t layer, std::span<const std::uint32_t> offsets, cudaStream_t consumer)
        : store_(store), consumer_(consumer), number_(++store.clock_) {
        if (!store.compute_.on_host()) {
            store.computed_->make_wait(store.copies_->get());  // victims may still be read by the step before
        }
        store.settle_hints();
        const std::uint32_t base = store.first_key_[layer];
        const std::uint32_t experts = store.first_key_[layer + 1] - base;
        for (std::uint32_t e = 0; e < experts; ++e) {
            if (offsets[e + 1] == offsets[e]) {
                continue;
            }
            item i{.key = base + e, .expert = e, .first = offsets[e], .count = offsets[e + 1] - offsets[e]};
            if (const std::optional<std::uint32_t> slot = store.slots_.find(i.key)) {
                i.slot = *slot;
                hits_.push_back(i);
                store.counters_.hints_right += std::exchange(store.unused_hint_[*slot], std::uint8_t{0});
            } else if (!take_over(i)) {
                missing_.push_back(i);
            }
        }
        store.note_call(layer, offsets);
        store.open_ = true;
        for (const item& i : hits_) {
            store.slots_.pin(i.slot);
            store.slots_.template touch<Eviction>(i.slot, number_);
            held_.push_back(i.slot);
        }
        ++store.counters_.steps;
        store.counters_.hits += hits_.size();
        store.counters_.misses += missing_.size() + flying_.size();
    }

    /// Waits for a guess instead of fetching the expert again, if there is one on its way. Whether there is.
    bool take_over(item& i) {
        const auto found = std::ranges::find_if(store_.hinted_, [&](const detail::hinted_fill& f) { return f.key == i.key && !f.dropped; });
        if (found == store_.hinted_.end()) {
            return false;
        }
        found->load.promote(i.key);
        i.slot = found->slot;
        i.hint = static_cast<std::int64_t>(hints_.size());
        filling_.push_back(i.slot);
        if (found->host_slot >= 0) {
            host_held_.push_back(static_cast<std::uint32_t>(found->host_slot));
        }
        hints_.push_back(std::move(*found));
        store_.hinted_.erase(found);
        flying_.push_back(i);
        ++store_.counters_.hints_right;
        ++store_.counters_.hints_late;
        return true;
    }

    [[nodiscard]] expert_work work(const item& i, const std::byte* record) const noexcept { return {i.expert, record, i.first, i.count}; }

    [[nodiscard]] bool computable_in_place(const item& i) const {
        return !store_.compute_.on_host() && store_.host_tier_mapped_ && i.count <= most_tokens_in_place;
    }

    /// Gives the waiting experts slots while there are any, and starts bringing them: what the host tier has first, it is nearest.
    void fetch() {
        std::vector<item> waiting;
        std::vector<item> from_files;
        std::vector<transfer> to_host;
        std::vector<transfer> to_compute;
        waiting.swap(missing_);
        for (item& i : waiting) {
            const std::optional<std::uint32_t> at_host = store_.host_slots_.find(i.key);
            const std::optional<slot_map::reservation> got = store_.reserve(i.key, number_);
            if (!got) {
                if (at_host && computable_in_place(i)) {
                    hold_host(*at_host);
                    ++store_.counters_.overflow;
                    ++store_.counters_.host_hits;
                    ready_.push_back(work(i, store_.host_slot(*at_host)));
                } else {
                    missing_.push_back(i);
                }
                continue;
            }
            i.slot = got->slot;
            filling_.push_back(i.slot);
            if (at_host) {
                hold_host(*at_host);
                ++store_.counters_.host_hits;
                i.host_slot = *at_host;
                copy_from_host(i);
                flying_.push_back(i);
            } else {
                from_files.push_back(i);
            }
        }
        bool reuses_host_slot = false;
        for (item& i : from_files) {
            if (const auto got = store_.host_slots_.template reserve<Eviction>(i.key, number_)) {
                reuses_host_slot |= got->evicted;
                i.host_slot = got->slot;
                host_filling_.push_back(got->slot);
                store_.from_files(i.key, store_.host_slot(got->slot), to_host);
            } else {
                store_.from_files(i.key, store_.compute_slot(i.slot), to_compute);
            }
        }
        if (reuses_host_slot && !store_.compute_.on_host()) {
            store_.copies_->synchronize();    // steps before this one may still read the victims:
            store_.computed_->synchronize();  // the copy engine, and kernels that computed in place
        }
        const std::int64_t host_ticket = start(to_host, on_host());
        const std::int64_t compute_ticket = start(to_compute, store_.copy_place());
        for (item& i : from_files) {
            i.ticket = i.host_slot >= 0 ? host_ticket : compute_ticket;
            flying_.push_back(i);
        }
    }

    std::int64_t start(const std::vector<transfer>& list, place to) {
        if (list.empty()) {
            return -1;
        }
        tickets_.push_back(store_.stream_.start(list, store_.source_, to));
        return static_cast<std::int64_t>(tickets_.size()) - 1;
    }

    /// Starts the copy of a record that the host tier has. One ticket an expert, so that on a device its own event can follow it.
    void copy_from_host(item& i) {
        std::vector<transfer> one;
        store_.from_memory(i.key, store_.host_slot(static_cast<std::uint32_t>(i.host_slot)), store_.host_tier_mapped_,
                           store_.compute_slot(i.slot), one);
        i.ticket = start(one, store_.copy_place());
        if (!store_.compute_.on_host() && store_.host_tier_mapped_) {
            i.arrival = mark_arrival();  // already enqueued: pinned memory needs no thread
        }
    }

    std::int64_t mark_arrival() {
        if (arrivals_ == store_.arrived_.size()) {
            store_.arrived_.emplace_back();
        }
        store_.arrived_[arrivals_].record(store_.copies_->get());
        return static_cast<std::int64_t>(arrivals_++);
    }

    /// Takes in the oldest fetch.
    void land() {
        item i = flying_.front();
        flying_.pop_front();
        ++store_.counters_.waits;
        const auto before = std::chrono::steady_clock::now();
        (i.hint >= 0 ? hints_[static_cast<std::size_t>(i.hint)].load : tickets_[static_cast<std::size_t>(i.ticket)]).wait(i.key);
        const auto host_slot = static_cast<std::uint32_t>(i.host_slot);
        if (i.host_slot >= 0 && !host_filling_.empty() && host_filling_.front() == host_slot) {
            host_filling_.pop_front();
            store_.host_slots_.publish(host_slot);
            store_.host_slots_.template touch<Eviction>(host_slot, number_);
            host_held_.push_back(host_slot);
            copy_from_host(i);
            tickets_[static_cast<std::size_t>(i.ticket)].wait(i.key);
        }
        store_.counters_.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
        if (i.hint >= 0 && !store_.compute_.on_host()) {
            event& copied = hints_[static_cast<std::size_t>(i.hint)].copied;
            copied.record(store_.hint_way());
            copied.make_wait(consumer_);
        } else if (!store_.compute_.on_host()) {
            if (i.arrival < 0) {
                i.arrival = mark_arrival();
            }
            store_.arrived_[static_cast<std::size_t>(i.arrival)].make_wait(consumer_);
        }
        std::erase(filling_, i.slot);
        store_.slots_.publish(i.slot);
        store_.slots_.template touch<Eviction>(i.slot, number_);
        held_.push_back(i.slot);
        fetched_.push_back(i.slot);
        ready_.push_back(work(i, store_.compute_slot(i.slot)));
    }

    /// No slot is left for the experts that still wait: those of this step's finished misses serve again, and only if there are none, its hits.
    void begin_wave() {
        ++store_.counters_.waves;
        if (!store_.compute_.on_host()) {
            store_.computed_->record(consumer_);
            store_.computed_->make_wait(store_.copies_->get());
        }
        if (fetched_.empty()) {
            fetched_.swap(held_);
        }
        for (const std::uint32_t slot : fetched_) {
            store_.slots_.unpin(slot);
            std::erase(held_, slot);
        }
        fetched_.clear();
    }

    void hold_host(std::uint32_t slot) {
        store_.host_slots_.pin(slot);
        store_.host_slots_.template touch<Eviction>(slot, number_);
        host_held_.push_back(slot);
    }

    void close() noexcept {
        if (!store_.open_ || closed_) {
            return;
        }
        closed_ = true;
        tickets_.clear();  // nobody writes to a slot from here on
        hints_.clear();
        if (!filling_.empty() && store_.hint_copies_ && detail::cuda_usable()) {  // their slots may be used again on the other stream
            static_cast<void>(cudaStreamSynchronize(store_.hint_way()));
            static_cast<void>(cudaStreamSynchronize(store_.copies_->get()));
        }
        for (const std::uint32_t slot : filling_) {
            store_.slots_.abandon(slot);
        }
        for (const std::uint32_t slot : host_filling_) {
            store_.host_slots_.abandon(slot);
        }
        for (const std::uint32_t slot : held_) {
            store_.slots_.unpin(slot);
        }
        if (!store_.compute_.on_host()) {
            try {
                store_.computed_->record(consumer_);
            } catch (...) {  // the error is the device's, and the next call reports it
            }
        }
        for (const std::uint32_t slot : host_held_) {
            store_.host_slots_.unpin(slot);
        }
        store_.open_ = false;
    }

    basic_expert_store& store_;
    cudaStream_t consumer_;
    std::uint64_t number_;
    bool begun_ = false;
    bool closed_ = false;
    std::vector<item> hits_;
    std::vector<item> missing_;
    std::deque<item> flying_;
    std::vector<expert_work> ready_;
    std::vector<std::uint32_t> held_;     ///< compute slots that this step pins
    std::vector<std::uint32_t> fetched_;  ///< those of them that misses of this wave got
    std::vector<std::uint32_t> filling_;
    std::vector<std::uint32_t> host_held_;
    std::deque<std::uint32_t> host_filling_;
    std::vector<detail::hinted_fill> hints_;  ///< that this step waits for
    std::deque<typename stream_type::ticket> tickets_;
    std::size_t arrivals_ = 0;
};

}  // namespace penstock::inline v0_1

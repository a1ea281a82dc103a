#pragma once

#include <penstock/residency/expert_store.hpp>

#include <algorithm>

namespace penstock::inline v0_1 {

template <class Memory, class Chunking, class Prefetch, class Scheduler, class Eviction>
std::size_t basic_expert_store<Memory, Chunking, Prefetch, Scheduler, Eviction>::hint(std::span<const expert_hint> guesses) {
    settle_hints();
    std::vector<expert_hint> surest(guesses.begin(), guesses.end());
    std::erase_if(surest, [&](const expert_hint& g) { return !(g.confidence >= hint_limits_.least_confidence); });  // nor NaN
    std::ranges::stable_sort(surest, std::greater<>{}, &expert_hint::confidence);
    const std::uint64_t pass = model_.layers.size();
    const std::uint64_t used_before = clock_ > pass ? clock_ - pass : 0;
    std::size_t taken = 0;
    for (const expert_hint& g : surest) {
        if (g.layer >= model_.layers.size() || g.expert >= model_.layers[g.layer].experts.size()) {
            throw configuration_error("penstock: a hint names expert " + std::to_string(g.expert) + " of layer " + std::to_string(g.layer) +
                                      ", which the model does not have");
        }
        const std::uint32_t key = first_key_[g.layer] + g.expert;
        if (hinted_.size() >= hint_limits_.on_the_way) {
            break;
        }
        if (slots_.holds(key)) {
            continue;
        }
        const std::optional<slot_map::reservation> got = slots_.template reserve<Eviction>(key, clock_, used_before);
        if (!got) {
            break;  // what is there is in use
        }
        note_eviction(*got);
        detail::hinted_fill f;
        f.key = key;
        f.slot = got->slot;
        f.confidence = g.confidence;
        f.step = clock_;
        try {
            begin(f, got->evicted);
        } catch (...) {
            slots_.abandon(f.slot);
            throw;
        }
        hinted_.push_back(std::move(f));
        ++counters_.hints;
        ++taken;
    }
    return taken;
}

/// Starts to bring it. @param after_others whether another expert was in its slot
template <class Memory, class Chunking, class Prefetch, class Scheduler, class Eviction>
void basic_expert_store<Memory, Chunking, Prefetch, Scheduler, Eviction>::begin(detail::hinted_fill& f, bool after_others) {
    std::vector<transfer> list;
    const std::optional<std::uint32_t> at_host = host_slots_.find(f.key);
    if (at_host) {
        from_memory(f.key, host_slot(*at_host), host_tier_mapped_, compute_slot(f.slot), list);
    } else {
        from_files(f.key, compute_slot(f.slot), list);
    }
    for (transfer& t : list) {
        t.level = urgency::prefetch;
        f.bytes += t.bytes;
    }
    place where = on_host();
    if (!compute_.on_host()) {
        if (!hint_copies_) {
            hint_copies_.emplace(compute_.device);
        }
        if (after_others) {
            computed_->make_wait(hint_copies_->get());  // steps before this one may still read it
        }
        where = on_device(compute_.device, hint_copies_->get());
    }
    f.load = stream_.start(list, source_, where);
    if (at_host) {
        host_slots_.pin(*at_host);
        f.host_slot = *at_host;
    }
    counters_.hint_bytes += f.bytes;
}

/// Takes in what has arrived, drops what nobody has wanted for long.
template <class Memory, class Chunking, class Prefetch, class Scheduler, class Eviction>
void basic_expert_store<Memory, Chunking, Prefetch, Scheduler, Eviction>::settle_hints() {
    const std::uint64_t life = hint_limits_.stale_after > 0 ? hint_limits_.stale_after : model_.layers.size();
    for (std::size_t i = 0; i < hinted_.size();) {
        detail::hinted_fill& f = hinted_[i];
        if (!f.dropped && !f.load.done() && clock_ - f.step > life) {
            f.load.cancel(f.key);
            f.dropped = true;
        }
        if (!f.over(hint_way())) {
            ++i;
            continue;
        }
        end(f);
        hinted_.erase(hinted_.begin() + static_cast<std::ptrdiff_t>(i));
    }
}

/// After its copies are over: the slot is resident where all of it is there.
template <class Memory, class Chunking, class Prefetch, class Scheduler, class Eviction>
void basic_expert_store<Memory, Chunking, Prefetch, Scheduler, Eviction>::end(detail::hinted_fill& f) noexcept {
    bool whole = !f.dropped;
    try {
        f.load.wait();
    } catch (...) {  // a guess that cannot be read is none; whoever needs the expert is told
        whole = false;
    }
    f.load = {};
    if (whole) {
        slots_.publish(f.slot);
        slots_.unpin(f.slot);
        unused_hint_[f.slot] = 1;
    } else {
        slots_.abandon(f.slot);
        counters_.hints_dropped += 1;
        counters_.hint_bytes_wasted += f.bytes;
    }
    if (f.host_slot >= 0) {
        host_slots_.unpin(static_cast<std::uint32_t>(f.host_slot));
    }
}

/// Drops a guess that is on its way, at once.
template <class Memory, class Chunking, class Prefetch, class Scheduler, class Eviction>
void basic_expert_store<Memory, Chunking, Prefetch, Scheduler, Eviction>::give_up(std::vector<detail::hinted_fill>::iterator at) {
    detail::hinted_fill f = std::move(*at);
    hinted_.erase(at);
    f.dropped = true;
    f.load.cancel(f.key);
    try {
        f.load.wait();
    } catch (const error&) {  // as in end()
    }
    if (hint_copies_) {
        hint_copies_->synchronize();
    }
    end(f);
}

}  // namespace penstock::inline v0_1

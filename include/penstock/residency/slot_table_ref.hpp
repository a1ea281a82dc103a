#pragma once

#include <penstock/policy/eviction.hpp>
#include <penstock/units.hpp>

#include <concepts>
#include <cstdint>
#include <limits>

/// Which expert lies in which slot, decided for one layer call at a time: hits, victims, and what is computed without a slot. On plain arrays that
/// kernels and the host read alike. `resolve` here is the sequential form; a parallel one must leave the same arrays.

namespace penstock::inline v0_1 {

inline constexpr std::uint32_t no_slot = std::numeric_limits<std::uint32_t>::max();

/// free -> filling(call) -> resident. A slot is filling from the call that gave it away until that call's commit: its bytes are not there yet.
/// One whose call was never committed is stale: its expert is a miss, and the slot is taken before any resident leaves.
enum class slot_state : std::uint32_t { free, filling, resident };

struct slot_entry {
    std::uint32_t key = 0;  ///< its expert, unless it is free
    slot_state state = slot_state::free;
    std::uint32_t pins = 0;    ///< pinned slots are never victims; a pinned filling one is a fill of the host's that is under way
    std::uint32_t unused = 0;  ///< keeps the layout free of padding
    std::uint64_t call = 0;    ///< the layer call that gave the slot to its expert
};

struct expert_entry {
    residency_entry seen;
    std::uint64_t asked = 0;  ///< the last layer call that needed it: its slot is no victim in that call
    std::uint32_t slot = no_slot;
};

/// What happened in the calls of one layer, each expert counted once a call. `misses` includes `overflow`.
struct residency_counters {
    std::uint64_t hits = 0;
    std::uint64_t misses = 0;
    std::uint64_t overflow = 0;   ///< computed without being cached
    std::uint64_t evictions = 0;  ///< residents that left for an expert of this layer
    std::uint64_t bytes = 0;      ///< of missing records
};

/// Where an expert of a call is computed from.
enum class found : std::uint32_t {
    hit,      ///< in its slot
    filling,  ///< where its bytes lie; they go to its slot on the way
    overflow  ///< where its bytes lie, and it gets no slot
};

struct resolution {
    std::uint32_t expert = 0;
    found how = found::overflow;
    std::uint32_t slot = no_slot;
    std::uint64_t call = 0;  ///< the layer call that this is about
};

struct slot_range {
    std::uint32_t first = 0;
    std::uint32_t end = 0;
};

/// Who shares slots: `S::range(layer, layers, slots)` are those that experts of the layer may lie in. Ranges of two layers are equal or disjoint.
template <class S>
concept slot_sharing = requires(std::uint32_t n) {
    { S::range(n, n, n) } -> std::same_as<slot_range>;
};

namespace sharing {

/// Every slot serves every layer.
struct all_layers {
    PENSTOCK_HD static constexpr slot_range range(std::uint32_t, std::uint32_t, std::uint32_t slots) noexcept { return {0, slots}; }
};

/// Each layer has slots of its own, as many as any other or one more.
struct per_layer {
    PENSTOCK_HD static constexpr slot_range range(std::uint32_t layer, std::uint32_t layers, std::uint32_t slots) noexcept {
        const std::uint64_t first = std::uint64_t{layer} * slots / layers;
        const std::uint64_t end = (std::uint64_t{layer} + 1) * slots / layers;
        return {static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(end)};
    }
};

}  // namespace sharing

/// An expert or a slot with its score: scratch of `resolve`.
struct scored {
    double score = 0;
    std::uint32_t index = 0;
};

/// The arrays, owned elsewhere (`slot_table` on the host). A key is a (layer, expert): first_key[layer] + expert.
template <eviction_policy Eviction, slot_sharing Sharing = sharing::all_layers>
struct slot_table_ref {
    std::uint32_t layers = 0;
    std::uint32_t slots = 0;
    const std::uint32_t* first_key = nullptr;     ///< [layers + 1]
    const std::uint64_t* record_bytes = nullptr;  ///< [layers]
    slot_entry* slot_at = nullptr;                ///< [slots]
    expert_entry* expert_at = nullptr;            ///< [first_key[layers]]
    residency_counters* counters = nullptr;       ///< [layers]
    scored* newcomers = nullptr;                  ///< [most experts of a layer], as the next
    scored* victims = nullptr;
    std::uint64_t* calls = nullptr;  ///< layer calls resolved so far

    [[nodiscard]] PENSTOCK_HD std::uint32_t experts(std::uint32_t layer) const noexcept { return first_key[layer + 1] - first_key[layer]; }

    /// The slot in which an expert is resident, else `no_slot`; a filling one does not count.
    [[nodiscard]] PENSTOCK_HD std::uint32_t find(std::uint32_t key) const noexcept {
        const std::uint32_t slot = expert_at[key].slot;
        return slot != no_slot && slot_at[slot].state == slot_state::resident ? slot : no_slot;
    }

    /// Decides one layer call. Its experts may come in any order and repeated; ids that are negative or no expert of the layer count as none.
    /// A miss gets a free slot, else that of a resident which neither this call needs nor anybody pins, the lowest score first; misses of higher
    /// score come first (ties: the lower expert), the rest is overflow. What was filling is stale, unless pinned.
    /// @param step of the model, never less than in the call before: the clock of the scores.
    /// @param out room for each distinct expert of the call: min(count, experts(layer)). They come by ascending expert.
    /// @returns how many.
    PENSTOCK_HD std::uint32_t resolve(std::uint32_t layer, std::uint64_t step, const std::int32_t* ids, std::uint32_t count,
                                      resolution* out) const {
        const std::uint64_t call = ++*calls;
        const std::uint32_t base = first_key[layer];
        const std::uint32_t all = experts(layer);
        for (std::uint32_t i = 0; i < count; ++i) {
            if (ids[i] >= 0 && static_cast<std::uint32_t>(ids[i]) < all) {
                expert_at[base + static_cast<std::uint32_t>(ids[i])].asked = call;
            }
        }
        residency_counters& counted = counters[layer];
        std::uint32_t needed = 0;
        std::uint32_t missing = 0;
        for (std::uint32_t e = 0; e < all; ++e) {
            expert_entry& expert = expert_at[base + e];
            if (expert.asked != call) {
                continue;
            }
            note_use<Eviction>(expert.seen, step);
            resolution r{e, found::overflow, no_slot, call};
            if (const std::uint32_t slot = expert.slot; slot == no_slot) {
                insert(newcomers, missing, all, {-score(expert, step), needed});
            } else if (slot_at[slot].state == slot_state::resident) {
                r.how = found::hit;
                r.slot = slot;
            } else if (slot_at[slot].pins == 0) {
                r.how = found::filling;  // stale: the slot is still its own
                r.slot = slot;
                slot_at[slot].call = call;
                expert.seen.filled = step;
            }
            counted.hits += r.how == found::hit;
            out[needed++] = r;
        }
        give_slots(layer, step, call, missing, out);
        for (std::uint32_t i = 0; i < needed; ++i) {
            counted.overflow += out[i].how == found::overflow;
            counted.misses += out[i].how != found::hit;
            counted.bytes += out[i].how != found::hit ? record_bytes[layer] : 0;
        }
        return needed;
    }

    /// All bytes of a call's fills are in their slots: they are resident from here on, but for slots that were given away again since.
    PENSTOCK_HD void commit(const resolution* list, std::uint32_t count) const {
        for (std::uint32_t i = 0; i < count; ++i) {
            if (list[i].how != found::filling) {
                continue;
            }
            slot_entry& slot = slot_at[list[i].slot];
            if (slot.state == slot_state::filling && slot.call == list[i].call) {
                slot.state = slot_state::resident;
            }
        }
    }

    /// A fill of the host's, between calls: a slot for an expert, filling and pinned until `publish` or `abandon`. By the same order of victims.
    /// @returns `no_slot` if every slot is pinned. @pre the expert is neither resident nor in a pinned filling slot.
    PENSTOCK_HD std::uint32_t reserve(std::uint32_t layer, std::uint32_t expert, std::uint64_t step) const {
        const std::uint32_t key = first_key[layer] + expert;
        std::uint32_t slot = expert_at[key].slot;
        if (slot == no_slot) {
            if (find_victims(layer, step, *calls + 1, 1) == 0) {
                return no_slot;
            }
            slot = victims[0].index;
            take(slot, key, 0, counters[layer]);
        }
        slot_at[slot].call = 0;  // no commit is about it
        ++slot_at[slot].pins;
        expert_at[key].seen.filled = step;
        return slot;
    }

    PENSTOCK_HD void publish(std::uint32_t slot) const noexcept {
        slot_at[slot].state = slot_state::resident;
        --slot_at[slot].pins;
    }

    /// The slot is free and its expert absent.
    PENSTOCK_HD void abandon(std::uint32_t slot) const noexcept {
        expert_at[slot_at[slot].key].slot = no_slot;
        slot_at[slot] = {};
    }

    PENSTOCK_HD void pin(std::uint32_t slot) const noexcept { ++slot_at[slot].pins; }
    PENSTOCK_HD void unpin(std::uint32_t slot) const noexcept { --slot_at[slot].pins; }

private:
    [[nodiscard]] PENSTOCK_HD static double score(const expert_entry& expert, std::uint64_t step) {
        return static_cast<double>(Eviction::score(expert.seen, step));
    }

    /// Keeps the `room` lowest of what is inserted, in order; what came first goes before its equals.
    PENSTOCK_HD static void insert(scored* list, std::uint32_t& size, std::uint32_t room, scored what) {
        if (size == room && !(what.score < list[size - 1].score)) {
            return;
        }
        std::uint32_t at = size < room ? size++ : size - 1;
        for (; at > 0 && what.score < list[at - 1].score; --at) {
            list[at] = list[at - 1];
        }
        list[at] = what;
    }

    /// Up to `wanted` slots that an expert of the layer may get in this call, those without a resident first, then by score. @returns how many.
    PENSTOCK_HD std::uint32_t find_victims(std::uint32_t layer, std::uint64_t step, std::uint64_t call, std::uint32_t wanted) const {
        std::uint32_t size = 0;
        if (wanted == 0) {
            return 0;
        }
        const slot_range mine = Sharing::range(layer, layers, slots);
        for (std::uint32_t s = mine.first; s < mine.end; ++s) {
            const slot_entry& slot = slot_at[s];
            if (slot.state == slot_state::free) {
                insert(victims, size, wanted, {without_resident, s});
            } else if (slot.pins == 0 && expert_at[slot.key].asked != call) {
                insert(victims, size, wanted, {slot.state == slot_state::filling ? without_resident : score(expert_at[slot.key], step), s});
            }
        }
        return size;
    }

    PENSTOCK_HD void give_slots(std::uint32_t layer, std::uint64_t step, std::uint64_t call, std::uint32_t missing, resolution* out) const {
        const std::uint32_t found_victims = find_victims(layer, step, call, missing);
        for (std::uint32_t i = 0; i < found_victims; ++i) {
            if (refuses_newcomers<Eviction> && -newcomers[i].score < victims[i].score) {
                return;  // those after it score less, and their victims more
            }
            resolution& r = out[newcomers[i].index];
            r.how = found::filling;
            r.slot = victims[i].index;
            take(r.slot, first_key[layer] + r.expert, call, counters[layer]);
            expert_at[first_key[layer] + r.expert].seen.filled = step;
        }
    }

    PENSTOCK_HD void take(std::uint32_t s, std::uint32_t key, std::uint64_t call, residency_counters& counted) const {
        if (slot_at[s].state != slot_state::free) {
            counted.evictions += slot_at[s].state == slot_state::resident;
            expert_at[slot_at[s].key].slot = no_slot;
        }
        slot_at[s] = {.key = key, .state = slot_state::filling, .call = call};
        expert_at[key].slot = s;
    }

    static constexpr double without_resident = -std::numeric_limits<double>::infinity();
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/buffer/arena.hpp>
#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/event.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/expert_work.hpp>
#include <penstock/model/moe_model.hpp>
#include <penstock/residency/expert_hints.hpp>
#include <penstock/residency/expert_trace.hpp>
#include <penstock/residency/slot_map.hpp>
#include <penstock/residency/store_budget.hpp>
#include <penstock/residency/store_report.hpp>
#include <penstock/stream/weight_stream.hpp>

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace penstock::inline v0_1 {

/// Memory of the caller's in place of allocations. Each span must hold what the budget it stands for asks for, 256-byte aligned.
struct store_memory {
    std::span<std::byte> compute;  ///< in the memory of the compute place
    std::span<std::byte> host;     ///< for a device: pinned; kernels read overflowing experts in it
};

/// The experts of all layers of a model, under a hard budget of compute memory (slots that kernels or host threads read) and one of host
/// memory (a tier of whole records between files and slots, and staging). Files are the last tier: any expert can be brought at any time.
///
/// A layer call is a `step`: it pins every expert it needs, hands them out as they arrive, and releases them when it ends. Decisions are
/// made on the host. One order of execution: steps of a store do not overlap, and all of a store's steps use streams that the caller orders.
template <class Memory, class Chunking, class Prefetch, class Scheduler, class Eviction>
class basic_expert_store {
    static_assert(std::is_same_v<Memory, memory::pinned> || std::is_same_v<Memory, memory::pageable>,
                  "penstock: expert_store keeps its host tier in memory::pinned or memory::pageable");
    static_assert(host_scheduler<Scheduler>, "penstock: expert_store needs a scheduler with a host queue");
    static_assert(eviction_policy<Eviction>, "penstock: an eviction rule offers score(residency_entry, step)");

public:
    using memory = Memory;
    using chunking = Chunking;
    using prefetch = Prefetch;
    using scheduler = Scheduler;
    using eviction = Eviction;
    using stream_type = basic_weight_stream<Memory, Chunking, Prefetch, Scheduler>;

    class step;

    /// @throws configuration_error when a budget holds not even one expert: it says the least and what one token's experts need.
    /// @throws out_of_memory, io_error. Nothing is kept when it throws.
    basic_expert_store(moe_model model, budgets limits, place compute, store_memory given = {}, stream_options options = {},
                       Chunking chunking = {}, Prefetch prefetch = {})
        : model_(std::move(model)),
          compute_(compute),
          source_(model_.files),
          stream_(options, chunking, prefetch),
          size_(plan_store(model_, limits, compute.device, stream_.staging_bytes_needed())),
          slots_(size_.slots),
          host_slots_(size_.host_slots),
          unused_hint_(size_.slots) {
        if (compute_.on_host()) {
            compute_bytes_ = given.compute.empty() ? take(host_compute_, size_.compute_bytes()) : given.compute.data();
        } else {
            compute_bytes_ = given.compute.empty() ? take(device_compute_, size_.compute_bytes()) : given.compute.data();
            copies_.emplace(compute_.device);
            computed_.emplace();
        }
        if (size_.host_slots > 0 && given.host.empty()) {
            host_tier_.emplace(size_.host_bytes(), arena_options{.device = pins_host_tier() ? compute_.device : -1});
            host_bytes_ = host_tier_->data();
            host_tier_mapped_ = host_tier_->pinned();
        } else if (size_.host_slots > 0) {
            host_bytes_ = given.host.data();
            host_tier_mapped_ = pins_host_tier();
        }
        first_key_.reserve(model_.layers.size() + 1);
        std::uint32_t keys = 0;
        for (const moe_layer_model& layer : model_.layers) {
            first_key_.push_back(keys);
            keys += static_cast<std::uint32_t>(layer.experts.size());
        }
        first_key_.push_back(keys);
    }

    basic_expert_store(const basic_expert_store&) = delete;
    basic_expert_store& operator=(const basic_expert_store&) = delete;

    /// Waits for the copies and for the computation of the last step, which may still read the slots and the host tier.
    ~basic_expert_store() {
        hinted_.clear();  // no copy is enqueued after this
        if (hint_copies_ && detail::cuda_usable()) {
            static_cast<void>(cudaStreamSynchronize(hint_copies_->get()));
        }
        if (copies_ && detail::cuda_usable()) {
            static_cast<void>(cudaStreamSynchronize(copies_->get()));
            computed_->synchronize_quietly();
        }
    }

    [[nodiscard]] const moe_model& model() const noexcept { return model_; }
    [[nodiscard]] place compute() const noexcept { return compute_; }
    [[nodiscard]] file_source& files() noexcept { return source_; }
    [[nodiscard]] stream_type& loader() noexcept { return stream_; }

    /// How the host tier's memory was had ("huge pages, registered", ...); empty without a host tier of the store's own.
    [[nodiscard]] std::string host_tier() const { return host_tier_ ? host_tier_->how() : std::string{}; }

    /// Begins a layer call. Expert e is needed by the pairs rows[offsets[e], offsets[e + 1]) of the caller's permutation.
    /// @param consumer the stream on which the caller enqueues its kernels; ignored by a store that computes on the host.
    /// @throws configuration_error when a step of this store is still open, or on a stream that is being captured.
    [[nodiscard]] step begin(std::uint32_t layer, std::span<const std::uint32_t> offsets, cudaStream_t consumer = nullptr) {
        if (open_) {
            throw configuration_error("penstock: an expert_store has one step at a time, and one is still open");
        }
        if (!compute_.on_host() && is_capturing(consumer)) {
            throw configuration_error("penstock: this expert_store decides on the host, so its layers cannot be captured in a CUDA graph");
        }
        return step(*this, layer, offsets, consumer);
    }

    /// Experts that are likely to be needed soon. Brings those that have no slot, the surest first, beside what is on demand and after it: into
    /// free slots, and into those of experts that no step has used for a pass over all layers, never of one that an open step uses. A step that
    /// needs one that is on its way makes it urgent and waits for the rest of it; one that needs a slot takes it from the least sure guess.
    /// Between or during steps, from their thread. What cannot be read is dropped. @return how many are brought
    /// @throws configuration_error for an expert that the model does not have; out_of_memory, cuda_error where staging cannot be had
    std::size_t hint(std::span<const expert_hint> guesses);

    void limit_hints(hint_limits limits) noexcept { hint_limits_ = limits; }

    /// Guesses that are on their way, as of the last call of the store.
    [[nodiscard]] std::size_t hints_on_the_way() const noexcept { return hinted_.size(); }

    /// Brings experts in the order of the layers until the host tier is full. Returns when the bytes are there.
    stream_report preload_host(const progress_callback& progress = {}, std::stop_token stop = {}) {
        return preload(host_slots_, host_bytes_, on_host(), progress, stop, [](std::uint32_t) { return nullptr; });
    }

    /// The same for the compute tier; experts that the host tier has come from there.
    stream_report preload_compute(const progress_callback& progress = {}, std::stop_token stop = {}) {
        return preload(slots_, compute_bytes_, copy_place(), progress, stop, [this](std::uint32_t key) -> const std::byte* {
            const std::optional<std::uint32_t> slot = host_slots_.find(key);
            return slot ? host_slot(*slot) : nullptr;
        });
    }

    [[nodiscard]] store_report report() const {
        store_report r = counters_;
        r.slots = size_.slots;
        r.slot_bytes = size_.slot_bytes;
        r.host_slots = size_.host_slots;
        r.device_peak_bytes = size_.compute_bytes();
        r.host_peak_bytes = size_.host_bytes() + stream_.staging_bytes();
        return r;
    }

    void reset_counters() noexcept { counters_ = {}; }

    /// Notes every layer call from here on in `into`, which must live as long as this goes on; nullptr ends it. An empty trace gets the shape of
    /// the model. @throws configuration_error when it has calls of a model of another shape.
    void record_to(expert_trace* into) {
        if (into != nullptr) {
            std::vector<std::uint32_t> experts;
            for (const moe_layer_model& layer : model_.layers) {
                experts.push_back(static_cast<std::uint32_t>(layer.experts.size()));
            }
            if (into->calls() == 0) {
                *into = expert_trace(std::move(experts));
            } else if (into->experts() != experts) {
                throw configuration_error(
                    "penstock: the trace to record to has calls of another model: its layers or their experts differ");
            }
        }
        trace_ = into;
    }

private:
    /// More tokens than one pass of the kernels serves would bring an expert over the link more than once.
    static constexpr std::uint32_t most_tokens_in_place = 8;

    [[nodiscard]] bool pins_host_tier() const noexcept { return Memory::device_accessible && !compute_.on_host(); }
    [[nodiscard]] std::byte* compute_slot(std::uint32_t s) const noexcept { return compute_bytes_ + s * size_.slot_bytes; }
    [[nodiscard]] std::byte* host_slot(std::uint32_t s) const noexcept { return host_bytes_ + s * size_.slot_bytes; }
    [[nodiscard]] place copy_place() const noexcept { return compute_.on_host() ? on_host() : on_device(compute_.device, copies_->get()); }

    [[nodiscard]] cudaStream_t hint_way() const noexcept { return hint_copies_ ? hint_copies_->get() : nullptr; }

    void begin(detail::hinted_fill& f, bool after_others);
    void end(detail::hinted_fill& f) noexcept;
    void settle_hints();
    void give_up(std::vector<detail::hinted_fill>::iterator at);
    void give_up_the_least_sure() { give_up(std::ranges::min_element(hinted_, {}, &detail::hinted_fill::confidence)); }

    void note_eviction(const slot_map::reservation& got) noexcept {
        counters_.evictions += got.evicted;
        if (std::exchange(unused_hint_[got.slot], std::uint8_t{0}) != 0) {
            counters_.hint_bytes_wasted += size_.slot_bytes;
        }
    }

    /// A slot for what is needed now: guesses give way.
    [[nodiscard]] std::optional<slot_map::reservation> reserve(std::uint32_t key, std::uint64_t step) {
        std::optional<slot_map::reservation> got = slots_.template reserve<Eviction>(key, step);
        while (!got && !hinted_.empty()) {
            give_up_the_least_sure();
            got = slots_.template reserve<Eviction>(key, step);
        }
        if (got) {
            note_eviction(*got);
        }
        return got;
    }

    template <class Buffer>
    static std::byte* take(std::optional<Buffer>& owner, std::uint64_t size) {
        owner.emplace(size);
        return owner->data();
    }

    std::byte* take(std::optional<buffer<std::byte, penstock::memory::device>>& owner, std::uint64_t size) {
        const device_guard here(compute_.device);
        owner.emplace(size);
        return owner->data();
    }

    [[nodiscard]] std::pair<std::uint32_t, std::uint32_t> layer_and_expert(std::uint32_t key) const noexcept {
        std::uint32_t layer = 0;
        while (key >= first_key_[layer + 1]) {
            ++layer;
        }
        return {layer, key - first_key_[layer]};
    }

    /// The transfers that put a record together at `destination`, from the files.
    void from_files(std::uint32_t key, std::byte* destination, std::vector<transfer>& list) {
        const auto [layer, expert] = layer_and_expert(key);
        for (const record_part& part : model_.layers[layer].experts[expert]) {
            transfer t;
            t.request = key;
            t.file = part.file;
            t.offset = part.offset;
            t.bytes = part.bytes;
            t.destination = destination + part.record_offset;
            t.row_bytes = part.row_bytes;
            list.push_back(t);
            counters_.bytes_from_files += part.bytes;
        }
    }

    /// The one transfer that copies a record that host memory has.
    void from_memory(std::uint32_t key, const std::byte* record, bool pinned, std::byte* destination, std::vector<transfer>& list) {
        transfer t;
        t.request = key;
        t.memory = record;
        t.memory_is_pinned = pinned;
        t.bytes = model_.layers[layer_and_expert(key).first].layout.bytes;
        t.destination = destination;
        list.push_back(t);
        counters_.bytes_from_host += t.bytes;
    }

    void note_call(std::uint32_t layer, std::span<const std::uint32_t> offsets) {
        if (trace_ == nullptr) {
            return;
        }
        std::vector<std::int32_t> needed;
        for (std::uint32_t e = 0; e < trace_->experts()[layer]; ++e) {
            if (offsets[e + 1] != offsets[e]) {
                needed.push_back(static_cast<std::int32_t>(e));
            }
        }
        trace_->add(layer, needed);
    }

    template <class RecordInMemory>
    stream_report preload(slot_map& map, std::byte* tier, place to, const progress_callback& progress, std::stop_token stop,
                          RecordInMemory in_memory) {
        if (open_) {
            throw configuration_error("penstock: an expert_store cannot be preloaded while a step is open");
        }
        while (!hinted_.empty()) {
            give_up_the_least_sure();
        }
        std::vector<transfer> list;
        std::vector<std::uint32_t> reserved;
        for (std::uint32_t key = 0; key < first_key_.back() && map.residents() + reserved.size() < map.slots(); ++key) {
            if (map.find(key)) {
                continue;
            }
            const std::uint32_t slot = map.template reserve<Eviction>(key, clock_)->slot;
            reserved.push_back(slot);
            if (const std::byte* record = in_memory(key)) {
                from_memory(key, record, host_tier_mapped_, tier + slot * size_.slot_bytes, list);
            } else {
                from_files(key, tier + slot * size_.slot_bytes, list);
            }
        }
        try {
            stream_report report = stream_.run(list, source_, to, progress, stop);
            for (const std::uint32_t slot : reserved) {
                map.publish(slot);
                map.unpin(slot);
            }
            return report;
        } catch (...) {
            for (const std::uint32_t slot : reserved) {
                map.abandon(slot);
            }
            throw;
        }
    }

    moe_model model_;
    place compute_;
    file_source source_;
    stream_type stream_;
    store_size size_;
    slot_map slots_;
    slot_map host_slots_;

    std::optional<buffer<std::byte, penstock::memory::pageable>> host_compute_;
    std::optional<buffer<std::byte, penstock::memory::device>> device_compute_;
    std::byte* compute_bytes_ = nullptr;
    std::optional<arena> host_tier_;
    std::byte* host_bytes_ = nullptr;
    bool host_tier_mapped_ = false;

    std::vector<std::uint8_t> unused_hint_;  ///< by slot: a guess brought what is there, and no step has used it
    hint_limits hint_limits_;
    std::vector<detail::hinted_fill> hinted_;  ///< on their way
    std::optional<stream> hint_copies_;        ///< of guesses, so that what is on demand does not stand behind them

    std::optional<stream> copies_;   ///< the copy engine's stream
    std::optional<event> computed_;  ///< the end of the last step on its consumer
    std::vector<event> arrived_;     ///< one for each fetch of a step, kept between steps
    std::vector<std::uint32_t> first_key_;
    store_report counters_;
    std::uint64_t clock_ = 0;  ///< layer calls, not reset with the counters
    expert_trace* trace_ = nullptr;
    bool open_ = false;
};

}  // namespace penstock::inline v0_1

#include <penstock/residency/store_hints.hpp>
#include <penstock/residency/store_step.hpp>

namespace penstock::inline v0_1 {

/// Policies in any order: memory (of the host tier and staging), chunking, prefetch, scheduler, eviction.
template <class... Ps>
struct expert_store_for {
    PENSTOCK_CHECK_POLICIES("expert_store", Ps...);
    using type =
        basic_expert_store<pick_policy<axis::memory, memory::pinned, Ps...>,
                           pick_policy<axis::chunking, chunking::fixed<bytes{8u << 20}>, Ps...>,
                           pick_policy<axis::prefetch, prefetch::budget<bytes{64u << 20}>, Ps...>,
                           pick_policy<axis::scheduling, scheduler::priority<3>, Ps...>, pick_policy<axis::eviction, eviction::lru, Ps...>>;
};

template <class... Ps>
using expert_store = typename expert_store_for<Ps...>::type;

/// The first GPU, or the host where there is none.
inline place default_place() noexcept { return device_count() > 0 ? on_device(0) : on_host(); }

/// A store with the given policies; see `basic_expert_store` for the arguments.
template <class... Ps>
[[nodiscard]] expert_store<Ps...> make_expert_store(moe_model model, budgets limits = {}, place compute = default_place(),
                                                    store_memory given = {}) {
    return expert_store<Ps...>(std::move(model), limits, compute, given);
}

}  // namespace penstock::inline v0_1

#pragma once

#include "report.hpp"

#include <penstock/checkpoint/checkpoint.hpp>

/// The three runs of moe_stream and what is held against what.
namespace example {

/// Fills the tiers, runs the steps, keeps what is to be reported; `inspect(layers, store)` sees the store afterwards.
template <class Inspect>
void run_store(session& s, const std::string& name, const ps::moe_model& model, const store_words& words, ps::budgets limits, float kept,
               Inspect inspect) {
    with_store(words, model, limits, [&](auto& store) {
        const bool cached = store.files().in_page_cache(0);
        const bool fills_host_tier = store.report().host_slots > 0;
        if (fills_host_tier) {
            const ps::stream_report r = store.preload_host(ps::progress_bar{});
            s.loads.push_back({name + ": files to host tier", r.seconds, r.bytes, cached});
        }
        const ps::stream_report r = store.preload_compute(ps::progress_bar{});
        s.loads.push_back({name + (fills_host_tier ? ": host tier to slots" : ": files to slots"), r.seconds, r.bytes, cached});
        with_layers(store, s.tokens, [&](auto& layers) {
            s.runs.push_back(run_steps(name, layers, store, s.tokens, s.steps, kept, s.machine));
            inspect(layers, store);
        });
        const ps::store_report end = store.report();
        s.within_budget &= end.device_peak_bytes <= limits.device && end.host_peak_bytes <= limits.host;
    });
}

/// A few more steps of (c), not timed: how many experts each layer reuses, and the first step's answers against plain reads.
template <class Layers, class Store>
void inspect_answers(session& s, Layers& layers, Store& store, const ps::moe_model& model, float kept) {
    ps::file_source files(model.files);
    ps::weight_stream<ps::memory::pageable> loader;
    const ps::dense_weights dense(model, files, loader, ps::on_host());
    walker<Layers, Store> w(layers, store, s.tokens, kept);
    std::vector<std::vector<std::int32_t>> before(layers.size());
    double sum = 0;
    constexpr int steps = 17;
    for (int step = 0; step < steps; ++step) {
        w.begin_step();
        for (std::size_t l = 0; l < layers.size(); ++l) {
            w.layer(l);
            w.synchronize();
            if (step == 0) {
                const std::vector<float> plain = plain_answer(model.layers[l], dense[l], files, w.input(), s.tokens);
                s.error = std::max(s.error, largest_error(w.output(), plain, model.layers[l].hidden));
            }
            std::vector<std::int32_t> now = distinct(w.ids(l));
            sum += step == 0 ? 0 : shared_part(before[l], now);
            before[l] = std::move(now);
        }
        w.finish_step();
    }
    s.reuse_measured = sum / ((steps - 1) * static_cast<double>(layers.size()));
}

/// Whether all experts fit the compute place at once.
inline bool fits_whole(const ps::moe_model& model, ps::place at) {
    std::uint64_t experts = 0;
    for (const ps::moe_layer_model& l : model.layers) {
        experts += l.experts.size();
    }
    return ps::plan_store(model, {ps::automatic, ps::bytes{ps::available_host_memory()}}, at.device, 0).slots == experts;
}

/// The share of a state that a walk keeps for the wanted reuse, by the first layer's router.
inline float find_kept(const session& s, const ps::moe_model& model) {
    ps::moe_model first = model;
    first.layers.resize(1);
    ps::file_source files(model.files);
    ps::weight_stream<ps::memory::pageable> loader;
    const ps::dense_weights dense(first, files, loader, ps::on_host());
    return kept_for_reuse(first.layers[0], dense[0].router, s.tokens, s.reuse_wanted);
}

/// (a) where it fits, (b), (c); then compares every step's outputs.
inline void run_all(session& s, const ps::moe_model& model, const store_words& words) {
    const ps::place at = words.place();
    s.machine = measure_ceilings(at);
    s.limits = words.budgets(model.expert_bytes());
    const float kept = find_kept(s, model);
    const auto nothing = [](auto&, auto&) {};
    if (fits_whole(model, at)) {
        const ps::weight_stream<ps::chunking::run_time, ps::prefetch::run_time> alone({}, {parse_bytes(words.chunk, 0)}, {words.depth});
        const ps::bytes staging_alone{alone.staging_bytes_needed()};
        run_store(s, "(a) all resident", model, words, {ps::automatic, at.on_host() ? ps::automatic : staging_alone}, kept, nothing);
    }
    store_words naive = words;
    naive.memory = "pageable";
    naive.scheduler = "fifo";
    naive.chunk = std::to_string(model.record_bytes());
    naive.depth = 1;
    naive.readers = 1;
    run_store(s, "(b) naive", model, naive, s.limits, kept, nothing);
    run_store(s, "(c) penstock", model, words, s.limits, kept,
              [&](auto& layers, auto& store) { inspect_answers(s, layers, store, model, kept); });
    for (std::size_t i = 1; i < s.runs.size(); ++i) {
        s.run_error = std::max(s.run_error, largest_error(s.runs[i].outputs, s.runs[0].outputs, model.layers[0].hidden));
        s.same_bits &= s.runs[i].outputs.size() == s.runs[0].outputs.size() &&
                       std::memcmp(s.runs[i].outputs.data(), s.runs[0].outputs.data(), s.runs[0].outputs.size() * sizeof(float)) == 0;
    }
}

}  // namespace example

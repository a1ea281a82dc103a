#include "../tiny_model.hpp"

#include <penstock/dispatch/host_experts.hpp>
#include <penstock/moe_layer.hpp>
#include <penstock/residency/router_predictor.hpp>

#include <doctest/doctest.h>

#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace ps = penstock;
using namespace ps::literals;
using tests::tiny_model;

namespace {

std::vector<std::uint32_t> one_row_each(const std::set<std::uint32_t>& experts) {
    std::vector<std::uint32_t> offsets{0};
    for (std::uint32_t e = 0; e < 8; ++e) {
        offsets.push_back(offsets.back() + experts.contains(e));
    }
    return offsets;
}

template <class Store>
void run_step(Store& store, const tiny_model& tiny, std::uint32_t layer, const std::set<std::uint32_t>& experts) {
    std::size_t seen = 0;
    auto step = store.begin(layer, one_row_each(experts));
    for (auto ready = step.next(); !ready.empty(); ready = step.next()) {
        for (const ps::expert_work& w : ready) {
            CHECK(experts.contains(w.expert));
            CHECK(tiny.is_record(layer, w.expert, w.record));
            ++seen;
        }
    }
    CHECK(seen == experts.size());
}

using store_type = ps::expert_store<ps::chunking::fixed<1000_B>>;

struct rig {
    explicit rig(std::uint64_t slots, std::uint64_t host = 0)
        : store(tiny.model, {{slots * tiny.slot_bytes()}, {host * tiny.slot_bytes()}}, ps::on_host()) {}

    /// Until no guess is on its way: each look settles.
    void settle() {
        while (in_flight() > 0) {
            std::this_thread::yield();
            store.hint({});
        }
    }
    std::uint64_t in_flight() {
        store.hint({});
        return store.hints_on_the_way();
    }

    tiny_model tiny;
    store_type store;
};

std::size_t hint(rig& r, std::uint32_t layer, std::uint32_t expert, float confidence = 1) {
    const ps::expert_hint g{layer, expert, confidence};
    return r.store.hint(std::span(&g, 1));
}

}  // namespace

TEST_CASE("a guessed expert is there when a step needs it, and counts as right once") {
    for (const std::uint64_t host : {0, 16}) {
        rig r(4, host);
        r.store.preload_host();
        r.store.reset_counters();
        CHECK(hint(r, 0, 5) == 1);
        CHECK(hint(r, 0, 5) == 0);  // on its way, or there
        r.settle();
        run_step(r.store, r.tiny, 0, {5});
        run_step(r.store, r.tiny, 0, {5});
        const ps::store_report report = r.store.report();
        CHECK(report.misses == 0);
        CHECK(report.hits == 2);
        CHECK(report.hints == 1);
        CHECK(report.hints_right == 1);
        CHECK(report.hints_late == 0);
        CHECK(report.hint_bytes_wasted == 0);
        CHECK(report.hint_bytes == r.tiny.model.record_bytes());
        CHECK(report.bytes_from_host + report.bytes_from_files == r.tiny.model.record_bytes());
    }
}

TEST_CASE("S05 an expert that is asked for by many while a prefetch of it is queued is read once") {
    for (int round = 0; round < 20; ++round) {
        rig r(4);
        std::mutex one_order_of_execution;
        hint(r, 0, 7);
        {
            std::vector<std::jthread> threads;
            for (int i = 0; i < 8; ++i) {
                threads.emplace_back([&] {
                    const std::lock_guard lock(one_order_of_execution);
                    run_step(r.store, r.tiny, 0, {7});
                });
            }
        }
        const ps::store_report report = r.store.report();
        CHECK(report.bytes_from_files == r.tiny.model.record_bytes());
        CHECK(report.hints_right == 1);
        CHECK(report.evictions == 0);
        CHECK(report.hits + report.misses == 8);
        CHECK(report.misses == report.hints_late);
    }
}

TEST_CASE("S04 a guess takes nothing that is in use: neither an open step's experts nor those of the last pass over the layers") {
    rig s(3);
    auto step = s.store.begin(0, one_row_each({0, 1}));
    std::vector<ps::expert_work> open;
    for (auto ready = step.next(); !ready.empty(); ready = step.next()) {
        open.insert(open.end(), ready.begin(), ready.end());
    }
    const std::vector<ps::expert_hint> guesses{{0, 2, 0.5f}, {0, 3, 0.9f}};
    CHECK(s.store.hint(guesses) == 1);  // one slot is free
    s.settle();
    CHECK(s.store.hint(guesses) == 0);
    for (const ps::expert_work& w : open) {
        CHECK(s.tiny.is_record(0, w.expert, w.record));
    }
    step.finish();
    CHECK(s.store.hint(guesses) == 0);  // used a step ago
    CHECK(s.store.report().evictions == 0);
    run_step(s.store, s.tiny, 0, {3});
    CHECK(s.store.report().hints_right == 1);  // the surer one had been brought
    for (int i = 0; i < 4; ++i) {
        run_step(s.store, s.tiny, 1, {5});  // takes the slot of 0 or 1, and a pass goes by
    }
    CHECK(s.store.hint(guesses) == 1);
    s.settle();
    run_step(s.store, s.tiny, 0, {2});
    CHECK(s.store.report().hints_right == 2);
}

TEST_CASE("what a step needs comes before guesses: it takes their slots, and they count as dropped and wasted") {
    rig r(1);
    CHECK(hint(r, 0, 5) == 1);
    run_step(r.store, r.tiny, 0, {1});
    run_step(r.store, r.tiny, 0, {1, 2, 3});
    const ps::store_report report = r.store.report();
    CHECK(report.hints_right == 0);
    CHECK(report.hint_bytes_wasted >= r.tiny.model.record_bytes());
    CHECK(report.hint_bytes_wasted <= r.tiny.slot_bytes());
}

TEST_CASE("a guess that nobody used counts as wasted when it leaves") {
    rig r(2);
    CHECK(hint(r, 0, 5) == 1);
    r.settle();
    run_step(r.store, r.tiny, 0, {0, 1});
    CHECK(r.store.report().hint_bytes_wasted == r.tiny.slot_bytes());
    CHECK(r.store.report().hints_right == 0);
    run_step(r.store, r.tiny, 0, {5});
    CHECK(r.store.report().hints_right == 0);
}

TEST_CASE("the surest guesses are brought, at most so many at a time, none that is not sure enough or not there") {
    rig r(8);
    r.store.limit_hints({.least_confidence = 0.25f, .on_the_way = 2});
    const std::vector<ps::expert_hint> guesses{{0, 0, 0.3f}, {0, 1, 0.1f}, {0, 2, 0.9f}, {0, 3, std::nanf("")}, {0, 4, 0.8f}};
    CHECK(r.store.hint(guesses) <= 2);
    r.settle();
    run_step(r.store, r.tiny, 0, {2, 4});
    CHECK(r.store.report().hints_right == 2);
    CHECK(r.store.hint(std::vector<ps::expert_hint>{{0, 1, 0.2f}, {0, 3, std::nanf("")}}) == 0);
    CHECK_THROWS_WITH_AS(hint(r, 0, 8), doctest::Contains("expert 8 of layer 0"), ps::configuration_error);
    CHECK_THROWS_AS(hint(r, 2, 0), ps::configuration_error);
}

TEST_CASE("a guess that cannot be read is dropped, and the step that needs the expert says why") {
    rig r(4);
    std::filesystem::resize_file(r.tiny.path(), 100);
    CHECK(hint(r, 1, 7) == 1);
    r.settle();
    CHECK(r.store.report().hints_dropped == 1);
    CHECK_THROWS_AS(run_step(r.store, r.tiny, 1, {7}), ps::io_error);
    CHECK(hint(r, 1, 6) == 1);
}

TEST_CASE("random steps and guesses, right and wrong, hand out the right bytes") {
    tiny_model tiny(3, 8, 16, 8);
    for (const std::uint64_t host : {0, 7}) {
        std::mt19937 random(9);
        store_type store(tiny.model, {{12 * tiny.slot_bytes()}, {host * tiny.slot_bytes()}}, ps::on_host());
        store.limit_hints({.on_the_way = 3, .stale_after = 2});
        for (int i = 0; i < 3000; ++i) {
            const auto layer = static_cast<std::uint32_t>(i % 3);
            std::set<std::uint32_t> experts;
            while (experts.empty() || random() % 3 != 0) {
                experts.insert(static_cast<std::uint32_t>(random() % 8));
            }
            std::vector<ps::expert_hint> guesses;
            for (int n = 0; n < 3; ++n) {
                guesses.push_back({random() % 2 == 0 ? layer : static_cast<std::uint32_t>(random() % 3),
                                   static_cast<std::uint32_t>(random() % 8), static_cast<float>(random() % 10) / 10});
            }
            store.hint(guesses);
            std::size_t seen = 0;
            auto step = store.begin(layer, one_row_each(experts));
            for (auto ready = step.next(); !ready.empty(); ready = step.next()) {
                for (const ps::expert_work& w : ready) {
                    REQUIRE(tiny.is_record(layer, w.expert, w.record));
                    ++seen;
                }
                if (random() % 4 == 0) {
                    store.hint(guesses);
                }
            }
            REQUIRE(seen == experts.size());
        }
        const ps::store_report r = store.report();
        CHECK(r.hints_right > 100);
        CHECK(r.hints_right + r.hints_dropped <= r.hints);
        CHECK(r.hint_bytes_wasted > 0);
    }
}

TEST_CASE("the next layer's router on a hidden state guesses what the layer chooses for that state") {
    tiny_model tiny;
    ps::expert_store<> store(tiny.model, {{16 * tiny.slot_bytes()}, {0}}, ps::on_host());
    auto layers = ps::make_moe_layers<ps::executor::host>(store, {.max_tokens = 3});
    ps::executor::host executor(1);
    ps::router_predictor<ps::executor::host> predictor(tiny.model, layers.dense(), 3);
    CHECK(predictor.take().empty());
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    std::vector<float> hidden(3 * 64), output(3 * 64);
    for (float& h : hidden) {
        h = normal(random);
    }
    const ps::activations in{hidden.data(), ps::dtype::f32, 3, 64};
    predictor.guess(executor, 1, in);
    const std::vector<ps::expert_hint> guesses = predictor.take();
    CHECK(predictor.take().empty());
    layers[1].forward(in, {output.data(), ps::dtype::f32, 3, 64});
    std::set<std::uint32_t> chosen, guessed;
    for (int p = 0; p < 6; ++p) {
        chosen.insert(static_cast<std::uint32_t>(layers[1].last_choices().ids[p]));
    }
    for (const ps::expert_hint& g : guesses) {
        CHECK(g.layer == 1);
        CHECK(g.confidence > 0);
        CHECK(g.confidence <= 1);
        guessed.insert(g.expert);
    }
    CHECK(guessed == chosen);
    CHECK_THROWS_AS(predictor.guess(executor, 2, in), ps::configuration_error);
}

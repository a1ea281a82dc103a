#include "../tiny_model.hpp"

#include <penstock/residency/expert_store.hpp>
#include <penstock/residency/simulate.hpp>

#include <doctest/doctest.h>

#include <random>
#include <set>

/// Under AddressSanitizer a request that is too large fails as it does elsewhere, instead of ending the program.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }  // NOLINT: the sanitizer's name

namespace ps = penstock;
using namespace ps::literals;
using tests::tiny_model;

namespace {

/// Offsets of a permutation in which each of `experts` has one row.
std::vector<std::uint32_t> one_row_each(std::uint32_t all, const std::set<std::uint32_t>& experts) {
    std::vector<std::uint32_t> offsets{0};
    for (std::uint32_t e = 0; e < all; ++e) {
        offsets.push_back(offsets.back() + experts.contains(e));
    }
    return offsets;
}

/// Runs a step and returns the experts in the order in which they were handed out; every record must hold its expert's bytes.
template <class Store>
std::vector<std::uint32_t> run_step(Store& store, const tiny_model& tiny, std::uint32_t layer, const std::set<std::uint32_t>& experts) {
    std::vector<std::uint32_t> seen;
    auto step = store.begin(layer, one_row_each(static_cast<std::uint32_t>(tiny.model.layers[layer].experts.size()), experts));
    while (true) {
        const std::span<const ps::expert_work> ready = step.next();
        if (ready.empty()) {
            break;
        }
        for (const ps::expert_work& w : ready) {
            CHECK(tiny.is_record(layer, w.expert, w.record));
            CHECK(w.count == 1);
            seen.push_back(w.expert);
        }
    }
    step.finish();
    CHECK(std::set<std::uint32_t>(seen.begin(), seen.end()) == experts);
    CHECK(seen.size() == experts.size());
    return seen;
}

ps::budgets slots(const tiny_model& tiny, std::uint64_t device, std::uint64_t host = 0) {
    return {{device * tiny.slot_bytes()}, {host * tiny.slot_bytes()}};
}

template <class... Ps>
ps::expert_store<Ps...> host_store(const tiny_model& tiny, ps::budgets limits) {
    return ps::make_expert_store<Ps...>(tiny.model, limits, ps::on_host());
}

}  // namespace

TEST_CASE("experts come on demand, stay while there is room, and leave in the order of their last use") {
    tiny_model tiny;
    auto store = host_store(tiny, slots(tiny, 3));
    run_step(store, tiny, 0, {1, 2});
    CHECK(store.report().misses == 2);
    run_step(store, tiny, 0, {1, 2});
    CHECK(store.report().hits == 2);
    run_step(store, tiny, 1, {1});  // another layer's expert 1 is another expert
    CHECK(store.report().misses == 3);
    CHECK(store.report().evictions == 0);
    run_step(store, tiny, 0, {1});
    run_step(store, tiny, 0, {5});  // 2 of layer 0 was used longest ago
    CHECK(store.report().evictions == 1);
    run_step(store, tiny, 0, {1});
    CHECK(store.report().misses == 4);
    run_step(store, tiny, 0, {2});
    CHECK(store.report().misses == 5);
}

TEST_CASE("S01 a step pins its hits and what it fetches") {
    tiny_model tiny;
    auto store = host_store(tiny, slots(tiny, 3));
    run_step(store, tiny, 0, {0, 1});
    run_step(store, tiny, 0, {4, 5});
    run_step(store, tiny, 0, {1, 4, 0});
    CHECK(store.report().waves == 0);
}

TEST_CASE("S02 a step that needs more experts than there are slots runs in waves") {
    tiny_model tiny;
    for (const std::uint64_t n : {1, 2, 4}) {
        auto store = host_store(tiny, slots(tiny, n));
        run_step(store, tiny, 0, {0, 1, 2, 3, 5, 7});
        const ps::store_report r = store.report();
        CHECK(r.waves == 6 / n - (6 % n == 0));
        CHECK(r.evictions == 6 - n);
        CHECK(r.device_peak_bytes <= n * tiny.slot_bytes());
        run_step(store, tiny, 0, {0, 1, 2, 3, 5, 7});  // hits keep their slots, the rest share what is left
    }
}

TEST_CASE("hits come first, so that they are computed while the misses are on their way") {
    tiny_model tiny;
    auto store = host_store(tiny, slots(tiny, 4));
    run_step(store, tiny, 0, {6});
    CHECK(run_step(store, tiny, 0, {1, 2, 6}).front() == 6);
}

TEST_CASE("a host tier saves reads of the files, and falls back to them when it is full of pinned records") {
    tiny_model tiny;
    auto store = host_store(tiny, slots(tiny, 1, 2));
    CHECK(store.report().host_slots == 2);
    run_step(store, tiny, 0, {0, 1});
    run_step(store, tiny, 0, {0});
    CHECK(store.report().host_hits == 1);
    run_step(store, tiny, 1, {0, 1, 2, 3, 4});
    CHECK(store.report().host_peak_bytes <= 2 * tiny.slot_bytes());
}

TEST_CASE("a step gives the records it held in the host tier back") {
    tiny_model tiny;
    auto store = host_store(tiny, slots(tiny, 1, 2));
    for (std::uint32_t e = 0; e < 8; ++e) {  // each brings two new experts to the host tier, so two others must leave it
        run_step(store, tiny, e % 2, {e, (e + 1) % 8});
    }
    const std::uint64_t before = store.report().host_hits;
    run_step(store, tiny, 1, {0});  // the slot holds expert 7 of layer 1, the host tier 0 and 7
    CHECK(store.report().host_hits == before + 1);
}

TEST_CASE("10,000 random steps under tight budgets hand out the right bytes") {
    tiny_model tiny(3, 8, 16, 8);
    std::mt19937 random(5);
    auto store = host_store(tiny, slots(tiny, 5, 7));
    for (int i = 0; i < 10000; ++i) {
        std::set<std::uint32_t> experts;
        while (experts.empty() || random() % 3 != 0) {
            experts.insert(static_cast<std::uint32_t>(random() % 8));
        }
        run_step(store, tiny, static_cast<std::uint32_t>(random() % 3), experts);
    }
    CHECK(store.report().device_peak_bytes <= 5 * tiny.slot_bytes());
}

TEST_CASE("preloading fills the tiers in the order of the layers") {
    tiny_model tiny;
    auto store = host_store(tiny, slots(tiny, 9, 12));
    store.preload_host();
    store.preload_compute();
    const std::uint64_t read = store.report().bytes_from_files;
    run_step(store, tiny, 0, {0, 1, 2, 3, 4, 5, 6, 7});
    run_step(store, tiny, 1, {0, 1, 2, 3});
    CHECK(store.report().hits == 9);
    CHECK(store.report().host_hits == 3);
    CHECK(store.report().bytes_from_files == read);
}

TEST_CASE_TEMPLATE("any policies give the same bytes", Policies, ps::expert_store<>,
                   ps::expert_store<ps::chunking::fixed<128_B>, ps::scheduler::fifo>,
                   ps::expert_store<ps::scheduler::round_robin, ps::chunking::fixed<1000_B>, ps::prefetch::depth<2>>,
                   ps::expert_store<ps::memory::pageable, ps::chunking::whole, ps::prefetch::none>,
                   ps::expert_store<ps::chunking::rows<3>>) {
    tiny_model tiny;
    Policies store(tiny.model, slots(tiny, 2, 3), ps::on_host());
    for (const std::uint32_t e : {0u, 3u, 7u}) {
        run_step(store, tiny, 0, {e, (e + 1) % 8, (e + 2) % 8});
        run_step(store, tiny, 1, {e});
    }
}

TEST_CASE("policies come in any order, equal choices are one type") {
    using a = ps::expert_store<ps::scheduler::fifo, ps::eviction::lru, ps::memory::pageable>;
    using b = ps::expert_store<ps::memory::pageable, ps::scheduler::fifo>;
    CHECK(std::is_same_v<a, b>);
    CHECK(std::is_same_v<a::scheduler, ps::scheduler::fifo>);
}

TEST_CASE("M20 budgets at their corners") {
    tiny_model tiny;
    const auto refused = [&](ps::budgets b, const std::string& words) {
        try {
            host_store(tiny, b);
            FAIL("a budget of " << b.device.count << " was accepted");
        } catch (const ps::configuration_error& e) {
            CHECK_MESSAGE(std::string(e.what()).find(words) != std::string::npos, e.what());
        }
    };
    refused({{0}, {0}}, "device budget 0 B holds no expert");
    refused({{1}, {0}}, std::to_string(tiny.slot_bytes()));
    refused({{tiny.slot_bytes() - 1}, {0}}, "budget");
    CHECK(host_store(tiny, {{tiny.slot_bytes()}, {0}}).report().slots == 1);
    CHECK(host_store(tiny, {}).report().slots == 16);
    CHECK(host_store(tiny, {{tiny.slot_bytes() * 1000}, {0}}).report().slots == 16);
    const ps::bytes almost_automatic{ps::automatic.count - 1};
    CHECK(host_store(tiny, {almost_automatic, {0}}).report().slots == 16);
    CHECK(host_store(tiny, {{tiny.slot_bytes()}, almost_automatic}).report().host_slots == 16);
    CHECK(host_store(tiny, {{tiny.slot_bytes()}, {1}}).report().host_slots == 0);
    // More than there is: at construction, not at the first step.
    tiny.model.layers[0].layout.bytes = std::uint64_t{1} << 46;
    CHECK_THROWS_WITH_AS(host_store(tiny, {almost_automatic, {0}}), doctest::Contains("host memory ran out: 1024.0 TiB"),
                         ps::out_of_memory);
    CHECK_THROWS_AS(ps::make_expert_store(ps::moe_model{}, {}, ps::on_host()), ps::configuration_error);
}

TEST_CASE("M14 host tier and staging together stay within the host budget of a store that computes on a device") {
    tiny_model tiny;
    constexpr std::uint64_t staging = 5000;
    for (std::uint64_t budget = staging; budget < 20 * tiny.slot_bytes(); budget += 777) {
        const ps::store_size size = ps::plan_store(tiny.model, {{tiny.slot_bytes()}, {budget}}, 0, staging);
        CHECK(size.host_bytes() + staging <= budget);
        CHECK((size.host_slots == 16 || size.host_bytes() + staging + tiny.slot_bytes() > budget));  // and none of it is wasted
    }
    CHECK_THROWS_AS(ps::plan_store(tiny.model, {{tiny.slot_bytes()}, {staging - 1}}, 0, staging), ps::configuration_error);
}

TEST_CASE("M16 a file that ends early names itself, frees the step's slots, and a later step works") {
    tiny_model tiny;
    const std::uint64_t whole = std::filesystem::file_size(tiny.path());
    auto store = host_store(tiny, slots(tiny, 2, 2));
    run_step(store, tiny, 0, {0});
    std::filesystem::resize_file(tiny.path(), whole / 2);
    for (int i = 0; i < 3; ++i) {
        try {
            run_step(store, tiny, 1, {7});
            FAIL("a truncated file was read");
        } catch (const ps::io_error& e) {
            CHECK(std::string(e.what()).find(tiny.path().filename().string()) != std::string::npos);
        }
    }
    run_step(store, tiny, 0, {0});
    CHECK(store.report().hits == 1);
    run_step(store, tiny, 0, {1, 2});
}

TEST_CASE("one step at a time") {
    tiny_model tiny;
    auto store = host_store(tiny, slots(tiny, 2));
    const std::vector<std::uint32_t> offsets = one_row_each(8, {1});
    auto step = store.begin(0, offsets);
    CHECK_THROWS_AS(static_cast<void>(store.begin(1, offsets)), ps::configuration_error);
    CHECK_THROWS_AS(store.preload_compute(), ps::configuration_error);
    step.finish();
    run_step(store, tiny, 0, {1});
}

TEST_CASE("a step that is dropped before its experts are handed out loses nothing") {
    tiny_model tiny;
    auto store = host_store(tiny, slots(tiny, 2));
    for (int i = 0; i < 50; ++i) {
        auto step = store.begin(0, one_row_each(8, {1, 2, 3}));
        static_cast<void>(step.next());
    }
    run_step(store, tiny, 0, {1, 2, 3});
}

TEST_CASE("the caller's memory is used instead of the store's") {
    tiny_model tiny;
    ps::buffer<std::byte, ps::memory::pageable> compute(2 * tiny.slot_bytes());
    ps::expert_store<> store(tiny.model, slots(tiny, 2), ps::on_host(), {.compute = {compute.data(), compute.size()}, .host = {}});
    auto step = store.begin(0, one_row_each(8, {4}));
    const std::byte* record = step.next().front().record;
    CHECK(record >= compute.data());
    CHECK(record < compute.data() + compute.size());
}

TEST_CASE("a recorded trace replays to the store's own hits, and costs nothing when nobody records") {
    tiny_model tiny;
    auto store = host_store(tiny, slots(tiny, 6));
    ps::expert_trace trace;
    store.record_to(&trace);
    std::mt19937 random(3);
    for (int call = 0; call < 400; ++call) {
        const auto any = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
        run_step(store, tiny, static_cast<std::uint32_t>(call % 2), {any(8), any(4), any(4)});
    }
    store.record_to(nullptr);
    const ps::store_report before = store.report();
    run_step(store, tiny, 0, {1});
    REQUIRE(trace.calls() == 400);
    CHECK(trace.requests() == before.hits + before.misses);
    // In the store a step is a layer call: the same trace as of a model of one layer, whose experts are those of both.
    ps::expert_trace as_one({16});
    for (std::size_t c = 0; c < trace.calls(); ++c) {
        std::vector<std::int32_t> needed(trace.needed(c).begin(), trace.needed(c).end());
        for (std::int32_t& e : needed) {
            e += static_cast<std::int32_t>(8 * trace.layer(c));
        }
        as_one.add(0, needed);
    }
    const ps::residency_counters replayed = ps::simulate<ps::eviction::lru>(as_one, 6);
    CHECK(replayed.hits == before.hits);
    CHECK(replayed.evictions == before.evictions);
    ps::expert_trace other({3});
    other.add(0, std::vector<std::int32_t>{1});
    CHECK_THROWS_AS(store.record_to(&other), ps::configuration_error);
}

TEST_CASE("who leaves is the least recently used after the counters were reset, too") {
    tiny_model tiny;
    auto store = host_store(tiny, slots(tiny, 2));
    for (int i = 0; i < 10; ++i) {
        run_step(store, tiny, 0, {1});
    }
    store.reset_counters();
    CHECK(store.report().steps == 0);
    run_step(store, tiny, 0, {2});
    run_step(store, tiny, 0, {3});  // 1 leaves
    run_step(store, tiny, 0, {2});
    CHECK(store.report().hits == 1);
}

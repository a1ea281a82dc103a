#include "../own_evictions.hpp"

#include <penstock/residency/simulate.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <map>
#include <random>
#include <sstream>

namespace ps = penstock;
namespace eviction = ps::eviction;
namespace sharing = ps::sharing;

namespace {

using ids = std::vector<std::int32_t>;

/// One layer, calls of the listed experts.
ps::expert_trace one_layer(std::uint32_t experts, const std::vector<ids>& calls) {
    ps::expert_trace trace({experts});
    for (const ids& c : calls) {
        trace.add(0, c);
    }
    return trace;
}

ps::expert_trace random_trace(std::uint32_t seed, std::uint32_t layers, std::uint32_t experts, std::uint32_t steps, std::uint32_t most) {
    std::mt19937 random(seed);
    ps::expert_trace trace(std::vector<std::uint32_t>(layers, experts));
    for (std::uint32_t s = 0; s < steps; ++s) {
        for (std::uint32_t l = 0; l < layers; ++l) {
            ids needed;
            for (auto i = random() % (most + 1); i > 0; --i) {
                needed.push_back(static_cast<std::int32_t>(std::min(random() % experts, random() % experts)));
            }
            trace.add(l, needed);
        }
    }
    return trace;
}

/// The most hits by trying every choice: after a call may be resident what was or what it needed.
std::uint64_t most_hits(const ps::expert_trace& trace, int slots) {
    std::map<unsigned, std::uint64_t> best{{0u, 0}};
    for (std::size_t c = 0; c < trace.calls(); ++c) {
        unsigned needed = 0;
        for (const std::int32_t id : trace.needed(c)) {
            needed |= 1u << id;
        }
        std::map<unsigned, std::uint64_t> after;
        for (const auto& [residents, hits] : best) {
            const unsigned held = residents & needed;
            const unsigned possible = residents | needed;
            for (unsigned chosen = possible;; chosen = (chosen - 1) & possible) {
                if (std::popcount(chosen) <= slots) {
                    std::uint64_t& most = after[chosen];
                    most = std::max(most, hits + static_cast<std::uint64_t>(std::popcount(held)));
                }
                if (chosen == 0) {
                    break;
                }
            }
        }
        best = std::move(after);
    }
    std::uint64_t most = 0;
    for (const auto& [residents, hits] : best) {
        most = std::max(most, hits);
    }
    return most;
}

}  // namespace

TEST_CASE("hits of tiny traces as counted by hand") {
    const ps::expert_trace around = one_layer(4, {{0}, {1}, {2}, {0}, {1}, {2}});
    CHECK(ps::simulate<eviction::lru>(around, 2).hits == 0);
    CHECK(ps::simulate<eviction::lru>(around, 3).hits == 3);
    CHECK(ps::simulate_best(around, 1).hits == 1);
    CHECK(ps::simulate_best(around, 2).hits == 2);
    CHECK(ps::simulate_best(around, 3).hits == 3);
    CHECK(ps::simulate_best(around, 0).hits == 0);
    CHECK(ps::simulate_best(around, 0).misses == 6);

    const ps::expert_trace often = one_layer(8, {{0}, {0}, {0}, {1}, {2}, {0}, {3}, {4}, {0}});
    CHECK(ps::simulate<eviction::lru>(often, 2).hits == 2);
    CHECK(ps::simulate<tests::least_used>(often, 2).hits == 4);
    CHECK(ps::simulate<eviction::lfru<8>>(often, 2).hits == 4);
    CHECK(ps::simulate<eviction::hot_set<>>(often, 2, std::vector<std::uint32_t>{0}).hits == 4);
    CHECK(ps::simulate<eviction::lru>(often, 2, {}, 3).hits == 0);  // the first three calls are not counted
    CHECK(ps::simulate_best(often, 2, 3).hits == 2);

    // Both of a pair are held at once: with two slots nothing of the one before is left.
    const ps::expert_trace pairs = one_layer(8, {{0, 1}, {2, 3}, {0, 1}, {0, 2}});
    CHECK(ps::simulate<eviction::lru>(pairs, 2).hits == 1);
    CHECK(ps::simulate_best(pairs, 2).hits == 3);
    CHECK(ps::simulate<eviction::lru>(pairs, 4).hits == 4);
}

TEST_CASE("layers share slots, or have their own") {
    ps::expert_trace trace({4, 4});
    for (int i = 0; i < 3; ++i) {
        trace.add(0, ids{0, 1});
        trace.add(1, ids{2});
    }
    CHECK(ps::simulate<eviction::lru>(trace, 3).hits == 6);
    CHECK(ps::simulate<eviction::lru, sharing::per_layer>(trace, 3).hits == 4);  // one slot and two
    CHECK(ps::simulate_best<sharing::per_layer>(trace, 3).hits == 4);
    CHECK(ps::simulate_best<sharing::per_layer>(trace, 1).hits == 2);  // the second layer has the only slot
    ps::expert_trace four({2, 2, 2, 2});
    for (int i = 0; i < 3; ++i) {
        for (std::uint32_t layer = 0; layer < 4; ++layer) {
            four.add(layer, ids{1});
        }
    }
    CHECK(ps::simulate<eviction::lru, sharing::per_layer>(four, 2).hits == 4);  // two layers have a slot
    CHECK(ps::simulate_best<sharing::per_layer>(four, 2).hits == 4);
    CHECK(ps::hottest<sharing::per_layer>(four, 2) == std::vector<std::uint32_t>{3, 7});
}

TEST_CASE("the best of a trace is what trying every choice finds") {
    for (std::uint32_t seed = 1; seed <= 300; ++seed) {
        const ps::expert_trace trace = random_trace(seed, 1, 4 + seed % 3, 14, 1 + seed % 4);
        for (const std::uint32_t slots : {1u, 2u, 3u}) {
            REQUIRE(ps::simulate_best(trace, slots).hits == most_hits(trace, static_cast<int>(slots)));
        }
    }
}

TEST_CASE_TEMPLATE("no rule has more hits than the best", E, eviction::lru, eviction::lfru<1>, eviction::lfru<64>, eviction::hot_set<>,
                   eviction::hot_set<eviction::lfru<8>>, eviction::selective<eviction::lfru<8>>, tests::least_used, tests::second_chance,
                   tests::at_random) {
    for (std::uint32_t seed = 1; seed <= 40; ++seed) {
        const ps::expert_trace trace = random_trace(seed, 3, 12, 60, 5);
        for (const std::uint32_t slots : {1u, 4u, 9u, 20u, 36u}) {
            const auto hot = ps::hottest(trace, slots, 0.5);
            const ps::residency_counters common = ps::simulate<E>(trace, slots, hot);
            const ps::hits_and_misses best = ps::simulate_best(trace, slots);
            REQUIRE(common.hits <= best.hits);
            REQUIRE(common.hits + common.misses == trace.requests());
            REQUIRE(best.hits + best.misses == trace.requests());
            const auto hot_apart = ps::hottest<sharing::per_layer>(trace, slots, 0.5);
            REQUIRE(ps::simulate<E, sharing::per_layer>(trace, slots, hot_apart).hits <=
                    ps::simulate_best<sharing::per_layer>(trace, slots).hits);
            REQUIRE(ps::simulate<E>(trace, slots, hot, 90).hits <= ps::simulate_best(trace, slots, 90).hits);
            if (slots == 36) {
                REQUIRE(common.hits == best.hits);
            }
        }
    }
}

TEST_CASE("the hottest of a trace are the most used, within the slots they may lie in") {
    ps::expert_trace trace({3, 3});
    trace.add(0, ids{0, 1, 2});
    trace.add(1, ids{2});
    trace.add(0, ids{0, 1});
    trace.add(0, ids{0});
    CHECK(ps::profile(trace) == std::vector<std::uint64_t>{3, 2, 1, 0, 0, 1});
    using keys = std::vector<std::uint32_t>;
    CHECK(ps::hottest(trace, 2) == keys{0, 1});
    CHECK(ps::hottest(trace, 4) == keys{0, 1, 2, 5});
    CHECK(ps::hottest(trace, 4, 0.5) == keys{0, 1});
    CHECK(ps::hottest<sharing::per_layer>(trace, 2) == keys{0, 5});
    CHECK(ps::hottest<sharing::per_layer>(trace, 1) == keys{5});
    CHECK(ps::hottest(trace, 100).size() == 6);
    CHECK(ps::hottest(trace, 0).empty());
}

TEST_CASE("a trace is read as it was written") {
    const ps::expert_trace trace = random_trace(3, 4, 9, 50, 4);
    std::stringstream text;
    text << trace;
    CHECK(ps::read_trace(text) == trace);
    std::istringstream by_hand("# of a model\r\npenstock-trace 1\n\nexperts 4 2\n0 3 1 3\n1\n1 0 1\n");
    const ps::expert_trace read = ps::read_trace(by_hand);
    CHECK(read.experts() == std::vector<std::uint32_t>{4, 2});
    REQUIRE(read.calls() == 3);
    CHECK(std::ranges::equal(read.needed(0), ids{1, 3}));
    CHECK(read.needed(1).empty());
    CHECK(read.layer(2) == 1);
}

TEST_CASE("a trace that is none names the line") {
    const auto said = [](const std::string& text) {
        std::istringstream in(text);
        try {
            static_cast<void>(ps::read_trace(in, "some.trace"));
        } catch (const ps::format_error& problem) {
            return std::string(problem.what());
        }
        return std::string("nothing");
    };
    const auto about = [&](const std::string& text, const char* words) { return said(text).find(words) != std::string::npos; };
    CHECK(about("", "some.trace ends"));
    CHECK(about("penstock-trace 1\n", "some.trace ends"));
    CHECK(about("penstock-trace 2\nexperts 4\n", "line 1"));
    CHECK(about("penstock-trace 1\n0 1\n", "line 2"));
    CHECK(about("penstock-trace 1\nexperts 4\n0 1\n0 x\n", "line 4: 'x'"));
    CHECK(about("penstock-trace 1\nexperts 4\n0 4\n", "given expert 4 (some.trace, line 3)"));
    CHECK(about("penstock-trace 1\nexperts 4\n1 0\n", "given layer 1"));
    CHECK(about("penstock-trace 1\nexperts 4\n0 -1\n", "'-1'"));
    CHECK(about("penstock-trace 1\nexperts 4\n0 99999999999\n", "'99999999999'"));
    CHECK(said("penstock-trace 1\nexperts 4\n") == "nothing");
    CHECK_THROWS_AS(static_cast<void>(ps::read_trace(std::filesystem::path("/does/not/exist"))), ps::io_error);
}

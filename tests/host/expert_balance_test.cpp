#include <penstock/parallel/balance.hpp>
#include <penstock/parallel/rebalance.hpp>

#include <doctest/doctest.h>

#include <limits>
#include <numeric>
#include <random>
#include <sstream>

using namespace penstock;

namespace {

using owner_lists = std::vector<std::vector<std::uint32_t>>;

std::vector<double> skewed(std::mt19937& random, std::uint32_t experts, double exponent) {
    std::vector<double> loads(experts);
    for (std::uint32_t e = 0; e < experts; ++e) {
        loads[e] = 1000 / std::pow(e + 1.0, exponent);
    }
    std::shuffle(loads.begin(), loads.end(), random);
    return loads;
}

expert_placement one_each(std::uint32_t experts, std::uint32_t ranks) {
    owner_lists owners(experts);
    for (std::uint32_t e = 0; e < experts; ++e) {
        owners[e] = {static_cast<std::uint32_t>(std::uint64_t{e} * ranks / experts)};
    }
    return {ranks, owners};
}

/// Within the slots; every expert somewhere, no rank twice (the placement itself refuses that).
void check_fits(const expert_placement& p, std::uint32_t slots) {
    for (std::uint32_t r = 0; r < p.ranks(); ++r) {
        CHECK(p.experts_of(r).size() <= slots);
        CHECK(std::is_sorted(p.experts_of(r).begin(), p.experts_of(r).end()));
    }
    for (std::uint32_t e = 0; e < p.experts(); ++e) {
        CHECK(!p.copies(e).empty());
        for (const auto& c : p.copies(e)) {
            CHECK(p.experts_of(c.rank)[c.local] == e);
        }
    }
}

}  // namespace

TEST_CASE("loads and imbalance of a placement, by hand") {
    const expert_placement p(3, owner_lists{{0}, {0, 2}, {1}});
    const std::vector<double> loads{4, 6, 2};
    CHECK(rank_loads(p, loads) == std::vector<double>{7, 2, 3});
    CHECK(imbalance(p, loads) == doctest::Approx(7.0 / 4));
    CHECK(imbalance(p, std::vector<double>{0, 0, 0}) == 1);
    CHECK_THROWS_WITH_AS(rank_loads(p, std::vector<double>{1}), doctest::Contains("loads of 1 experts"), configuration_error);
}

TEST_CASE("a small case by hand: the hot expert gets the spare slots") {
    // Two ranks with three slots: 12 becomes 6 and 6, 3 becomes 1.5 and 1.5; then 6 + 2 + 1.5 and 6 + 1.5 + 1.
    const std::vector<double> loads{3, 12, 2, 1};
    const expert_placement p = balance_greedy(loads, 2, 3);
    CHECK(p.copies(1).size() == 2);
    CHECK(p.copies(0).size() == 2);
    CHECK(rank_loads(p, loads) == std::vector<double>{9.5, 8.5});
    CHECK(imbalance(p, loads) == doctest::Approx(9.5 / 9));
    check_fits(p, 3);
}

TEST_CASE("greedy balance never does worse than one run of neighbours a rank, and much better where few experts are hot") {
    std::mt19937 random{1};
    for (const std::uint32_t ranks : {1u, 2u, 8u, 64u, 256u}) {
        for (const double exponent : {0.0, 0.5, 1.0, 2.0}) {
            const std::vector<double> loads = skewed(random, 256, exponent);
            const std::uint32_t slots = 256 / ranks + (ranks == 1 ? 0 : std::max(1u, 32 / ranks));
            const expert_placement before = one_each(256, ranks), after = balance_greedy(loads, ranks, slots);
            CAPTURE(ranks);
            CAPTURE(exponent);
            check_fits(after, slots);
            CHECK(imbalance(after, loads) <= imbalance(before, loads) + 1e-9);
            if (exponent == 1.0 && ranks > 1) {
                CHECK(imbalance(after, loads) < 1.2);
            }
            CHECK(after == balance_greedy(loads, ranks, slots));
        }
    }
}

TEST_CASE("every expert has a place, however tight the slots and whatever the loads") {
    std::mt19937 random{2};
    for (int i = 0; i < 400; ++i) {
        const auto ranks = static_cast<std::uint32_t>(1 + random() % 9), experts = static_cast<std::uint32_t>(random() % 30);
        const auto least = static_cast<std::uint32_t>(ceil_div(experts, ranks));
        const auto slots = static_cast<std::uint32_t>(least + random() % 3);
        std::vector<double> loads(experts);
        for (double& l : loads) {
            l = random() % 3 == 0 ? 0 : std::pow(10.0, random() % 6);
        }
        const expert_placement p = balance_greedy(loads, ranks, slots);
        CHECK(p.experts() == experts);
        check_fits(p, slots);
    }
}

TEST_CASE("by node: a group and its replicas stay in one node") {
    std::mt19937 random{3};
    for (const rank_topology topology : {rank_topology{1, 8}, {2, 8}, {4, 4}, {8, 8}, {32, 8}}) {
        const std::uint32_t groups = topology.nodes > 8 ? 32 : 8, slots = 256 / topology.ranks() + (topology.ranks() > 64 ? 1 : 4);
        const std::vector<double> loads = skewed(random, 256, 0.8);
        const expert_placement p = balance_by_node(loads, topology, groups, slots);
        check_fits(p, slots);
        for (std::uint32_t g = 0; g < groups; ++g) {
            const std::uint32_t members = 256 / groups, node = p.copies(g * members)[0].rank / topology.ranks_per_node;
            for (std::uint32_t e = g * members; e < (g + 1) * members; ++e) {
                for (const auto& c : p.copies(e)) {
                    CHECK(c.rank / topology.ranks_per_node == node);
                }
            }
        }
        CHECK(imbalance(p, loads) <= imbalance(one_each(256, topology.ranks()), loads) + 1e-9);
    }
}

TEST_CASE("what cannot be placed is refused with the numbers") {
    const std::vector<double> loads(10, 1.0);
    CHECK_THROWS_WITH_AS(balance_greedy(loads, 3, 3), doctest::Contains("10 experts do not fit 3 ranks with 3 slots"), configuration_error);
    CHECK_THROWS_AS(balance_greedy(loads, 0, 3), configuration_error);
    CHECK_THROWS_WITH_AS(balance_by_node(loads, {2, 2}, 3, 4), doctest::Contains("do not divide into 3 groups"), configuration_error);
    // Two nodes of one rank with six slots: five groups of two are three in one node, which fit; with five slots they do not.
    CHECK_NOTHROW(balance_by_node(loads, {2, 1}, 5, 6));
    CHECK_THROWS_WITH_AS(balance_by_node(loads, {2, 1}, 5, 5), doctest::Contains("kept together"), configuration_error);
    for (const double bad : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        std::vector<double> l = loads;
        l[7] = bad;
        CHECK_THROWS_WITH_AS(balance_greedy(l, 3, 4), doctest::Contains("expert 7"), configuration_error);
    }
}

TEST_CASE("rebalancing fetches no more than it may, never makes things worse, and each further expert helps") {
    std::mt19937 random{4};
    for (const std::uint32_t ranks : {2u, 8u, 64u}) {
        for (const std::uint32_t spare : {0u, 1u, 4u}) {
            const std::vector<double> loads = skewed(random, 256, 0.7), later = skewed(random, 256, 0.7);
            const expert_placement before = one_each(256, ranks);
            const std::uint32_t slots = 256 / ranks + spare;
            double last = imbalance(before, loads);
            for (const std::uint32_t most : {0u, 1u, 2u, 8u, 64u}) {
                const expert_placement after = rebalance(before, loads, slots, most);
                check_fits(after, slots);
                CHECK(arrivals(before, after).size() <= most);
                CHECK((most > 0 || after == before));
                CHECK(imbalance(after, loads) <= last + 1e-9);
                last = imbalance(after, loads);
                CHECK(after == rebalance(before, loads, slots, most));
                const expert_placement moved_on = rebalance(after, later, slots, 64);  // replicas of what was hot make room
                check_fits(moved_on, slots);
                CHECK(imbalance(moved_on, later) <= imbalance(after, later) + 1e-9);
            }
            CAPTURE(ranks);
            CAPTURE(spare);
            // Without a spare slot nobody can have a second copy, so the hottest expert is on one rank.
            const double alone = *std::max_element(loads.begin(), loads.end()) * ranks / std::accumulate(loads.begin(), loads.end(), 0.0);
            CHECK(last < (spare == 0 ? std::max(1.1, 1.1 * alone) : ranks == 64 ? 2.0 : 1.1));
            CHECK(last < imbalance(before, loads));
        }
    }
    CHECK_THROWS_WITH_AS(rebalance(one_each(8, 2), std::vector<double>(8, 1.0), 3, 4), doctest::Contains("as they are placed now"),
                         configuration_error);
}

TEST_CASE("what has to move, and the report") {
    const expert_placement before = one_each(4, 2), after(2, owner_lists{{1}, {0, 1}, {1}, {0}});
    CHECK(arrivals(before, after) == std::vector<expert_arrival>{{0, 3}, {1, 0}, {1, 1}});
    CHECK(arrivals(before, before).empty());
    CHECK_THROWS_AS(arrivals(before, one_each(4, 3)), configuration_error);
    std::ostringstream text;
    print_balance(text, before, after, std::vector<double>{8, 4, 2, 2});
    CHECK(
        text.str() ==
        "before  imbalance (max over mean)  1.500   rank 0 has 75.00 % of the load, rank 1 25.00 %   4 copies of 4 experts, 0 replicated, "
        "at most 2 on a rank\n"
        "after   imbalance (max over mean)  1.500   rank 1 has 75.00 % of the load, rank 0 25.00 %   5 copies of 4 experts, 1 replicated, "
        "at most 3 on a rank\n"
        "3 experts to fetch\n");
}

TEST_CASE("placements from plans, and those that are none") {
    CHECK_THROWS_WITH_AS(expert_placement(2, owner_lists{{0}, {}}), doctest::Contains("expert 1 has no owner"), configuration_error);
    CHECK_THROWS_WITH_AS(expert_placement(2, owner_lists{{2}}), doctest::Contains("rank 2 of 2"), configuration_error);
    CHECK_THROWS_WITH_AS(expert_placement(2, owner_lists{{1, 0, 1}}), doctest::Contains("twice"), configuration_error);
    CHECK_THROWS_AS(expert_placement(0, owner_lists{}), configuration_error);
    moe_model model;
    model.layers.resize(1);
    model.layers[0].intermediate = 64;
    model.layers[0].experts.resize(30);
    const shard_plan plan = shard_plan::by_expert(model, 8).replicate(2, {std::vector<double>(30, 1.0)});
    const expert_placement p(plan, 0);
    for (std::uint32_t e = 0; e < 30; ++e) {
        CHECK(p.copies(e).size() == plan.owners(0, e).size());
        for (const auto& c : p.copies(e)) {
            CHECK(plan.local_index(0, e, c.rank) == c.local);
        }
    }
    CHECK_THROWS_WITH_AS(expert_placement(shard_plan::by_slice(model, 2)), doctest::Contains("by slice"), configuration_error);
}

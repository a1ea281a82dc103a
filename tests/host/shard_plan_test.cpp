#include <penstock/model/shard_plan.hpp>

#include <doctest/doctest.h>

#include <array>
#include <random>
#include <sstream>

namespace {

using namespace penstock;

moe_model of(std::initializer_list<std::uint32_t> experts, std::uint32_t intermediate = 768, weight_kind kind = weight_kind::bf16) {
    moe_model model;
    for (const std::uint32_t e : experts) {
        moe_layer_model& l = model.layers.emplace_back();
        l.intermediate = intermediate;
        l.layout.kind = kind;
        l.layout.bytes = 1000;
        l.experts.resize(e);
    }
    return model;
}

using list = std::vector<std::uint32_t>;

list copy(std::span<const std::uint32_t> s) { return {s.begin(), s.end()}; }

list sizes(const shard_plan& plan, std::uint32_t layer = 0) {
    list result;
    for (std::uint32_t g = 0; g < plan.gpus(); ++g) {
        result.push_back(static_cast<std::uint32_t>(plan.experts_of(layer, g).size()));
    }
    return result;
}

/// Owners and lists say the same; every expert is owned, by different GPUs.
void check_consistent(const shard_plan& plan) {
    for (std::uint32_t l = 0; l < plan.layers(); ++l) {
        std::size_t held = 0, owned = 0;
        for (std::uint32_t g = 0; g < plan.gpus(); ++g) {
            const auto own = plan.experts_of(l, g);
            held += own.size();
            CHECK(std::is_sorted(own.begin(), own.end()));
            for (std::uint32_t i = 0; i < own.size(); ++i) {
                const auto owners = plan.owners(l, own[i]);
                CHECK(std::count(owners.begin(), owners.end(), g) == 1);
                CHECK(plan.local_index(l, own[i], g) == i);
            }
        }
        for (std::uint32_t e = 0; e < plan.experts(l); ++e) {
            const auto owners = plan.owners(l, e);
            CHECK(!owners.empty());
            CHECK(plan.owner(l, e) == owners[0]);
            owned += owners.size();
            for (std::uint32_t g = 0; g < plan.gpus(); ++g) {
                CHECK(plan.local_index(l, e, g).has_value() == (std::count(owners.begin(), owners.end(), g) == 1));
            }
        }
        CHECK(held == owned);
    }
}

bool says(const auto& call, const char* word) {
    try {
        static_cast<void>(call());
    } catch (const configuration_error& e) {
        return std::string(e.what()).find(word) != std::string::npos;
    }
    return false;
}

}  // namespace

TEST_CASE("D01 Experts do not divide by GPUs") {
    struct division {
        std::uint32_t experts, gpus;
        list sizes;
    };
    for (const division& d :
         {division{30, 8, {4, 4, 4, 4, 4, 4, 3, 3}}, division{5, 8, {1, 1, 1, 1, 1, 0, 0, 0}}, division{7, 2, {4, 3}},
          division{128, 6, {22, 22, 21, 21, 21, 21}}, division{1, 2, {1, 0}}, division{8, 8, {1, 1, 1, 1, 1, 1, 1, 1}}}) {
        const moe_model model = of({d.experts});
        const shard_plan runs = shard_plan::by_expert(model, d.gpus);
        const shard_plan turns = shard_plan::by_expert(model, d.gpus, placement::round_robin{});
        const shard_plan even = shard_plan::by_expert(model, d.gpus, placement::by_load{{std::vector<double>(d.experts, 2.5)}});
        for (const shard_plan* plan : {&runs, &turns, &even}) {
            CHECK(sizes(*plan) == d.sizes);
            check_consistent(*plan);
            std::uint32_t owned = 0;
            for (const std::uint32_t s : sizes(*plan)) {
                owned += s;
            }
            CHECK(owned == d.experts);  // with check_consistent: exactly once
        }
        std::uint32_t first = 0;
        for (std::uint32_t g = 0; g < d.gpus; ++g) {  // contiguous: owner(e) agrees with the ranges
            for (std::uint32_t e = first; e < first + d.sizes[g]; ++e) {
                CHECK(runs.owner(0, e) == g);
                CHECK(runs.local_index(0, e, g) == e - first);
            }
            first += d.sizes[g];
        }
    }
    const shard_plan turns = shard_plan::by_expert(of({30}), 8, placement::round_robin{});
    CHECK(copy(turns.experts_of(0, 6)) == list{6, 14, 22});
    CHECK(turns.owner(0, 29) == 5);
}

TEST_CASE("D02 Global and local expert ids mixed") {
    // Expert e returns 10^e. Each GPU computes with its own experts by their local ids; the sum over GPUs is that of one GPU.
    const moe_model model = of({4});
    constexpr std::array<std::array<std::uint32_t, 2>, 4> tokens{{{0, 3}, {1, 2}, {2, 3}, {3, 0}}};
    constexpr std::array<int, 4> right{1001, 110, 1100, 1001};
    const expert_loads loads{{1, 5, 2, 4}};
    for (const shard_plan& plan : {shard_plan::by_expert(model, 2), shard_plan::by_expert(model, 2, placement::round_robin{}),
                                   shard_plan::by_expert(model, 2, placement::by_load{loads}), shard_plan::by_expert(model, 1),
                                   shard_plan::by_expert(model, 2).replicate(2, loads)}) {
        for (std::size_t t = 0; t < tokens.size(); ++t) {
            int sum = 0;
            for (std::uint32_t g = 0; g < plan.gpus(); ++g) {
                std::vector<int> returns;  // by local id
                for (const std::uint32_t e : plan.experts_of(0, g)) {
                    returns.push_back(std::array{1, 10, 100, 1000}[e]);
                }
                for (const std::uint32_t e : tokens[t]) {
                    if (plan.owner(0, e) == g) {  // a replica does not count again
                        sum += returns.at(plan.local_index(0, e, g).value());
                    }
                }
            }
            CHECK(sum == right[t]);
        }
        CHECK(says([&] { return plan.owner(0, 4); }, "expert 4, it has 4"));  // refused, not dropped
        CHECK(says([&] { return plan.owners(1, 0); }, "layer 1, it has 1"));
        CHECK(says([&] { return plan.experts_of(0, plan.gpus()); }, "GPU"));
        CHECK(says([&] { return plan.local_index(0, ~0u, 0); }, "expert 4294967295"));
    }
}

TEST_CASE("by load: heaviest first to the least loaded, ties to the lower number") {
    const shard_plan plan = shard_plan::by_expert(of({6, 5}), 2, placement::by_load{{{1, 7, 3, 3, 5, 1}, {0, 0, 9, 0, 0}}});
    // 7 -> 0; 5 -> 1; 3 (expert 2) -> 1 (5 < 7); 3 (expert 3) -> 0 (7 < 8); 1 (expert 0) -> 1 (8 < 10); 1 (expert 5) -> 1 (9 < 10)
    CHECK(copy(plan.experts_of(0, 0)) == list{1, 3});
    CHECK(copy(plan.experts_of(0, 1)) == list{0, 2, 4, 5});
    CHECK(plan.imbalance(0) == doctest::Approx(1.0));
    CHECK(copy(plan.experts_of(1, 0)) == list{2});
    CHECK(plan.imbalance(1) == doctest::Approx(2.0));
    check_consistent(plan);
    CHECK(shard_plan::by_expert(of({6}), 2).imbalance(0) == doctest::Approx(1.0));
    CHECK(shard_plan::by_expert(of({7}), 2).imbalance(0) == doctest::Approx(8.0 / 7));

    std::mt19937 random(5);
    std::exponential_distribution<double> heavy(1.0);
    std::vector<double> loads(128);
    for (double& l : loads) {
        l = heavy(random);
    }
    const shard_plan balanced = shard_plan::by_expert(of({128}), 8, placement::by_load{{loads}});
    const shard_plan again = shard_plan::by_expert(of({128}), 8, placement::by_load{{loads}});
    CHECK(balanced.imbalance(0) < 1.01);
    for (std::uint32_t g = 0; g < 8; ++g) {
        CHECK(copy(balanced.experts_of(0, g)) == copy(again.experts_of(0, g)));
    }
}

TEST_CASE("replicas: the hottest experts on further GPUs, where load is least") {
    const moe_model model = of({4});
    const expert_loads loads{{8, 1, 6, 1}};
    const shard_plan base = shard_plan::by_expert(model, 4, placement::by_load{loads});  // 0 -> 0, 2 -> 1, 1 -> 2, 3 -> 3
    const shard_plan everywhere = base.replicate(1);
    CHECK(copy(everywhere.owners(0, 0)) == list{0, 2, 3, 1});
    CHECK(everywhere.owners(0, 2).size() == 1);
    CHECK(sizes(everywhere) == list{1, 2, 2, 2});
    CHECK(everywhere.load(0, 1) == doctest::Approx(8));  // 6 + 8 / 4
    const shard_plan twice = base.replicate(2, loads, 2);
    CHECK(copy(twice.owners(0, 0)) == list{0, 2});
    CHECK(copy(twice.owners(0, 2)) == list{1, 3});
    CHECK(twice.imbalance(0) == doctest::Approx(1.25));
    CHECK(base.imbalance(0) == doctest::Approx(2.0));
    CHECK(copy(base.replicate(0).owners(0, 0)) == list{0});
    CHECK(base.replicate(9).experts_of(0, 3).size() == 4);
    for (const shard_plan& plan : {everywhere, twice, base.replicate(9)}) {
        check_consistent(plan);
    }
    CHECK(base.replicate(1, loads, 99).owners(0, 0).size() == 4);
    CHECK(says([&] { return shard_plan::by_expert(model, 2).replicate(1); }, "measured loads"));
    CHECK(says([&] { return shard_plan::by_slice(model, 2).replicate(1, loads); }, "by slice"));
}

TEST_CASE("by slice: every GPU a part of every expert") {
    const shard_plan plan = shard_plan::by_slice(of({3, 2}), 4);
    check_consistent(plan);
    CHECK(plan.sliced());
    CHECK(plan.slice_of(0, 1) == index_range{192, 192});
    CHECK(sizes(plan) == list{3, 3, 3, 3});
    CHECK(plan.local_index(1, 1, 3) == 1);
    CHECK(plan.bytes(0) == 5 * 250);
    CHECK(plan.imbalance(0) == doctest::Approx(1.0));
    CHECK(shard_plan::by_slice(of({1}, 320, weight_kind::mxfp4), 4).slice_of(0, 0) == index_range{0, 96});
    CHECK(shard_plan::by_slice(of({1}, 320, weight_kind::fp8_block128), 4).slice_of(0, 3) == index_range{240, 80});
    CHECK(shard_plan::by_slice(of({1}, 320), 2, 128).slice_of(0, 1) == index_range{256, 64});
    CHECK(shard_plan::by_expert(of({3}), 2).slice_of(0, 1) == index_range{0, 768});
}

TEST_CASE("wrong plans are refused, plans can be printed") {
    const moe_model model = of({4, 2});
    CHECK(says([&] { return shard_plan::by_expert(model, 0); }, "0 GPUs"));
    CHECK(says([&] { return shard_plan::by_slice(model, 0); }, "0 GPUs"));
    CHECK(says([&] { return shard_plan::by_expert(model, 2, placement::by_load{{{1, 2, 3, 4}}}); }, "2"));
    CHECK(says([&] { return shard_plan::by_expert(model, 2, placement::by_load{{{1, 2, 3, 4}, {1}}}); }, "layer 1"));
    CHECK(says([&] { return shard_plan::by_expert(model, 2, placement::by_load{{{1, 2, 3, -4}, {1, 1}}}); }, "expert 3"));
    CHECK(says(
        [&] {
            return shard_plan::by_expert(model, 2, placement::by_load{{{1, 2, 3, std::numeric_limits<double>::quiet_NaN()}, {1, 1}}});
        },
        "expert 3"));
    std::ostringstream text;
    text << shard_plan::by_expert(model, 2, placement::by_load{{{8, 0, 0, 0}, {1, 1}}});
    CHECK(text.str() ==
          "shard plan by expert, by load: 2 layers over 2 GPUs\n"
          "GPU 0          2 experts       2.0 KiB   90.0 % of the load\n"
          "GPU 1          4 experts       3.9 KiB   10.0 % of the load\n"
          "imbalance (busiest GPU over the mean, measured loads): 1.500 in the mean of the layers, 2.000 at worst\n");
    CHECK(shard_plan::by_expert(moe_model{}, 3).layers() == 0);
}

#include <penstock/parallel/dispatch_plan.hpp>
#include <penstock/parallel/fp8_rows.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

using namespace penstock;

namespace {

using list = std::vector<std::uint32_t>;
using owner_lists = std::vector<std::vector<std::uint32_t>>;

template <class T>
std::vector<std::remove_const_t<T>> copy(std::span<T> s) {
    return {s.begin(), s.end()};
}

}  // namespace

TEST_CASE("a plan by hand") {
    // Rank 0: experts 0, 2; rank 1: nothing; rank 2: experts 1, 3.
    const expert_placement placement(3, owner_lists{{0}, {2}, {0}, {2}});
    const std::vector<std::int32_t> ids{3,  0,  1,    // both ranks
                                        -1, -1, -1,   // nowhere
                                        2,  0,  -7};  // rank 0 alone
    dispatch_plan plan;
    plan.make<replica::spread>(placement, 1, ids, 3);
    CHECK(plan.tokens() == 3);
    CHECK(plan.rows() == 3);
    CHECK(copy(plan.to()) == list{0, 2, 2, 3});
    CHECK(copy(plan.token_of()) == list{0, 2, 0});
    CHECK(copy(plan.local_ids()) == std::vector<std::int32_t>{-1, 0, -1, 1, 0, -1, 1, -1, 0});
    CHECK(copy(plan.rows_of(0)) == list{0, 2});
    CHECK(plan.rows_of(1).empty());
    CHECK(copy(plan.rows_of(2)) == list{1});
    plan.make<replica::spread>(placement, 0, std::vector<std::int32_t>{}, 3);  // a smaller one leaves nothing behind
    CHECK(plan.rows() == 0);
    CHECK(plan.tokens() == 0);
}

TEST_CASE("what a plan refuses") {
    const expert_placement placement(2, owner_lists{{0}, {1}});
    dispatch_plan plan;
    CHECK_THROWS_WITH_AS(plan.make<replica::spread>(placement, 1, std::vector<std::int32_t>{0, 1, 1, 2}, 2),
                         doctest::Contains("token 1 of rank 1 asks for expert 2 of 2"), configuration_error);
    CHECK_THROWS_AS(plan.make<replica::spread>(placement, 0, std::vector<std::int32_t>{0, 1, 1}, 2), configuration_error);
    CHECK_THROWS_AS(plan.make<replica::spread>(placement, 0, std::vector<std::int32_t>{}, 0), configuration_error);
    CHECK_THROWS_AS(plan.make<replica::spread>(placement, 2, std::vector<std::int32_t>{}, 1), configuration_error);
}

TEST_CASE("replicas: in turn, or the nearest") {
    const expert_placement placement(4, owner_lists{{0, 1, 2, 3}, {3}});
    const std::vector<std::int32_t> only(8, 0);
    dispatch_plan plan;
    for (std::uint32_t source = 0; source < 4; ++source) {
        plan.make<replica::spread>(placement, source, only, 1);
        CHECK(copy(plan.to()) == list{0, 2, 4, 6, 8});
        plan.make<replica::nearest>(placement, source, only, 1);
        CHECK(plan.rows_to(source) == 8);
    }
    // Not on rank 3's own, but where expert 1 takes the token in any case.
    const expert_placement others(4, owner_lists{{0, 1, 2}, {2}});
    plan.make<replica::nearest>(others, 3, std::vector<std::int32_t>{1, 0, 1, 0}, 2);
    CHECK(copy(plan.to()) == list{0, 0, 0, 2, 2});
    CHECK(copy(plan.local_ids()) == std::vector<std::int32_t>{1, 0, 1, 0});
    plan.make<replica::spread>(others, 3, std::vector<std::int32_t>{1, 0, 1, 0}, 2);
    CHECK(plan.rows() == 4);
}

TEST_CASE("random plans: every choice is in one row, a token has one row a rank, rows are in order") {
    std::mt19937 random{1};
    for (int i = 0; i < 200; ++i) {
        const auto ranks = static_cast<std::uint32_t>(1 + random() % 12), experts = static_cast<std::uint32_t>(1 + random() % 40),
                   k = static_cast<std::uint32_t>(1 + random() % 16), tokens = static_cast<std::uint32_t>(random() % 30);
        owner_lists owners(experts);
        for (auto& o : owners) {
            for (std::uint32_t r = 0; r < ranks; ++r) {
                if (random() % 4 == 0) {
                    o.push_back(r);
                }
            }
            if (o.empty()) {
                o.push_back(static_cast<std::uint32_t>(random() % ranks));
            }
        }
        const expert_placement placement(ranks, owners);
        std::vector<std::int32_t> ids(std::size_t{tokens} * k);
        for (std::int32_t& id : ids) {
            id = static_cast<std::int32_t>(random() % (experts + 1)) - 1;
        }
        dispatch_plan plan;
        plan.make<replica::spread>(placement, static_cast<std::uint32_t>(random() % ranks), ids, k);
        std::vector<int> seen(ids.size(), 0);
        for (std::uint32_t d = 0; d < ranks; ++d) {
            for (std::uint32_t r = plan.to()[d]; r < plan.to()[d + 1]; ++r) {
                const std::uint32_t t = plan.token_of()[r];
                CHECK((r == plan.to()[d] || plan.token_of()[r - 1] < t));
                int here = 0;
                for (std::uint32_t j = 0; j < k; ++j) {
                    const std::int32_t local = plan.local_ids()[std::size_t{r} * k + j];
                    if (local >= 0) {
                        ++here;
                        ++seen[std::size_t{t} * k + j];
                        CHECK(static_cast<std::int32_t>(placement.experts_of(d)[static_cast<std::size_t>(local)]) ==
                              ids[std::size_t{t} * k + j]);
                    }
                }
                CHECK(here > 0);
            }
        }
        std::uint32_t listed = 0;
        for (std::uint32_t t = 0; t < tokens; ++t) {
            const auto rows = plan.rows_of(t);
            CHECK(std::is_sorted(rows.begin(), rows.end()));
            for (const std::uint32_t r : rows) {
                CHECK(plan.token_of()[r] == t);
            }
            listed += static_cast<std::uint32_t>(rows.size());
        }
        CHECK(listed == plan.rows());
        for (std::size_t p = 0; p < ids.size(); ++p) {
            CHECK(seen[p] == (ids[p] >= 0 ? 1 : 0));
        }
    }
}

TEST_CASE("quantised rows: a scale for 128, zeros, the smallest and largest numbers, and what is no number") {
    std::mt19937 random{2};
    std::normal_distribution<float> normal;
    std::vector<float> x(300);
    for (std::uint32_t i = 0; i < 300; ++i) {
        x[i] = normal(random) * (i < 128 ? 1e-3f : i < 256 ? 1e4f : 0.0f);
    }
    x[5] = INFINITY;
    x[6] = std::nanf("");
    x[299] = 1e-44f;  // subnormal
    std::vector<std::uint8_t> small(300);
    float scales[3];
    quantise_row(x.data(), dtype::f32, 300, small.data(), scales);
    double difference[2]{}, size[2]{};
    for (std::uint32_t i = 0; i < 256; ++i) {
        const float back = dequantised(small.data(), scales, i);
        if (i == 5 || i == 6) {
            CHECK(std::isnan(back));
            continue;
        }
        difference[i / 128] += std::pow(back - x[i], 2);
        size[i / 128] += std::pow(x[i], 2);
    }
    CHECK(std::sqrt(difference[0] / size[0]) < 3e-2);
    CHECK(std::sqrt(difference[1] / size[1]) < 3e-2);
    for (std::uint32_t i = 256; i < 300; ++i) {
        CHECK(dequantised(small.data(), scales, i) == 0.0f);
    }
    const std::vector<float> zeros(16, 0.0f), large(16, 3.4e38f);
    quantise_row(zeros.data(), dtype::f32, 16, small.data(), scales);
    CHECK(scales[0] == 1.0f);
    CHECK(small[3] == 0);
    quantise_row(large.data(), dtype::f32, 16, small.data(), scales);
    CHECK(dequantised(small.data(), scales, 7) == doctest::Approx(3.4e38).epsilon(1e-5));
}

#include <penstock/dispatch/host_experts.hpp>
#include <penstock/dispatch/routing.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace ps = penstock;

namespace {

struct routed {
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
};

routed route(const ps::routing_rule& rule, const std::vector<float>& logits, const std::vector<float>& bias = {}) {
    ps::validate(rule);
    REQUIRE(logits.size() == rule.experts);
    routed r{std::vector<std::int32_t>(rule.top_k, -7), std::vector<float>(rule.top_k, -7.0f)};
    std::vector<float> scratch(rule.experts);
    ps::route_token(ps::lane_group_of_one{}, rule, logits.data(), bias.empty() ? nullptr : bias.data(), scratch.data(), r.ids.data(),
                    r.weights.data());
    return r;
}

void check_weights(const routed& r, const std::vector<double>& wanted) {
    REQUIRE(r.weights.size() == wanted.size());
    for (std::size_t j = 0; j < wanted.size(); ++j) {
        CAPTURE(j);
        CHECK(std::abs(r.weights[j] - wanted[j]) < 1e-6);
    }
}

void check_distinct(const std::int32_t* ids, std::uint32_t k, std::uint32_t experts) {
    std::set<std::int32_t> seen;
    for (std::uint32_t j = 0; j < k; ++j) {
        CHECK(ids[j] >= 0);
        CHECK(ids[j] < static_cast<std::int32_t>(experts));
        CHECK(seen.insert(ids[j]).second);
    }
}

/// A rule from its definition, in double, by sorting.
routed reference(const ps::routing_rule& rule, const std::vector<float>& logits, const std::vector<float>& bias) {
    const std::size_t n = rule.experts;
    std::vector<double> score(n);
    double total = 0;
    const double peak = *std::max_element(logits.begin(), logits.end());
    for (std::size_t i = 0; i < n; ++i) {
        total += std::exp(logits[i] - peak);
    }
    for (std::size_t i = 0; i < n; ++i) {
        const double x = logits[i];
        score[i] = rule.score == ps::score_function::softmax   ? std::exp(x - peak) / total
                   : rule.score == ps::score_function::sigmoid ? 1 / (1 + std::exp(-x))
                                                               : std::sqrt(std::log1p(std::exp(x)));
    }
    std::vector<double> choice(n);
    for (std::size_t i = 0; i < n; ++i) {
        choice[i] = (rule.softmax_after_top_k ? static_cast<double>(logits[i]) : score[i]) + (bias.empty() ? 0.0 : bias[i]);
    }
    if (rule.groups > 1) {
        const std::size_t members = n / rule.groups;
        std::vector<std::pair<double, std::size_t>> order;
        for (std::size_t g = 0; g < rule.groups; ++g) {
            std::vector<double> of(choice.begin() + g * members, choice.begin() + (g + 1) * members);
            std::sort(of.rbegin(), of.rend());
            order.push_back({-(rule.rank_groups_by == ps::group_score::maximum ? of[0] : of[0] + of[1]), g});
        }
        std::sort(order.begin(), order.end());
        for (std::size_t o = rule.groups_kept; o < order.size(); ++o) {
            for (std::size_t i = order[o].second * members; i < (order[o].second + 1) * members; ++i) {
                choice[i] = -std::numeric_limits<double>::infinity();
            }
        }
    }
    std::vector<std::int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return choice[a] > choice[b]; });
    routed r{{order.begin(), order.begin() + rule.top_k}, std::vector<float>(rule.top_k)};
    double sum = 0;
    std::vector<double> weight(rule.top_k);
    for (std::uint32_t j = 0; j < rule.top_k; ++j) {
        weight[j] = rule.softmax_after_top_k ? std::exp(logits[r.ids[j]] - peak) : score[r.ids[j]];
        sum += weight[j];
    }
    for (std::uint32_t j = 0; j < rule.top_k; ++j) {
        const bool divide = rule.softmax_after_top_k || rule.renormalise;
        r.weights[j] = static_cast<float>((divide ? weight[j] / sum : weight[j]) * rule.scale);
    }
    return r;
}

constexpr ps::routing_rule sigmoid_rule(std::uint32_t experts, std::uint32_t k) {
    return {.experts = experts, .top_k = k, .score = ps::score_function::sigmoid};
}

}  // namespace

TEST_CASE("R01 bias picks experts, it does not weight them") {
    ps::routing_rule rule = sigmoid_rule(4, 2);
    rule.renormalise = true;
    rule.scale = 2.5f;
    const routed r = route(rule, {2, 1, 0, -1}, {0, 0, 0, 1});
    CHECK(r.ids == std::vector<std::int32_t>{3, 0});
    check_weights(r, {0.584788, 1.915212});
}

TEST_CASE("R02 group score is the sum of the two best") {
    ps::routing_rule rule = sigmoid_rule(8, 2);
    rule.renormalise = true;
    rule.groups = 2;
    rule.groups_kept = 1;
    const std::vector<float> logits{2.1972f, -2.1972f, -2.3136f, -2.4423f, 0.4895f, 0.3228f, -2.9444f, -3.1781f};
    routed r = route(rule, logits, std::vector<float>(8, 0.0f));
    CHECK(r.ids == std::vector<std::int32_t>{4, 5});
    check_weights(r, {0.516659, 0.483341});
    rule.rank_groups_by = ps::group_score::maximum;
    r = route(rule, logits);
    CHECK(r.ids == std::vector<std::int32_t>{0, 1});
    CHECK(std::abs(r.weights[0] - 0.9f) < 1e-4f);
}

TEST_CASE("R04 all sigmoid scores underflow") {
    ps::routing_rule rule = sigmoid_rule(4, 2);
    rule.renormalise = true;
    for (float epsilon : {1e-20f, 0.0f}) {
        rule.epsilon = epsilon;
        const routed r = route(rule, {-120, -120, -120, -120}, {0, 0, 0, 0});
        CHECK(r.ids == std::vector<std::int32_t>{0, 1});
        CHECK(r.weights == std::vector<float>{0, 0});
    }
    rule.epsilon = 1e-20f;
    rule.score = ps::score_function::softmax;  // stable: the largest logit is taken off first
    check_weights(route(rule, {-120, -120, -120, -120}), {0.5, 0.5});
    check_weights(route(rule, {3e38f, 3e38f, -3e38f, 0}), {0.5, 0.5});
}

TEST_CASE("R06 correction bias stays float32") {
    const routed r = route(sigmoid_rule(4, 1), {0, 0, 0, 0}, {6.820f, 6.826f, 6.823f, 6.819f});
    CHECK(r.ids == std::vector<std::int32_t>{1});
    check_weights(r, {0.5});
}

TEST_CASE("R07 a whole row of NaN") {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    constexpr float inf = std::numeric_limits<float>::infinity();
    const std::vector<float> normal{0.5f, -1, 2, 0.25f, 1, -3, 0, 0.75f};
    for (ps::score_function score : {ps::score_function::softmax, ps::score_function::sigmoid, ps::score_function::sqrt_softplus}) {
        for (int variant = 0; variant < 6; ++variant) {
            CAPTURE(variant);
            ps::routing_rule rule{.experts = 8, .top_k = 4, .score = score, .renormalise = true};
            rule.softmax_after_top_k = variant == 1;
            rule.groups = variant == 2 ? 4 : 1;
            rule.groups_kept = variant == 2 ? 2 : 1;
            rule.sparse_mixer = variant == 3;
            rule.jitter = 0.01f;
            rule.scales_input = variant == 4;
            const std::vector<float> bias = variant == 5 ? std::vector<float>(8, 0.125f) : std::vector<float>{};
            const std::vector<float> mixed{nan, inf, -inf, 1, nan, inf, -inf, 0};
            for (const std::vector<float>& row :
                 {std::vector<float>(8, nan), std::vector<float>(8, inf), std::vector<float>(8, -inf), mixed}) {
                const routed r = route(rule, row, bias);
                check_distinct(r.ids.data(), 4, 8);
                for (float w : r.weights) {
                    CHECK(std::isfinite(w));
                }
            }
            // NaN ranks below every number.
            const routed r = route(rule, {nan, 1, nan, -5, 2, nan, 3, nan}, bias);
            if (variant != 2) {
                CHECK(std::set<std::int32_t>(r.ids.begin(), r.ids.end()) == std::set<std::int32_t>{1, 3, 4, 6});
            }
        }
    }
    // Beside such rows a normal one is what it is alone.
    ps::executor::host host{2};
    const ps::routing_rule rule{.experts = 8, .top_k = 4, .renormalise = true};
    std::vector<float> logits;
    for (float value : {nan, inf, -inf}) {
        logits.insert(logits.end(), normal.begin(), normal.end());
        logits.insert(logits.end(), 8, value);
    }
    std::vector<std::int32_t> ids(6 * 4);
    std::vector<float> weights(6 * 4);
    host.route(rule, {.experts = 8}, logits.data(), 6, nullptr, ids.data(), weights.data());
    const routed alone = route(rule, normal);
    for (std::size_t t = 0; t < 6; ++t) {
        check_distinct(ids.data() + t * 4, 4, 8);
        if (t % 2 == 0) {
            CHECK(std::equal(alone.ids.begin(), alone.ids.end(), ids.begin() + t * 4));
            CHECK(std::equal(alone.weights.begin(), alone.weights.end(), weights.begin() + t * 4));
        }
    }
}

TEST_CASE("R09 ties go to the lower id") {
    for (std::uint32_t experts : {8u, 384u}) {
        for (ps::score_function score : {ps::score_function::softmax, ps::score_function::sigmoid}) {
            const ps::routing_rule rule{.experts = experts, .top_k = 4, .score = score};
            CHECK(route(rule, std::vector<float>(experts, 0.0f)).ids == std::vector<std::int32_t>{0, 1, 2, 3});
        }
    }
    CHECK(route({.experts = 4, .top_k = 2}, {-0.0f, 0.0f, -0.0f, 0.0f}).ids == std::vector<std::int32_t>{0, 1});
    // bf16-like logits with many equal values, alone and inside a batch of 1000.
    std::mt19937 random{5};
    const ps::routing_rule rule{.experts = 96, .top_k = 8, .renormalise = true};
    std::vector<float> logits(1000 * 96);
    for (float& l : logits) {
        l = static_cast<float>(random() % 7) * 0.25f;
    }
    ps::executor::host host;
    std::vector<std::int32_t> ids(1000 * 8);
    std::vector<float> weights(1000 * 8);
    host.route(rule, {.experts = 96}, logits.data(), 1000, nullptr, ids.data(), weights.data());
    for (std::size_t t = 0; t < 1000; ++t) {
        const std::vector<float> row(logits.begin() + t * 96, logits.begin() + (t + 1) * 96);
        const routed alone = route(rule, row);
        REQUIRE(alone.ids == reference(rule, row, {}).ids);
        REQUIRE(std::equal(alone.ids.begin(), alone.ids.end(), ids.begin() + t * 8));
        REQUIRE(std::equal(alone.weights.begin(), alone.weights.end(), weights.begin() + t * 8));
    }
}

TEST_CASE("R11 softmax with and without renormalisation") {
    ps::routing_rule rule{.experts = 4, .top_k = 2};
    routed r = route(rule, {1, 2, 3, 4});
    CHECK(r.ids == std::vector<std::int32_t>{3, 2});
    check_weights(r, {0.643914, 0.236883});
    rule.renormalise = true;
    check_weights(route(rule, {1, 2, 3, 4}), {0.731059, 0.268941});
    rule.renormalise = false;
    rule.softmax_after_top_k = true;
    check_weights(route(rule, {1, 2, 3, 4}), {0.731059, 0.268941});
}

TEST_CASE("R12 scaling factor once, and not on the shared expert") {
    // Two chosen experts with outputs 4 and 0 and equal scores: the routed sum is 2 before the factor.
    ps::routing_rule rule = sigmoid_rule(2, 2);
    rule.renormalise = true;
    rule.scale = 2.5f;
    const routed r = route(rule, {0, 0});
    const float partial[] = {4.0f, 0.0f};
    const float shared = 3.0f;
    float out = -1;
    ps::executor::host host{1};
    host.combine(partial, r.ids.data(), r.weights.data(), 2, &shared, {&out, ps::dtype::f32, 1, 1});
    CHECK(out == 8.0f);
}

TEST_CASE("R14 top-k larger than what is available") {
    CHECK_THROWS_WITH_AS(ps::validate({.experts = 8, .top_k = 16}), doctest::Contains("top-16 of 8"), ps::configuration_error);
    CHECK_THROWS_WITH_AS(ps::validate({.experts = 8, .top_k = 4, .groups = 4, .groups_kept = 1}), doctest::Contains("hold 2 experts"),
                         ps::configuration_error);
    CHECK_THROWS_WITH_AS(ps::validate({.experts = 8, .top_k = 0}), doctest::Contains("top-0"), ps::configuration_error);
    CHECK_THROWS_WITH_AS(ps::validate({.experts = 64, .top_k = 17}), doctest::Contains("1 to 16"), ps::configuration_error);
    CHECK_THROWS_WITH_AS(ps::validate({.experts = 1025, .top_k = 1}), doctest::Contains("1 to 1024"), ps::configuration_error);
    CHECK_THROWS_AS(ps::validate({.experts = 0, .top_k = 1}), ps::configuration_error);
    CHECK_THROWS_WITH_AS(ps::validate({.experts = 10, .top_k = 1, .groups = 4, .groups_kept = 2}), doctest::Contains("10 experts"),
                         ps::configuration_error);
    CHECK_THROWS_AS(ps::validate({.experts = 8, .top_k = 1, .groups = 2, .groups_kept = 3}), ps::configuration_error);
    CHECK_THROWS_AS(ps::validate({.experts = 8, .top_k = 1, .groups = 2, .groups_kept = 2, .sparse_mixer = true}), ps::configuration_error);
    CHECK_THROWS_AS(ps::validate({.experts = 8, .top_k = 1, .epsilon = -1}), ps::configuration_error);
    const routed r = route({.experts = 1, .top_k = 1, .renormalise = true}, {-3});
    CHECK(r.ids == std::vector<std::int32_t>{0});
    CHECK(r.weights == std::vector<float>{1});
    // The executor refuses as well, before it writes anything.
    ps::executor::host host{1};
    float logits[8]{};
    CHECK_THROWS_AS(host.route({.experts = 8, .top_k = 16}, {.experts = 8}, logits, 1, nullptr, nullptr, nullptr), ps::configuration_error);
}

TEST_CASE("R15 router arithmetic in float32") {
    CHECK(route({.experts = 4, .top_k = 1}, {1.000f, 1.001f, 1.002f, 1.003f}).ids == std::vector<std::int32_t>{3});
    std::vector<float> x(4096);
    std::vector<std::uint16_t> weight(4096);
    for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] = i % 2 == 0 ? 1.0f : -1.0f;
        weight[i] = ps::encode_bf16(1.0f);
    }
    x[1000] += 0x1p-9f;
    float logit = 0;
    ps::executor::host host{1};
    host.logits({weight.data(), ps::dtype::bf16, 1, 4096}, x.data(), 1, &logit);
    CHECK(logit == 0x1p-9f);
}

TEST_CASE("R17 duplicate experts from a lookup table") {
    const std::vector<std::int32_t> choice{3, 3, 7, 7, 1, 2};
    const std::vector<float> share{0.1f, 0.2f, 0.3f, 0.1f, 0.2f, 0.1f};
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    for (int t = 0; t < 9; ++t) {
        ids.insert(ids.end(), choice.begin(), choice.end());
        weights.insert(weights.end(), share.begin(), share.end());
    }
    // Expert e returns the constant e: no weights, a down bias of e.
    constexpr std::uint32_t experts = 8;
    std::vector<std::vector<float>> record(experts, std::vector<float>(4, 0.0f));
    ps::expert_layout layout;
    layout.kind = ps::weight_kind::f32;
    layout.bytes = 16;
    layout.gate = {.offset = 0, .rows = 1, .cols = 1, .row_stride = 1};
    layout.up = {.offset = 4, .rows = 1, .cols = 1, .row_stride = 1};
    layout.down = {.offset = 8, .rows = 1, .cols = 1, .row_stride = 1, .bias_offset = 12, .bias_stride = 1, .bias_type = ps::dtype::f32};
    ps::executor::host host{2};
    std::vector<std::int32_t> rows(ids.size());
    std::vector<std::uint32_t> offsets(experts + 1);
    std::vector<std::byte> scratch(host.permute_scratch_bytes(54, experts));
    host.permute(ids.data(), 54, experts, rows.data(), offsets.data(), scratch);
    CHECK(offsets[experts] == 54);
    std::vector<ps::expert_work> work;
    for (std::uint32_t e = 0; e < experts; ++e) {
        record[e][3] = static_cast<float>(e);
        if (offsets[e + 1] > offsets[e]) {
            work.push_back({e, reinterpret_cast<const std::byte*>(record[e].data()), offsets[e], offsets[e + 1] - offsets[e]});
        }
    }
    const std::vector<float> x(9, 1.0f);
    std::vector<float> activated(54), partial(54), out(9);
    host.experts(layout, work, rows.data(), 6, x.data(), nullptr, activated.data(), partial.data());
    host.combine(partial.data(), ids.data(), weights.data(), 6, nullptr, {out.data(), ps::dtype::f32, 9, 1});
    for (float y : out) {
        CHECK(std::abs(y - 4.1f) < 1e-6f);
    }
}

TEST_CASE("R19 counts and prefix sums for odd expert numbers") {
    std::mt19937 random{11};
    std::normal_distribution<float> normal;
    ps::executor::host host{2};
    for (std::uint32_t experts : {1u, 2u, 3u, 7u, 31u, 33u, 60u, 63u, 65u, 100u, 160u, 257u, 384u, 896u}) {
        for (std::uint32_t tokens : {1u, 2u, 5u, 64u}) {
            for (int variant = 0; variant < 5; ++variant) {
                ps::routing_rule rule{.experts = experts, .top_k = std::min(8u, experts), .renormalise = variant != 0};
                rule.score = variant == 1   ? ps::score_function::sigmoid
                             : variant == 2 ? ps::score_function::sqrt_softplus
                                            : ps::score_function::softmax;
                rule.softmax_after_top_k = variant == 3;
                if (variant == 4 && experts % 4 == 0) {
                    rule.groups = 4;
                    rule.groups_kept = 2;
                    rule.rank_groups_by = experts % 8 == 0 ? ps::group_score::sum_of_two : ps::group_score::maximum;
                }
                std::vector<float> logits(std::size_t{tokens} * experts), bias(variant == 1 ? experts : 0);
                std::generate(logits.begin(), logits.end(), [&] { return normal(random); });
                std::generate(bias.begin(), bias.end(), [&] { return 0.1f * normal(random); });
                const std::uint32_t pairs = tokens * rule.top_k;
                std::vector<std::int32_t> ids(pairs), rows(pairs);
                std::vector<float> weights(pairs);
                ps::router_ref router{.experts = experts};
                router.correction_bias = bias.empty() ? nullptr : bias.data();
                host.route(rule, router, logits.data(), tokens, nullptr, ids.data(), weights.data());
                for (std::uint32_t t = 0; t < tokens; ++t) {
                    const routed wanted = reference(rule, {logits.begin() + t * experts, logits.begin() + (t + 1) * experts}, bias);
                    for (std::uint32_t j = 0; j < rule.top_k; ++j) {
                        REQUIRE(ids[t * rule.top_k + j] == wanted.ids[j]);
                        REQUIRE(std::abs(weights[t * rule.top_k + j] - wanted.weights[j]) < 1e-5f);
                    }
                }
                std::vector<std::uint32_t> offsets(experts + 1, 99);
                std::vector<std::byte> scratch(host.permute_scratch_bytes(pairs, experts));
                host.permute(ids.data(), pairs, experts, rows.data(), offsets.data(), scratch);
                REQUIRE(offsets[0] == 0);
                REQUIRE(offsets[experts] == pairs);
                std::vector<std::int32_t> wanted(pairs);
                std::iota(wanted.begin(), wanted.end(), 0);
                std::stable_sort(wanted.begin(), wanted.end(), [&](auto a, auto b) { return ids[a] < ids[b]; });
                REQUIRE(rows == wanted);
                for (std::uint32_t e = 0; e < experts; ++e) {
                    REQUIRE(offsets[e + 1] - offsets[e] == std::count(ids.begin(), ids.end(), static_cast<std::int32_t>(e)));
                }
            }
        }
    }
}

TEST_CASE("sparse mixer: each pick has a masked softmax of its own") {
    const ps::routing_rule rule{.experts = 4, .top_k = 2, .sparse_mixer = true, .jitter = 0.1f};
    // Threshold 0.2. First pick 2.0: (2 - 1.7) / 2 = 0.15 stays, 1.5 and -1 are masked. Second pick 1.7: (1.7 - 1.5) / 1.7 stays.
    const routed r = route(rule, {1.5f, 2.0f, -1.0f, 1.7f});
    CHECK(r.ids == std::vector<std::int32_t>{1, 3});
    check_weights(r, {1 / (1 + std::exp(-0.3)), 1 / (1 + std::exp(-0.2))});
    // Nothing but the pick within the threshold: weight 1.
    check_weights(route(rule, {10, 1, 0, -1}), {1, 1});
}

TEST_CASE("a score that saturates makes no tie where the choice is made on the logits") {
    const ps::routing_rule rule{.experts = 3, .top_k = 1, .score = ps::score_function::sigmoid, .scales_input = true};
    const routed r = route(rule, {40, 50, 60});
    CHECK(r.ids == std::vector<std::int32_t>{2});
    CHECK(r.weights == std::vector<float>{1});
}

TEST_CASE("rows past the live count are nobody's") {
    const ps::routing_rule rule{.experts = 4, .top_k = 2};
    std::vector<float> logits(3 * 4, 1.0f);
    std::vector<std::int32_t> ids(6, 77);
    std::vector<float> weights(6, 77.0f);
    ps::executor::host host{1};
    const std::int32_t live = 1;
    host.route(rule, {.experts = 4}, logits.data(), 3, &live, ids.data(), weights.data());
    CHECK(ids == std::vector<std::int32_t>{0, 1, -1, -1, -1, -1});
    CHECK(weights == std::vector<float>{0.25f, 0.25f, 0, 0, 0, 0});
}

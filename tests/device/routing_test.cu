#include <penstock/dispatch/cuda_experts.cuh>

#include "device_memory.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <set>

namespace ps = penstock;
using namespace tests;

using cuda_executor = ps::executor::cuda<ps::format::f32>;

namespace {

struct choice {
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
};

choice route_on_gpu(const ps::routing_rule& rule, const std::vector<float>& logits, const std::vector<float>& correction = {},
                    std::optional<std::int32_t> live = {}) {
    const auto tokens = static_cast<std::uint32_t>(logits.size() / rule.experts);
    const guarded<float> device_logits(logits);
    const guarded<float> device_correction(correction);
    const guarded<std::int32_t> device_live(std::vector<std::int32_t>{live.value_or(0)});
    guarded<std::int32_t> ids(std::size_t{tokens} * rule.top_k);
    guarded<float> weights(std::size_t{tokens} * rule.top_k);
    ps::router_ref router;
    router.experts = rule.experts;
    router.correction_bias = correction.empty() ? nullptr : device_correction.data();
    cuda_executor(nullptr).route(rule, router, device_logits.data(), tokens, live ? device_live.data() : nullptr, ids.data(),
                                 weights.data());
    choice c{ids.get(), weights.get()};
    CHECK(ids.guards_hold());
    CHECK(weights.guards_hold());
    return c;
}

/// The host's lane group, one token after another.
choice route_on_host(const ps::routing_rule& rule, const std::vector<float>& logits, const std::vector<float>& correction = {}) {
    const std::size_t tokens = logits.size() / rule.experts;
    choice c{std::vector<std::int32_t>(tokens * rule.top_k), std::vector<float>(tokens * rule.top_k)};
    std::vector<float> scratch(rule.experts);
    for (std::size_t t = 0; t < tokens; ++t) {
        ps::route_token(ps::lane_group_of_one{}, rule, logits.data() + t * rule.experts, correction.empty() ? nullptr : correction.data(),
                        scratch.data(), c.ids.data() + t * rule.top_k, c.weights.data() + t * rule.top_k);
    }
    return c;
}

void check_same(const choice& got, const choice& want) {
    CHECK(got.ids == want.ids);
    for (std::size_t i = 0; i < want.weights.size(); ++i) {
        CAPTURE(i);
        REQUIRE(std::fabs(got.weights[i] - want.weights[i]) <= 1e-5f);
    }
}

void check_weights(const choice& got, const std::vector<std::int32_t>& ids, const std::vector<double>& weights) {
    CHECK(got.ids == ids);
    for (std::size_t i = 0; i < weights.size(); ++i) {
        CHECK(std::fabs(got.weights[i] - weights[i]) < 2e-6);
    }
}

/// Logits on a coarse grid, so that ties are common and the host's rounding cannot change an order.
std::vector<float> grid_logits(std::size_t count, std::mt19937& random) {
    std::vector<float> logits(count);
    for (float& l : logits) {
        l = static_cast<float>(static_cast<int>(random() % 129) - 64) / 16.0f;
    }
    return logits;
}

}  // namespace

TEST_CASE("R01 bias picks experts, it does not weight them") {
    const ps::routing_rule rule{.experts = 4, .top_k = 2, .score = ps::score_function::sigmoid, .renormalise = true, .scale = 2.5f};
    check_weights(route_on_gpu(rule, {2, 1, 0, -1}, {0, 0, 0, 1}), {3, 0}, {0.584788, 1.915212});
}

TEST_CASE("R02 group score is the sum of the two best") {
    const ps::routing_rule rule{
        .experts = 8, .top_k = 2, .score = ps::score_function::sigmoid, .renormalise = true, .groups = 2, .groups_kept = 1};
    check_weights(route_on_gpu(rule, {2.1972f, -2.1972f, -2.3136f, -2.4423f, 0.4895f, 0.3228f, -2.9444f, -3.1781f}), {4, 5},
                  {0.516659, 0.483341});
}

TEST_CASE("R04 all sigmoid scores underflow") {
    const ps::routing_rule rule{.experts = 4, .top_k = 2, .score = ps::score_function::sigmoid, .renormalise = true, .epsilon = 1e-20f};
    const choice got = route_on_gpu(rule, std::vector<float>(4, -120.0f));
    CHECK(got.ids == std::vector<std::int32_t>{0, 1});
    CHECK(std::isfinite(got.weights[0]));
    CHECK(std::isfinite(got.weights[1]));
}

TEST_CASE("R06 correction bias rounded to bf16") {
    const ps::routing_rule rule{.experts = 4, .top_k = 1, .score = ps::score_function::sigmoid};
    CHECK(route_on_gpu(rule, std::vector<float>(4, 0.0f), {6.820f, 6.826f, 6.823f, 6.819f}).ids[0] == 1);
}

TEST_CASE("R07 a whole row of NaN") {
    std::mt19937 random(1);
    for (const ps::score_function score : {ps::score_function::softmax, ps::score_function::sigmoid, ps::score_function::sqrt_softplus}) {
        for (const std::uint32_t experts : {8u, 128u}) {
            const ps::routing_rule rule{.experts = experts, .top_k = 4, .score = score, .renormalise = true};
            std::vector<float> logits = random_floats(std::size_t{5} * experts, random);
            const choice normal = route_on_host(rule, logits);
            std::fill_n(logits.begin() + experts, experts, NAN);
            std::fill_n(logits.begin() + 2 * experts, experts, HUGE_VALF);
            std::fill_n(logits.begin() + 3 * experts, experts, -HUGE_VALF);
            const choice got = route_on_gpu(rule, logits);
            for (std::size_t t = 0; t < 5; ++t) {
                std::set<std::int32_t> distinct;
                for (std::size_t j = 0; j < 4; ++j) {
                    const std::int32_t id = got.ids[t * 4 + j];
                    CHECK(id >= 0);
                    CHECK(id < static_cast<std::int32_t>(experts));
                    CHECK(std::isfinite(got.weights[t * 4 + j]));
                    distinct.insert(id);
                    if (t == 0 || t == 4) {
                        CHECK(id == normal.ids[t * 4 + j]);
                    }
                }
                CHECK(distinct.size() == 4);
            }
        }
    }
}

TEST_CASE("R09 ties") {
    for (const std::uint32_t experts : {8u, 384u}) {
        const ps::routing_rule rule{.experts = experts, .top_k = 4};
        CHECK(route_on_gpu(rule, std::vector<float>(experts, 0.0f)).ids == std::vector<std::int32_t>{0, 1, 2, 3});
        std::mt19937 random(2);
        const std::vector<float> batch = grid_logits(std::size_t{1000} * experts, random);
        const choice together = route_on_gpu(rule, batch);
        for (const std::size_t t : {0u, 1u, 499u, 999u}) {
            const choice alone = route_on_gpu(rule, {batch.begin() + static_cast<std::ptrdiff_t>(t * experts),
                                                     batch.begin() + static_cast<std::ptrdiff_t>((t + 1) * experts)});
            CHECK(std::equal(alone.ids.begin(), alone.ids.end(), together.ids.begin() + static_cast<std::ptrdiff_t>(t * 4)));
            CHECK(same_bits(alone.weights.data(), together.weights.data() + t * 4, 4));
            std::vector<std::int32_t> order(experts);  // higher value first, then lower id
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
                return batch[t * experts + static_cast<std::size_t>(a)] > batch[t * experts + static_cast<std::size_t>(b)];
            });
            CHECK(std::equal(alone.ids.begin(), alone.ids.end(), order.begin()));
        }
    }
}

TEST_CASE("R11 softmax without renormalisation") {
    ps::routing_rule rule{.experts = 4, .top_k = 2};
    check_weights(route_on_gpu(rule, {1, 2, 3, 4}), {3, 2}, {0.643914, 0.236883});
    rule.renormalise = true;
    check_weights(route_on_gpu(rule, {1, 2, 3, 4}), {3, 2}, {0.731059, 0.268941});
    rule.renormalise = false;
    rule.softmax_after_top_k = true;
    check_weights(route_on_gpu(rule, {1, 2, 3, 4}), {3, 2}, {0.731059, 0.268941});
}

TEST_CASE("R14 top-k larger than what is available") {
    const cuda_executor executor(nullptr);
    const auto route = [&](const ps::routing_rule& rule) { executor.route(rule, {}, nullptr, 1, nullptr, nullptr, nullptr); };
    CHECK_THROWS_AS(route({.experts = 8, .top_k = 16}), ps::configuration_error);
    CHECK_THROWS_AS(route({.experts = 8, .top_k = 4, .groups = 4, .groups_kept = 1}), ps::configuration_error);
    CHECK_THROWS_AS(route({.experts = 8, .top_k = 0}), ps::configuration_error);
    check_weights(route_on_gpu({.experts = 1, .top_k = 1, .renormalise = true}, {3.0f}), {0}, {1.0});
}

TEST_CASE("every kind of rule against the host, 1 to 1024 experts, top-k to 16") {
    std::mt19937 random(3);
    for (const std::uint32_t experts : {1u, 2u, 3u, 8u, 31u, 33u, 64u, 100u, 160u, 257u, 384u, 896u, 1024u}) {
        for (const std::uint32_t k : {1u, 4u, 8u, 16u}) {
            if (k > experts) {
                continue;
            }
            INFO(experts, " experts, top-", k);
            const std::vector<float> logits = grid_logits(std::size_t{9} * experts, random);
            std::vector<float> correction(experts);
            for (float& b : correction) {
                b = static_cast<float>(random() % 64) / 64.0f;
            }
            check_same(route_on_gpu({.experts = experts, .top_k = k}, logits), route_on_host({.experts = experts, .top_k = k}, logits));
            for (const ps::score_function score :
                 {ps::score_function::softmax, ps::score_function::sigmoid, ps::score_function::sqrt_softplus}) {
                const ps::routing_rule rule{
                    .experts = experts, .top_k = k, .score = score, .renormalise = true, .epsilon = 1e-20f, .scale = 2.5f};
                check_same(route_on_gpu(rule, logits), route_on_host(rule, logits));
            }
            const ps::routing_rule after{.experts = experts, .top_k = k, .softmax_after_top_k = true};
            check_same(route_on_gpu(after, logits), route_on_host(after, logits));
            const ps::routing_rule input{.experts = experts, .top_k = k, .score = ps::score_function::sigmoid, .scales_input = true};
            check_same(route_on_gpu(input, logits), route_on_host(input, logits));
            const ps::routing_rule mixer{.experts = experts, .top_k = k, .sparse_mixer = true, .jitter = 0.01f};
            check_same(route_on_gpu(mixer, logits), route_on_host(mixer, logits));
            if (experts % 8 == 0 && k <= experts / 8 * 4) {
                for (const ps::group_score by : {ps::group_score::maximum, ps::group_score::sum_of_two}) {
                    const ps::routing_rule groups{.experts = experts,
                                                  .top_k = k,
                                                  .score = ps::score_function::softmax,
                                                  .groups = 8,
                                                  .groups_kept = 4,
                                                  .rank_groups_by = by};
                    check_same(route_on_gpu(groups, logits), route_on_host(groups, logits));
                }
            }
        }
    }
}

TEST_CASE("correction bias against float64") {
    std::mt19937 random(4);
    const std::uint32_t experts = 256;
    const ps::routing_rule rule{.experts = experts,
                                .top_k = 8,
                                .score = ps::score_function::sigmoid,
                                .renormalise = true,
                                .scale = 2.5f,
                                .groups = 8,
                                .groups_kept = 4};
    const std::vector<float> logits = random_floats(std::size_t{33} * experts, random);
    const std::vector<float> correction = random_floats(experts, random);
    const choice got = route_on_gpu(rule, logits, correction);
    for (std::size_t t = 0; t < 33; ++t) {
        std::vector<double> score(experts);
        std::vector<double> pick(experts);
        for (std::size_t e = 0; e < experts; ++e) {
            score[e] = 1 / (1 + std::exp(-static_cast<double>(logits[t * experts + e])));
            pick[e] = score[e] + correction[e];
        }
        std::vector<std::pair<double, int>> groups;
        for (int g = 0; g < 8; ++g) {
            std::vector<double> members(pick.begin() + g * 32, pick.begin() + (g + 1) * 32);
            std::sort(members.rbegin(), members.rend());
            groups.emplace_back(-(members[0] + members[1]), g);
        }
        std::sort(groups.begin(), groups.end());
        std::vector<std::pair<double, int>> order;
        for (int i = 0; i < 4; ++i) {
            for (int e = groups[static_cast<std::size_t>(i)].second * 32; e < (groups[static_cast<std::size_t>(i)].second + 1) * 32; ++e) {
                order.emplace_back(-pick[static_cast<std::size_t>(e)], e);
            }
        }
        std::sort(order.begin(), order.end());
        double sum = 0;
        for (std::size_t j = 0; j < 8; ++j) {
            sum += score[static_cast<std::size_t>(order[j].second)];
        }
        for (std::size_t j = 0; j < 8; ++j) {
            CHECK(got.ids[t * 8 + j] == order[j].second);
            CHECK(std::fabs(got.weights[t * 8 + j] - score[static_cast<std::size_t>(order[j].second)] / sum * 2.5) < 1e-5);
        }
    }
}

TEST_CASE("rows past the live count choose nobody") {
    std::mt19937 random(5);
    const ps::routing_rule rule{.experts = 16, .top_k = 4};
    const std::vector<float> logits = random_floats(9 * 16, random);
    const choice all = route_on_gpu(rule, logits);
    for (const std::int32_t live : {0, 1, 4, 8, 9, 100, -1}) {
        CAPTURE(live);
        const choice got = route_on_gpu(rule, logits, {}, live);
        for (std::int32_t t = 0; t < 9; ++t) {
            for (std::size_t j = 0; j < 4; ++j) {
                const std::size_t p = static_cast<std::size_t>(t) * 4 + j;
                CHECK(got.ids[p] == (t < live ? all.ids[p] : -1));
                CHECK(got.weights[p] == (t < live ? all.weights[p] : 0.0f));
            }
        }
    }
}

namespace {

std::uint16_t to_bits(float value, ps::dtype type) { return type == ps::dtype::bf16 ? ps::encode_bf16(value) : ps::encode_f16(value); }

void check_logits(std::uint32_t tokens, std::uint32_t experts, std::uint32_t hidden, ps::dtype type, ps::dtype bias_type, bool shifted,
                  std::mt19937& random) {
    CAPTURE(tokens);
    CAPTURE(experts);
    CAPTURE(hidden);
    const std::vector<float> x = random_floats(std::size_t{tokens} * hidden, random);
    const std::vector<float> values = random_floats(std::size_t{experts} * hidden, random);
    const std::vector<float> biases = random_floats(experts, random);
    const auto stored = [](const std::vector<float>& from, ps::dtype as, std::vector<double>& truth, std::size_t skip) {
        std::vector<std::byte> bytes((from.size() + skip) * (as == ps::dtype::f32 ? 4 : 2), std::byte{0xff});
        for (std::size_t i = 0; i < from.size(); ++i) {
            if (as == ps::dtype::f32) {
                std::memcpy(bytes.data() + (i + skip) * 4, &from[i], 4);
                truth.push_back(from[i]);
            } else {
                const std::uint16_t half = to_bits(from[i], as);
                std::memcpy(bytes.data() + (i + skip) * 2, &half, 2);
                truth.push_back(as == ps::dtype::bf16 ? ps::decode_bf16(half) : ps::decode_f16(half));
            }
        }
        return bytes;
    };
    std::vector<double> true_weight;
    std::vector<double> true_bias;
    const guarded<std::byte> weight(stored(values, type, true_weight, shifted ? 1 : 0));
    const guarded<std::byte> bias(stored(biases, bias_type, true_bias, 0));
    const guarded<float> device_x(x);
    guarded<float> logits(std::size_t{tokens} * experts);
    const std::byte* start = weight.data() + (shifted ? (type == ps::dtype::f32 ? 4 : 2) : 0);
    const ps::router_ref router{
        .weight = start, .type = type, .experts = experts, .hidden = hidden, .bias = bias.data(), .bias_type = bias_type};
    const cuda_executor executor(nullptr);
    executor.logits(router, device_x.data(), tokens, logits.data());
    const std::vector<float> got = logits.get();
    CHECK(logits.guards_hold());
    for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t e = 0; e < experts; ++e) {
            double want = true_bias[e];
            double terms = std::fabs(want);
            for (std::size_t h = 0; h < hidden; ++h) {
                const double term = true_weight[e * hidden + h] * x[t * hidden + h];
                want += term;
                terms += std::fabs(term);
            }
            REQUIRE(std::fabs(got[t * experts + e] - want) <= 2e-6 * terms);
        }
    }
    guarded<float> last(experts);  // the same bits alone
    executor.logits(router, device_x.data() + std::size_t{tokens - 1} * hidden, 1, last.data());
    CHECK(same_bits(last.get().data(), got.data() + std::size_t{tokens - 1} * experts, experts));
}

}  // namespace

TEST_CASE("logits against float64") {
    std::mt19937 random(6);
    for (const ps::dtype type : {ps::dtype::f32, ps::dtype::bf16, ps::dtype::f16}) {
        for (const std::uint32_t tokens : {1u, 3u, 4u, 5u, 17u}) {
            check_logits(tokens, 128, 2048, type, ps::dtype::bf16, false, random);
            check_logits(tokens, 7, 37, type, ps::dtype::f32, false, random);
            check_logits(tokens, 33, 100, type, ps::dtype::f16, false, random);
            check_logits(tokens, 3, 256, type, ps::dtype::f32, true, random);
        }
    }
    check_logits(2, 1024, 64, ps::dtype::bf16, ps::dtype::f32, false, random);
    check_logits(1, 1, 1, ps::dtype::f32, ps::dtype::f32, false, random);
}

TEST_CASE("R15 router arithmetic in bf16") {
    CHECK(route_on_gpu({.experts = 4, .top_k = 1}, {1.000f, 1.001f, 1.002f, 1.003f}).ids[0] == 3);
    std::vector<float> x(4096);
    std::vector<std::uint16_t> weight(4096, 0x3f80);
    for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] = i % 2 == 0 ? 1.0f : -1.0f;
    }
    x[4094] = 0.001953125f;  // 2^-9
    x[4095] = 0.0f;
    const guarded<std::uint16_t> device_weight(weight);
    const guarded<float> device_x(x);
    guarded<float> logits(1);
    cuda_executor(nullptr).logits({.weight = device_weight.data(), .type = ps::dtype::bf16, .experts = 1, .hidden = 4096}, device_x.data(),
                                  1, logits.data());
    CHECK(logits.get()[0] == 0.001953125f);
}

TEST_CASE("K02 zero tokens") {
    const cuda_executor executor(nullptr);
    executor.logits({.experts = 8, .hidden = 64}, nullptr, 0, nullptr);
    executor.route({.experts = 8, .top_k = 2}, {}, nullptr, 0, nullptr, nullptr, nullptr);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(route_on_gpu({.experts = 8, .top_k = 1}, {0, 1, 2, 3, 4, 5, 6, 7}).ids[0] == 7);
}

TEST_CASE("K05 70000 tokens are routed") {
    std::mt19937 random(7);
    const ps::routing_rule rule{.experts = 32, .top_k = 8, .renormalise = true};
    const std::vector<float> logits = grid_logits(std::size_t{70000} * 32, random);
    const choice got = route_on_gpu(rule, logits);
    const choice want = route_on_host(rule, logits);
    CHECK(got.ids == want.ids);
}

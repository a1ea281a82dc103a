#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/cuda_experts.cuh>

#include "device_memory.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <optional>

namespace ps = penstock;
using namespace tests;

using cuda_executor = ps::executor::cuda<ps::format::f32>;

namespace {

/// Logits in device memory with the places where the four results go.
class routing_case {
public:
    routing_case(const ps::routing_rule& rule, const std::vector<float>& logits, const std::vector<float>& correction,
                 std::optional<std::int32_t> live = {})
        : rule_(rule),
          tokens_(static_cast<std::uint32_t>(logits.size() / rule.experts)),
          has_live_(live),
          logits_(logits),
          correction_(correction),
          live_(std::vector<std::int32_t>{live.value_or(0)}),
          ids_(std::size_t{tokens_} * rule.top_k),
          weights_(std::size_t{tokens_} * rule.top_k),
          rows_(std::size_t{tokens_} * rule.top_k),
          offsets_(rule.experts + std::size_t{1}),
          scratch_(cuda_executor::route_to_work_scratch_bytes(tokens_, rule.top_k, rule.experts)) {
        router_.experts = rule.experts;
        router_.correction_bias = correction.empty() ? nullptr : correction_.data();
    }

    struct results {
        std::vector<std::int32_t> ids, rows;
        std::vector<std::uint32_t> offsets;
        std::vector<std::uint32_t> weights;  ///< their bits

        bool operator==(const results&) const = default;
    };

    void poison() {
        ids_.poison();
        weights_.poison();
        rows_.poison();
        offsets_.poison();
        scratch_.poison();
    }

    void set_logits(const std::vector<float>& logits) { logits_.set(logits); }

    void in_two_steps() {
        const cuda_executor executor(nullptr);
        executor.route(rule_, router_, logits_.data(), tokens_, live(), ids_.data(), weights_.data());
        executor.permute(ids_.data(), tokens_ * rule_.top_k, rule_.experts, rows_.data(), offsets_.data(), scratch());
    }

    void in_one_step(cudaStream_t stream = nullptr) {
        cuda_executor(stream).route_to_work(rule_, router_, logits_.data(), tokens_, live(), ids_.data(), weights_.data(), rows_.data(),
                                            offsets_.data(), scratch());
    }

    template <class Selector>
    void in_one_step_by() {
        ps::detail::run_route_to_work<Selector>(rule_, router_, logits_.data(), tokens_, live(), ids_.data(), weights_.data(), rows_.data(),
                                                offsets_.data(), scratch(), scratch_.size(), nullptr);
    }

    results get() {
        const std::vector<float> weights = weights_.get();
        results r{ids_.get(), rows_.get(), offsets_.get(), std::vector<std::uint32_t>(weights.size())};
        std::memcpy(r.weights.data(), weights.data(), weights.size() * sizeof(float));
        CHECK(ids_.guards_hold());
        CHECK(weights_.guards_hold());
        CHECK(rows_.guards_hold());
        CHECK(offsets_.guards_hold());
        CHECK(scratch_.guards_hold());
        return r;
    }

private:
    const std::int32_t* live() { return has_live_ ? live_.data() : nullptr; }
    std::span<std::byte> scratch() { return {scratch_.data(), scratch_.size()}; }

    ps::routing_rule rule_;
    std::uint32_t tokens_;
    std::optional<std::int32_t> has_live_;
    guarded<float> logits_, correction_;
    guarded<std::int32_t> live_, ids_;
    guarded<float> weights_;
    guarded<std::int32_t> rows_;
    guarded<std::uint32_t> offsets_;
    guarded<std::byte> scratch_;
    ps::router_ref router_;
};

void check_same(const routing_case::results& got, const routing_case::results& want) {
    CHECK(got.ids == want.ids);
    CHECK(got.weights == want.weights);
    CHECK(got.offsets == want.offsets);
    CHECK(got.rows == want.rows);
}

void check_one_step(const ps::routing_rule& rule, const std::vector<float>& logits, const std::vector<float>& correction = {},
                    std::optional<std::int32_t> live = {}) {
    INFO(rule.experts, " experts, top-", rule.top_k, ", ", logits.size() / rule.experts, " tokens, ", rule.groups, " groups, score ",
         static_cast<int>(rule.score), ", live ", live.value_or(-2));
    routing_case c(rule, logits, correction, live);
    c.in_two_steps();
    const routing_case::results want = c.get();
    c.poison();
    c.in_one_step();
    check_same(c.get(), want);
}

/// Rows of many kinds in turn: normal, on a grid with many ties, equal, zeros of both signs, of large size, and with NaN or infinities here
/// and there or throughout.
std::vector<float> motley_logits(std::size_t tokens, std::size_t experts, std::mt19937& random) {
    std::vector<float> logits = random_floats(tokens * experts, random);
    for (std::size_t t = 0; t < tokens; ++t) {
        const std::size_t kind = tokens == 1 ? 0 : (t + 7) % 13;
        for (std::size_t e = 0; e < experts; ++e) {
            float& l = logits[t * experts + e];
            switch (kind) {
                case 1: l = static_cast<float>(static_cast<int>(random() % 9) - 4) / 2.0f; break;
                case 2: l = 0.5f; break;
                case 3: l = random() % 2 == 0 ? 0.0f : -0.0f; break;
                case 4: l *= 100.0f; break;
                case 5: l = random() % 4 == 0 ? NAN : l; break;
                case 6: l = random() % 4 == 0 ? HUGE_VALF : random() % 3 == 0 ? -HUGE_VALF : l; break;
                case 8: l = NAN; break;
                case 9: l = HUGE_VALF; break;
                case 10: l = -HUGE_VALF; break;
                case 11: l = -120.0f; break;
                default: break;
            }
        }
    }
    return logits;
}

struct named_rule {
    ps::routing_rule rule;
    bool corrected;
};

/// A rule of each family, and some that mix their features.
std::vector<named_rule> rules(std::uint32_t experts) {
    using ps::score_function;
    const std::uint32_t k = std::min(8u, experts);
    std::vector<named_rule> all;
    all.push_back({{.experts = experts, .top_k = k}, false});
    all.push_back({{.experts = experts, .top_k = k, .renormalise = true}, false});
    all.push_back({{.experts = experts, .top_k = std::min(4u, experts), .softmax_after_top_k = true}, true});
    all.push_back(
        {{.experts = experts, .top_k = k, .score = score_function::sigmoid, .renormalise = true, .epsilon = 1e-20f, .scale = 2.5f}, true});
    all.push_back({{.experts = experts,
                    .top_k = std::min(16u, experts),
                    .score = score_function::sqrt_softplus,
                    .renormalise = true,
                    .epsilon = 1e-20f},
                   true});
    all.push_back({{.experts = experts, .top_k = 1, .score = score_function::sigmoid, .scales_input = true}, false});
    all.push_back({{.experts = experts, .top_k = std::min(3u, experts), .scales_input = true}, true});
    all.push_back({{.experts = experts, .top_k = std::min(2u, experts), .sparse_mixer = true, .jitter = 0.01f}, false});
    for (const std::uint32_t groups : {4u, 8u, experts / 32}) {
        const std::uint32_t kept = (groups + 1) / 2;
        if (groups < 2 || experts % groups != 0 || k > kept * (experts / groups)) {
            continue;
        }
        all.push_back({{.experts = experts,
                        .top_k = k,
                        .score = score_function::sigmoid,
                        .renormalise = true,
                        .epsilon = 1e-20f,
                        .scale = 2.5f,
                        .groups = groups,
                        .groups_kept = kept},
                       true});
        all.push_back({{.experts = experts,
                        .top_k = k,
                        .scale = 16.0f,
                        .groups = groups,
                        .groups_kept = kept,
                        .rank_groups_by = ps::group_score::maximum},
                       false});
    }
    return all;
}

/// What `route_token` says for a warp, which is what routing is by definition.
__global__ void route_by_definition(ps::routing_rule rule, const float* correction, const float* logits, std::int32_t* ids,
                                    float* weights) {
    __shared__ float scratch[ps::max_experts];
    ps::route_token(ps::warp_lanes{}, rule, logits + std::size_t{blockIdx.x} * rule.experts, correction, scratch,
                    ids + std::size_t{blockIdx.x} * rule.top_k, weights + std::size_t{blockIdx.x} * rule.top_k);
}

/// The shapes that a selector may choose, one after another.
template <std::uint32_t Blocks, std::uint32_t Warps, std::uint32_t Each>
struct always {
    ps::route_to_work_shape operator()(std::uint32_t, std::uint32_t, std::uint32_t) const noexcept { return {Blocks, Warps, Each}; }
};

ps::routing_rule deepseek_v3() {
    return {.experts = 256,
            .top_k = 8,
            .score = ps::score_function::sigmoid,
            .renormalise = true,
            .epsilon = 1e-20f,
            .scale = 2.5f,
            .groups = 8,
            .groups_kept = 4};
}

}  // namespace

TEST_CASE("the kernel's registers hold what route_token says, bit for bit") {
    std::mt19937 random(1);
    for (const std::uint32_t experts : {1u, 2u, 31u, 33u, 64u, 100u, 128u, 160u, 256u, 257u, 384u, 512u, 896u}) {
        const std::uint32_t tokens = 104;
        const guarded<float> logits(motley_logits(tokens, experts, random));
        const guarded<float> correction(random_floats(experts, random));
        for (const named_rule& r : rules(experts)) {
            INFO(experts, " experts, top-", r.rule.top_k, ", ", r.rule.groups, " groups, score ", static_cast<int>(r.rule.score));
            const float* bias = r.corrected ? correction.data() : nullptr;
            guarded<std::int32_t> ids(std::size_t{tokens} * r.rule.top_k), want_ids(std::size_t{tokens} * r.rule.top_k);
            guarded<float> weights(std::size_t{tokens} * r.rule.top_k), want_weights(std::size_t{tokens} * r.rule.top_k);
            ps::launch(route_by_definition, dim3(tokens), dim3(32), 0, nullptr, r.rule, bias, logits.data(), want_ids.data(),
                       want_weights.data());
            ps::router_ref router;
            router.experts = experts;
            router.correction_bias = bias;
            cuda_executor(nullptr).route(r.rule, router, logits.data(), tokens, nullptr, ids.data(), weights.data());
            CHECK(ids.get() == want_ids.get());
            CHECK(same_bits(weights.get().data(), want_weights.get().data(), weights.size()));
        }
    }
}

TEST_CASE("one step gives the bits of two, every kind of rule, R07 R09 R19") {
    std::mt19937 random(2);
    for (const std::uint32_t experts : {1u, 2u, 3u, 7u, 31u, 33u, 60u, 63u, 65u, 100u, 128u, 160u, 256u, 257u, 384u, 512u, 896u}) {
        const std::vector<float> correction = random_floats(experts, random);
        for (const std::uint32_t tokens : {0u, 1u, 2u, 5u, 64u, 128u, 129u, 256u, 300u}) {
            const std::vector<float> logits = motley_logits(tokens, experts, random);
            for (const named_rule& r : rules(experts)) {
                check_one_step(r.rule, logits, r.corrected ? correction : std::vector<float>{});
            }
        }
    }
}

TEST_CASE("every token count up to the limit and one beyond") {
    std::mt19937 random(3);
    const std::vector<float> correction = random_floats(256, random);
    for (std::uint32_t tokens = 1; tokens <= 257; ++tokens) {
        check_one_step(deepseek_v3(), motley_logits(tokens, 256, random), correction);
    }
}

TEST_CASE("all tokens to the same experts") {
    std::mt19937 random(4);
    const std::vector<float> row = random_floats(128, random);
    std::vector<float> logits;
    for (int t = 0; t < 256; ++t) {
        logits.insert(logits.end(), row.begin(), row.end());
    }
    check_one_step({.experts = 128, .top_k = 8, .renormalise = true}, logits);
}

TEST_CASE("rows past the live count visit nobody") {
    std::mt19937 random(5);
    const std::vector<float> correction = random_floats(256, random);
    for (const std::uint32_t tokens : {1u, 9u, 64u, 256u, 300u}) {
        const std::vector<float> logits = random_floats(std::size_t{tokens} * 256, random);
        for (const std::int32_t live : {-1, 0, 1, 4, 33, 63, 64, 200, 1000}) {
            check_one_step(deepseek_v3(), logits, correction, live);
        }
    }
}

TEST_CASE("a graph that is replayed gives the same, and follows new logits") {
    std::mt19937 random(6);
    const std::vector<float> correction = random_floats(256, random);
    for (const std::uint32_t tokens : {1u, 8u, 31u, 128u, 256u}) {
        CAPTURE(tokens);
        const std::vector<float> first = motley_logits(tokens, 256, random);
        const std::vector<float> second = random_floats(std::size_t{tokens} * 256, random);
        routing_case c(deepseek_v3(), second, correction);
        c.in_two_steps();
        const routing_case::results want_second = c.get();
        c.set_logits(first);
        c.in_two_steps();
        const routing_case::results want_first = c.get();

        const ps::stream stream;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t ready = nullptr;
        ps::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        c.in_one_step(stream.get());
        ps::check(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
        std::size_t nodes = 0;
        ps::check(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
        CHECK(nodes == 1);
        ps::check(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
        const auto replay = [&](const routing_case::results& want) {
            c.poison();
            ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            ps::check(cudaGraphLaunch(ready, stream.get()), "cudaGraphLaunch");
            ps::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
            check_same(c.get(), want);
        };
        replay(want_first);
        replay(want_first);
        c.set_logits(second);
        replay(want_second);
        ps::check(cudaGraphExecDestroy(ready), "cudaGraphExecDestroy");
        ps::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
}

TEST_CASE("the selector: one block, then a cluster that grows, then two launches") {
    constexpr ps::route_to_work_selector select;
    static_assert(select(0, 256, 8).blocks == 0);
    static_assert(select(1, 256, 8).blocks == 1 && select(1, 256, 8).tokens_each == 1);
    static_assert(select(8, 256, 8).blocks == 1);
    static_assert(select(9, 256, 8).blocks == 2 && select(9, 256, 8).tokens_each == 5);
    static_assert(select(128, 256, 8).blocks == 8 && select(128, 256, 8).warps == 16);
    static_assert(select(256, 256, 8).blocks == 8 && select(256, 256, 8).tokens_each == 32);
    static_assert(select(257, 256, 8).blocks == 0);
    static_assert(select(32, 256, 1).blocks == 1 && select(33, 256, 1).blocks == 0);
    CHECK(select(1, 896, 8).warps == 16);
}

TEST_CASE("every shape gives the same bits; an impossible one is refused") {
    std::mt19937 random(7);
    const std::vector<float> correction = random_floats(256, random);
    for (const bool sparse : {false, true}) {
        const ps::routing_rule rule =
            sparse ? ps::routing_rule{.experts = 256, .top_k = 2, .sparse_mixer = true, .jitter = 0.01f} : deepseek_v3();
        routing_case c(rule, motley_logits(31, 256, random), correction);
        c.in_two_steps();
        const routing_case::results want = c.get();
        const auto check_shape = [&]<class Selector>(Selector) {
            c.poison();
            c.in_one_step_by<Selector>();
            check_same(c.get(), want);
        };
        check_shape(always<1, 1, 31>{});
        check_shape(always<1, 16, 32>{});
        check_shape(always<0, 0, 0>{});
        check_shape(always<2, 3, 16>{});
        check_shape(always<4, 8, 8>{});
        check_shape(always<8, 1, 4>{});
        check_shape(always<8, 16, 32>{});  // seven blocks without a token
        CHECK_THROWS_AS((c.in_one_step_by<always<9, 8, 4>>()), ps::configuration_error);
        CHECK_THROWS_AS((c.in_one_step_by<always<1, 0, 31>>()), ps::configuration_error);
        CHECK_THROWS_AS((c.in_one_step_by<always<1, 17, 31>>()), ps::configuration_error);
        CHECK_THROWS_AS((c.in_one_step_by<always<1, 8, 33>>()), ps::configuration_error);
        CHECK_THROWS_AS((c.in_one_step_by<always<2, 8, 15>>()), ps::configuration_error);
    }
}

TEST_CASE("what cannot be followed is refused, K02 zero tokens") {
    const cuda_executor executor(nullptr);
    CHECK_THROWS_AS(executor.route_to_work({.experts = 8, .top_k = 16}, {}, nullptr, 1, nullptr, nullptr, nullptr, nullptr, nullptr, {}),
                    ps::configuration_error);
    CHECK_THROWS_WITH_AS(
        executor.route_to_work({.experts = 8, .top_k = 8}, {}, nullptr, 300, nullptr, nullptr, nullptr, nullptr, nullptr, {}),
        "penstock: route_to_work of 300 tokens needs 64 bytes of scratch, 0 were given", ps::configuration_error);
    executor.route_to_work({.experts = 8, .top_k = 2}, {}, nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, {});
    CHECK(cudaGetLastError() == cudaSuccess);
}

#include "../tiny_model.hpp"

#include <penstock/moe_layer.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <random>

namespace ps = penstock;
using namespace ps::literals;
using tests::tiny_model;

namespace {

std::vector<float> random_states(std::uint32_t tokens, std::uint32_t hidden, unsigned seed = 3) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(std::size_t{tokens} * hidden);
    for (float& v : x) {
        v = ps::decode_bf16(ps::encode_bf16(normal(random)));
    }
    return x;
}

struct answer {
    std::vector<float> output;
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    ps::store_report report;
};

/// Runs `layer` of the tiny model on the host; the output is poisoned before.
template <class... Ps>
answer run(const tiny_model& tiny, std::uint32_t layer, const std::vector<float>& x, ps::budgets limits = {},
           std::optional<std::uint32_t> live = {}) {
    const ps::moe_layer_model& m = tiny.model.layers[layer];
    const auto tokens = static_cast<std::uint32_t>(x.size() / m.hidden);
    ps::expert_store<Ps...> store(tiny.model, limits, ps::on_host());
    ps::moe_layers<ps::executor::host, ps::expert_store<Ps...>> layers(store, {.max_tokens = tokens});
    answer a;
    a.output.assign(x.size(), std::nanf(""));
    layers[layer].forward({x.data(), ps::dtype::f32, tokens, m.hidden}, {a.output.data(), ps::dtype::f32, tokens, m.hidden}, live);
    const ps::choices c = layers[layer].last_choices();
    a.ids.assign(c.ids, c.ids + tokens * c.top_k);
    a.weights.assign(c.weights, c.weights + tokens * c.top_k);
    a.report = store.report();
    return a;
}

/// The same in double, with the choices given, straight from the file's weights.
std::vector<double> plain(const tiny_model& tiny, std::uint32_t layer, const std::vector<float>& x, const std::vector<std::int32_t>& ids,
                          const std::vector<float>& weights) {
    const ps::moe_layer_model& m = tiny.model.layers[layer];
    std::ifstream file(tiny.path(), std::ios::binary);
    const std::vector<char> raw{std::istreambuf_iterator<char>(file), {}};
    const std::size_t k = m.routing.top_k;
    std::vector<double> out(x.size());
    for (std::size_t p = 0; p < ids.size(); ++p) {
        if (ids[p] < 0) {
            continue;
        }
        const ps::expert_parts& parts = m.experts[static_cast<std::size_t>(ids[p])];
        const float* in = x.data() + p / k * m.hidden;
        const auto weight = [&](int part, std::size_t i) {
            return double{ps::load_element(raw.data() + parts[static_cast<std::size_t>(part)].offset, ps::dtype::bf16, i)};
        };
        std::vector<double> middle(m.intermediate);
        for (std::size_t i = 0; i < m.intermediate; ++i) {
            double gate = 0;
            double up = 0;
            for (std::size_t h = 0; h < m.hidden; ++h) {
                gate += weight(0, i * m.hidden + h) * in[h];
                up += weight(1, i * m.hidden + h) * in[h];
            }
            middle[i] = gate / (1 + std::exp(-gate)) * up;
        }
        for (std::size_t h = 0; h < m.hidden; ++h) {
            for (std::size_t i = 0; i < m.intermediate; ++i) {
                out[p / k * m.hidden + h] += double{weights[p]} * weight(2, h * m.intermediate + i) * middle[i];
            }
        }
    }
    return out;
}

double error(const std::vector<float>& a, const std::vector<double>& b) {
    double difference = 0;
    double norm = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        norm += b[i] * b[i];
    }
    return std::sqrt(difference / norm);
}

ps::budgets slots(const tiny_model& tiny, std::uint64_t device, std::uint64_t host = 0) {
    return {{device * tiny.slot_bytes()}, {host * tiny.slot_bytes()}};
}

}  // namespace

TEST_CASE("a layer agrees with a plain computation in double") {
    tiny_model tiny;
    const std::vector<float> x = random_states(5, 64);
    for (const std::uint32_t layer : {0u, 1u}) {
        const answer a = run(tiny, layer, x);
        CHECK(error(a.output, plain(tiny, layer, x, a.ids, a.weights)) < 1e-6);
    }
}

TEST_CASE("the bits are the same with every budget, memory kind, chunk, depth and scheduler") {
    tiny_model tiny;
    const std::vector<float> x = random_states(13, 64);
    const answer whole = run(tiny, 1, x);
    CHECK(run(tiny, 1, x, slots(tiny, 1)).output == whole.output);
    CHECK(run(tiny, 1, x, slots(tiny, 2, 1)).output == whole.output);
    CHECK(run(tiny, 1, x, slots(tiny, 3, 16)).output == whole.output);
    CHECK(run<ps::memory::pageable, ps::chunking::whole, ps::prefetch::none>(tiny, 1, x, slots(tiny, 1)).output == whole.output);
    CHECK(run<ps::chunking::fixed<1000_B>, ps::prefetch::depth<3>, ps::scheduler::round_robin>(tiny, 1, x, slots(tiny, 2)).output ==
          whole.output);
    CHECK(run<ps::chunking::rows<5>, ps::scheduler::fifo>(tiny, 1, x, slots(tiny, 4, 3)).output == whole.output);
    CHECK(run(tiny, 1, x, slots(tiny, 1)).report.waves > 0);
}

TEST_CASE("a token's bits do not depend on the tokens beside it") {
    tiny_model tiny;
    const std::vector<float> x = random_states(13, 64);
    const answer all = run(tiny, 0, x);
    for (std::size_t t = 0; t < 13; ++t) {
        const answer one =
            run(tiny, 0, std::vector<float>(x.begin() + static_cast<long>(t * 64), x.begin() + static_cast<long>(t * 64 + 64)));
        CHECK(std::equal(one.output.begin(), one.output.end(), all.output.begin() + static_cast<long>(t * 64)));
    }
}

TEST_CASE("K02 no token is legal and costs nothing, and one token works after it") {
    tiny_model tiny;
    auto store = ps::make_expert_store(tiny.model, {}, ps::on_host());
    auto layers = ps::make_moe_layers<ps::executor::host>(store, {.max_tokens = 4});
    layers[0].forward({nullptr, ps::dtype::f32, 0, 64}, {nullptr, ps::dtype::f32, 0, 64});
    CHECK(store.report().steps == 0);
    const std::vector<float> x = random_states(1, 64);
    std::vector<float> out(64, std::nanf(""));
    layers[0].forward({x.data(), ps::dtype::f32, 1, 64}, {out.data(), ps::dtype::f32, 1, 64});
    CHECK(std::ranges::none_of(out, [](float v) { return std::isnan(v); }));
}

TEST_CASE("rows past the live count choose nobody, load nothing and come out as zero") {
    tiny_model tiny(1, 8, 64, 48, 2);
    const std::vector<float> x = random_states(6, 64);
    const answer two = run(tiny, 0, x, {}, 2);
    const answer all = run(tiny, 0, x);
    CHECK(std::equal(two.output.begin(), two.output.begin() + 128, all.output.begin()));
    CHECK(std::all_of(two.output.begin() + 128, two.output.end(), [](float v) { return v == 0; }));
    CHECK(std::all_of(two.ids.begin() + 4, two.ids.end(), [](std::int32_t id) { return id == -1; }));
    CHECK(two.report.misses <= 4);
    CHECK(run(tiny, 0, x, {}, 0).report.misses == 0);
}

TEST_CASE("a shared expert adds to every token that lives, and to none that does not") {
    tiny_model tiny(1, 8, 64, 48, 2);
    const std::vector<float> x = random_states(6, 64);
    const answer without = run(tiny, 0, x);
    tiny.model.layers[0].shared = ps::shared_expert{tiny.model.layers[0].layout, tiny.model.layers[0].experts[3], {}};
    const answer with = run(tiny, 0, x);
    std::vector<std::int32_t> three(12, -1);  // the shared expert alone: everyone visits expert 3 once, with weight 1
    std::vector<float> weights(12, 0.0f);
    for (std::size_t t = 0; t < 6; ++t) {
        three[2 * t] = 3;
        weights[2 * t] = 1;
    }
    std::vector<double> want = plain(tiny, 0, x, three, weights);
    for (std::size_t i = 0; i < want.size(); ++i) {
        want[i] += without.output[i];
    }
    CHECK(error(with.output, want) < 1e-6);
    const answer two = run(tiny, 0, x, {}, 2);
    CHECK(std::equal(two.output.begin(), two.output.begin() + 128, with.output.begin()));
    CHECK(std::all_of(two.output.begin() + 128, two.output.end(), [](float v) { return v == 0; }));
}

TEST_CASE("K16 a rule that scales the input does so once, and the output counts as it is") {
    tiny_model tiny(1, 8, 64, 48, 1);
    tiny.model.layers[0].routing.scales_input = true;
    tiny.model.layers[0].routing.score = ps::score_function::sigmoid;
    tiny.model.layers[0].routing.renormalise = false;
    std::vector<float> x = random_states(4, 64);
    const answer a = run(tiny, 0, x);
    for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] *= a.weights[i / 64];
    }
    CHECK(error(a.output, plain(tiny, 0, x, a.ids, std::vector<float>(4, 1.0f))) < 1e-6);
}

TEST_CASE("the engine's own choices: -1 is nobody, repeats add up, too large is an error that names the token") {
    tiny_model tiny;
    auto store = ps::make_expert_store(tiny.model, slots(tiny, 2), ps::on_host());
    auto layers = ps::make_moe_layers<ps::executor::host>(store, {.max_tokens = 4});
    const std::vector<float> x = random_states(3, 64);
    std::vector<std::int32_t> ids{5, 5, 7, -1, -1, -1};
    const std::vector<float> weights{0.25f, 0.5f, 1.5f, 9.0f, 9.0f, 9.0f};
    std::vector<float> out(3 * 64, std::nanf(""));
    const auto call = [&] {
        layers[1].experts({x.data(), ps::dtype::f32, 3, 64}, {ids.data(), weights.data(), 2}, {out.data(), ps::dtype::f32, 3, 64});
    };
    call();
    CHECK(error(out, plain(tiny, 1, x, ids, weights)) < 1e-6);
    CHECK(std::all_of(out.begin() + 128, out.end(), [](float v) { return v == 0; }));
    ids[3] = 8;
    try {
        call();
        FAIL("expert 8 of 8 was accepted");
    } catch (const ps::configuration_error& e) {
        CHECK(std::string(e.what()).find("token 1 asks for expert 8 of 8") != std::string::npos);
    }
    ids[3] = -1;
    call();
}

TEST_CASE("hidden states and outputs may be bf16 or f16") {
    tiny_model tiny;
    const std::vector<float> x = random_states(4, 64);
    const answer wide = run(tiny, 0, x);
    for (const ps::dtype type : {ps::dtype::bf16, ps::dtype::f16}) {
        std::vector<std::uint16_t> in(x.size());
        std::vector<std::uint16_t> out(x.size(), 0xffff);
        for (std::size_t i = 0; i < x.size(); ++i) {
            ps::store_element(in.data(), type, i, x[i]);
        }
        auto store = ps::make_expert_store(tiny.model, {}, ps::on_host());
        auto layers = ps::make_moe_layers<ps::executor::host>(store, {.max_tokens = 4});
        layers[0].forward({in.data(), type, 4, 64}, {out.data(), type, 4, 64});
        for (std::size_t i = 0; i < x.size(); ++i) {
            CHECK(ps::load_element(out.data(), type, i) == doctest::Approx(wide.output[i]).epsilon(0.01));
        }
    }
}

TEST_CASE("shapes and workspaces that do not fit are refused with both sides named") {
    tiny_model tiny;
    auto store = ps::make_expert_store(tiny.model, {}, ps::on_host());
    using layers_t = ps::moe_layers<ps::executor::host, ps::expert_store<>>;
    layers_t layers(store, {.max_tokens = 2});
    std::vector<float> x(3 * 64);
    CHECK_THROWS_AS(layers[0].forward({x.data(), ps::dtype::f32, 3, 64}, {x.data(), ps::dtype::f32, 3, 64}), ps::configuration_error);
    CHECK_THROWS_AS(layers[0].forward({x.data(), ps::dtype::f32, 1, 63}, {x.data(), ps::dtype::f32, 1, 63}), ps::configuration_error);
    CHECK_THROWS_AS(layers[0].forward({x.data(), ps::dtype::f32, 2, 64}, {x.data(), ps::dtype::f32, 1, 64}), ps::configuration_error);
    const std::uint64_t needed = layers_t::workspace_bytes(tiny.model, 2);
    ps::buffer<std::byte, ps::memory::pageable> memory(needed);
    CHECK_THROWS_AS(layers_t(store, {.max_tokens = 2, .workspace = {memory.data(), needed - 1}}), ps::configuration_error);
    layers_t own(store, {.max_tokens = 2, .workspace = {memory.data(), needed}});
    CHECK(own.workspace_size() == needed);
}

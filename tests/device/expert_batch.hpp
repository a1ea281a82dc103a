#pragma once

#include "device_memory.hpp"
#include "test_expert.hpp"

#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/decode.hpp>
#include <penstock/dispatch/expert_step.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <vector>

/// Steps of a layer's experts for `Experts`, a class such as expert_decode or expert_prefill, and what is right for them.
namespace tests {

/// Experts of one layer, on the device and as they truly are.
struct layer {
    expert_shape shape;
    std::vector<test_expert> experts;
    std::vector<std::unique_ptr<guarded<std::byte>>> records;
    std::unique_ptr<guarded<const std::byte*>> table;

    layer(const expert_shape& s, std::uint32_t count, std::mt19937& random, place_of_test where = place_of_test::device) : shape(s) {
        std::vector<const std::byte*> addresses;
        for (std::uint32_t e = 0; e < count; ++e) {
            experts.push_back(make_expert(s, random));
            records.push_back(std::make_unique<guarded<std::byte>>(experts.back().record, where));
            addresses.push_back(records.back()->data());
        }
        table = std::make_unique<guarded<const std::byte*>>(addresses);
    }

    const ps::expert_layout& layout() const { return experts[0].layout; }
    std::uint32_t count() const { return static_cast<std::uint32_t>(experts.size()); }
};

/// Tokens and where they go.
struct batch {
    std::uint32_t tokens, k;
    std::vector<std::uint16_t> hidden;
    std::vector<std::int32_t> ids;
    std::vector<float> weights, input_scale, shared;
};

template <class Experts>
std::uint16_t to_bits(float value) {
    return Experts::operand_type == ps::dtype::bf16 ? ps::encode_bf16(value) : ps::encode_f16(value);
}

template <class Experts>
float from_bits(std::uint16_t bits) {
    return Experts::operand_type == ps::dtype::bf16 ? ps::decode_bf16(bits) : ps::decode_f16(bits);
}

template <class Experts>
batch random_batch(const layer& l, std::uint32_t tokens, std::uint32_t k, std::mt19937& random) {
    batch b{tokens, k, {}, {}, {}, {}, {}};
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < std::size_t{tokens} * l.shape.hidden; ++i) {
        b.hidden.push_back(to_bits<Experts>(normal(random)));
        b.shared.push_back(normal(random));
    }
    for (std::uint32_t i = 0; i < tokens * k; ++i) {
        b.ids.push_back(static_cast<std::int32_t>(random() % l.count()));  // an expert twice for a token, too
        b.weights.push_back(0.1f + 0.01f * static_cast<float>(random() % 50));
        b.input_scale.push_back(0.5f + 0.01f * static_cast<float>(random() % 100));
    }
    return b;
}

template <class Experts>
std::vector<double> truth(const layer& l, const batch& b, bool extras) {
    std::vector<double> out(std::size_t{b.tokens} * l.shape.hidden, 0.0);
    for (std::uint32_t t = 0; t < b.tokens; ++t) {
        std::vector<float> x(l.shape.hidden);
        for (std::uint32_t c = 0; c < l.shape.hidden; ++c) {
            x[c] = from_bits<Experts>(b.hidden[std::size_t{t} * l.shape.hidden + c]);
        }
        for (std::uint32_t j = 0; j < b.k; ++j) {
            const std::size_t p = std::size_t{t} * b.k + j;
            if (b.ids[p] < 0 || b.ids[p] >= static_cast<std::int32_t>(l.count())) {
                continue;
            }
            const test_expert& expert = l.experts[static_cast<std::size_t>(b.ids[p])];
            const std::vector<double> y = evaluate(expert, x.data(), extras ? double{b.input_scale[p]} : 1.0).partial;
            for (std::uint32_t c = 0; c < l.shape.hidden; ++c) {
                out[std::size_t{t} * l.shape.hidden + c] += b.weights[p] * y[c];
            }
        }
        for (std::uint32_t c = 0; extras && c < l.shape.hidden; ++c) {
            out[std::size_t{t} * l.shape.hidden + c] += b.shared[std::size_t{t} * l.shape.hidden + c];
        }
    }
    return out;
}

/// A batch on the device, and where its output goes.
template <class Experts>
struct call {
    guarded<std::uint16_t> hidden;
    guarded<std::int32_t> ids;
    guarded<float> weights, input_scale, shared, out;
    ps::expert_step step;

    call(const layer& l, const batch& b, bool extras)
        : hidden(b.hidden),
          ids(b.ids),
          weights(b.weights),
          input_scale(b.input_scale),
          shared(b.shared),
          out(std::size_t{b.tokens} * l.shape.hidden) {
        step = ps::expert_step{.records = l.table->data(),
                               .hidden = {hidden.data(), Experts::operand_type, b.tokens, l.shape.hidden},
                               .ids = ids.data(),
                               .weights = weights.data(),
                               .input_scale = extras ? input_scale.data() : nullptr,
                               .shared = extras ? shared.data() : nullptr,
                               .out = {out.data(), ps::dtype::f32, b.tokens, l.shape.hidden}};
    }
};

/// Outputs of the last of some calls on one workspace; every output, and the workspace before the first call but for its counters, is NaN before.
template <class Experts>
std::vector<float> run(const layer& l, const batch& b, std::uint32_t max_tokens, bool extras, std::uint32_t blocks = 0, int calls = 2,
                       const std::function<void()>& before_each = {}) {
    const Experts experts(l.layout(), l.count(), max_tokens, b.k, blocks);
    guarded<std::byte> workspace(experts.workspace_bytes());
    std::size_t counters = 0;
    if constexpr (requires { experts.counter_bytes(); }) {
        counters = experts.counter_bytes();
        ps::check(cudaMemset(workspace.data(), 0, counters), "cudaMemset");
    }
    call<Experts> one(l, b, extras);
    const ps::stream stream;
    for (int i = 0; i < calls; ++i) {
        one.out.poison();
        ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        if (before_each) {
            before_each();
        }
        experts.enqueue(one.step, {workspace.data(), workspace.size()}, stream.get());
        stream.synchronize();
    }
    const std::vector<std::byte> after = workspace.get();
    CHECK(std::all_of(after.begin(), after.begin() + static_cast<std::ptrdiff_t>(counters), [](std::byte v) { return v == std::byte{}; }));
    CHECK(workspace.guards_hold());
    CHECK(one.out.guards_hold());
    return one.out.get();
}

/// The relative error that is allowed.
template <class Experts>
constexpr double tolerance = 1e-2;

template <class Experts>
void check(const expert_shape& shape, std::uint32_t experts, const std::vector<std::uint32_t>& token_counts, std::uint32_t k,
           double most = tolerance<Experts>) {
    std::mt19937 random(shape.hidden * 31 + shape.intermediate);
    CAPTURE(shape.hidden);
    CAPTURE(shape.intermediate);
    CAPTURE(static_cast<int>(shape.kind));
    const layer l(shape, experts, random);
    for (const std::uint32_t tokens : token_counts) {
        for (const bool extras : {false, true}) {
            CAPTURE(tokens);
            CAPTURE(extras);
            batch b = random_batch<Experts>(l, tokens, k, random);
            if (extras && b.ids.size() > 2) {
                b.ids[1] = -1;
                b.ids[2] = static_cast<std::int32_t>(experts) + 5;
            }
            const std::vector<float> got = run<Experts>(l, b, tokens, extras);
            const double error = relative_error(got.data(), truth<Experts>(l, b, extras).data(), got.size());
            CHECK(error < most);
        }
    }
}

}  // namespace tests

#include <penstock/dispatch/cuda_experts.cuh>

#include "device_memory.hpp"

#include <doctest/doctest.h>

namespace ps = penstock;
using namespace tests;

using cuda_executor = ps::executor::cuda<ps::format::f32>;

namespace {

float bf16_value(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

float f16_value(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31;
    const double magnitude = exponent == 0 ? std::ldexp(bits & 1023, -24) : std::ldexp(1024 + (bits & 1023), exponent - 25);
    return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
}

struct combine_case {
    std::uint32_t tokens, k, hidden;
    bool weights, shared;
    ps::dtype type;
};

void check_combine(const combine_case& c, std::mt19937& random) {
    CAPTURE(c.tokens);
    CAPTURE(c.k);
    CAPTURE(c.hidden);
    const std::size_t pairs = std::size_t{c.tokens} * c.k;
    std::vector<float> partial = random_floats(pairs * c.hidden, random);
    const std::vector<float> weights = random_floats(pairs, random);
    const std::vector<float> shared = random_floats(std::size_t{c.tokens} * c.hidden, random);
    std::vector<std::int32_t> ids(pairs);
    for (std::size_t p = 0; p < pairs; ++p) {
        ids[p] = random() % 4 == 0 ? -1 : static_cast<std::int32_t>(random() % 1024);
        for (std::uint32_t h = 0; ids[p] < 0 && h < c.hidden; ++h) {
            partial[p * c.hidden + h] = NAN;  // nobody's result must not be read
        }
    }
    const guarded<float> device_partial(partial);
    const guarded<float> device_weights(weights);
    const guarded<float> device_shared(shared);
    const guarded<std::int32_t> device_ids(ids);
    const std::size_t size = c.type == ps::dtype::f32 ? 4 : 2;
    guarded<std::byte> out(std::size_t{c.tokens} * c.hidden * size);
    cuda_executor(nullptr).combine(device_partial.data(), device_ids.data(), c.weights ? device_weights.data() : nullptr, c.k,
                                   c.shared ? device_shared.data() : nullptr, {out.data(), c.type, c.tokens, c.hidden});
    const std::vector<std::byte> got = out.get();
    CHECK(out.guards_hold());
    for (std::size_t t = 0; t < c.tokens; ++t) {
        for (std::size_t h = 0; h < c.hidden; ++h) {
            double want = 0;
            double terms = 0;
            for (std::size_t j = 0; j < c.k; ++j) {
                if (ids[t * c.k + j] >= 0) {
                    const double term =
                        static_cast<double>(partial[(t * c.k + j) * c.hidden + h]) * (c.weights ? weights[t * c.k + j] : 1.0f);
                    want += term;
                    terms += std::fabs(term);
                }
            }
            want += c.shared ? shared[t * c.hidden + h] : 0.0f;
            terms += c.shared ? std::fabs(shared[t * c.hidden + h]) : 0.0f;
            const std::byte* at = got.data() + (t * c.hidden + h) * size;
            float value;
            std::uint16_t half;
            std::memcpy(&half, at, 2);
            if (c.type == ps::dtype::f32) {
                std::memcpy(&value, at, 4);
                REQUIRE(std::fabs(value - want) <= 1e-6 * terms);
            } else if (c.type == ps::dtype::bf16) {
                REQUIRE(std::fabs(bf16_value(half) - want) <= std::fabs(want) / 255 + 1e-6 * terms);
            } else {
                REQUIRE(std::fabs(f16_value(half) - want) <= std::fabs(want) / 2047 + 1e-6 * terms + 3e-8);
            }
        }
    }
}

}  // namespace

TEST_CASE("combine against float64, in every output type") {
    std::mt19937 random(1);
    for (const ps::dtype type : {ps::dtype::f32, ps::dtype::bf16, ps::dtype::f16}) {
        for (const bool weights : {true, false}) {
            for (const bool shared : {true, false}) {
                check_combine({3, 8, 2880, weights, shared, type}, random);
                check_combine({17, 2, 37, weights, shared, type}, random);
                check_combine({1, 16, 1, weights, shared, type}, random);
                check_combine({9, 1, 1024, weights, shared, type}, random);
                check_combine({2, 4, 1025, weights, shared, type}, random);
            }
        }
    }
}

TEST_CASE("K05 70000 tokens") {
    std::mt19937 random(2);
    check_combine({70000, 8, 32, true, false, ps::dtype::f32}, random);
}

TEST_CASE("rows that nobody chose are zero, and the shared expert is not weighted") {
    const guarded<std::int32_t> ids(std::vector<std::int32_t>{-1, -1});
    const guarded<float> partial(2 * 8);  // NaN
    const guarded<float> weights(std::vector<float>{0, 0});
    guarded<float> out(8);
    cuda_executor(nullptr).combine(partial.data(), ids.data(), weights.data(), 2, nullptr, {out.data(), ps::dtype::f32, 1, 8});
    CHECK(out.get() == std::vector<float>(8, 0.0f));
}

TEST_CASE("R12 the scaling factor is in the weights and nowhere else") {
    const guarded<std::int32_t> ids(std::vector<std::int32_t>{0});
    const guarded<float> partial(std::vector<float>{2.0f});
    const guarded<float> weights(std::vector<float>{2.5f});
    const guarded<float> shared(std::vector<float>{3.0f});
    guarded<float> out(1);
    cuda_executor(nullptr).combine(partial.data(), ids.data(), weights.data(), 1, shared.data(), {out.data(), ps::dtype::f32, 1, 1});
    CHECK(out.get()[0] == 8.0f);
}

TEST_CASE("R17 duplicate experts of one token") {
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    std::vector<float> partial;
    for (int t = 0; t < 9; ++t) {
        for (const std::int32_t e : {3, 3, 7, 7, 1, 2}) {
            ids.push_back(e);
            partial.push_back(static_cast<float>(e));
        }
        weights.insert(weights.end(), {0.1f, 0.2f, 0.3f, 0.1f, 0.2f, 0.1f});
    }
    const guarded<std::int32_t> device_ids(ids);
    const guarded<float> device_weights(weights);
    const guarded<float> device_partial(partial);
    guarded<float> out(9);
    cuda_executor(nullptr).combine(device_partial.data(), device_ids.data(), device_weights.data(), 6, nullptr,
                                   {out.data(), ps::dtype::f32, 9, 1});
    for (const float v : out.get()) {
        CHECK(std::fabs(v - 4.1f) < 1e-6f);
    }
}

TEST_CASE("widen reads every float type exactly") {
    std::mt19937 random(3);
    std::vector<std::uint16_t> bits(5 * 333);
    for (std::uint16_t& b : bits) {
        b = static_cast<std::uint16_t>(random() & 0xfbff);
        b = (b & 0x7f80) == 0x7f80 ? 0x3f80 : b;
    }
    const guarded<std::uint16_t> halves(bits);
    guarded<float> x(bits.size());
    const cuda_executor executor(nullptr);
    executor.widen({halves.data(), ps::dtype::bf16, 5, 333}, x.data());
    std::vector<float> got = x.get();
    for (std::size_t i = 0; i < bits.size(); ++i) {
        REQUIRE(got[i] == bf16_value(bits[i]));
    }
    executor.widen({halves.data(), ps::dtype::f16, 5, 333}, x.data());
    got = x.get();
    for (std::size_t i = 0; i < bits.size(); ++i) {
        REQUIRE(got[i] == f16_value(bits[i]));
    }
    const std::vector<float> floats = random_floats(bits.size(), random);
    const guarded<float> wide(floats);
    executor.widen({wide.data(), ps::dtype::f32, 5, 333}, x.data());
    CHECK(x.get() == floats);
    CHECK(x.guards_hold());
    CHECK_THROWS_AS(executor.widen({wide.data(), ps::dtype::i32, 5, 333}, x.data()), ps::configuration_error);
}

TEST_CASE("shared gate against float64") {
    std::mt19937 random(4);
    for (const std::uint32_t hidden : {1u, 37u, 256u, 2048u, 2880u}) {
        const std::uint32_t tokens = 3;
        std::vector<std::uint16_t> weight(hidden);
        for (std::uint16_t& w : weight) {
            w = static_cast<std::uint16_t>((random() % 2) << 15 | (115 + random() % 8) << 7 | random() % 128);
        }
        const std::vector<float> x = random_floats(std::size_t{tokens} * hidden, random);
        const std::vector<float> shared = random_floats(x.size(), random);
        const guarded<std::uint16_t> device_weight(weight);
        const guarded<float> device_x(x);
        guarded<float> device_shared(shared);
        cuda_executor(nullptr).shared_gate(device_weight.data(), ps::dtype::bf16, device_x.data(), tokens, hidden, device_shared.data());
        const std::vector<float> got = device_shared.get();
        CHECK(device_shared.guards_hold());
        for (std::size_t t = 0; t < tokens; ++t) {
            double logit = 0;
            for (std::size_t h = 0; h < hidden; ++h) {
                logit += static_cast<double>(bf16_value(weight[h])) * x[t * hidden + h];
            }
            for (std::size_t h = 0; h < hidden; ++h) {
                const double want = shared[t * hidden + h] / (1 + std::exp(-logit));
                REQUIRE(std::fabs(got[t * hidden + h] - want) <= 2e-5 * std::fabs(want));
            }
        }
    }
}

TEST_CASE("K02 zero tokens launch nothing") {
    const cuda_executor executor(nullptr);
    executor.widen({nullptr, ps::dtype::bf16, 0, 64}, nullptr);
    executor.shared_gate(nullptr, ps::dtype::bf16, nullptr, 0, 64, nullptr);
    executor.combine(nullptr, nullptr, nullptr, 8, nullptr, {nullptr, ps::dtype::f32, 0, 64});
    CHECK(cudaGetLastError() == cudaSuccess);
    std::mt19937 random(5);
    check_combine({1, 8, 64, true, true, ps::dtype::f32}, random);
}

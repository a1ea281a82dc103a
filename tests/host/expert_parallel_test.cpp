#include "parallel_world.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <cstring>

using namespace parallel_world;

namespace {

using results = std::vector<std::vector<float>>;

struct settings {
    bool fp8 = false;
    double shared_factor = 0;
    int rounds = 1;
    bool jitter = false;
};

/// One layer over all ranks of the batch. Every rank must succeed.
template <class... Ps>
results run_layer(const batch& b, const ps::expert_placement& placement, settings s = {}) {
    results out(b.tokens.size());
    const auto thrown = on_every_rank(placement.ranks(), [&](loopback endpoint) {
        const std::uint32_t r = endpoint.rank();
        std::mt19937 random{r + static_cast<std::uint32_t>(std::random_device{}())};
        ps::expert_parallel<loopback, Ps...> layer(
            std::move(endpoint), {.hidden = b.hidden, .top_k = b.top_k, .type = b.type, .fp8_dispatch = s.fp8, .rows = 4096});
        const simple_experts experts{&placement, r};
        const auto linger = [&] {
            if (s.jitter) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
            }
        };
        std::vector<float> added;
        for (int round = 0; round < s.rounds; ++round) {
            out[r].assign(std::size_t{b.tokens[r]} * b.hidden, std::nanf(""));
            linger();
            layer.run(
                placement, tokens_of(b, r),
                [&](const ps::expert_rows& rows, ps::activations_out sums) {
                    linger();
                    experts(rows, sums);
                },
                [&](const ps::routed_tokens& t) -> const float* {
                    if (s.shared_factor == 0) {
                        return nullptr;
                    }
                    added.resize(std::size_t{t.hidden.tokens} * b.hidden);
                    for (std::size_t i = 0; i < added.size(); ++i) {
                        added[i] = static_cast<float>(s.shared_factor) * ps::load_element(t.hidden.data, b.type, i);
                    }
                    return added.data();
                },
                {out[r].data(), ps::dtype::f32, b.tokens[r], b.hidden});
        }
    });
    for (const auto& e : thrown) {
        REQUIRE(text_of(e) == "");
    }
    return out;
}

double worst_error(const batch& b, const results& found, double shared_factor = 0) {
    double worst = 0;
    for (std::uint32_t r = 0; r < b.tokens.size(); ++r) {
        worst = std::max(worst, relative_error(found[r], reference(b, r, b.tokens[r], shared_factor)));
    }
    return worst;
}

bool same_bits(const results& a, const results& b) {
    for (std::size_t r = 0; r < a.size(); ++r) {
        if (a[r].size() != b[r].size() || (!a[r].empty() && std::memcmp(a[r].data(), b[r].data(), a[r].size() * sizeof(float)) != 0)) {
            return false;
        }
    }
    return a.size() == b.size();
}

/// Every number of tokens from 0 on, the empty ranks at the front, in the middle and at the end.
std::vector<std::uint32_t> ragged(std::uint32_t ranks, std::uint32_t most) {
    std::vector<std::uint32_t> tokens(ranks);
    for (std::uint32_t r = 0; r < ranks; ++r) {
        tokens[r] = (r * 5 + 7) % (most + 1);
    }
    return tokens;
}

/// Some experts on two ranks or on all.
ps::expert_placement replicated(std::uint32_t experts, std::uint32_t ranks) {
    std::vector<std::vector<std::uint32_t>> owners(experts);
    for (std::uint32_t e = 0; e < experts; ++e) {
        for (std::uint32_t r = 0; r < (e % 5 == 0 ? ranks : e % 3 == 0 ? std::min(2u, ranks) : 1); ++r) {
            owners[e].push_back((e + r) % ranks);
        }
    }
    return {ranks, owners};
}

}  // namespace

TEST_CASE("every world gives what one rank gives, in every type, evenly and unevenly routed") {
    std::mt19937 random{1};
    for (const std::uint32_t ranks : {1u, 2u, 3u, 8u}) {
        CAPTURE(ranks);
        for (const double skew : {0.0, 3.0}) {
            CAPTURE(skew);
            for (const ps::dtype type : {ps::dtype::f32, ps::dtype::bf16, ps::dtype::f16}) {
                CAPTURE(std::string(ps::name(type)));
                const batch b = random_batch(random, 48, 4, 13, type, ragged(ranks, 11), skew);
                // A sum crosses in the payload's type: half of its last bit for each rank it comes from.
                const double tolerance = type == ps::dtype::f32 ? 1e-6 : type == ps::dtype::f16 ? 1e-3 : 8e-3;
                CHECK(worst_error(b, run_layer(b, contiguous(13, ranks))) < tolerance);
                CHECK(worst_error(b, run_layer<ps::capacity::fixed>(b, contiguous(13, ranks), {.shared_factor = 0.75}), 0.75) < tolerance);
                CHECK(worst_error(b, run_layer<ps::replica::nearest>(b, replicated(13, ranks))) < tolerance);
                CHECK(worst_error(b, run_layer<>(b, replicated(13, ranks), {.rounds = 3})) < tolerance);
            }
        }
    }
}

TEST_CASE("rows in fp8 with 1 x 128 scales") {
    std::mt19937 random{2};
    for (const std::uint32_t ranks : {1u, 3u}) {
        for (const std::uint32_t hidden : {16u, 128u, 272u}) {  // a short block, one, two and a short one
            const batch b = random_batch(random, hidden, 8, 16, ps::dtype::bf16, ragged(ranks, 9));
            const results found = run_layer(b, contiguous(16, ranks), {.fp8 = true});
            for (std::uint32_t r = 0; r < ranks; ++r) {
                CHECK(relative_rms(found[r], reference(b, r, b.tokens[r])) < 3e-2);
            }
        }
    }
}

TEST_CASE("256 ranks") {
    std::mt19937 random{3};
    for (const double skew : {0.0, 4.0}) {
        const batch b = random_batch(random, 8, 8, 256, ps::dtype::f32, ragged(256, 6), skew);
        CHECK(worst_error(b, run_layer(b, contiguous(256, 256), {.rounds = 2})) < 1e-6);
    }
    const batch few = random_batch(random, 8, 4, 60, ps::dtype::bf16, ragged(256, 3));  // most ranks hold no expert
    CHECK(worst_error(few, run_layer(few, contiguous(60, 256))) < 8e-3);
}

TEST_CASE("the same bits in every run, whatever the timing") {
    std::mt19937 random{4};
    for (const ps::dtype type : {ps::dtype::f32, ps::dtype::bf16}) {
        const batch b = random_batch(random, 32, 8, 24, type, ragged(8, 20), 1.0);
        const results first = run_layer(b, replicated(24, 8));
        for (int run = 0; run < 4; ++run) {
            CHECK(same_bits(first, run_layer(b, replicated(24, 8), {.jitter = true})));
            CHECK(same_bits(first, run_layer<ps::capacity::fixed>(b, replicated(24, 8), {.rounds = 2, .jitter = true})));
        }
    }
}

TEST_CASE("top-1 to top-16, and rows of 16 bytes") {
    std::mt19937 random{5};
    for (const std::uint32_t k : {1u, 2u, 16u}) {
        for (const std::uint32_t hidden : {4u, 12u, 100u}) {
            const batch b = random_batch(random, hidden, k, 20, ps::dtype::f32, {7, 0, 3});
            CHECK(worst_error(b, run_layer(b, contiguous(20, 3))) < 1e-6);
        }
    }
}

#include "parallel_world.hpp"

#include <doctest/doctest.h>

#include <atomic>

using namespace parallel_world;

namespace {

using namespace std::chrono_literals;
using layer_type = ps::expert_parallel<loopback>;

constexpr ps::expert_parallel_options options{.hidden = 8, .top_k = 2, .type = ps::dtype::f32};

/// What a rank does in place of its part in round 2.
enum class mishap { bad_id, experts_throw, shared_throws, leaves, sleeps, other_world, other_shape };

std::uint32_t failed_rank(const std::exception_ptr& e) {
    try {
        if (e != nullptr) {
            std::rethrow_exception(e);
        }
    } catch (const ps::rank_failed& f) {
        return f.rank();
    } catch (...) {
    }
    return 999;
}

struct outcome {
    std::vector<std::exception_ptr> thrown;
    std::vector<std::uint64_t> held;  ///< bytes, after the failure
    std::atomic<std::uint64_t> under_way{0};
    double seconds = 0;
};

void play(std::uint32_t ranks, std::uint32_t culprit, mishap what, std::chrono::milliseconds limit, outcome& o) {
    std::mt19937 random{1};
    const ps::expert_placement placement = contiguous(6, ranks);
    const batch b = random_batch(random, 8, 2, 6, ps::dtype::f32, std::vector<std::uint32_t>(ranks, 4));
    o.held.assign(ranks, 0);
    std::atomic<std::uint32_t> over{0};
    const auto start = std::chrono::steady_clock::now();
    o.thrown = on_every_rank(
        ranks,
        [&](loopback endpoint) {
            const std::uint32_t r = endpoint.rank();
            layer_type layer(std::move(endpoint), options);
            try {
                for (int round = 0; round < 5; ++round) {
                    const bool now = round == 2 && r == culprit;
                    std::vector<float> out(32);
                    batch mine = b;
                    if (now && what == mishap::leaves) {
                        ++over;
                        return;
                    }
                    if (now && what == mishap::sleeps) {  // until all others have given up
                        while (over.load() < ranks - 1) {
                            std::this_thread::sleep_for(1ms);
                        }
                    }
                    if (now && what == mishap::bad_id) {
                        mine.ids[r][3] = 6;
                    }
                    const auto experts = [&](const ps::expert_rows& rows, ps::activations_out sums) {
                        if (now && what == mishap::experts_throw) {
                            throw std::runtime_error("the experts fell ill");
                        }
                        simple_experts{&placement, r}(rows, sums);
                    };
                    const auto shared = [&](const ps::routed_tokens&) -> const float* {
                        if (now && what == mishap::shared_throws) {
                            throw 7;
                        }
                        return nullptr;
                    };
                    layer.run(now && what == mishap::other_world ? contiguous(6, ranks + 1) : placement, tokens_of(mine, r), experts,
                              shared, {out.data(), ps::dtype::f32, now && what == mishap::other_shape ? 3u : 4u, 8});
                }
            } catch (...) {
                o.held[r] = layer.bytes_held();
                // Every further call says the same.
                std::vector<float> out(32);
                CHECK_THROWS_AS(layer.run(placement, tokens_of(b, r), simple_experts{&placement, r}, {out.data(), ps::dtype::f32, 4, 8}),
                                ps::error);
                ++over;
                while (over.load() < ranks) {  // whoever reported the failure has then cleared the world
                    std::this_thread::sleep_for(1ms);
                }
                o.under_way += layer.endpoint().bytes_under_way();
                throw;
            }
        },
        limit);
    o.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("a rank that errors, leaves or does not come is named by all others in time, and memory is given back") {
    for (const std::uint32_t ranks : {2u, 3u, 8u, 64u}) {
        for (const mishap what : {mishap::bad_id, mishap::experts_throw, mishap::shared_throws, mishap::leaves, mishap::sleeps,
                                  mishap::other_world, mishap::other_shape}) {
            const std::uint32_t culprit = ranks / 2;
            CAPTURE(ranks);
            CAPTURE(static_cast<int>(what));
            // Time enough for a machine with more ranks than cores; only a rank that sleeps runs into it.
            const std::chrono::milliseconds limit = what == mishap::sleeps ? 500ms : 60s;
            outcome o;
            play(ranks, culprit, what, limit, o);
            for (std::uint32_t r = 0; r < ranks; ++r) {
                CAPTURE(text_of(o.thrown[r]));
                if (r != culprit) {
                    CHECK(failed_rank(o.thrown[r]) == culprit);
                    CHECK(o.held[r] == 0);
                }
            }
            CHECK(o.held[culprit] == 0);
            CHECK(o.under_way.load() == 0);
            CHECK(o.seconds < 30);
            const std::string other = text_of(o.thrown[culprit == 0 ? 1 : 0]);
            if (what == mishap::experts_throw) {
                CHECK(other == "penstock: rank " + std::to_string(culprit) + " failed: the experts fell ill");
                CHECK(text_of(o.thrown[culprit]) == "the experts fell ill");
            }
            if (what == mishap::bad_id) {
                CHECK(other.find("asks for expert 6 of 6") != std::string::npos);
            }
            if (what == mishap::leaves) {
                CHECK(other.find("it has left the world") != std::string::npos);
            }
            if (what == mishap::sleeps) {
                CHECK(other.find("did not come within 500 ms") != std::string::npos);
                CHECK(failed_rank(o.thrown[culprit]) == culprit);
            }
        }
    }
}

TEST_CASE("calls out of turn and formats that are not served") {
    std::vector<loopback> world = loopback::world(1);
    layer_type layer(std::move(world[0]), options);
    CHECK_THROWS_WITH_AS(layer.finish_dispatch(), doctest::Contains("out of turn"), ps::configuration_error);
    const auto refused = [](ps::expert_parallel_options o, const char* why) {
        std::vector<loopback> w = loopback::world(1);
        CHECK_THROWS_WITH_AS(layer_type(std::move(w[0]), o), doctest::Contains(why), ps::configuration_error);
    };
    refused({.hidden = 6, .top_k = 2, .type = ps::dtype::f32}, "rows of 24 bytes in F32; multiples of 16 bytes");
    refused({.hidden = 12, .top_k = 2}, "rows of 24 bytes in BF16");
    refused({.hidden = 24, .top_k = 2, .fp8_dispatch = true}, "rows of 24 bytes in F8_E4M3");
    refused({.hidden = 0, .top_k = 2}, "a hidden size of 0");
    refused({.hidden = 8, .top_k = 17}, "top-17");
    refused({.hidden = 8, .top_k = 0}, "top-0");
    refused({.hidden = 16, .top_k = 2, .type = ps::dtype::i8}, "rows of I8");
    CHECK_THROWS_AS(loopback::world(0), ps::configuration_error);
}

TEST_CASE("ranks that finish early leave the others in peace") {
    const auto thrown = on_every_rank(8, [](loopback endpoint) {
        std::vector<std::uint32_t> to(8, endpoint.rank()), from(8);
        endpoint.exchange_counts(to, from);
        for (std::uint32_t s = 0; s < 8; ++s) {
            CHECK(from[s] == s);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(endpoint.rank() * 3));
    });
    for (const auto& e : thrown) {
        CHECK(text_of(e) == "");
    }
}

TEST_CASE("ranks that make different calls are told so") {
    const auto thrown = on_every_rank(2, [](loopback endpoint) {
        std::vector<std::uint32_t> to(2), from(2);
        if (endpoint.rank() == 0) {
            endpoint.exchange_counts(to, from);
            endpoint.exchange_counts(to, from);
        } else {
            endpoint.begin_exchange({}, {});
            endpoint.finish_exchange();
            endpoint.exchange_counts(to, from);
        }
    });
    CHECK((text_of(thrown[0]) + text_of(thrown[1])).find("do all ranks make the same calls?") != std::string::npos);
}

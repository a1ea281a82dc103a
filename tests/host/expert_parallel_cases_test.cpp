#include "host_experts_records.hpp"
#include "parallel_world.hpp"

#include <penstock/parallel/experts_on_host.hpp>

#include <doctest/doctest.h>

#include <cstring>

using namespace parallel_world;

namespace {

using layer_type = ps::expert_parallel<loopback>;

/// Runs every rank and holds that none threw.
void on_all(std::uint32_t ranks, const auto& f) {
    for (const auto& e : on_every_rank(ranks, f)) {
        REQUIRE(text_of(e) == "");
    }
}

/// As std::fill: every row of `sums` becomes the weighted sum of value(global expert).
struct constant_experts {
    const ps::expert_placement* placement;
    std::uint32_t rank;
    double (*value)(std::uint32_t expert);

    void operator()(const ps::expert_rows& rows, ps::activations_out sums) const {
        std::vector<float> partial(std::size_t{rows.rows} * rows.top_k * rows.width);
        for (std::size_t p = 0; p < std::size_t{rows.rows} * rows.top_k; ++p) {
            if (rows.ids[p] >= 0) {
                std::fill_n(&partial[p * rows.width], rows.width,
                            static_cast<float>(value(placement->experts_of(rank)[static_cast<std::size_t>(rows.ids[p])])));
            }
        }
        ps::weigh(rows, partial.data(), sums);
    }
};

}  // namespace

TEST_CASE("D02 Global and local expert ids mixed") {
    const ps::expert_placement placement = contiguous(4, 2);
    const std::int32_t ids[2][4] = {{0, 3, 1, 2}, {2, 3, 3, 0}};
    const float wanted[2][2] = {{1001, 110}, {1100, 1001}};
    on_all(2, [&](loopback endpoint) {
        const std::uint32_t r = endpoint.rank();
        layer_type layer(std::move(endpoint), {.hidden = 4, .top_k = 2, .type = ps::dtype::f32});
        const std::vector<float> x(8, 1.0f);
        std::vector<float> out(8);
        layer.run(placement, {{x.data(), ps::dtype::f32, 2, 4}, ids[r]},
                  constant_experts{&placement, r, [](std::uint32_t e) { return std::pow(10.0, e); }}, {out.data(), ps::dtype::f32, 2, 4});
        CHECK(out[0] == wanted[r][0]);
        CHECK(out[7] == wanted[r][1]);
    });
}

TEST_CASE("D03 A rank without tokens takes part, 1000 times in turn") {
    std::mt19937 random{3};
    const ps::expert_placement placement = contiguous(4, 2);
    std::vector<batch> batches;
    batches.push_back(random_batch(random, 4, 2, 4, ps::dtype::f32, {5, 0}));
    batches.push_back(random_batch(random, 4, 2, 2, ps::dtype::f32, {3, 4}));  // experts 0 and 1: nothing goes to rank 1
    batches.push_back(random_batch(random, 4, 2, 4, ps::dtype::f32, {0, 0}));
    on_all(2, [&](loopback endpoint) {
        const std::uint32_t r = endpoint.rank();
        layer_type layer(std::move(endpoint), {.hidden = 4, .top_k = 2, .type = ps::dtype::f32});
        for (int i = 0; i < 1000; ++i) {
            const batch& b = batches[static_cast<std::size_t>(i) % 3];
            std::vector<float> out(std::size_t{b.tokens[r]} * 4);
            layer.run(placement, tokens_of(b, r), simple_experts{&placement, r}, {out.data(), ps::dtype::f32, b.tokens[r], 4});
            if (relative_error(out, reference(b, r, b.tokens[r])) > 1e-6) {
                throw ps::error("round " + std::to_string(i) + " is wrong");
            }
        }
    });
}

TEST_CASE("D05 Shared expert summed once") {
    const ps::expert_placement placement = contiguous(2, 2);
    const std::int32_t ids[2] = {0, 1};  // one choice on each rank
    on_all(2, [&](loopback endpoint) {
        const std::uint32_t r = endpoint.rank();
        layer_type layer(std::move(endpoint), {.hidden = 4, .top_k = 2, .type = ps::dtype::f32});
        const std::vector<float> x(4, 1.0f), shared(4, 3.0f);
        std::vector<float> out(4);
        int calls = 0;
        layer.run(placement, {{x.data(), ps::dtype::f32, 1, 4}, ids}, constant_experts{&placement, r, [](std::uint32_t) { return 1.0; }},
                  [&](const ps::routed_tokens&) {
                      ++calls;
                      return shared.data();
                  },
                  {out.data(), ps::dtype::f32, 1, 4});
        CHECK(calls == 1);
        CHECK(out == std::vector<float>(4, 5.0f));
    });
}

TEST_CASE("D07 All tokens to one rank") {
    const ps::expert_placement placement = contiguous(4, 2);
    constexpr std::uint32_t tokens = 2304;
    const std::vector<float> x(tokens * 4, 1.0f);
    std::vector<std::int32_t> ids(tokens * 2);
    for (std::uint32_t i = 0; i < ids.size(); ++i) {
        ids[i] = static_cast<std::int32_t>(i % 2);
    }
    const auto value = [](std::uint32_t e) { return e + 1.0; };
    on_all(2, [&](loopback endpoint) {
        const std::uint32_t r = endpoint.rank();
        layer_type layer(std::move(endpoint), {.hidden = 4, .top_k = 2, .type = ps::dtype::f32});
        std::vector<float> out(tokens * 4);
        layer.run(placement, {{x.data(), ps::dtype::f32, tokens, 4}, ids.data()}, constant_experts{&placement, r, value},
                  {out.data(), ps::dtype::f32, tokens, 4});
        CHECK(std::count(out.begin(), out.end(), 3.0f) == tokens * 4);
        CHECK(layer.report().rows_sent == tokens);  // both experts of a token are on one rank: it crosses once
        CHECK(layer.report().rows_crossing == (r == 0 ? 0 : tokens));
        CHECK(layer.report().rows_received == (r == 0 ? 2 * tokens : 0));
        CHECK(layer.report().pairs_received == (r == 0 ? 4 * tokens : 0));
    });
    on_all(2, [&](loopback endpoint) {
        const std::uint32_t r = endpoint.rank();
        ps::expert_parallel<loopback, ps::capacity::fixed> layer(std::move(endpoint),
                                                                 {.hidden = 4, .top_k = 2, .type = ps::dtype::f32, .rows = tokens});
        const std::uint64_t held = layer.bytes_held();
        std::vector<float> out(tokens * 4);
        const constant_experts experts{&placement, r, value};
        for (int again = 0; again < 2; ++again) {  // too small, in words that name both numbers; then half the tokens fit
            CHECK_THROWS_WITH_AS(
                layer.run(placement, {{x.data(), ps::dtype::f32, tokens, 4}, ids.data()}, experts, {out.data(), ps::dtype::f32, tokens, 4}),
                doctest::Contains("rank 0 needs room for 4608 rows, 2304 are set up"), ps::capacity_exceeded);
            layer.run(placement, {{x.data(), ps::dtype::f32, tokens / 2, 4}, ids.data()}, experts,
                      {out.data(), ps::dtype::f32, tokens / 2, 4});
            CHECK(std::count(out.begin(), out.begin() + tokens / 2 * 4, 3.0f) == tokens / 2 * 4);
        }
        CHECK(layer.bytes_held() - held < 64);  // the offsets of the experts, and nothing else, came later
    });
}

TEST_CASE("D11 A rank that owns no expert of a layer") {
    std::mt19937 random{11};
    const ps::expert_placement both = contiguous(2, 2), first = contiguous(1, 2);
    const batch b0 = random_batch(random, 8, 2, 2, ps::dtype::f32, {6, 5}), b1 = random_batch(random, 8, 2, 1, ps::dtype::f32, {4, 6});
    on_all(2, [&](loopback endpoint) {
        const std::uint32_t r = endpoint.rank();
        layer_type layer(std::move(endpoint), {.hidden = 8, .top_k = 2, .type = ps::dtype::f32});
        for (int i = 0; i < 4; ++i) {
            const batch& b = i % 2 == 0 ? b0 : b1;
            const ps::expert_placement& placement = i % 2 == 0 ? both : first;
            std::vector<float> out(std::size_t{b.tokens[r]} * 8);
            layer.run(placement, tokens_of(b, r), simple_experts{&placement, r}, {out.data(), ps::dtype::f32, b.tokens[r], 8});
            CHECK(relative_error(out, reference(b, r, b.tokens[r])) < 1e-6);
        }
    });
}

TEST_CASE("tokens past the live count and ids below 0 cost nothing") {
    std::mt19937 random{6};
    batch b = random_batch(random, 8, 3, 9, ps::dtype::bf16, {8, 8, 8});
    for (std::uint32_t r = 0; r < 3; ++r) {  // past the live count: ids that do not exist, hidden states that are NaN
        std::fill(b.ids[r].begin() + 5 * 3, b.ids[r].end(), 1000);
        std::fill(b.rows[r].begin() + 5 * 16, b.rows[r].end(), std::byte{0xff});
        std::fill_n(b.ids[r].begin() + 3, 3, r == 1 ? -1 : -1000);  // a token without experts
    }
    const ps::expert_placement placement = contiguous(9, 3);
    on_all(3, [&](loopback endpoint) {
        const std::uint32_t r = endpoint.rank();
        layer_type layer(std::move(endpoint), {.hidden = 8, .top_k = 3});
        for (const std::int32_t live : {5, 0, -3, 5}) {
            std::vector<float> out(64, std::nanf(""));
            const std::vector<float> shared(64, 0.0f);
            layer.run(placement, tokens_of(b, r, &live), simple_experts{&placement, r},
                      [&](const ps::routed_tokens&) { return shared.data(); }, {out.data(), ps::dtype::f32, 8, 8});
            CHECK(relative_error(out, reference(b, r, live > 0 ? 5 : 0)) < 8e-3);
            std::uint64_t wanted = 0;
            for (int t = 0; t < live; ++t) {
                std::vector<char> visits(3, 0);
                for (std::size_t j = 0; j < 3; ++j) {
                    const std::int32_t id = b.ids[r][static_cast<std::size_t>(t) * 3 + j];
                    wanted += id >= 0 && visits[static_cast<std::size_t>(id) / 3]++ == 0 ? 1 : 0;
                }
            }
            CHECK(layer.report().rows_sent == wanted);
        }
    });
}

TEST_CASE("two micro-batches: the dispatch of one under the experts of the other") {
    std::mt19937 random{7};
    const ps::expert_placement placement = contiguous(10, 3);
    const batch a = random_batch(random, 16, 4, 10, ps::dtype::f32, {9, 4, 0}),
                b = random_batch(random, 16, 4, 10, ps::dtype::f32, {2, 8, 5});
    std::vector<loopback> second = loopback::world(3);
    on_all(3, [&](loopback endpoint) {
        const std::uint32_t r = endpoint.rank();
        layer_type one(std::move(endpoint), {.hidden = 16, .top_k = 4, .type = ps::dtype::f32});
        layer_type two(std::move(second[r]), {.hidden = 16, .top_k = 4, .type = ps::dtype::f32});
        const simple_experts experts{&placement, r};
        std::vector<float> out_a(a.tokens[r] * 16), out_b(b.tokens[r] * 16);
        one.begin_dispatch(placement, tokens_of(a, r));
        const ps::expert_rows& rows_a = one.finish_dispatch();
        two.begin_dispatch(placement, tokens_of(b, r));
        experts(rows_a, one.sums());
        const ps::expert_rows& rows_b = two.finish_dispatch();
        one.begin_combine();
        experts(rows_b, two.sums());
        one.finish_combine(nullptr, {out_a.data(), ps::dtype::f32, a.tokens[r], 16});
        two.combine(nullptr, {out_b.data(), ps::dtype::f32, b.tokens[r], 16});
        CHECK(relative_error(out_a, reference(a, r, a.tokens[r])) < 1e-6);
        CHECK(relative_error(out_b, reference(b, r, b.tokens[r])) < 1e-6);
    });
}

TEST_CASE("real experts on the host executor give what one rank gives and what double gives") {
    std::mt19937 random{8};
    constexpr std::uint32_t experts = 11, hidden = 64, k = 3;
    const ps::executor::host host{2};
    for (const ps::weight_kind kind : {ps::weight_kind::bf16, ps::weight_kind::fp8_block128}) {
        const ps::expert_layout layout = records::make_layout(kind, {hidden, 40}, records::arrangement::apart, false);
        std::vector<std::vector<std::byte>> record;
        for (std::uint32_t e = 0; e < experts; ++e) {
            record.push_back(records::random_record(layout, random));
        }
        for (const std::uint32_t ranks : {1u, 2u, 3u, 8u}) {
            for (const bool fp8 : {false, true}) {
                const batch b = random_batch(random, hidden, k, experts, ps::dtype::bf16, std::vector<std::uint32_t>(ranks, 3));
                const ps::expert_placement placement = contiguous(experts, ranks);
                on_all(ranks, [&](loopback endpoint) {
                    const std::uint32_t r = endpoint.rank();
                    layer_type layer(std::move(endpoint), {.hidden = hidden, .top_k = k, .fp8_dispatch = fp8});
                    std::vector<const std::byte*> mine;
                    for (const std::uint32_t e : placement.experts_of(r)) {
                        mine.push_back(record[e].data());
                    }
                    std::vector<float> out(3 * hidden);
                    ps::experts_on_host hook(host, layout, mine);
                    layer.run(placement, tokens_of(b, r), hook, {out.data(), ps::dtype::f32, 3, hidden});
                    std::vector<double> wanted(3 * hidden);
                    for (std::uint32_t t = 0; t < 3; ++t) {
                        std::vector<float> x(hidden);
                        std::uint8_t small[hidden];
                        float scale;
                        ps::quantise_row(&b.rows[r][std::size_t{t} * hidden * 2], b.type, hidden, small, &scale);
                        for (std::uint32_t i = 0; i < hidden; ++i) {  // what the experts get to see
                            x[i] = fp8 ? ps::dequantised(small, &scale, i) : ps::load_element(b.rows[r].data(), b.type, t * hidden + i);
                        }
                        for (std::uint32_t p = t * k; p < (t + 1) * k; ++p) {
                            if (b.ids[r][p] >= 0) {
                                const auto one = records::reference(layout, record[static_cast<std::size_t>(b.ids[r][p])].data(), x.data());
                                for (std::uint32_t i = 0; i < hidden; ++i) {
                                    wanted[t * hidden + i] += b.weights[r][p] * one[i];
                                }
                            }
                        }
                    }
                    CHECK(relative_rms(out, wanted) < 4e-3);
                });
            }
        }
    }
}

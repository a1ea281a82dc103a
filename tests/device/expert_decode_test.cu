#include "expert_batch.hpp"
#include "gpu_work.hpp"

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/cuda_experts.cuh>
#include <penstock/dispatch/expert_decode.cuh>

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>

namespace ps = penstock;
using namespace tests;

namespace {

using bf16 = ps::expert_decode<ps::format::bf16>;
using f16 = ps::expert_decode<ps::format::f16>;
using fp8 = ps::expert_decode<ps::format::fp8_block128>;
using mxfp4 = ps::expert_decode<ps::format::mxfp4>;
using ps::weight_kind;

}  // namespace

TEST_CASE("the output is right for every format, arrangement, activation and number of tokens, K01 K15 K20") {
    check<bf16>({.kind = weight_kind::bf16, .hidden = 512, .intermediate = 192}, 7, {1, 2, 3, 4, 5, 9, 40}, 4);
    check<bf16>({.kind = weight_kind::bf16,
                 .hidden = 192,
                 .intermediate = 200,
                 .how = arrangement::rows_alternate,
                 .act = ps::activation::gpt_oss,
                 .biases = true},
                5, {1, 2, 17}, 3);
    check<f16>({.kind = weight_kind::f16, .hidden = 264, .intermediate = 520, .how = arrangement::rows_together}, 4, {1, 3, 33}, 2);
    check<fp8>({.kind = weight_kind::fp8_block128, .hidden = 768, .intermediate = 320}, 6, {1, 2, 4, 5, 20}, 3);
    check<fp8>({.kind = weight_kind::fp8_block128, .hidden = 272, .intermediate = 208, .how = arrangement::rows_together}, 5, {1, 6, 30},
               8);
    check<fp8>({.kind = weight_kind::fp8_block128, .hidden = 2064, .intermediate = 1040}, 3, {1, 9}, 2);
    check<mxfp4>({.kind = weight_kind::mxfp4, .hidden = 512, .intermediate = 352}, 6, {1, 2, 9, 30}, 4);
    check<mxfp4>({.kind = weight_kind::mxfp4,
                  .hidden = 2880,
                  .intermediate = 96,
                  .how = arrangement::rows_alternate,
                  .act = ps::activation::gpt_oss,
                  .biases = true},
                 5, {1, 17}, 4);
}

TEST_CASE("K06 sizes that fit no tile") {
    for (const auto& [hidden, intermediate] : {std::pair{8u, 8u}, {16u, 8u}, {8u, 264u}, {2880u, 360u}, {192u, 192u}, {136u, 72u}}) {
        check<bf16>({.kind = weight_kind::bf16, .hidden = hidden, .intermediate = intermediate}, 3, {1, 10}, 2);
    }
    for (const auto& [hidden, intermediate] : {std::pair{16u, 16u}, {16u, 144u}, {144u, 16u}, {576u, 192u}}) {
        check<fp8>({.kind = weight_kind::fp8_block128, .hidden = hidden, .intermediate = intermediate}, 3, {1, 10}, 2);
    }
    for (const auto& [hidden, intermediate] : {std::pair{32u, 32u}, {96u, 288u}, {288u, 32u}}) {
        check<mxfp4>({.kind = weight_kind::mxfp4, .hidden = hidden, .intermediate = intermediate}, 3, {1, 10}, 2);
    }
}

TEST_CASE("K08 every number of tokens of an expert around the tile, and experts without any") {
    std::mt19937 random(5);
    const layer l({.kind = weight_kind::bf16, .hidden = 128, .intermediate = 64}, 13, random);
    const std::uint32_t counts[] = {1, 0, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129};
    batch b = random_batch<bf16>(l, 640, 1, random);
    std::size_t at = 0;
    for (std::size_t e = 0; e < 13; ++e) {
        at = std::fill_n(b.ids.begin() + static_cast<std::ptrdiff_t>(at), counts[e], static_cast<std::int32_t>(e)) - b.ids.begin();
    }
    REQUIRE(at == 640);
    std::shuffle(b.ids.begin(), b.ids.end(), random);
    const std::vector<float> got = run<bf16>(l, b, 640, false);
    CHECK(relative_error(got.data(), truth<bf16>(l, b, false).data(), got.size()) < 1e-2);
}

TEST_CASE("a token's bits are the same alone, in a batch, with other blocks and in mapped host memory") {
    std::mt19937 random(9);
    const expert_shape shape{.kind = weight_kind::fp8_block128, .hidden = 512, .intermediate = 384};
    const layer l(shape, 6, random);
    std::mt19937 again(9);
    const layer on_host(shape, 6, again, place_of_test::pinned);
    const batch b = random_batch<fp8>(l, 12, 3, random);
    const std::vector<float> all = run<fp8>(l, b, 12, false);
    CHECK(run<fp8>(l, b, 64, false) == all);
    CHECK(run<fp8>(l, b, 5000, false) == all);  // rows of so many pairs stay in global memory
    CHECK(run<fp8>(l, b, 12, false, 3) == all);
    CHECK(run<fp8>(on_host, b, 12, false) == all);
    for (const std::uint32_t t : {0u, 5u, 11u}) {
        batch one{1, 3, {}, {}, {}, {}, std::vector<float>(512)};
        one.hidden.assign(b.hidden.begin() + t * 512, b.hidden.begin() + (t + 1) * 512);
        one.ids.assign(b.ids.begin() + t * 3, b.ids.begin() + (t + 1) * 3);
        one.weights.assign(b.weights.begin() + t * 3, b.weights.begin() + (t + 1) * 3);
        one.input_scale.assign(3, 1.0f);
        const std::vector<float> alone = run<fp8>(l, one, 1, false);
        CHECK(run<fp8>(l, one, 5000, false) == alone);
        CHECK(same_bits(alone.data(), all.data() + t * 512, 512));
    }
}

TEST_CASE("K02 no tokens, and tokens that visit nobody") {
    std::mt19937 random(1);
    const layer l({.kind = weight_kind::bf16, .hidden = 64, .intermediate = 64}, 4, random);
    const bf16 decode(l.layout(), 4, 8, 2);
    decode.enqueue({}, {}, nullptr);
    CHECK(cudaGetLastError() == cudaSuccess);
    for (const std::uint32_t tokens : {1u, 3u, 30u}) {
        batch b = random_batch<bf16>(l, tokens, 2, random);
        std::fill(b.ids.begin(), b.ids.end(), -1);
        const std::vector<float> got = run<bf16>(l, b, tokens, false);
        CHECK(std::all_of(got.begin(), got.end(), [](float v) { return v == 0.0f; }));
    }
}

TEST_CASE("a NaN stays with its token") {
    std::mt19937 random(2);
    const layer l({.kind = weight_kind::fp8_block128, .hidden = 256, .intermediate = 128}, 2, random);
    batch b = random_batch<fp8>(l, 5, 2, random);
    const std::vector<float> before = run<fp8>(l, b, 5, false);
    b.hidden[2 * 256 + 7] = 0x7fc0;
    b.hidden[4 * 256 + 200] = 0x7f80;  // infinity
    const std::vector<float> got = run<fp8>(l, b, 5, false);
    for (const std::uint32_t t : {0u, 1u, 3u}) {
        CHECK(same_bits(got.data() + t * 256, before.data() + t * 256, 256));
    }
    CHECK(std::all_of(got.begin() + 2 * 256, got.begin() + 3 * 256, [](float v) { return v != v; }));
    CHECK(std::all_of(got.begin() + 4 * 256, got.end(), [](float v) { return v != v; }));
}

TEST_CASE("a kernel on another stream that holds most of the device does not stop a call, with one block or many") {
    std::mt19937 random(3);
    const layer l({.kind = weight_kind::bf16, .hidden = 512, .intermediate = 512}, 8, random);
    const batch b = random_batch<bf16>(l, 16, 4, random);
    const std::vector<float> want = run<bf16>(l, b, 16, false);
    const ps::stream neighbour;
    const auto spin_there = [&] { ps::launch(spin, 131, 1024, 0, neighbour.get(), 40'000'000ll); };
    CHECK(run<bf16>(l, b, 16, false, 0, 1, spin_there) == want);
    neighbour.synchronize();
    CHECK(run<bf16>(l, b, 16, false, 1, 1, spin_there) == want);
    neighbour.synchronize();
}

TEST_CASE("calls are captured once and replayed, with other inputs in the same memory") {
    std::mt19937 random(4);
    const layer l({.kind = weight_kind::fp8_block128, .hidden = 256, .intermediate = 256}, 8, random);
    for (const std::uint32_t tokens : {1u, 4u, 24u}) {
        const batch first = random_batch<fp8>(l, tokens, 4, random);
        const batch second = random_batch<fp8>(l, tokens, 4, random);
        const fp8 decode(l.layout(), 8, tokens, 4);
        guarded<std::byte> workspace(decode.workspace_bytes());
        ps::check(cudaMemset(workspace.data(), 0, decode.counter_bytes()), "cudaMemset");
        guarded<std::uint16_t> hidden(first.hidden);
        guarded<std::int32_t> ids(first.ids);
        guarded<float> weights(first.weights);
        guarded<float> out(std::size_t{tokens} * 256);
        const ps::stream stream;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t ready = nullptr;
        ps::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "begin capture");
        decode.enqueue({.records = l.table->data(),
                        .hidden = {hidden.data(), ps::dtype::bf16, tokens, 256},
                        .ids = ids.data(),
                        .weights = weights.data(),
                        .out = {out.data(), ps::dtype::f32, tokens, 256}},
                       {workspace.data(), workspace.size()}, stream.get());
        ps::check(cudaStreamEndCapture(stream.get(), &graph), "end capture");
        ps::check(cudaGraphInstantiate(&ready, graph, 0), "instantiate");
        for (const batch* b : {&first, &second, &first}) {
            hidden.set(b->hidden);
            ids.set(b->ids);
            weights.set(b->weights);
            out.poison();
            ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            ps::check(cudaGraphLaunch(ready, stream.get()), "cudaGraphLaunch");
            stream.synchronize();
            const std::vector<float> got = out.get();
            CHECK(relative_error(got.data(), truth<fp8>(l, *b, false).data(), got.size()) < 1e-2);
        }
        ps::check(cudaGraphExecDestroy(ready), "destroy");
        ps::check(cudaGraphDestroy(graph), "destroy");
    }
}

TEST_CASE("pairs that come sorted give the same bits, and calls follow each other without a wait") {
    std::mt19937 random(6);
    const layer l({.kind = weight_kind::bf16, .hidden = 256, .intermediate = 192}, 16, random);
    const bf16 decode(l.layout(), 16, 24, 4);
    const ps::stream stream;
    for (const std::uint32_t tokens : {3u, 24u}) {
        const batch b = random_batch<bf16>(l, tokens, 4, random);
        const std::vector<float> want = run<bf16>(l, b, 24, false);
        std::vector<std::int32_t> order(b.ids.size());
        std::vector<std::uint32_t> begins(17, 0);
        for (std::size_t p = 0; p < order.size(); ++p) {
            order[p] = static_cast<std::int32_t>(p);
            for (auto e = static_cast<std::size_t>(b.ids[p]) + 1; e <= 16; ++e) {
                ++begins[e];
            }
        }
        std::stable_sort(order.begin(), order.end(), [&](std::int32_t i, std::int32_t j) {
            return b.ids[static_cast<std::size_t>(i)] < b.ids[static_cast<std::size_t>(j)];
        });
        const guarded<std::int32_t> rows(order), ids(b.ids);
        const guarded<std::uint32_t> offsets(begins);
        const guarded<std::uint16_t> hidden(b.hidden);
        const guarded<float> weights(b.weights);
        guarded<std::byte> workspace(decode.workspace_bytes());
        ps::check(cudaMemset(workspace.data(), 0, decode.counter_bytes()), "cudaMemset");
        std::vector<std::unique_ptr<guarded<float>>> outs;
        for (int call = 0; call < 20; ++call) {
            outs.push_back(std::make_unique<guarded<float>>(want.size()));
        }
        ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        for (std::size_t call = 0; call < outs.size(); ++call) {
            const bool sorted = call % 3 != 0;
            decode.enqueue({.records = l.table->data(),
                            .hidden = {hidden.data(), ps::dtype::bf16, tokens, 256},
                            .ids = ids.data(),
                            .rows = sorted ? rows.data() : nullptr,
                            .offsets = sorted ? offsets.data() : nullptr,
                            .weights = weights.data(),
                            .out = {outs[call]->data(), ps::dtype::f32, tokens, 256}},
                           {workspace.data(), workspace.size()}, stream.get());
        }
        stream.synchronize();
        for (const auto& out : outs) {
            CHECK(out->get() == want);
        }
    }
}

TEST_CASE("what does not fit is refused by name") {
    const ps::expert_layout odd = make_layout({.kind = weight_kind::bf16, .hidden = 100, .intermediate = 36});
    CHECK_THROWS_WITH_AS(bf16(odd, 4, 1, 2), doctest::Contains("16 bytes"), ps::configuration_error);
    const ps::expert_layout fits = make_layout({.kind = weight_kind::bf16, .hidden = 64, .intermediate = 64});
    CHECK_THROWS_WITH_AS(f16(fits, 4, 1, 2), doctest::Contains("bf16"), ps::configuration_error);
    CHECK_THROWS_AS(bf16(fits, 4, 1, 0), ps::configuration_error);
    const bf16 decode(fits, 4, 2, 2);
    guarded<std::byte> memory(decode.workspace_bytes());
    ps::expert_step step{.hidden = {memory.data(), ps::dtype::bf16, 3, 64}, .out = {memory.data(), ps::dtype::bf16, 3, 64}};
    CHECK_THROWS_WITH_AS(decode.enqueue(step, {memory.data(), memory.size()}, nullptr), doctest::Contains("3 tokens"),
                         ps::configuration_error);
    step.hidden.tokens = step.out.tokens = 2;
    CHECK_THROWS_WITH_AS(decode.enqueue(step, {memory.data(), 256}, nullptr), doctest::Contains("workspace"), ps::configuration_error);
    step.hidden.type = ps::dtype::f32;
    CHECK_THROWS_WITH_AS(decode.enqueue(step, {memory.data(), memory.size()}, nullptr), doctest::Contains("BF16"), ps::configuration_error);
    step.hidden.type = ps::dtype::bf16;
    step.out.type = ps::dtype::u8;
    CHECK_THROWS_WITH_AS(decode.enqueue(step, {memory.data(), memory.size()}, nullptr), doctest::Contains("U8"), ps::configuration_error);
    step.out.type = ps::dtype::f32;
    step.rows = reinterpret_cast<const std::int32_t*>(memory.data());
    CHECK_THROWS_WITH_AS(decode.enqueue(step, {memory.data(), memory.size()}, nullptr), doctest::Contains("come together"),
                         ps::configuration_error);
}

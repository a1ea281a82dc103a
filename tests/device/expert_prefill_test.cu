#include "expert_batch.hpp"
#include "gpu_work.hpp"

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/cuda_experts.cuh>
#include <penstock/dispatch/expert_prefill.cuh>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <memory>
#include <numeric>
#include <string>

namespace ps = penstock;
using namespace tests;
using ps::weight_kind;

namespace {

using bf16 = ps::expert_prefill<ps::format::bf16>;
using f16 = ps::expert_prefill<ps::format::f16>;
using fp8 = ps::expert_prefill<ps::format::fp8_block128>;
using fp8_by_fp8 = ps::expert_prefill<ps::format::fp8_block128, ps::precision::a8>;
using mxfp4 = ps::expert_prefill<ps::format::mxfp4>;

}  // namespace

template <>
constexpr double tests::tolerance<fp8_by_fp8> = 5e-2;

TEST_CASE("the output is right for every format, arrangement, activation and number of tokens, K01 K15 K20") {
    check<bf16>({.kind = weight_kind::bf16, .hidden = 512, .intermediate = 192}, 7, {1, 9, 40, 70, 150}, 4);
    check<bf16>({.kind = weight_kind::bf16,
                 .hidden = 192,
                 .intermediate = 200,
                 .how = arrangement::rows_alternate,
                 .act = ps::activation::gpt_oss,
                 .biases = true},
                5, {1, 17, 90}, 3);
    check<f16>({.kind = weight_kind::f16, .hidden = 264, .intermediate = 520, .how = arrangement::rows_together}, 4, {3, 100}, 2);
}

TEST_CASE("fp8 weights by 16-bit inputs") {
    check<fp8>({.kind = weight_kind::fp8_block128, .hidden = 768, .intermediate = 320}, 6, {1, 5, 20, 130}, 3);
    check<fp8>({.kind = weight_kind::fp8_block128, .hidden = 272, .intermediate = 208, .how = arrangement::rows_together}, 5, {30}, 8);
}

TEST_CASE("fp8 weights by fp8 inputs") {
    check<fp8_by_fp8>({.kind = weight_kind::fp8_block128, .hidden = 768, .intermediate = 320}, 6, {1, 5, 20, 130}, 3);
    check<fp8_by_fp8>({.kind = weight_kind::fp8_block128, .hidden = 272, .intermediate = 208, .how = arrangement::rows_together}, 5, {30},
                      8);
}

TEST_CASE("mxfp4 weights") {
    check<mxfp4>({.kind = weight_kind::mxfp4, .hidden = 320, .intermediate = 96}, 4, {1, 20, 100}, 2);
    check<mxfp4>({.kind = weight_kind::mxfp4,
                  .hidden = 160,
                  .intermediate = 224,
                  .how = arrangement::rows_alternate,
                  .act = ps::activation::gpt_oss,
                  .biases = true},
                 5, {33}, 4);
}

TEST_CASE("K06 sizes that fit no tile") {
    for (const auto& [hidden, intermediate] : {std::pair{8u, 8u}, {16u, 8u}, {8u, 264u}, {2880u, 72u}, {192u, 192u}, {136u, 72u}}) {
        check<bf16>({.kind = weight_kind::bf16, .hidden = hidden, .intermediate = intermediate}, 3, {10}, 2);
    }
    for (const auto& [hidden, intermediate] : {std::pair{16u, 16u}, {16u, 144u}, {144u, 16u}, {576u, 192u}, {1040u, 272u}}) {
        check<fp8>({.kind = weight_kind::fp8_block128, .hidden = hidden, .intermediate = intermediate}, 3, {10}, 2);
        // So few products hardly average the inputs' roundings, of up to 2^-4.
        check<fp8_by_fp8>({.kind = weight_kind::fp8_block128, .hidden = hidden, .intermediate = intermediate}, 3, {10}, 2, 6.5e-2);
    }
    for (const auto& [hidden, intermediate] : {std::pair{32u, 32u}, {32u, 160u}, {160u, 32u}, {288u, 192u}}) {
        check<mxfp4>({.kind = weight_kind::mxfp4, .hidden = hidden, .intermediate = intermediate}, 3, {10}, 2);
    }
}

TEST_CASE("K08 every number of tokens of an expert around the tiles, and experts without any") {
    const auto around = [&]<class Experts>(Experts*, weight_kind kind, std::vector<std::uint32_t> counts) {
        std::mt19937 random(5);
        const layer l({.kind = kind, .hidden = 128, .intermediate = 64}, static_cast<std::uint32_t>(counts.size()), random);
        const std::uint32_t tokens = std::accumulate(counts.begin(), counts.end(), 0u);
        batch b = random_batch<Experts>(l, tokens, 1, random);
        auto at = b.ids.begin();
        for (std::size_t e = 0; e < counts.size(); ++e) {
            at = std::fill_n(at, counts[e], static_cast<std::int32_t>(e));
        }
        std::shuffle(b.ids.begin(), b.ids.end(), random);
        const std::vector<float> got = run<Experts>(l, b, tokens, false);
        CHECK(relative_error(got.data(), truth<Experts>(l, b, false).data(), got.size()) < tolerance<Experts>);
    };
    const std::vector<std::uint32_t> few{1, 0, 7, 8, 15, 0, 16, 17},
        many{1, 0, 7, 8, 63, 64, 65, 127, 128, 129, 161, 193, 255, 256, 257, 300, 600};
    around(static_cast<bf16*>(nullptr), weight_kind::bf16, few);
    around(static_cast<bf16*>(nullptr), weight_kind::bf16, many);
    around(static_cast<bf16*>(nullptr), weight_kind::bf16, {0, 0, 300, 0});
    around(static_cast<fp8*>(nullptr), weight_kind::fp8_block128, few);
    around(static_cast<fp8*>(nullptr), weight_kind::fp8_block128, many);
    around(static_cast<fp8_by_fp8*>(nullptr), weight_kind::fp8_block128, few);
    around(static_cast<fp8_by_fp8*>(nullptr), weight_kind::fp8_block128, many);
    around(static_cast<mxfp4*>(nullptr), weight_kind::mxfp4, many);
}

TEST_CASE("a token's bits are the same alone, in a batch, with other blocks and in mapped host memory") {
    const auto same = [&]<class Experts>(Experts*, weight_kind kind) {
        std::mt19937 random(9);
        const expert_shape shape{.kind = kind, .hidden = 512, .intermediate = 384};
        const layer l(shape, 6, random);
        std::mt19937 again(9);
        const layer on_host(shape, 6, again, place_of_test::pinned);
        const batch b = random_batch<Experts>(l, 100, 3, random);
        const std::vector<float> all = run<Experts>(l, b, 100, false);
        CHECK(run<Experts>(l, b, 3000, false) == all);
        CHECK(run<Experts>(l, b, 100, false, 1) == all);
        CHECK(run<Experts>(l, b, 100, false, 7) == all);
        CHECK(run<Experts>(on_host, b, 100, false) == all);
        for (const std::uint32_t tokens : {1u, 5u, 64u}) {  // fewer: the other kernel
            batch some{tokens, 3, {}, {}, {}, std::vector<float>(tokens * 3, 1.0f), std::vector<float>(tokens * 512)};
            some.hidden.assign(b.hidden.begin() + 30 * 512, b.hidden.begin() + (30 + tokens) * 512);
            some.ids.assign(b.ids.begin() + 30 * 3, b.ids.begin() + (30 + tokens) * 3);
            some.weights.assign(b.weights.begin() + 30 * 3, b.weights.begin() + (30 + tokens) * 3);
            const std::vector<float> alone = run<Experts>(l, some, tokens, false);
            CHECK(same_bits(alone.data(), all.data() + 30 * 512, tokens * 512));
        }
    };
    same(static_cast<bf16*>(nullptr), weight_kind::bf16);
    same(static_cast<fp8*>(nullptr), weight_kind::fp8_block128);
    same(static_cast<fp8_by_fp8*>(nullptr), weight_kind::fp8_block128);
    same(static_cast<mxfp4*>(nullptr), weight_kind::mxfp4);
}

TEST_CASE("sizes of models, against the float32 kernels") {
    const auto against = [&]<class Format, class Precision>(Format, Precision, std::uint32_t hidden, std::uint32_t intermediate,
                                                            std::uint32_t tokens) {
        using experts = ps::expert_prefill<Format, Precision>;
        CAPTURE(hidden);
        CAPTURE(intermediate);
        CAPTURE(tokens);
        std::mt19937 random(hidden);
        const ps::expert_layout layout = make_layout({.kind = Format::kind, .hidden = hidden, .intermediate = intermediate});
        // Codes of moderate size, and where scales are, moderate scales.
        std::vector<std::uint32_t> words(layout.bytes / 4);
        const std::uint64_t scales = Format::bits == 16 ? layout.bytes : layout.gate.scale_offset;
        for (std::size_t i = 0; i < words.size(); ++i) {
            const auto word = static_cast<std::uint32_t>(random());
            const float scale = 0.001f + 0.001f * static_cast<float>(word & 0xff) / 256;
            words[i] = i * 4 < scales      ? Format::bits == 16  ? (word & 0x81ff81ffu) | 0x3c003c00u
                                             : Format::bits == 8 ? word & 0xb7b7b7b7u
                                                                 : word
                       : Format::bits == 8 ? std::bit_cast<std::uint32_t>(scale)
                                           : (word & 0x03030303u) + 0x78787878u;
        }
        const guarded<std::uint32_t> first(words);
        std::rotate(words.begin(), words.begin() + 1024, words.begin() + static_cast<std::ptrdiff_t>(scales / 4));
        const guarded<std::uint32_t> second(words);
        const std::vector<const std::byte*> addresses{reinterpret_cast<const std::byte*>(first.data()),
                                                      reinterpret_cast<const std::byte*>(second.data())};
        layer l({.kind = Format::kind, .hidden = 64, .intermediate = 64}, 2, random);
        l.shape.hidden = hidden;
        l.table = std::make_unique<guarded<const std::byte*>>(addresses);
        batch b = random_batch<experts>(l, tokens, 2, random);
        std::vector<std::int32_t> rows(b.ids.size());
        for (std::size_t i = 0; i < rows.size(); ++i) {
            b.ids[i] = static_cast<std::int32_t>(i % 2);  // every token visits both
            rows[i] = static_cast<std::int32_t>(i % tokens * 2 + i / tokens);
        }
        call<experts> one(l, b, false);
        const experts many(layout, 2, tokens, 2);
        guarded<std::byte> workspace(many.workspace_bytes());
        const ps::stream stream;
        ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        many.enqueue(one.step, {workspace.data(), workspace.size()}, stream.get());
        stream.synchronize();
        const std::vector<float> got = one.out.get();

        const guarded<std::int32_t> device_rows(rows);
        guarded<float> x(std::size_t{tokens} * hidden), activated(std::size_t{tokens} * 2 * intermediate),
            partial(std::size_t{tokens} * 2 * hidden);
        const ps::executor::cuda<Format> exact(stream.get());
        const ps::expert_work works[] = {{0, addresses[0], 0, tokens}, {1, addresses[1], tokens, tokens}};
        exact.widen(one.step.hidden, x.data());
        exact.experts(layout, works, device_rows.data(), 2, x.data(), nullptr, activated.data(), partial.data());
        exact.combine(partial.data(), one.step.ids, one.step.weights, 2, nullptr, one.step.out);
        stream.synchronize();
        const std::vector<float> want = one.out.get();
        const std::vector<double> wide(want.begin(), want.end());
        CHECK(relative_error(got.data(), wide.data(), got.size()) < tolerance<experts>);
    };
    const ps::precision::a16 a16;
    against(ps::format::fp8_block128{}, a16, 7168, 2048, 20);
    against(ps::format::fp8_block128{}, ps::precision::a8{}, 7168, 2048, 100);
    against(ps::format::fp8_block128{}, a16, 3072, 1536, 70);
    against(ps::format::bf16{}, a16, 4096, 1536, 100);
    against(ps::format::bf16{}, a16, 2048, 768, 30);
    against(ps::format::bf16{}, a16, 2048, 1408, 12);
    against(ps::format::bf16{}, a16, 4096, 6400, 12);
    against(ps::format::mxfp4{}, a16, 2880, 2880, 66);
}

TEST_CASE("K02 no tokens, and tokens that visit nobody") {
    std::mt19937 random(1);
    const layer l({.kind = weight_kind::bf16, .hidden = 64, .intermediate = 64}, 4, random);
    const bf16 experts(l.layout(), 4, 8, 2);
    experts.enqueue({}, {}, nullptr);
    CHECK(cudaGetLastError() == cudaSuccess);
    for (const std::uint32_t tokens : {1u, 90u}) {
        batch b = random_batch<bf16>(l, tokens, 2, random);
        std::fill(b.ids.begin(), b.ids.end(), -1);
        const std::vector<float> got = run<bf16>(l, b, tokens, false);
        CHECK(std::all_of(got.begin(), got.end(), [](float v) { return v == 0.0f; }));
    }
}

TEST_CASE("a NaN stays with its token") {
    const auto stays = [&]<class Experts>(Experts*, weight_kind kind) {
        std::mt19937 random(2);
        const layer l({.kind = kind, .hidden = 256, .intermediate = 128}, 2, random);
        batch b = random_batch<Experts>(l, 5, 2, random);
        const std::vector<float> before = run<Experts>(l, b, 5, false);
        b.hidden[2 * 256 + 7] = 0x7fc0;
        b.hidden[4 * 256 + 200] = 0x7f80;  // infinity
        const std::vector<float> got = run<Experts>(l, b, 5, false);
        for (const std::uint32_t t : {0u, 1u, 3u}) {
            CHECK(same_bits(got.data() + t * 256, before.data() + t * 256, 256));
        }
        CHECK(std::all_of(got.begin() + 2 * 256, got.begin() + 3 * 256, [](float v) { return v != v; }));
        CHECK(std::all_of(got.begin() + 4 * 256, got.end(), [](float v) { return !std::isfinite(v); }));
    };
    stays(static_cast<bf16*>(nullptr), weight_kind::bf16);
    stays(static_cast<fp8*>(nullptr), weight_kind::fp8_block128);
    stays(static_cast<fp8_by_fp8*>(nullptr), weight_kind::fp8_block128);
}

TEST_CASE("a kernel on another stream that holds most of the device does not stop a call, with one block or many") {
    std::mt19937 random(3);
    const layer l({.kind = weight_kind::bf16, .hidden = 512, .intermediate = 512}, 8, random);
    const batch b = random_batch<bf16>(l, 70, 4, random);
    const std::vector<float> want = run<bf16>(l, b, 70, false);
    const ps::stream neighbour;
    const auto spin_there = [&] { ps::launch(spin, 131, 1024, 0, neighbour.get(), 40'000'000ll); };
    CHECK(run<bf16>(l, b, 70, false, 0, 2, spin_there) == want);
    neighbour.synchronize();
    CHECK(run<bf16>(l, b, 70, false, 1, 2, spin_there) == want);
    neighbour.synchronize();
}

TEST_CASE("calls are captured once and replayed, with other inputs in the same memory") {
    const auto replayed = [&]<class Experts>(Experts*, weight_kind kind, std::uint32_t tokens) {
        std::mt19937 random(4);
        const layer l({.kind = kind, .hidden = 256, .intermediate = 256}, 8, random);
        const batch first = random_batch<Experts>(l, tokens, 4, random);
        batch second = random_batch<Experts>(l, tokens, 4, random);
        std::fill(second.ids.begin(), second.ids.begin() + tokens, 3);  // many to one expert
        const Experts experts(l.layout(), 8, tokens, 4);
        guarded<std::byte> workspace(experts.workspace_bytes());
        call<Experts> one(l, first, false);
        const ps::stream stream;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t ready = nullptr;
        ps::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "begin capture");
        experts.enqueue(one.step, {workspace.data(), workspace.size()}, stream.get());
        ps::check(cudaStreamEndCapture(stream.get(), &graph), "end capture");
        ps::check(cudaGraphInstantiate(&ready, graph, 0), "instantiate");
        for (const batch* b : std::array<const batch*, 3>{&first, &second, &first}) {
            one.hidden.set(b->hidden);
            one.ids.set(b->ids);
            one.weights.set(b->weights);
            one.out.poison();
            ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            ps::check(cudaGraphLaunch(ready, stream.get()), "cudaGraphLaunch");
            stream.synchronize();
            const std::vector<float> got = one.out.get();
            CHECK(relative_error(got.data(), truth<Experts>(l, *b, false).data(), got.size()) < tolerance<Experts>);
        }
        ps::check(cudaGraphExecDestroy(ready), "destroy");
        ps::check(cudaGraphDestroy(graph), "destroy");
    };
    replayed(static_cast<bf16*>(nullptr), weight_kind::bf16, 24);
    replayed(static_cast<fp8*>(nullptr), weight_kind::fp8_block128, 80);
    replayed(static_cast<fp8_by_fp8*>(nullptr), weight_kind::fp8_block128, 80);
}

TEST_CASE("pairs that come sorted give the same bits, and calls follow each other without a wait") {
    const auto follow = [&]<class Experts>(Experts*, weight_kind kind) {
        std::mt19937 random(6);
        const layer l({.kind = kind, .hidden = 256, .intermediate = 192}, 16, random);
        const Experts experts(l.layout(), 16, 100, 4);
        guarded<std::byte> workspace(experts.workspace_bytes());
        const ps::stream stream;
        for (const std::uint32_t tokens : {3u, 100u}) {
            const batch b = random_batch<Experts>(l, tokens, 4, random);
            const std::vector<float> want = run<Experts>(l, b, 100, false);
            std::vector<std::int32_t> order(b.ids.size());
            std::vector<std::uint32_t> begins(17, 0);
            std::iota(order.begin(), order.end(), 0);
            for (const std::int32_t id : b.ids) {
                for (auto e = static_cast<std::size_t>(id) + 1; e <= 16; ++e) {
                    ++begins[e];
                }
            }
            std::stable_sort(order.begin(), order.end(), [&](std::int32_t i, std::int32_t j) {
                return b.ids[static_cast<std::size_t>(i)] < b.ids[static_cast<std::size_t>(j)];
            });
            const guarded<std::int32_t> rows(order);
            const guarded<std::uint32_t> offsets(begins);
            call<Experts> one(l, b, false);
            std::vector<std::unique_ptr<guarded<float>>> outs;
            for (int i = 0; i < 20; ++i) {
                outs.push_back(std::make_unique<guarded<float>>(want.size()));
            }
            ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            for (std::size_t i = 0; i < outs.size(); ++i) {
                one.step.rows = i % 3 != 0 ? rows.data() : nullptr;
                one.step.offsets = i % 3 != 0 ? offsets.data() : nullptr;
                one.step.out.data = outs[i]->data();
                experts.enqueue(one.step, {workspace.data(), workspace.size()}, stream.get());
            }
            stream.synchronize();
            for (const auto& out : outs) {
                CHECK(out->get() == want);
            }
        }
    };
    follow(static_cast<bf16*>(nullptr), weight_kind::bf16);
    follow(static_cast<fp8_by_fp8*>(nullptr), weight_kind::fp8_block128);
}

TEST_CASE("what does not fit is refused by name") {
    const ps::expert_layout odd = make_layout({.kind = weight_kind::bf16, .hidden = 100, .intermediate = 36});
    CHECK_THROWS_WITH_AS(bf16(odd, 4, 1, 2), doctest::Contains("16 bytes"), ps::configuration_error);
    const ps::expert_layout fits = make_layout({.kind = weight_kind::bf16, .hidden = 64, .intermediate = 64});
    CHECK_THROWS_WITH_AS(f16(fits, 4, 1, 2), doctest::Contains("bf16"), ps::configuration_error);
    CHECK_THROWS_AS(bf16(fits, 4, 1, 0), ps::configuration_error);
    ps::expert_layout unlike = fits;
    unlike.up.row_stride = 128;
    CHECK_THROWS_WITH_AS(bf16(unlike, 4, 1, 2), doctest::Contains("gate and up"), ps::configuration_error);
    const bf16 experts(fits, 4, 2, 2);
    guarded<std::byte> memory(experts.workspace_bytes());
    ps::expert_step step{.hidden = {memory.data(), ps::dtype::bf16, 3, 64}, .out = {memory.data(), ps::dtype::bf16, 3, 64}};
    const auto enqueue = [&](std::size_t bytes) { experts.enqueue(step, {memory.data(), bytes}, nullptr); };
    CHECK_THROWS_WITH_AS(enqueue(memory.size()), doctest::Contains("3 tokens"), ps::configuration_error);
    step.hidden.tokens = step.out.tokens = 2;
    CHECK_THROWS_WITH_AS(enqueue(256), doctest::Contains("workspace"), ps::configuration_error);
    step.hidden.type = ps::dtype::f32;
    CHECK_THROWS_WITH_AS(enqueue(memory.size()), doctest::Contains("BF16"), ps::configuration_error);
    step.hidden.type = ps::dtype::bf16;
    step.out.type = ps::dtype::u8;
    CHECK_THROWS_WITH_AS(enqueue(memory.size()), doctest::Contains("U8"), ps::configuration_error);
    step.out.type = ps::dtype::f32;
    step.rows = reinterpret_cast<const std::int32_t*>(memory.data());
    CHECK_THROWS_WITH_AS(enqueue(memory.size()), doctest::Contains("come together"), ps::configuration_error);
}

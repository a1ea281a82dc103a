#include "../tiny_model.hpp"

#include <penstock/dispatch/cuda_experts.cuh>
#include <penstock/moe_layer.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <random>

namespace ps = penstock;
using namespace ps::literals;
using tests::tiny_model;

namespace {

using kernels = ps::executor::cuda<ps::format::bf16>;

std::vector<float> random_states(std::uint32_t tokens, std::uint32_t hidden, unsigned seed = 3) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(std::size_t{tokens} * hidden);
    for (float& v : x) {
        v = normal(random);
    }
    return x;
}

template <class T>
ps::buffer<T, ps::memory::device> to_device(const std::vector<T>& values) {
    ps::buffer<T, ps::memory::device> there(values.size());
    ps::check(cudaMemcpy(there.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
    return there;
}

template <class T>
std::vector<T> to_host(const T* there, std::size_t count) {
    std::vector<T> values(count);
    ps::check(cudaMemcpy(values.data(), there, count * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return values;
}

__global__ void spin(long long cycles) {
    for (const long long start = clock64(); clock64() - start < cycles;) {
    }
}

struct answer {
    std::vector<float> output;
    ps::store_report report;
};

/// Two calls of each layer on the GPU, so that hits and misses mix; the last output of layer 1. The output and the workspace are poisoned.
template <class... Ps>
answer run(const tiny_model& tiny, const std::vector<float>& x, ps::budgets limits, const std::int32_t* live = nullptr,
           bool preload = false) {
    const std::uint32_t hidden = tiny.model.layers[0].hidden;
    const auto tokens = static_cast<std::uint32_t>(x.size() / hidden);
    using store_t = ps::expert_store<Ps...>;
    using layers_t = ps::moe_layers<kernels, store_t>;
    store_t store(tiny.model, limits, ps::on_device(0));
    if (preload) {
        store.preload_host();
    }
    auto workspace = to_device(std::vector<std::uint8_t>(layers_t::workspace_bytes(tiny.model, tokens), 0xff));
    layers_t layers(store, {.max_tokens = tokens, .workspace = {reinterpret_cast<std::byte*>(workspace.data()), workspace.size()}});
    const auto in = to_device(x);
    auto out = to_device(std::vector<float>(x.size(), std::nanf("")));
    const ps::stream stream;
    for (int round = 0; round < 2; ++round) {
        for (auto& layer : layers) {
            layer.forward_async({in.data(), ps::dtype::f32, tokens, hidden}, {out.data(), ps::dtype::f32, tokens, hidden}, live,
                                stream.get());
        }
    }
    stream.synchronize();
    return {to_host(out.data(), x.size()), store.report()};
}

ps::budgets slots(const tiny_model& tiny, std::uint64_t device, std::uint64_t host) {
    return {{device * tiny.slot_bytes()}, {host * tiny.slot_bytes() + (1u << 20)}};
}

using small_chunks = ps::chunking::fixed<4096_B>;
using few = ps::prefetch::depth<4>;

}  // namespace

TEST_CASE("the GPU agrees with the host executor") {
    tiny_model tiny;
    const std::vector<float> x = random_states(13, 64);
    auto store = ps::make_expert_store(tiny.model, {}, ps::on_host());
    auto layers = ps::make_moe_layers<ps::executor::host>(store, {.max_tokens = 13});
    std::vector<float> want(x.size());
    layers[1].forward({x.data(), ps::dtype::f32, 13, 64}, {want.data(), ps::dtype::f32, 13, 64});
    const std::vector<float> got = run<>(tiny, x, {}).output;
    double difference = 0;
    double norm = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
        difference += std::pow(double{got[i]} - want[i], 2);
        norm += std::pow(double{want[i]}, 2);
    }
    CHECK(std::sqrt(difference / norm) < 1e-5);
}

TEST_CASE("the bits are the same whatever the budget, tier, memory kind, chunk, depth and scheduler") {
    tiny_model tiny;
    for (const std::uint32_t tokens : {1u, 13u, 40u}) {
        const std::vector<float> x = random_states(tokens, 64);
        const answer whole = run<>(tiny, x, {});
        CHECK(whole.report.misses <= 16);
        for (const std::uint64_t host : {0, 1, 5, 16}) {
            for (const std::uint64_t device : {1, 2, 5}) {
                CAPTURE(host);
                CAPTURE(device);
                const answer a = run<small_chunks, few>(tiny, x, slots(tiny, device, host));
                CHECK(a.output == whole.output);
                CHECK(a.report.device_peak_bytes <= device * tiny.slot_bytes());
                CHECK(a.report.host_peak_bytes <= host * tiny.slot_bytes() + (1u << 20));
            }
        }
        CHECK(run<ps::memory::pageable, ps::chunking::whole, ps::prefetch::none>(tiny, x, {{3 * tiny.slot_bytes()}, 1_GiB}).output ==
              whole.output);
        CHECK(run<ps::scheduler::round_robin, ps::chunking::fixed<1000_B>, ps::prefetch::depth<3>>(tiny, x, slots(tiny, 2, 3)).output ==
              whole.output);
        CHECK(run<ps::scheduler::fifo, ps::chunking::rows<5>, ps::prefetch::depth<2>>(tiny, x, {{4 * tiny.slot_bytes()}, 1_GiB}).output ==
              whole.output);
    }
}

TEST_CASE("S02 without slots for all, few tokens are computed straight from mapped host memory, many in waves") {
    tiny_model tiny;
    const answer few_tokens = run<small_chunks, few>(tiny, random_states(2, 64), slots(tiny, 1, 16), nullptr, true);
    CHECK(few_tokens.report.overflow > 0);
    CHECK(few_tokens.report.waves == 0);
    const answer many = run<small_chunks, few>(tiny, random_states(100, 64), slots(tiny, 1, 16), nullptr, true);
    CHECK(many.report.waves > 0);
}

TEST_CASE("S13 a stream that is being captured is refused, and works afterwards") {
    tiny_model tiny;
    auto store = ps::make_expert_store(tiny.model, {}, ps::on_device(0));
    auto layers = ps::make_moe_layers<kernels>(store, {.max_tokens = 1});
    const auto in = to_device(random_states(1, 64));
    ps::buffer<float, ps::memory::device> out(64);
    const ps::stream stream;
    const auto call = [&] {
        layers[0].forward_async({in.data(), ps::dtype::f32, 1, 64}, {out.data(), ps::dtype::f32, 1, 64}, nullptr, stream.get());
    };
    cudaGraph_t graph = nullptr;
    ps::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "begin capture");
    CHECK_THROWS_AS(call(), ps::configuration_error);
    ps::check(cudaStreamEndCapture(stream.get(), &graph), "end capture");
    ps::check(cudaGraphDestroy(graph), "destroy");
    call();
    stream.synchronize();
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("S14 the host waits for the routing, whatever delays it, and the copies for the computation before") {
    tiny_model tiny;
    const std::vector<float> x = random_states(4, 64);
    const answer want = run<>(tiny, x, {});
    ps::expert_store<small_chunks, few> store(tiny.model, slots(tiny, 2, 200), ps::on_device(0));
    ps::moe_layers<kernels, decltype(store)> layers(store, {.max_tokens = 4});
    auto in = to_device(std::vector<float>(x.size(), 0.0f));
    const auto real = to_device(x);
    auto out = to_device(std::vector<float>(x.size(), std::nanf("")));
    const ps::stream stream;
    for (int i = 0; i < 50; ++i) {
        spin<<<1, 1, 0, stream.get()>>>(2'000'000);
        ps::check(cudaMemcpyAsync(in.data(), real.data(), x.size() * sizeof(float), cudaMemcpyDeviceToDevice, stream.get()), "copy");
        layers[0].forward_async({in.data(), ps::dtype::f32, 4, 64}, {out.data(), ps::dtype::f32, 4, 64}, nullptr, stream.get());
        layers[1].forward_async({in.data(), ps::dtype::f32, 4, 64}, {out.data(), ps::dtype::f32, 4, 64}, nullptr, stream.get());
        ps::check(cudaMemsetAsync(in.data(), 0xff, x.size() * sizeof(float), stream.get()), "poison");
    }
    stream.synchronize();
    CHECK(to_host(out.data(), x.size()) == want.output);
}

TEST_CASE("the live count comes from device memory, and the engine's ids too") {
    tiny_model tiny;
    const std::vector<float> x = random_states(6, 64);
    const auto live = to_device(std::vector<std::int32_t>{2});
    const answer two = run<>(tiny, x, {}, live.data());
    const answer all = run<>(tiny, x, {});
    CHECK(std::equal(two.output.begin(), two.output.begin() + 128, all.output.begin()));
    CHECK(std::all_of(two.output.begin() + 128, two.output.end(), [](float v) { return v == 0; }));

    auto store = ps::make_expert_store(tiny.model, {}, ps::on_device(0));
    auto layers = ps::make_moe_layers<kernels>(store, {.max_tokens = 6});
    const auto in = to_device(x);
    auto out = to_device(std::vector<float>(x.size(), std::nanf("")));
    const auto weights = to_device(std::vector<float>(12, 0.5f));
    const ps::stream stream;
    const auto call = [&](const std::vector<std::int32_t>& ids) {
        const auto there = to_device(ids);
        layers[0].experts_async({in.data(), ps::dtype::f32, 6, 64}, {there.data(), weights.data(), 2}, {out.data(), ps::dtype::f32, 6, 64},
                                nullptr, stream.get());
        stream.synchronize();
        return to_host(out.data(), x.size());
    };
    const std::vector<float> result = call({3, 3, -1, -1, 1, -1, 0, 7, 2, 2, 5, 4});
    CHECK(std::all_of(result.begin() + 64, result.begin() + 128, [](float v) { return v == 0; }));
    CHECK(std::none_of(result.begin(), result.end(), [](float v) { return std::isnan(v); }));
    CHECK_THROWS_AS(call({3, 3, -1, 99, 1, -1, 0, 7, 2, 2, 5, 4}), ps::configuration_error);
    CHECK(call({3, 3, -1, -1, 1, -1, 0, 7, 2, 2, 5, 4}) == result);
}

TEST_CASE("M14 real device allocations stay within the budget and what is asked for beside it") {
    tiny_model tiny(4, 32, 512, 256, 4);
    std::size_t before = 0;
    std::size_t total = 0;
    ps::check(cudaFree(nullptr), "context");
    run<>(tiny, random_states(4, 512), {{8 * tiny.slot_bytes()}, 1_GiB});  // the kernels are loaded
    ps::check(cudaMemGetInfo(&before, &total), "cudaMemGetInfo");
    ps::expert_store<> store(tiny.model, {{8 * tiny.slot_bytes()}, 1_GiB}, ps::on_device(0));
    std::size_t with_store = 0;
    ps::check(cudaMemGetInfo(&with_store, &total), "cudaMemGetInfo");
    CHECK(before - with_store <= ps::round_up(8 * tiny.slot_bytes(), 2u << 20));  // the driver hands out 2 MiB granules
    CHECK(store.report().device_peak_bytes == 8 * tiny.slot_bytes());
}

TEST_CASE("M16 a file that ends early is an error on the device path too, and a retry works") {
    tiny_model tiny;
    const std::vector<float> x = random_states(4, 64);
    const answer want = run<>(tiny, x, {});
    const std::uint64_t whole = std::filesystem::file_size(tiny.path());
    ps::expert_store<small_chunks, few> store(tiny.model, slots(tiny, 2, 1), ps::on_device(0));
    ps::moe_layers<kernels, decltype(store)> layers(store, {.max_tokens = 4});
    const auto in = to_device(x);
    auto out = to_device(std::vector<float>(x.size(), std::nanf("")));
    const ps::stream stream;
    const auto call = [&] {
        layers[1].forward_async({in.data(), ps::dtype::f32, 4, 64}, {out.data(), ps::dtype::f32, 4, 64}, nullptr, stream.get());
        stream.synchronize();
    };
    std::vector<char> bytes(whole);
    std::ifstream(tiny.path(), std::ios::binary).read(bytes.data(), static_cast<std::streamsize>(whole));
    std::filesystem::resize_file(tiny.path(), whole / 2);
    CHECK_THROWS_AS(call(), ps::io_error);
    std::ofstream(tiny.path(), std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(whole));
    call();
    CHECK(to_host(out.data(), x.size()) == want.output);
    CHECK(cudaGetLastError() == cudaSuccess);
}

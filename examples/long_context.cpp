/// long_context [--tokens 4096] [--layers 8] [--heads 8] [--head-size 64] [--room 64]
/// A context whose KV cache is larger than the pool that attention reads: its blocks come layer by layer, in windows, one window ahead of
/// the computation. Runs on the host. `--tokens 32768 --layers 80 --head-size 128` is Llama-3-70B in float32: 21 GB.

#include <penstock/kv/layer_windows.hpp>
#include <penstock/kv/running_attention.hpp>

#include <CLI/CLI.hpp>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <numeric>
#include <random>
#include <vector>

namespace ps = penstock;

int main(int argc, char** argv) try {
    CLI::App app{"Attention over a long context, its KV blocks streamed through a small pool"};
    std::uint32_t tokens = 4096, layers = 8, heads = 8, head_size = 64, room_blocks = 64;
    app.add_option("--tokens", tokens, "of the context, in blocks of 16");
    app.add_option("--layers", layers);
    app.add_option("--heads", heads, "KV heads, each read by 4 query heads");
    app.add_option("--head-size", head_size);
    app.add_option("--room", room_blocks, "blocks of one layer that the small pool holds");
    CLI11_PARSE(app, argc, argv);

    ps::block_geometry geometry{16, layers, heads, head_size, ps::dtype::f32};
    const ps::block_layout all(geometry, static_cast<std::uint32_t>(ps::ceil_div(tokens, 16)));
    geometry.layers = 1;
    const ps::block_layout few(geometry, room_blocks, ps::block_order::layer_first);
    std::vector<float> cache(all.bytes() / 4), room(few.bytes() / 4), queries(std::size_t{heads} * 4 * head_size), output(queries.size());
    std::minstd_rand random(1);
    for (float& x : cache) {
        x = static_cast<float>(random() % 2001) / 1000 - 1;
    }
    std::copy_n(cache.begin(), std::min(cache.size(), queries.size()), queries.begin());
    const ps::block_memory from{reinterpret_cast<std::byte*>(cache.data()), all};
    const ps::block_memory to{reinterpret_cast<std::byte*>(room.data()), few};

    ps::weight_stream<ps::scheduler::priority<3>> loader;  // an engine's own, which brings its weights, too
    ps::block_stream blocks(loader);
    std::vector<std::uint32_t> context(all.blocks());
    std::iota(context.begin(), context.end(), 0);
    ps::running_attention attention(heads * 4, heads, head_size);
    const auto attend = [&](const ps::block_memory& where, std::uint32_t block, std::uint32_t layer, std::uint32_t n) {
        const auto part = [&](ps::kv_part p) { return reinterpret_cast<const float*>(where.at(block, layer, p)); };
        attention.add(queries.data(), part(ps::kv_part::keys), part(ps::kv_part::values), std::min(16u, tokens - n * 16));
    };

    std::printf("context %s, pool of one layer %s\n", to_string(ps::bytes{all.bytes()}).c_str(), to_string(ps::bytes{few.bytes()}).c_str());
    const auto started = std::chrono::steady_clock::now();
    ps::layer_windows windows(blocks, from, context, to);
    std::vector<std::vector<float>> results;
    while (const auto w = windows.next()) {
        for (std::uint32_t i = 0; i < w->blocks; ++i) {
            attend(to, w->at + i, 0, w->first + i);
        }
        if (w->last) {
            attention.result(output);
            attention.reset();
            results.push_back(output);
            std::printf("\rlayer %u of %u", w->layer + 1, layers);
            std::fflush(stdout);
        }
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    std::printf("\n%.3f s, %.2f GB/s; first window after %.2f ms, then stalled %.1f %% of the time\n", seconds,
                static_cast<double>(all.bytes()) / seconds / 1e9, 1e3 * windows.first_wait(),
                100 * windows.waited() / (seconds - windows.first_wait()));

    double worst = 0;
    for (std::uint32_t layer = 0; layer < layers; ++layer) {  // the same without the pool, from where the cache lies
        for (const std::uint32_t n : context) {
            attend(from, n, layer, n);
        }
        attention.result(output);
        attention.reset();
        for (std::size_t i = 0; i < output.size(); ++i) {
            worst = std::max(worst, static_cast<double>(std::abs(output[i] - results[layer][i])));
        }
    }
    std::printf("largest difference from attention where the cache lies: %g\n", worst);
    return worst <= 1e-5 ? 0 : 1;
} catch (const std::exception& e) {
    std::fprintf(stderr, "long_context: %s\n", e.what());
    return 1;
}

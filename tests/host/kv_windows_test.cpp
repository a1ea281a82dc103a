#include <penstock/kv/layer_windows.hpp>
#include <penstock/kv/running_attention.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <thread>

using namespace penstock;
using namespace penstock::literals;
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t query_heads = 6, heads = 3, head_size = 8, layers = 4, tokens_a_block = 5;
constexpr std::uint32_t tokens = 203, context_blocks = 41;  // the last block is not full
const block_geometry geometry{tokens_a_block, layers, heads, head_size, dtype::f32};

/// A pool of floats on the host.
struct pool {
    pool(const block_geometry& g, std::uint32_t blocks, block_order order) : layout(g, blocks, order), values(layout.bytes() / 4) {}

    [[nodiscard]] block_memory memory() { return {reinterpret_cast<std::byte*>(values.data()), layout}; }
    [[nodiscard]] float* at(std::uint32_t block, std::uint32_t layer, kv_part part) {
        return values.data() + layout.offset(block, layer, part) / 4;
    }

    block_layout layout;
    std::vector<float> values;
};

/// A context in scattered blocks of a larger pool. Scores reach so far that exp() of them overflows, and grow towards the end.
struct context {
    explicit context(block_order order) : from(geometry, 50, order) {
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        for (std::uint32_t b = 0; b < context_blocks; ++b) {
            blocks.push_back((b * 7 + 3) % 50);
        }
        for (float& x : from.values) {
            x = normal(random);
        }
        for (std::uint32_t b = 0; b < context_blocks; ++b) {
            for (std::uint32_t l = 0; l < layers; ++l) {
                float* keys = from.at(blocks[b], l, kv_part::keys);
                for (std::size_t i = 0; i < tokens_a_block * heads * head_size; ++i) {
                    keys[i] *= 5 + static_cast<float>(b);
                }
            }
        }
        for (std::uint32_t i = 0; i < layers * query_heads * head_size; ++i) {
            queries.push_back(normal(random) * 4);
        }
    }

    /// The textbook's formula in one pass, in float64.
    [[nodiscard]] std::vector<double> in_one_pass(std::uint32_t layer) {
        std::vector<double> result;
        for (std::uint32_t q = 0; q < query_heads; ++q) {
            const std::uint32_t head = q / (query_heads / heads);
            std::vector<double> weight;
            double largest = -1e300, sum = 0;
            const auto element = [&](std::uint32_t t, kv_part part, std::uint32_t d) {
                return static_cast<double>(
                    from.at(blocks[t / tokens_a_block], layer, part)[(t % tokens_a_block * heads + head) * head_size + d]);
            };
            for (std::uint32_t t = 0; t < tokens; ++t) {
                double dot = 0;
                for (std::uint32_t d = 0; d < head_size; ++d) {
                    dot += static_cast<double>(queries[(layer * query_heads + q) * head_size + d]) * element(t, kv_part::keys, d);
                }
                weight.push_back(dot / std::sqrt(static_cast<double>(head_size)));
                largest = std::max(largest, weight.back());
            }
            most = std::max(most, largest);
            for (double& w : weight) {
                sum += w = std::exp(w - largest);
            }
            for (std::uint32_t d = 0; d < head_size; ++d) {
                double x = 0;
                for (std::uint32_t t = 0; t < tokens; ++t) {
                    x += weight[t] * element(t, kv_part::values, d);
                }
                result.push_back(x / sum);
            }
        }
        return result;
    }

    pool from;
    std::vector<std::uint32_t> blocks;
    std::vector<float> queries;
    double most = 0;  ///< the largest score
};

/// Adds `count` blocks from `first` on, which are blocks [at, at + count) of one layer of a pool.
void add(running_attention& attention, context& c, pool& where, std::uint32_t first, std::uint32_t count, std::uint32_t at,
         std::uint32_t layer) {
    for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint32_t here = std::min(tokens_a_block, tokens - (first + i) * tokens_a_block);
        attention.add(c.queries.data() + std::size_t{layer} * query_heads * head_size, where.at(at + i, 0, kv_part::keys),
                      where.at(at + i, 0, kv_part::values), here);
    }
}

double furthest(const std::vector<double>& a, const std::vector<float>& b) {
    double most = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        most = std::max(most, std::abs(a[i] - static_cast<double>(b[i])));
    }
    return most;
}

using small_stream = weight_stream<memory::pageable, chunking::run_time, scheduler::priority<3>>;

block_geometry one_layer() {
    block_geometry g = geometry;
    g.layers = 1;
    return g;
}

}  // namespace

TEST_CASE("a context that is larger than the pool runs in windows with the results of one pass") {
    small_stream weights({.readers = 2}, {bytes{1000}});
    block_stream stream(weights);
    for (const block_order order : {block_order::block_first, block_order::layer_first}) {
        context c(order);
        for (const std::uint32_t room_blocks : {2u, 3u, 9u, 40u, 82u, 200u}) {
            pool room(one_layer(), room_blocks, block_order::layer_first);
            layer_windows windows(stream, c.from.memory(), c.blocks, room.memory());
            CHECK(windows.windows_a_layer() == ceil_div(context_blocks, std::min(room_blocks / 2, context_blocks)));
            running_attention attention(query_heads, heads, head_size);
            std::vector<float> result(query_heads * head_size);
            std::uint32_t layer = 0, next = 0;
            std::uint64_t given = 0;
            double worst = 0;
            while (const auto w = windows.next()) {
                ++given;
                CHECK(w->layer == layer);
                CHECK(w->first == next);
                CHECK(w->at + w->blocks <= room_blocks);
                add(attention, c, room, w->first, w->blocks, w->at, w->layer);
                next += w->blocks;
                CHECK(w->last == (next == context_blocks));
                if (w->last) {
                    attention.result(result);
                    worst = std::max(worst, furthest(c.in_one_pass(layer), result));
                    attention.reset();
                    next = 0;
                    ++layer;
                }
            }
            CHECK(worst <= 1e-5);
            CHECK(layer == layers);
            CHECK(given == windows.windows());
            CHECK_FALSE(windows.next());
            CHECK(windows.waited() >= 0);
        }
        CHECK(c.most > 100);  // exp(100) is no float32
    }
}

TEST_CASE("windows of any size, in any order, give the same; of none, zeros") {
    context c(block_order::layer_first);
    const float* queries = c.queries.data();
    const std::size_t row = heads * head_size;
    std::vector<float> keys, values;
    for (std::uint32_t b = 0; b < context_blocks; ++b) {
        const auto append = [&](std::vector<float>& to, kv_part part) {
            const float* from = c.from.at(c.blocks[b], 0, part);
            to.insert(to.end(), from, from + std::min(tokens_a_block, tokens - b * tokens_a_block) * row);
        };
        append(keys, kv_part::keys);
        append(values, kv_part::values);
    }
    const std::vector<double> wanted = c.in_one_pass(0);
    std::vector<float> result(query_heads * head_size, 1);
    running_attention attention(query_heads, heads, head_size);
    attention.result(result);
    CHECK(std::all_of(result.begin(), result.end(), [](float x) { return x == 0; }));
    for (const std::uint32_t window : {1u, 7u, 100u, tokens}) {
        for (const bool backwards : {false, true}) {
            attention.reset();
            attention.add(queries, nullptr, nullptr, 0);
            const std::uint32_t windows = static_cast<std::uint32_t>(ceil_div(tokens, window));
            for (std::uint32_t n = 0; n < windows; ++n) {
                const std::uint32_t first = (backwards ? windows - 1 - n : n) * window;
                attention.add(queries, keys.data() + first * row, values.data() + first * row, std::min(window, tokens - first));
            }
            attention.result(result);
            CHECK(furthest(wanted, result) <= 1e-5);
        }
    }
    CHECK_THROWS_AS(running_attention(5, 2, 8), configuration_error);
    CHECK_THROWS_AS(running_attention(4, 0, 8), configuration_error);
    CHECK_THROWS_AS(running_attention(4, 2, 0), configuration_error);
}

TEST_CASE("the next window arrives while this one is computed on, and does not touch it") {
    small_stream weights({.readers = 1}, {bytes{256}});
    block_stream stream(weights);
    context c(block_order::block_first);
    pool room(one_layer(), 5, block_order::block_first);
    const std::size_t floats = room.layout.layer_bytes() / 4;
    layer_windows windows(stream, c.from.memory(), c.blocks, room.memory());
    const auto holds = [&](std::uint32_t n, std::uint32_t layer, std::uint32_t at) {
        return std::memcmp(room.at(at, 0, kv_part::keys), c.from.at(c.blocks[n], layer, kv_part::keys), floats * 4) == 0;
    };
    for (int n = 0; n < 6; ++n) {
        const auto w = windows.next();
        REQUIRE(w);
        CHECK(w->blocks == 2);
        for (int turns = 0; turns < 2000 && !windows.arrived(); ++turns) {
            std::this_thread::sleep_for(1ms);
        }
        CHECK(windows.arrived());
        CHECK((holds(w->first, w->layer, w->at) && holds(w->first + 1, w->layer, w->at + 1)));
        CHECK((holds(w->first + 2, w->layer, 2 - w->at) && holds(w->first + 3, w->layer, 3 - w->at)));
    }
}

TEST_CASE("a reader of windows that goes away early leaves the stream usable") {
    small_stream weights({.readers = 2}, {bytes{256}});
    block_stream stream(weights);
    context c(block_order::block_first);
    for (int n = 0; n < 3; ++n) {
        pool room(one_layer(), 8, block_order::block_first);
        layer_windows windows(stream, c.from.memory(), c.blocks, room.memory());
        for (int i = 0; i < n; ++i) {
            CHECK(windows.next());
        }
    }
}

TEST_CASE("a pool that is too small for a window, and lists that cannot be brought, are refused") {
    small_stream weights({.readers = 1}, {bytes{256}});
    block_stream stream(weights);
    context c(block_order::block_first);
    pool one(one_layer(), 1, block_order::block_first), room(one_layer(), 4, block_order::block_first);
    pool whole(geometry, 4, block_order::block_first);
    block_geometry other = one_layer();
    other.head_size = 4;
    pool odd(other, 4, block_order::block_first);
    const auto refused = [&](const std::vector<std::uint32_t>& blocks, pool& to, const char* text) {
        CHECK_THROWS_WITH_AS(layer_windows(stream, c.from.memory(), blocks, to.memory()), doctest::Contains(text), configuration_error);
    };
    refused(c.blocks, one, "too small for windows of a layer");
    refused({}, room, "names no blocks");
    refused({1, 2, 1}, room, "block 1 to copy from is named twice");
    refused({1, 50}, room, "block 50 to copy from is beyond the last of 50");
    refused(c.blocks, whole, "blocks of one layer, not of 4");
    refused(c.blocks, odd, "do not fit into blocks of");
}

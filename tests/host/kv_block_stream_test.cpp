#include "stream_fakes.hpp"

#include <penstock/kv/block_stream.hpp>

#include <doctest/doctest.h>

#include <numeric>

namespace {

using namespace stream_fakes;

const block_geometry geometry{.tokens = 4, .layers = 5, .heads = 2, .head_size = 6, .type = dtype::f16};

/// A pool in host memory. Part (block, layer, K or V) of a full one holds the bytes of pattern(which, number of the part in the geometry).
struct pool {
    pool(const block_geometry& g, std::uint32_t blocks, block_order order) : layout(g, blocks, order), bytes(layout.bytes(), guard) {}

    [[nodiscard]] block_memory memory() { return {bytes.data(), layout}; }
    [[nodiscard]] std::span<std::byte> layer(std::uint32_t block, std::uint32_t l) {
        return std::span(bytes).subspan(layout.offset(block, l), layout.layer_bytes());
    }
    void fill(std::uint64_t which) {
        for (std::uint32_t b = 0; b < layout.blocks(); ++b) {
            for (std::uint32_t l = 0; l < layout.geometry().layers; ++l) {
                std::uint64_t at = first_byte(b, l);
                for (std::byte& x : layer(b, l)) {
                    x = tests::pattern(which, at++);
                }
            }
        }
    }
    /// Whether layer `l` of `block` has what layer `from_layer` of `from_block` has in the full pool `which`.
    [[nodiscard]] bool has(std::uint32_t block, std::uint32_t l, std::uint64_t which, std::uint32_t from_block, std::uint32_t from_layer) {
        return tests::holds(layer(block, l), which, first_byte(from_block, from_layer));
    }
    [[nodiscard]] bool untouched(std::uint32_t block, std::uint32_t l) {
        const auto part = layer(block, l);
        return std::all_of(part.begin(), part.end(), [](std::byte b) { return b == guard; });
    }
    [[nodiscard]] std::uint64_t first_byte(std::uint32_t block, std::uint32_t l) const {
        return (std::uint64_t{block} * 1000 + l) * layout.layer_bytes();
    }

    block_layout layout;
    std::vector<std::byte> bytes;
};

constexpr block_order orders[] = {block_order::block_first, block_order::layer_first};
using small_stream = weight_stream<memory::pageable, chunking::run_time, scheduler::priority<3>>;

}  // namespace

TEST_CASE("whole blocks go from any order to any order, and nothing else is touched") {
    const std::vector<std::uint32_t> from_blocks{6, 0, 1, 2, 5};
    const std::vector<std::uint32_t> to_blocks{3, 4, 5, 0, 8};
    for (const std::uint64_t chunk : {std::uint64_t{100}, std::uint64_t{4096}, std::uint64_t{1} << 20}) {
        small_stream weights({.readers = 2}, {bytes{chunk}});
        block_stream blocks(weights);
        for (const block_order from_order : orders) {
            for (const block_order to_order : orders) {
                pool from(geometry, 7, from_order), to(geometry, 9, to_order);
                from.fill(1);
                const stream_report report = blocks.run({from.memory(), from_blocks, to.memory(), to_blocks});
                CHECK(report.bytes == 5 * from.layout.block_bytes());
                bool right = true;
                for (std::uint32_t b = 0; b < 9; ++b) {
                    const auto i = std::find(to_blocks.begin(), to_blocks.end(), b) - to_blocks.begin();
                    for (std::uint32_t l = 0; l < 5; ++l) {
                        right = right && (i == 5 ? to.untouched(b, l) : to.has(b, l, 1, from_blocks[static_cast<std::size_t>(i)], l));
                    }
                }
                CHECK(right);
            }
        }
    }
}

TEST_CASE("some layers of blocks go to other layers, and to pools that have fewer of them") {
    small_stream weights({.readers = 2}, {bytes{512}});
    block_stream blocks(weights);
    block_geometry two = geometry;
    two.layers = 2;
    const std::vector<std::uint32_t> from_blocks{2, 0}, to_blocks{1, 3};
    for (const block_order from_order : orders) {
        for (const block_order to_order : orders) {
            pool from(geometry, 3, from_order), to(two, 4, to_order);
            from.fill(2);
            block_copy c{from.memory(), from_blocks, to.memory(), to_blocks};
            c.from_layer = 3;
            c.layers = 2;
            blocks.run(c);
            CHECK((to.has(1, 0, 2, 2, 3) && to.has(1, 1, 2, 2, 4) && to.has(3, 0, 2, 0, 3) && to.has(3, 1, 2, 0, 4)));
            CHECK((to.untouched(0, 0) && to.untouched(0, 1) && to.untouched(2, 0) && to.untouched(2, 1)));
            c.from_layer = 1;
            c.to_layer = 1;
            c.layers = 1;
            blocks.run(c);
            CHECK((to.has(1, 0, 2, 2, 3) && to.has(1, 1, 2, 2, 1) && to.has(3, 1, 2, 0, 1)));
        }
    }
}

TEST_CASE("a block may go to another place of its own pool") {
    small_stream weights({.readers = 1}, {bytes{512}});
    block_stream blocks(weights);
    pool one(geometry, 4, block_order::layer_first);
    one.fill(3);
    const std::vector<std::uint32_t> from{1}, to{3}, both{1, 3};
    blocks.run({one.memory(), from, one.memory(), to});
    CHECK((one.has(3, 0, 3, 1, 0) && one.has(3, 4, 3, 1, 4) && one.has(2, 0, 3, 2, 0)));
    CHECK_THROWS_WITH_AS(blocks.run({one.memory(), both, one.memory(), both}), doctest::Contains("from and to"), configuration_error);
}

TEST_CASE("neighbouring blocks of one order are one run of bytes, and small ones share chunks") {
    pool from(geometry, 64, block_order::block_first), to(geometry, 64, block_order::block_first);
    std::vector<std::uint32_t> all(64), shuffled(64);
    std::iota(all.begin(), all.end(), 0);
    std::iota(shuffled.rbegin(), shuffled.rend(), 0);
    const transfer_plan whole(transfers_of({from.memory(), all, to.memory(), all}), chunking::run_time{1_MiB});
    CHECK(whole.chunks().size() == 1);
    CHECK(whole.cost().copies == 1);
    const transfer_plan scattered(transfers_of({from.memory(), shuffled, to.memory(), all}), chunking::run_time{1_MiB});
    CHECK(scattered.chunks().size() == 1);
    CHECK(scattered.cost().copies == 64);
}

TEST_CASE("layers arrive one by one, in their order, and are waited for one by one") {
    weight_stream<memory::pageable, chunking::fixed<1_KiB>, scheduler::priority<3>> weights({.readers = 1});
    block_stream blocks(weights);
    pool from(geometry, 8, block_order::block_first), to(geometry, 8, block_order::layer_first);
    from.fill(4);
    std::vector<std::uint32_t> all(8);
    std::iota(all.begin(), all.end(), 0);
    block_copy c{from.memory(), all, to.memory(), all};
    c.layer_by_layer = true;
    c.request = 100;
    c.deadline = 7;
    c.level = urgency::prefetch;
    const std::vector<transfer> list = transfers_of(c);
    CHECK(list.front().request == 100);
    CHECK(list.front().deadline == 7);
    CHECK(list.back().request == 104);
    CHECK(list.back().deadline == 11);
    CHECK(list.back().level == urgency::prefetch);
    std::mutex mutex;
    std::vector<std::uint64_t> seen;  // bytes that had arrived when each layer was whole
    const auto callback = [&](const progress& p) {
        const std::lock_guard lock(mutex);
        seen.push_back(p.bytes);
    };
    ticket t = blocks.start(c, nullptr, callback);
    for (std::uint32_t l = 0; l < 5; ++l) {
        t.wait(100 + l);
        bool right = true;
        for (std::uint32_t b = 0; b < 8; ++b) {
            right = right && to.has(b, l, 4, b, l);
        }
        CHECK(right);
    }
    t.wait();
    CHECK_THROWS_AS(t.wait(105), configuration_error);
    CHECK(std::is_sorted(seen.begin(), seen.end()));
    // By a queue of its own: the scheduler gives the chunks of layer l before those of layer l + 1.
    const transfer_plan plan(list, chunking::run_time{1_KiB});
    scheduler::priority<3>::queue queue;
    for (auto r = plan.requests().rbegin(); r != plan.requests().rend(); ++r) {
        queue.push(r->what);
    }
    std::uint64_t last = 100;
    while (const auto next = queue.next()) {
        CHECK(next->request >= last);
        last = next->request;
    }
    CHECK(last == 104);
}

TEST_CASE("one queue has blocks and weights: what is on demand passes blocks in the background") {
    slow_source files;
    weight_stream<memory::pageable, chunking::fixed<1_KiB>, scheduler::priority<3>> weights({.readers = 1});
    block_stream blocks(weights);
    pool from(geometry, 64, block_order::block_first), to(geometry, 64, block_order::block_first);
    from.fill(5);
    std::vector<std::uint32_t> all(64);
    std::iota(all.begin(), all.end(), 0);
    std::vector<std::byte> first(1024), second(1024);
    // The only reader is kept at the first weights until all three loads wait.
    const std::vector<transfer> one{from_file(1, 0, 0, first)}, two{from_file(2, 0, 0, second)};
    files.allow(0);
    ticket held = weights.start(one, files, on_host());
    files.wait_for_reads(1);
    block_copy c{from.memory(), all, to.memory(), all};
    c.level = urgency::background;
    std::atomic<std::uint64_t> of_blocks{0};
    ticket offload = blocks.start(c, nullptr, [&](const progress& p) { of_blocks = p.bytes; });
    std::uint64_t blocks_before = ~std::uint64_t{0};
    ticket urgent = weights.start(two, files, on_host(), [&](const progress&) { blocks_before = of_blocks; });
    files.allow(2);
    urgent.wait();
    CHECK(blocks_before == 0);
    offload.wait();
    held.wait();
    CHECK(of_blocks == from.layout.bytes());
    CHECK(to.has(63, 4, 5, 63, 4));
}

TEST_CASE("what cannot be copied is refused by name before anything moves") {
    small_stream weights({.readers = 1}, {bytes{512}});
    block_stream blocks(weights);
    pool from(geometry, 4, block_order::block_first), to(geometry, 4, block_order::block_first);
    from.fill(6);
    const std::vector<std::uint32_t> none, one{1}, two{1, 2}, twice{2, 1, 2}, three{0, 1, 2}, beyond{0, 4};
    const auto refused = [&](block_copy c, const char* text) {
        CHECK_THROWS_WITH_AS(blocks.run(c), doctest::Contains(text), configuration_error);
        CHECK_THROWS_WITH_AS(static_cast<void>(blocks.start(c)), doctest::Contains(text), configuration_error);
    };
    const auto copy = [&](const std::vector<std::uint32_t>& a, const std::vector<std::uint32_t>& b) {
        return block_copy{from.memory(), a, to.memory(), b};
    };
    refused(copy(none, none), "names no blocks");
    refused(copy(one, none), "names no blocks");
    refused(copy(beyond, two), "block 4 to copy from is beyond the last of 4");
    refused(copy(two, beyond), "block 4 to copy to is beyond the last of 4");
    refused(copy(twice, three), "block 2 to copy from is named twice");
    refused(copy(three, twice), "block 2 to copy to is named twice");
    refused(copy(two, one), "2 KV blocks do not fit into the places of 1");
    block_copy c = copy(one, one);
    c.layers = 0;
    refused(c, "0 layers");
    c.layers = 1;
    c.from_layer = 5;
    refused(c, "from layer 5 on, to copy from");
    c.from_layer = 0;
    c.to_layer = 4;
    c.layers = 2;
    refused(c, "2 layers from layer 4 on, to copy to");
    c = copy(one, one);
    c.from_layer = 1;
    refused(c, "5 layers from layer 1 on");
    c = copy(one, one);
    c.to.data = nullptr;
    refused(c, "no memory");
    block_geometry other = geometry;
    other.layers = 4;
    pool fewer(other, 4, block_order::block_first);
    refused({from.memory(), one, fewer.memory(), one}, "do not fit into blocks of 4 tokens x 4 layers");
    other = geometry;
    other.type = dtype::bf16;
    pool typed(other, 4, block_order::block_first);
    c = {from.memory(), one, typed.memory(), one};
    c.layers = 1;
    refused(c, "do not fit into blocks of 4 tokens x 5 layers x 2 heads x 6 BF16");
    CHECK(std::all_of(to.bytes.begin(), to.bytes.end(), [](std::byte b) { return b == guard; }));
}

TEST_CASE("a copy to or from a device is placed at that device") {
    pool host(geometry, 1, block_order::block_first);
    block_memory device = host.memory();
    device.device = 3;
    const std::vector<std::uint32_t> one{0};
    const block_copy fetch{host.memory(), one, device, one}, offload{device, one, host.memory(), one};
    CHECK(place_of(fetch).device == 3);
    CHECK(place_of(offload).device == 3);
    CHECK(place_of({host.memory(), one, host.memory(), one}).on_host());
    CHECK_FALSE(transfers_of({host.memory(), one, {host.bytes.data() + 1, host.layout, 3}, one}).front().memory_is_pinned);
    CHECK(transfers_of({{host.bytes.data() + 1, host.layout, 3}, one, host.memory(), one}).front().memory_is_pinned);
    if (device_count() == 0) {
        weight_stream<> weights;
        block_stream blocks(weights);
        CHECK_THROWS_WITH_AS(blocks.run({host.memory(), one, {host.bytes.data() + 1, host.layout, 0}, one}),
                             doctest::Contains("no CUDA device"), configuration_error);
    }
}

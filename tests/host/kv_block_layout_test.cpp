#include <penstock/kv/block_layout.hpp>

#include <doctest/doctest.h>

#include <set>
#include <type_traits>

namespace ps = penstock;
using ps::block_layout;
using ps::block_order;
using ps::kv_part;

static_assert(std::is_trivially_copyable_v<block_layout>);

TEST_CASE("a KV block of Llama-3-70B takes 320 KiB a token") {
    const block_layout layout({.tokens = 16, .layers = 80, .heads = 8, .head_size = 128, .type = ps::dtype::bf16}, 2048);
    CHECK(layout.part_bytes() == 16 * 8 * 128 * 2);
    CHECK(layout.layer_bytes() == 64 << 10);
    CHECK(layout.block_bytes() == 16 * (320 << 10));
    CHECK(layout.bytes() == std::uint64_t{32768} * (320 << 10));
    CHECK(to_string(layout.geometry()) == "16 tokens x 80 layers x 8 heads x 128 BF16");
}

TEST_CASE("every part of every block has bytes of its own, all of the pool is used, and what belongs together is together") {
    for (const block_order order : {block_order::block_first, block_order::layer_first}) {
        const block_layout layout({.tokens = 3, .layers = 4, .heads = 2, .head_size = 6, .type = ps::dtype::f4}, 5, order);
        CHECK(layout.part_bytes() == 3 * 2 * 3);
        std::set<std::uint64_t> starts;
        for (std::uint32_t block = 0; block < 5; ++block) {
            for (std::uint32_t layer = 0; layer < 4; ++layer) {
                CHECK(layout.offset(block, layer, kv_part::values) == layout.offset(block, layer) + layout.part_bytes());
                for (const kv_part part : {kv_part::keys, kv_part::values}) {
                    const std::uint64_t at = layout.offset(block, layer, part);
                    CHECK(at % layout.part_bytes() == 0);
                    CHECK(at + layout.part_bytes() <= layout.bytes());
                    starts.insert(at);
                }
            }
        }
        CHECK(starts.size() == 5 * 4 * 2);
        const bool by_block = order == block_order::block_first;
        CHECK(layout.offset(2, 1) ==
              (by_block ? layout.offset(2, 0) + layout.layer_bytes() : layout.offset(2, 0) + 5 * layout.layer_bytes()));
        CHECK(layout.offset(3, 2) == (by_block ? layout.offset(2, 2) + layout.block_bytes() : layout.offset(2, 2) + layout.layer_bytes()));
    }
}

TEST_CASE("sizes that hold nothing, or more than can be counted, are refused by name") {
    const ps::block_geometry good{.tokens = 16, .layers = 2, .heads = 2, .head_size = 8, .type = ps::dtype::f32};
    const auto refused = [](const ps::block_geometry& g, std::uint32_t blocks, const char* text) {
        CHECK_THROWS_WITH_AS(block_layout(g, blocks), doctest::Contains(text), ps::configuration_error);
    };
    auto g = good;
    g.tokens = 0;
    refused(g, 1, "zero tokens");
    g = good;
    g.layers = 0;
    refused(g, 1, "zero layers");
    g = good;
    g.heads = 0;
    refused(g, 1, "zero heads");
    g = good;
    g.head_size = 0;
    refused(g, 1, "zero elements");
    refused(good, 0, "zero blocks");
    g = good;
    g.head_size = 7;
    g.type = ps::dtype::f4;
    refused(g, 1, "7 elements of F4");
    constexpr std::uint32_t most = ~std::uint32_t{0};
    refused({most, 1, most, 1, ps::dtype::f32}, 1, "more bytes than 64 bits count");
    refused({1u << 16, 1u << 16, 1u << 16, 1u << 12, ps::dtype::u8}, 16, "more bytes than 64 bits count");
    CHECK(block_layout({1u << 16, 1u << 16, 1u << 16, 1u << 12, ps::dtype::u8}, 4).bytes() == std::uint64_t{1} << 63);
}

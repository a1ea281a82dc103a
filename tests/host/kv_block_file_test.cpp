#include "../known_bytes.hpp"

#include <penstock/kv/block_file.hpp>

#include <doctest/doctest.h>

#include <sys/stat.h>

using namespace penstock;
using namespace penstock::literals;

namespace {

const block_geometry geometry{.tokens = 3, .layers = 4, .heads = 2, .head_size = 5, .type = dtype::f16};

struct pool_of {
    explicit pool_of(std::uint32_t blocks, block_order order = block_order::block_first, const block_geometry& g = geometry)
        : bytes(block_layout(g, blocks, order).bytes()), pool(block_layout(g, blocks, order), bytes) {}

    block_pool<>* operator->() { return &pool; }

    std::vector<std::byte> bytes;
    block_pool<> pool;
};

std::vector<block_key> chain(const std::string& tokens) {
    std::vector<block_key> keys;
    std::uint64_t hash = 7;
    for (const char c : tokens) {
        hash = (hash ^ static_cast<std::uint64_t>(c)) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 31;
        keys.push_back({hash, 1});
    }
    return keys;
}

/// A layer of a block as its key has it, whatever pool it is in.
std::span<std::byte> layer_of(pool_of& pool, std::uint32_t block, std::uint32_t layer) {
    return {pool->memory().at(block, layer), pool->layout().layer_bytes()};
}

void store(pool_of& pool, const std::string& tokens) {
    const std::vector<block_key> keys = chain(tokens);
    auto r = pool->insert(keys);
    for (std::size_t i = 0; i < r.blocks().size(); ++i) {
        for (std::uint32_t l = 0; l < geometry.layers; ++l) {
            tests::fill(layer_of(pool, r.blocks()[i], l), keys[r.first() + i].low, l * 1000);
        }
    }
    r.publish();
}

/// How many blocks of a context are found, all with their bytes.
std::size_t stored(pool_of& pool, const std::string& tokens) {
    const std::vector<block_key> keys = chain(tokens);
    const pinned_blocks found = pool->find(keys);
    for (std::size_t i = 0; i < found.size(); ++i) {
        for (std::uint32_t l = 0; l < geometry.layers; ++l) {
            CHECK(tests::holds(layer_of(pool, found.blocks()[i], l), keys[i].low, l * 1000));
        }
    }
    return found.size();
}

using small_stream = weight_stream<memory::pageable, chunking::fixed<1_KiB>>;

std::string content(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

std::size_t files_in(const std::filesystem::path& path) {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path), std::filesystem::directory_iterator()));
}

}  // namespace

TEST_CASE("a pool is restored with all its contexts, into a pool of any order") {
    const tests::temporary_directory dir;
    small_stream stream({.readers = 2});
    for (const block_order from_order : {block_order::block_first, block_order::layer_first}) {
        pool_of from(12, from_order);
        store(from, "abcd");
        store(from, "xy");
        store(from, "abq");
        store(from, "abcde");
        CHECK(save_blocks(from.pool, dir / "kv") == 8);
        CHECK(files_in(dir.path()) == 1);
        struct stat info {};
        REQUIRE(::stat((dir / "kv").c_str(), &info) == 0);
        CHECK((info.st_mode & 0777) == 0600);
        for (const block_order to_order : {block_order::block_first, block_order::layer_first}) {
            pool_of to(8, to_order);
            CHECK(restore_blocks(to.pool, dir / "kv", stream) == 8);
            CHECK(to->report().free == 0);
            CHECK((stored(to, "abcde") == 5 && stored(to, "abq") == 3 && stored(to, "xy") == 2));
            store(to, "12345678");  // nothing has stayed pinned
            CHECK(stored(to, "12345678") == 8);
        }
        store(from, "123456789");  // nor here
        CHECK(stored(from, "123456789") == 9);
    }
}

TEST_CASE("what is stored already stays, and what somebody is filling is left out with what comes behind it") {
    const tests::temporary_directory dir;
    small_stream stream({.readers = 2});
    pool_of from(8), to(8);
    store(from, "abcd");
    store(from, "xyz");
    CHECK(save_blocks(from.pool, dir / "kv") == 7);
    store(to, "abq");
    auto filling = to->insert(chain("xy"));
    CHECK(restore_blocks(to.pool, dir / "kv", stream) == 2);
    CHECK((stored(to, "abcd") == 4 && stored(to, "abq") == 3 && stored(to, "xyz") == 0));
    CHECK(restore_blocks(to.pool, dir / "kv", stream) == 0);
    filling = {};
    CHECK(restore_blocks(to.pool, dir / "kv", stream) == 3);
    CHECK(stored(to, "xyz") == 3);
}

TEST_CASE("an empty pool is a file, too") {
    const tests::temporary_directory dir;
    small_stream stream({.readers = 1});
    pool_of pool(3);
    CHECK(save_blocks(pool.pool, dir / "kv") == 0);
    CHECK(restore_blocks(pool.pool, dir / "kv", stream) == 0);
    store(pool, "abc");
    CHECK(save_blocks(pool.pool, dir / "kv") == 3);  // in the place of the one before
    pool_of other(3);
    CHECK(restore_blocks(other.pool, dir / "kv", stream) == 3);
    CHECK(stored(other, "abc") == 3);
}

TEST_CASE("truncated, foreign and spoilt files are refused, and nothing is half restored") {
    const tests::temporary_directory dir;
    small_stream stream({.readers = 2});
    pool_of from(8), to(8);
    store(from, "abcde");
    store(to, "xy");
    save_blocks(from.pool, dir / "kv");
    const std::string whole = content(dir / "kv");
    CHECK(whole.size() == 4096 + 5 * from->layout().block_bytes());
    const auto unharmed = [&] {
        CHECK(stored(to, "abcde") == 0);
        CHECK(stored(to, "xy") == 2);
        CHECK(to->report().free == 6);
    };
    const auto refused = [&](const std::string& bytes, const char* text) {
        const auto path = dir.write("odd", bytes);
        CHECK_THROWS_WITH_AS(restore_blocks(to.pool, path, stream), doctest::Contains(text), format_error);
        CHECK_THROWS_WITH_AS(restore_blocks(to.pool, path, stream), doctest::Contains(path.string().c_str()), format_error);
        unharmed();
    };
    refused("", "0 bytes are no file");
    refused(whole.substr(0, 55), "55 bytes are no file");
    refused(whole.substr(0, 56), "this one has 56");
    refused(whole.substr(0, 4096), "this one has 4096");
    refused(whole.substr(0, whole.size() - 1), "5 KV blocks make a file of");
    refused(whole + "x", "5 KV blocks make a file of");
    refused(std::string(10'000, 'x'), "is no file of KV blocks");
    std::string odd = whole;
    odd[24] = 2;
    refused(odd, "version 2");
    odd = whole;
    odd[44] = 4;  // blocks
    refused(odd, "4 KV blocks make a file of");
    for (const std::size_t at : {48u, 56u, 72u, 56u + 24u + 16u, 56u + 4u * 24u + 3u}) {
        odd = whole;
        odd[at] = static_cast<char>(odd[at] + 1);
        refused(odd, "spoilt");
    }
    // An index that is whole and makes no sense.
    const auto with_index = [&](auto change) {
        std::vector<detail::block_file_entry> index(5);
        detail::block_file_head head;
        std::memcpy(&head, whole.data(), sizeof head);
        std::memcpy(index.data(), whole.data() + sizeof head, 5 * sizeof index[0]);
        change(index);
        head.checksum = detail::checksum_of(head, index);
        std::string file = whole;
        std::memcpy(file.data(), &head, sizeof head);
        std::memcpy(file.data() + sizeof head, index.data(), 5 * sizeof index[0]);
        return file;
    };
    refused(with_index([](auto& index) { index[2].before = 2; }), "at block 2");
    refused(with_index([](auto& index) { index[3].key = index[0].key; }), "at block 3");
    // Other failures.
    CHECK_THROWS_AS(restore_blocks(to.pool, dir / "none", stream), io_error);
    CHECK_THROWS_AS(restore_blocks(to.pool, dir.path(), stream), io_error);
    unharmed();
    std::stop_source stop;
    stop.request_stop();
    CHECK_THROWS_AS(restore_blocks(to.pool, dir / "kv", stream, {}, stop.get_token()), cancelled);
    unharmed();
    const auto breaks = [](const progress&) { throw std::logic_error("enough"); };
    CHECK_THROWS_AS(restore_blocks(to.pool, dir / "kv", stream, breaks), std::logic_error);
    unharmed();
    CHECK(restore_blocks(to.pool, dir / "kv", stream) == 5);
    CHECK(stored(to, "abcde") == 5);
}

TEST_CASE("another geometry is refused, and so are too few free blocks and keys in another order") {
    const tests::temporary_directory dir;
    small_stream stream({.readers = 2});
    pool_of from(8);
    store(from, "abcd");
    save_blocks(from.pool, dir / "kv");
    const auto refused = [&](auto change) {
        block_geometry g = geometry;
        change(g);
        pool_of to(8, block_order::block_first, g);
        CHECK_THROWS_WITH_AS(restore_blocks(to.pool, dir / "kv", stream),
                             doctest::Contains("holds KV blocks of 3 tokens x 4 layers x 2 heads x 5 F16, the pool has "),
                             configuration_error);
        CHECK(to->report().free == 8);
    };
    refused([](block_geometry& g) { g.tokens = 6; });
    refused([](block_geometry& g) { g.layers = 2; });
    refused([](block_geometry& g) { g.heads = 1; });
    refused([](block_geometry& g) { g.head_size = 10; });
    refused([](block_geometry& g) { g.type = dtype::bf16; });
    pool_of small(5);
    store(small, "xy");
    CHECK_THROWS_WITH_AS(restore_blocks(small.pool, dir / "kv", stream), doctest::Contains("4 KV blocks were to be restored, 3 are free"),
                         out_of_memory);
    CHECK(stored(small, "xy") == 2);
    pool_of swapped(8);
    std::vector<block_key> keys = chain("ab");
    std::swap(keys[0], keys[1]);
    swapped->insert(keys).publish();
    CHECK_THROWS_WITH_AS(restore_blocks(swapped.pool, dir / "kv", stream), doctest::Contains("stored behind another block"),
                         configuration_error);
    CHECK(swapped->report().free == 6);
}

TEST_CASE("a file that cannot be written leaves nothing, and the one before it as it was") {
    const tests::temporary_directory dir;
    small_stream stream({.readers = 1});
    pool_of pool(4);
    store(pool, "ab");
    CHECK_THROWS_WITH_AS(save_blocks(pool.pool, dir / "none" / "kv"), doctest::Contains("cannot be made: No such file"), io_error);
    std::filesystem::create_directories(dir / "folder" / "full");
    CHECK_THROWS_WITH_AS(save_blocks(pool.pool, dir / "folder"), doctest::Contains("cannot be put in its place"), io_error);
    CHECK(files_in(dir.path()) == 1);
    store(pool, "xyzw");  // the blocks are not pinned any more
    CHECK(stored(pool, "xyzw") == 4);
}

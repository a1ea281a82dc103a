#include <penstock/kv/block_pool.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <thread>

using namespace penstock;

namespace {

const block_geometry geometry{.tokens = 2, .layers = 2, .heads = 1, .head_size = 4, .type = dtype::f16};

/// A pool of its own memory.
template <class Eviction = eviction::lru>
struct pool_of {
    explicit pool_of(std::uint32_t blocks) : bytes(block_layout(geometry, blocks).bytes()), pool(block_layout(geometry, blocks), bytes) {}

    block_pool<Eviction>* operator->() { return &pool; }

    std::vector<std::byte> bytes;
    block_pool<Eviction> pool;
};

/// The keys of a context's blocks: each a hash of all tokens so far, as an engine makes them.
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

/// Stores a context and unpins it.
template <class Pool>
void store(Pool& pool, const std::string& tokens) {
    pool->insert(chain(tokens)).publish();
}

template <class Pool>
std::size_t stored(Pool& pool, const std::string& tokens) {
    return pool->find(chain(tokens)).size();
}

}  // namespace

TEST_CASE("the longest stored prefix is found, and contexts share what they have in common") {
    pool_of pool(10);
    CHECK(pool->find(chain("abc")).empty());
    auto first = pool->insert(chain("abcd"));
    CHECK(first.first() == 0);
    CHECK(first.blocks().size() == 4);
    CHECK(stored(pool, "abcd") == 0);  // not before its bytes are there
    const pinned_blocks abcd = first.publish();
    CHECK(abcd.size() == 4);
    CHECK(first.empty());
    CHECK(stored(pool, "abcd") == 4);
    CHECK(stored(pool, "abcdef") == 4);
    CHECK(stored(pool, "abx") == 2);
    CHECK(stored(pool, "xbcd") == 0);
    CHECK(pool->find({}).empty());
    auto second = pool->insert(chain("abxy"));
    CHECK(second.first() == 2);
    CHECK(second.blocks().size() == 2);
    const pinned_blocks abxy = second.publish();
    CHECK(abxy.size() == 4);
    CHECK(abxy.blocks()[1] == abcd.blocks()[1]);
    CHECK(abxy.blocks()[2] != abcd.blocks()[2]);
    CHECK(pool->insert(chain("abxy")).empty());
    CHECK(pool->report().stored == 6);
    CHECK(pool->report().free == 4);
    CHECK(pool->report().evicted == 0);
}

TEST_CASE("what nobody publishes is free again") {
    pool_of pool(3);
    {
        auto r = pool->insert(chain("abc"));
        CHECK(pool->report().free == 0);
        auto moved = std::move(r);
        CHECK(r.empty());
        CHECK(moved.blocks().size() == 3);
    }
    CHECK(pool->report().free == 3);
    CHECK(pool->report().stored == 0);
    store(pool, "abc");
    CHECK(stored(pool, "abc") == 3);
}

TEST_CASE("a prefix is stored without gaps: the ends of contexts leave first, the least recently used before others") {
    pool_of pool(6);
    store(pool, "abc");
    store(pool, "xyz");
    CHECK(stored(pool, "abc") == 3);  // used after xyz
    store(pool, "q");
    CHECK(stored(pool, "xyz") == 2);
    CHECK(stored(pool, "abc") == 3);
    CHECK(pool->report().evicted == 1);
    CHECK(stored(pool, "xy") == 2);
    CHECK(stored(pool, "q") == 1);
    store(pool, "rst");  // abc was used before xy and q
    CHECK(stored(pool, "abc") == 0);
    CHECK(stored(pool, "xy") == 2);
    CHECK(stored(pool, "rst") == 3);
}

namespace {

struct most_recent {
    using policy_axis = axis::eviction;
    PENSTOCK_HD static constexpr double score(const residency_entry& e, std::uint64_t) noexcept {
        return -static_cast<double>(e.last_used);
    }
};

}  // namespace

TEST_CASE("the score decides, and of equal ones the lower number") {
    pool_of<most_recent> pool(3);
    store(pool, "a");
    store(pool, "b");
    store(pool, "c");
    store(pool, "d");
    CHECK(stored(pool, "c") == 0);
    CHECK((stored(pool, "a") == 1 && stored(pool, "b") == 1 && stored(pool, "d") == 1));
    pool_of<> equal(4);
    const pinned_blocks ab = equal->insert(chain("ab")).publish();
    {
        const pinned_blocks ac = equal->insert(chain("ac")).publish();
        CHECK(ac.blocks()[1] == 2);
    }
    static_cast<void>(equal->insert(chain("q")));  // takes the free one and gives it back
    CHECK(stored(equal, "ac") == 2);
}

TEST_CASE("pinned blocks stay, with all before them, and a full pool says why it refuses") {
    pool_of pool(4);
    store(pool, "ab");
    store(pool, "cd");
    pinned_blocks pin = pool->find(chain("ab"));
    CHECK_THROWS_WITH_AS(static_cast<void>(pool->insert(chain("wxy"))),
                         doctest::Contains("0 are free, and 2 are stored that nobody has pinned"), out_of_memory);
    CHECK(stored(pool, "cd") == 2);  // nothing has left for what was refused
    store(pool, "wx");
    CHECK(stored(pool, "ab") == 2);
    CHECK(stored(pool, "cd") == 0);
    const pinned_blocks more = pool->find(chain("a"));
    pin = {};
    store(pool, "qrs");
    CHECK(stored(pool, "ab") == 1);
    CHECK(stored(pool, "qrs") == 3);
    // A reservation pins what comes before it.
    pool_of small(3);
    store(small, "ab");
    auto r = small->insert(chain("abc"));
    CHECK_THROWS_AS(static_cast<void>(small->insert(chain("z"))), out_of_memory);
    // And so does what it publishes.
    const pinned_blocks abc = r.publish();
    r = {};
    CHECK_THROWS_AS(static_cast<void>(small->insert(chain("z"))), out_of_memory);
    CHECK(abc.size() == 3);
}

TEST_CASE("what somebody is filling is not given out twice") {
    pool_of pool(6);
    auto one = pool->insert(chain("abc"));
    auto two = pool->insert(chain("abcd"));
    CHECK(two.first() == 0);
    CHECK(two.empty());
    one.publish();
    two = pool->insert(chain("abcd"));
    CHECK(two.first() == 3);
    CHECK(two.blocks().size() == 1);
    CHECK(pool->insert(chain("abcde")).empty());
}

TEST_CASE("chains that make no sense are refused") {
    pool_of pool(8);
    CHECK_THROWS_AS(static_cast<void>(pool->insert({})), configuration_error);
    std::vector<block_key> keys = chain("abc");
    store(pool, "abc");
    const std::vector<block_key> twice{{9, 9}, {8, 8}, {9, 9}};
    CHECK_THROWS_WITH_AS(static_cast<void>(pool->insert(twice)), doctest::Contains("is twice in one chain"), configuration_error);
    std::swap(keys[1], keys[2]);
    CHECK_THROWS_WITH_AS(static_cast<void>(pool->find(keys)), doctest::Contains("stored behind another block"), configuration_error);
    const std::vector<block_key> behind_a_new_one{{5, 5}, keys[1]};
    CHECK_THROWS_WITH_AS(static_cast<void>(pool->insert(behind_a_new_one)), doctest::Contains("stored behind another block"),
                         configuration_error);
    CHECK(pool->report().free == 5);
    CHECK(stored(pool, "abc") == 3);
    std::vector<std::byte> too_small(block_layout(geometry, 8).bytes() - 1);
    CHECK_THROWS_WITH_AS(block_pool<>(block_layout(geometry, 8), too_small), doctest::Contains("511 were given"), configuration_error);
}

TEST_CASE("a pool takes its memory from an arena, and gives it back") {
    const block_layout layout(geometry, 8);
    arena from(round_up(layout.bytes(), 4096));
    const std::size_t before = from.free_bytes();
    {
        block_pool<> pool(layout, from);
        CHECK(from.free_bytes() == before - layout.bytes());
        CHECK(pool.memory().data >= from.data());
        CHECK_FALSE(pool.memory().pinned);
        CHECK_THROWS_AS(block_pool<>(block_layout(geometry, 1000), from), out_of_memory);
    }
    CHECK(from.free_bytes() == before);
}

TEST_CASE("pins and reservations may outlive their pool") {
    pinned_blocks pin;
    block_reservation<eviction::lru> open;
    {
        pool_of pool(4);
        store(pool, "ab");
        pin = pool->find(chain("ab"));
        open = pool->insert(chain("abc"));
    }
    CHECK(pin.size() == 2);
    CHECK(open.blocks().size() == 1);
}

TEST_CASE("threads that store, find and give up: whoever has a prefix pinned reads the bytes of its keys") {
    constexpr std::uint32_t blocks = 24;
    pool_of<> pool(blocks);
    const block_memory& memory = pool->memory();
    const auto first_byte = [&](std::uint32_t b) { return reinterpret_cast<std::uint64_t*>(memory.at(b, 0)); };
    std::atomic<std::uint32_t> wrong{0}, found{0}, refused{0};
    {
        std::vector<std::jthread> threads;
        for (std::uint32_t n = 0; n < 6; ++n) {
            threads.emplace_back([&, n] {
                std::mt19937 random(n);
                for (int round = 0; round < 1500; ++round) {
                    std::string tokens;
                    const std::size_t length = 1 + random() % 8;
                    while (tokens.size() < length) {
                        tokens += static_cast<char>('a' + random() % 3);
                    }
                    const std::vector<block_key> keys = chain(tokens);
                    const auto read = [&](const pinned_blocks& p) {
                        for (std::size_t i = 0; i < p.size(); ++i) {
                            wrong += *first_byte(p.blocks()[i]) != keys[i].low;
                        }
                        found += static_cast<std::uint32_t>(p.size());
                    };
                    try {
                        if (round % 2 == 0) {
                            read(pool->find(keys));
                            continue;
                        }
                        auto r = pool->insert(keys);
                        for (std::size_t i = 0; i < r.blocks().size(); ++i) {
                            *first_byte(r.blocks()[i]) = keys[r.first() + i].low;
                        }
                        if (round % 5 != 0) {
                            read(r.publish());
                        }
                    } catch (const out_of_memory&) {
                        ++refused;
                    }
                }
            });
        }
    }
    CHECK(wrong == 0);
    CHECK(found > 1000);
    const block_pool_report r = pool->report();
    CHECK(r.stored + r.free == blocks);
    CHECK(r.evicted > 100);
    store(pool, "000000000000000000000000");  // nothing has stayed pinned
    CHECK(stored(pool, "000000000000000000000000") == blocks);
}

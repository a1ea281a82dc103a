#include <penstock/residency/slot_map.hpp>

#include <doctest/doctest.h>

#include <map>
#include <random>

namespace ps = penstock;
using ps::eviction::lru;

namespace {

/// Most used first to leave: a rule that differs from LRU, to see that the score decides.
struct most_used {
    using policy_axis = ps::axis::eviction;
    static double score(const ps::residency_entry& e, std::uint64_t) { return -static_cast<double>(e.uses); }
};

std::uint32_t bring(ps::slot_map& map, std::uint32_t key, std::uint64_t step) {
    const auto r = map.reserve<lru>(key, step);
    REQUIRE(r);
    map.publish(r->slot);
    map.touch<lru>(r->slot, step);
    map.unpin(r->slot);
    return r->slot;
}

}  // namespace

TEST_CASE("a slot that is filling is not found until it is published") {
    ps::slot_map map(2);
    const auto r = map.reserve<lru>(7, 1);
    REQUIRE(r);
    CHECK_FALSE(map.find(7));
    map.publish(r->slot);
    CHECK(map.find(7) == r->slot);
}

TEST_CASE("a failed fill leaves nothing behind") {
    ps::slot_map map(1);
    const auto r = map.reserve<lru>(7, 1);
    map.abandon(r->slot);
    CHECK_FALSE(map.find(7));
    CHECK(map.residents() == 0);
    CHECK(map.reserve<lru>(8, 2));
}

TEST_CASE("the victim is the least recently used, ties go to the lower slot, pinned ones stay") {
    ps::slot_map map(3);
    const std::uint32_t a = bring(map, 10, 1);
    const std::uint32_t b = bring(map, 11, 1);
    const std::uint32_t c = bring(map, 12, 2);
    REQUIRE(a == 0);
    map.pin(a);
    const auto first = map.reserve<lru>(13, 3);
    CHECK(first->slot == b);
    CHECK(first->evicted);
    CHECK_FALSE(map.find(11));
    map.unpin(a);
    CHECK(map.reserve<lru>(14, 3)->slot == a);
    CHECK(map.reserve<lru>(15, 3)->slot == c);
    CHECK_FALSE(map.reserve<lru>(16, 3));  // all are filling, none may leave
}

TEST_CASE("S01 a fetch for this step does not evict what this step needs") {
    ps::slot_map map(2);
    bring(map, 0, 1);
    bring(map, 1, 1);
    const auto four = map.reserve<most_used>(4, 2);
    const auto five = map.reserve<most_used>(5, 2);
    REQUIRE(four);
    REQUIRE(five);
    CHECK(four->slot != five->slot);
    map.publish(four->slot);
    map.publish(five->slot);
    CHECK(map.find(4));
    CHECK(map.find(5));
}

TEST_CASE("random use agrees with a plain model of LRU") {
    constexpr std::uint32_t slots = 5;
    ps::slot_map map(slots);
    std::map<std::uint32_t, std::uint64_t> last;  // resident key -> step of its last use
    std::mt19937 random(1);
    for (std::uint64_t step = 1; step < 20000; ++step) {
        const auto key = static_cast<std::uint32_t>(random() % 12);
        const auto slot = map.find(key);
        REQUIRE(slot.has_value() == last.contains(key));
        if (slot) {
            map.touch<lru>(*slot, step);
        } else {
            if (last.size() == slots) {
                auto oldest = last.begin();
                for (auto i = last.begin(); i != last.end(); ++i) {
                    oldest = i->second < oldest->second ? i : oldest;
                }
                last.erase(oldest);
            }
            bring(map, key, step);
        }
        last[key] = step;
        REQUIRE(map.residents() == last.size());
    }
}

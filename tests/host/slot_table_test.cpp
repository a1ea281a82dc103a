#include "../own_evictions.hpp"

#include <penstock/residency/slot_table.hpp>

#include <doctest/doctest.h>

#include <map>
#include <optional>
#include <random>
#include <set>

namespace ps = penstock;
using ps::found;
namespace eviction = ps::eviction;
namespace sharing = ps::sharing;

namespace {

using ids = std::vector<std::int32_t>;

template <class Eviction, class Sharing = sharing::all_layers>
ps::slot_table<Eviction, Sharing> table_of(std::uint32_t layers, std::uint32_t experts, std::uint32_t slots) {
    return {std::vector<std::uint32_t>(layers, experts), slots, std::vector<std::uint64_t>(layers, 1000)};
}

/// Resolves and commits. @returns the experts by how they were found.
template <class Table>
std::map<found, std::set<std::uint32_t>> call(Table& table, std::uint32_t layer, std::uint64_t step, const ids& needed) {
    std::map<found, std::set<std::uint32_t>> by;
    for (const ps::resolution& r : table.resolve(layer, step, needed)) {
        by[r.how].insert(r.expert);
    }
    table.commit();
    return by;
}

/// A slow and plain statement of the same rules: maps of what is where, one victim sought at a time among all slots.
template <class Eviction, class Sharing>
class model {
public:
    model(std::uint32_t layers, std::uint32_t experts, std::uint32_t slots) : layers_(layers), experts_(experts), slots_(slots) {}

    std::vector<ps::resolution> resolve(std::uint32_t layer, std::uint64_t step, const ids& list) {
        std::set<std::uint32_t> needed;
        for (const std::int32_t id : list) {
            if (id >= 0 && id < static_cast<std::int32_t>(experts_)) {
                needed.insert(layer * experts_ + static_cast<std::uint32_t>(id));
            }
        }
        std::map<std::uint32_t, ps::resolution> out;
        std::vector<std::uint32_t> newcomers;
        std::set<std::uint32_t> taken;
        for (const std::uint32_t key : needed) {
            ps::note_use<Eviction>(seen[key], step);
            out[key] = {key % experts_, found::overflow, ps::no_slot, 0};
            if (const auto slot = slot_of(key)) {
                if (in[*slot].ready) {
                    out[key] = {key % experts_, found::hit, *slot, 0};
                } else if (!in[*slot].pinned) {
                    out[key] = {key % experts_, found::filling, *slot, 0};
                    seen[key].filled = step;
                }
            } else {
                newcomers.push_back(key);
            }
        }
        std::stable_sort(newcomers.begin(), newcomers.end(),
                         [&](std::uint32_t a, std::uint32_t b) { return Eviction::score(seen[a], step) > Eviction::score(seen[b], step); });
        const ps::slot_range mine = Sharing::range(layer, layers_, slots_);
        for (const std::uint32_t key : newcomers) {
            std::optional<std::uint32_t> best;
            double lowest = 0;
            for (std::uint32_t s = mine.first; s < mine.end; ++s) {
                if (taken.contains(s) || (in.contains(s) && (in[s].pinned || needed.contains(in[s].key)))) {
                    continue;
                }
                const bool empty = !in.contains(s) || !in[s].ready;
                const double score = empty ? -1e300 : static_cast<double>(Eviction::score(seen[in[s].key], step));
                if (!best || score < lowest) {
                    best = s;
                    lowest = score;
                }
            }
            if (!best || (ps::refuses_newcomers<Eviction> && Eviction::score(seen[key], step) < lowest)) {
                continue;
            }
            taken.insert(*best);
            in[*best] = {key, false, false};
            seen[key].filled = step;
            out[key] = {key % experts_, found::filling, *best, 0};
        }
        last_.clear();
        std::vector<ps::resolution> result;
        for (const auto& [key, r] : out) {
            result.push_back(r);
            if (r.how == found::filling) {
                last_.insert(r.slot);
            }
        }
        return result;
    }

    void commit() {
        for (const std::uint32_t s : last_) {
            in[s].ready = true;
        }
        last_.clear();
    }

    [[nodiscard]] std::optional<std::uint32_t> slot_of(std::uint32_t key) const {
        for (const auto& [s, c] : in) {
            if (c.key == key) {
                return s;
            }
        }
        return std::nullopt;
    }

    struct content {
        std::uint32_t key;
        bool ready;
        bool pinned;
    };
    std::map<std::uint32_t, content> in;
    std::map<std::uint32_t, ps::residency_entry> seen;

private:
    std::uint32_t layers_, experts_, slots_;
    std::set<std::uint32_t> last_;
};

}  // namespace

TEST_CASE("S01 a call's misses do not evict each other or its hits, under any rule") {
    SUBCASE("a frequency rule") {
        auto table = table_of<tests::least_used>(1, 8, 2);
        for (std::uint64_t step = 1; step <= 10; ++step) {
            call(table, 0, step, {0, 1});
        }
        CHECK(call(table, 0, 11, {4, 5})[found::filling] == std::set<std::uint32_t>{4, 5});
        CHECK(call(table, 0, 12, {4, 5})[found::hit] == std::set<std::uint32_t>{4, 5});
    }
    SUBCASE("LFRU") {
        auto table = table_of<eviction::lfru<100>>(1, 8, 2);
        for (std::uint64_t step = 1; step <= 10; ++step) {
            call(table, 0, step, {0, 1});
        }
        CHECK(call(table, 0, 11, {4, 5})[found::filling] == std::set<std::uint32_t>{4, 5});
        CHECK(call(table, 0, 12, {4, 5})[found::hit] == std::set<std::uint32_t>{4, 5});
    }
    SUBCASE("LRU with one slot more") {
        auto table = table_of<eviction::lru>(1, 8, 3);
        call(table, 0, 1, {0, 1});
        call(table, 0, 2, {2});
        auto by = call(table, 0, 3, {1, 4, 0});
        CHECK(by[found::hit] == std::set<std::uint32_t>{0, 1});
        CHECK(by[found::filling] == std::set<std::uint32_t>{4});
        CHECK(call(table, 0, 4, {0, 1, 4})[found::hit].size() == 3);
    }
}

TEST_CASE("S02 a call of more experts than there are slots computes the rest without caching it") {
    SUBCASE("six experts of 16 tokens, four slots") {
        auto table = table_of<eviction::lru>(1, 8, 4);
        auto by = call(table, 0, 1, {0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 0, 3, 1, 4, 2, 5, 5, 4, 3, 2, 1, 0, 0, 5, 1, 4, 2, 3, 0, 2});
        CHECK(by[found::filling] == std::set<std::uint32_t>{0, 1, 2, 3});
        CHECK(by[found::overflow] == std::set<std::uint32_t>{4, 5});
        by = call(table, 0, 2, {5, 4, 3, 2, 1, 0});
        CHECK(by[found::hit] == std::set<std::uint32_t>{0, 1, 2, 3});
        CHECK(by[found::overflow] == std::set<std::uint32_t>{4, 5});
        CHECK(table.counters().overflow == 4);
        CHECK(table.counters().misses == 8);
        CHECK(table.counters().bytes == 8000);
    }
    SUBCASE("eight experts, one slot") {
        auto table = table_of<eviction::lru>(1, 8, 1);
        for (std::uint64_t step = 1; step < 5; ++step) {
            auto by = call(table, 0, step, {0, 1, 2, 3, 4, 5, 6, 7});
            CHECK(by[found::hit].size() == (step > 1));
            CHECK(by[found::overflow].size() == 7);
        }
    }
    SUBCASE("no slot at all") {
        auto table = table_of<eviction::lru>(1, 8, 0);
        CHECK(call(table, 0, 1, {3, 1})[found::overflow] == std::set<std::uint32_t>{1, 3});
    }
}

TEST_CASE("S09 what was used a thousand times leaves when it is used no more") {
    const auto misses_after = [](auto table) {
        for (std::uint64_t step = 1; step <= 1000; ++step) {
            call(table, 0, step, {0});
        }
        table.reset_counters();
        for (std::uint64_t step = 1001; step <= 1100; ++step) {
            call(table, 0, step, {step % 2 == 0 ? 1 : 2});
        }
        return table.counters().misses;
    };
    CHECK(misses_after(table_of<eviction::lru>(1, 3, 2)) == 2);
    CHECK(misses_after(table_of<eviction::lfru<4>>(1, 3, 2)) < 20);
    CHECK(misses_after(table_of<eviction::lfru<16>>(1, 3, 2)) < 2 * 16);
    CHECK(misses_after(table_of<eviction::last_step_first<eviction::lfru<16>>>(1, 3, 2)) < 2 * 16);
    CHECK(misses_after(table_of<eviction::selective<eviction::lfru<4>>>(1, 3, 2)) < 20);
    CHECK(misses_after(table_of<tests::least_used>(1, 3, 2)) > 90);  // what happens without ageing
}

TEST_CASE("S12 slots follow their experts, whatever their numbers") {
    auto table = table_of<eviction::lru>(1, 8, 3);
    std::vector<std::uint32_t> in_slot(3, 99);  // stands for an expert's weights, scales and bias
    std::uint64_t step = 0;
    for (const std::int32_t expert : {5, 2, 7, 5, 0}) {
        const ps::resolution r = table.resolve(0, ++step, ids{expert}).front();
        REQUIRE(r.slot < 3);
        if (r.how == found::filling) {
            in_slot[r.slot] = static_cast<std::uint32_t>(expert);
        }
        CHECK(in_slot[r.slot] == static_cast<std::uint32_t>(expert));
        table.commit();
    }
    CHECK(table.counters().hits == 1);
    CHECK(in_slot == std::vector<std::uint32_t>{5, 0, 7});  // 2 was used longest ago
}

TEST_CASE("a fill that was not committed is a miss, and the first to leave") {
    auto table = table_of<eviction::lru>(1, 8, 2);
    const ps::slot_table_ref<eviction::lru> ref = table.ref();
    call(table, 0, 1, {0});
    std::vector<ps::resolution> lost(1);
    REQUIRE(ref.resolve(0, 2, ids{1}.data(), 1, lost.data()) == 1);  // the call fails: no commit
    CHECK(ref.find(1) == ps::no_slot);
    SUBCASE("its expert fills the slot again") {
        const ps::resolution again = table.resolve(0, 3, ids{1}).front();
        CHECK(again.how == found::filling);
        CHECK(again.slot == lost[0].slot);
        ref.commit(lost.data(), 1);  // late: about bytes that another fill may have overwritten
        CHECK(ref.find(1) == ps::no_slot);
        table.commit();
        CHECK(ref.find(1) == again.slot);
    }
    SUBCASE("another takes the slot, and the late commit is about nobody") {
        const ps::resolution other = table.resolve(0, 3, ids{2}).front();
        CHECK(other.slot == lost[0].slot);
        CHECK(table.counters().evictions == 0);
        ref.commit(lost.data(), 1);
        CHECK(ref.find(1) == ps::no_slot);
        CHECK(ref.find(2) == ps::no_slot);
        table.commit();
        CHECK(ref.find(2) == other.slot);
        CHECK(ref.find(0) != ps::no_slot);
    }
    SUBCASE("the host fills it instead, and the late commit is not about that") {
        CHECK(ref.reserve(0, 1, 3) == lost[0].slot);
        ref.commit(lost.data(), 1);
        CHECK(ref.find(1) == ps::no_slot);
        ref.publish(lost[0].slot);
        CHECK(ref.find(1) == lost[0].slot);
    }
}

TEST_CASE("a fill of the host's is neither served nor a victim until it is published") {
    auto table = table_of<eviction::lru>(1, 8, 2);
    const auto ref = table.ref();
    const std::uint32_t slot = ref.reserve(0, 3, 1);
    REQUIRE(slot != ps::no_slot);
    auto by = call(table, 0, 2, {3, 4, 5});
    CHECK(by[found::overflow] == std::set<std::uint32_t>{3, 5});
    CHECK(by[found::filling] == std::set<std::uint32_t>{4});
    ref.publish(slot);
    CHECK(call(table, 0, 3, {3})[found::hit].size() == 1);
    ref.pin(slot);
    CHECK(call(table, 0, 4, {5, 6})[found::overflow] == std::set<std::uint32_t>{6});
    ref.unpin(slot);
    CHECK(call(table, 0, 5, {6})[found::filling].size() == 1);
    CHECK(ref.find(3) == ps::no_slot);  // used before 5
    const std::uint32_t given_up = ref.reserve(0, 7, 6);
    ref.abandon(given_up);
    CHECK(ref.slot_at[given_up].state == ps::slot_state::free);
    CHECK(call(table, 0, 6, {7})[found::filling].size() == 1);
}

TEST_CASE("slots of a layer are its own, or everybody's") {
    auto apart = table_of<eviction::lru, sharing::per_layer>(3, 8, 7);
    call(apart, 0, 1, {0, 1, 2, 3});
    CHECK(apart.counters(0).overflow == 2);
    call(apart, 2, 1, {0, 1, 2, 3});
    CHECK(apart.counters(2).overflow == 1);
    CHECK(call(apart, 0, 2, {0, 1})[found::hit].size() == 2);
    auto common = table_of<eviction::lru>(3, 8, 7);
    call(common, 0, 1, {0, 1, 2, 3});
    call(common, 2, 1, {0, 1, 2, 3});
    CHECK(common.counters().overflow == 0);
    CHECK(common.counters(2).evictions == 1);
    CHECK(call(common, 0, 2, {0, 1, 2, 3})[found::hit].size() == 3);
}

TEST_CASE("hot experts leave for nobody, the others share the rest") {
    auto table = table_of<eviction::hot_set<>>(1, 8, 3);
    table.mark_hot(std::vector<std::uint32_t>{2, 6});
    call(table, 0, 1, {0, 1, 2});
    call(table, 0, 2, {6});
    for (std::uint64_t step = 3; step < 20; ++step) {
        CHECK(call(table, 0, step, {step % 2 == 0 ? 3 : 4})[found::filling].size() == 1);
    }
    CHECK(call(table, 0, 20, {2, 6})[found::hit].size() == 2);
    auto full = table_of<eviction::hot_set<>>(1, 8, 2);
    full.mark_hot(std::vector<std::uint32_t>{2, 6});
    call(full, 0, 1, {2, 6});
    CHECK(call(full, 0, 2, {1})[found::overflow].size() == 1);
}

TEST_CASE("a selective rule keeps what is used often from what is used once") {
    auto table = table_of<eviction::selective<eviction::lfru<64>>>(1, 64, 2);
    std::uint64_t step = 0;
    for (; step < 20; ++step) {
        call(table, 0, step, {0, 1});
    }
    for (std::int32_t once = 2; once < 12; ++once) {
        CHECK(call(table, 0, ++step, {once})[found::overflow].size() == 1);
    }
    CHECK(call(table, 0, ++step, {0, 1})[found::hit].size() == 2);
}

TEST_CASE("ids that are none count nothing, repeated ones once, and their order changes nothing") {
    auto table = table_of<eviction::lru>(2, 4, 8);
    CHECK(table.resolve(1, 1, ids{-1, 4, 2, -7, 2147483647, 2}).size() == 1);
    table.commit();
    CHECK(table.counters(1).misses == 1);
    CHECK(table.resolve(1, 2, ids{}).empty());
    std::mt19937 random(5);
    auto straight = table_of<eviction::lfru<8>>(2, 16, 6);
    auto shuffled = table_of<eviction::lfru<8>>(2, 16, 6);
    for (std::uint64_t step = 1; step < 2000; ++step) {
        ids needed;
        for (int i = 0; i < 5; ++i) {
            needed.push_back(static_cast<std::int32_t>(random() % 16));
        }
        const auto layer = static_cast<std::uint32_t>(step % 2);
        call(straight, layer, step, needed);
        std::shuffle(needed.begin(), needed.end(), random);
        needed.push_back(needed.front());
        call(shuffled, layer, step, needed);
        for (std::uint32_t s = 0; s < 6; ++s) {
            REQUIRE(straight.slots()[s].key == shuffled.slots()[s].key);
        }
    }
}

TEST_CASE("a table refuses what it cannot count") {
    const std::vector<std::uint32_t> experts{4, 4};
    const std::vector<std::uint64_t> one{1};
    CHECK_THROWS_AS((ps::slot_table<eviction::lru>(experts, 1, one)), ps::configuration_error);
    const std::vector<std::uint32_t> many{4000000000u, 4000000000u};
    CHECK_THROWS_AS((ps::slot_table<eviction::lru>(many, 1)), ps::configuration_error);
}

/// Rules and who shares slots.
template <class Eviction, class Sharing>
struct setting {
    using eviction = Eviction;
    using sharing = Sharing;
};

TEST_CASE_TEMPLATE("12,000 random calls agree with a plain model, some never committed, with fills of the host's between", S,
                   setting<eviction::lru, sharing::all_layers>, setting<eviction::lru, sharing::per_layer>,
                   setting<eviction::lfru<16>, sharing::all_layers>, setting<eviction::lfru<3>, sharing::per_layer>,
                   setting<eviction::hot_set<>, sharing::all_layers>,
                   setting<eviction::last_step_first<eviction::lfru<16>>, sharing::all_layers>,
                   setting<eviction::selective<eviction::lfru<16>>, sharing::all_layers>,
                   setting<tests::second_chance, sharing::all_layers>, setting<tests::at_random, sharing::per_layer>) {
    constexpr std::uint32_t layers = 3;
    constexpr std::uint32_t experts = 10;
    constexpr std::uint32_t slots = 11;
    using E = typename S::eviction;
    using Sharing = typename S::sharing;
    auto table = table_of<E, Sharing>(layers, experts, slots);
    const auto ref = table.ref();
    model<E, Sharing> plain(layers, experts, slots);
    const std::vector<std::uint32_t> hot{0, 3, 11, 12, 25};
    table.mark_hot(hot);
    for (const std::uint32_t key : hot) {
        plain.seen[key].hot = 1;
    }
    std::mt19937 random(11);
    std::uint64_t hits = 0, misses = 0, overflow = 0;
    std::vector<std::uint32_t> under_way;
    for (std::uint64_t n = 0; n < 12000; ++n) {
        const auto layer = static_cast<std::uint32_t>(n % layers);
        const std::uint64_t step = 1 + n / layers;
        ids needed;
        for (std::uint64_t i = random() % 7; i > 0; --i) {
            needed.push_back(static_cast<std::int32_t>(random() % (random() % 2 ? experts + 1 : 3)) - (random() % 50 == 0 ? 9 : 0));
        }
        const auto got = table.resolve(layer, step, needed);
        const auto wanted = plain.resolve(layer, step, needed);
        REQUIRE(got.size() == wanted.size());
        std::set<std::uint32_t> in_use;
        for (std::size_t i = 0; i < got.size(); ++i) {
            REQUIRE(got[i].expert == wanted[i].expert);
            REQUIRE(got[i].how == wanted[i].how);
            REQUIRE(got[i].slot == wanted[i].slot);
            hits += got[i].how == found::hit;
            misses += got[i].how != found::hit;
            overflow += got[i].how == found::overflow;
            if (got[i].how != found::overflow) {
                REQUIRE(in_use.insert(got[i].slot).second);  // nobody's slot is another's of the same call
                REQUIRE(ref.slot_at[got[i].slot].key == table.key(layer, got[i].expert));
            }
        }
        if (random() % 8 != 0) {
            table.commit();
            plain.commit();
        }
        if (under_way.size() < 2 && random() % 16 == 0) {
            const auto e = static_cast<std::uint32_t>(random() % experts);
            if (const std::uint32_t key = table.key(layer, e); ref.expert_at[key].slot == ps::no_slot) {
                if (const std::uint32_t s = ref.reserve(layer, e, step); s != ps::no_slot) {
                    REQUIRE((!plain.in.contains(s) || !plain.in[s].pinned));
                    plain.in[s] = {key, false, true};
                    plain.seen[key].filled = step;
                    under_way.push_back(s);
                }
            }
        } else if (!under_way.empty() && random() % 4 == 0) {
            const std::uint32_t s = under_way.back();
            under_way.pop_back();
            if (random() % 3 == 0) {
                ref.abandon(s);
                plain.in.erase(s);
            } else {
                ref.publish(s);
                plain.in[s].ready = true;
                plain.in[s].pinned = false;
            }
        }
        std::map<std::uint32_t, std::uint32_t> owner;
        for (std::uint32_t s = 0; s < slots; ++s) {
            REQUIRE((ref.slot_at[s].state == ps::slot_state::free) == !plain.in.contains(s));
            if (plain.in.contains(s)) {
                REQUIRE(ref.slot_at[s].key == plain.in[s].key);
                REQUIRE((ref.slot_at[s].state == ps::slot_state::resident) == plain.in[s].ready);
                REQUIRE(owner.emplace(ref.slot_at[s].key, s).second);
                REQUIRE(ref.expert_at[ref.slot_at[s].key].slot == s);
            }
        }
    }
    const ps::residency_counters c = table.counters();
    CHECK(c.hits == hits);
    CHECK(c.misses == misses);
    CHECK(c.overflow == overflow);
    CHECK(c.bytes == 1000 * misses);
    CHECK(hits > 1000);
    CHECK(overflow > 0);
}

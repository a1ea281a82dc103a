#include <penstock/policy/axis.hpp>
#include <penstock/policy/chunking.hpp>
#include <penstock/policy/eviction.hpp>
#include <penstock/policy/memory.hpp>
#include <penstock/policy/prefetch.hpp>
#include <penstock/policy/scheduling.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

namespace ps = penstock;
using namespace ps::literals;

namespace {

template <class Axis, class Default, class... Ps>
constexpr bool picks(auto expected) {
    return std::is_same_v<ps::pick_policy<Axis, Default, Ps...>, decltype(expected)>;
}

std::vector<ps::chunk> drain(auto& queue) {
    std::vector<ps::chunk> all;
    while (std::optional<ps::chunk> c = queue.next()) {
        all.push_back(*c);
    }
    return all;
}

/// Every tile goes to exactly one scope, and a scope's tiles end for good.
template <class Order>
void check_order(std::uint32_t scopes, std::uint32_t tiles) {
    std::vector<int> taken(tiles, 0);
    for (std::uint32_t scope = 0; scope < scopes; ++scope) {
        bool ended = false;
        for (std::uint32_t i = 0; i <= tiles; ++i) {
            const std::uint32_t t = Order::tile(i, scope, scopes, tiles);
            REQUIRE(t <= tiles);
            if (t == tiles) {
                ended = true;
            } else {
                CHECK_FALSE(ended);
                ++taken[t];
            }
        }
        CHECK(ended);
    }
    CHECK(std::ranges::all_of(taken, [](int n) { return n == 1; }));
}

struct not_a_policy {};

struct stingy_memory {  // no member page_aligned
    using policy_axis = ps::axis::memory;
    static constexpr bool host_accessible = true;
    static constexpr bool device_accessible = false;
};

struct queue_without_next {
    using policy_axis = ps::axis::scheduling;
    struct queue {
        void push(ps::request) {}
    };
};

}  // namespace

TEST_CASE("chunking that suits its source is fixed chunking with a lower limit") {
    constexpr ps::chunking::suited<16_MiB> c;
    static_assert(ps::chunking_policy<ps::chunking::suited<16_MiB>>);
    CHECK(c.bytes_per_chunk(0, 1_GiB) == 16_MiB);
    CHECK(c.within(1_MiB).bytes_per_chunk(0, 1_GiB) == 1_MiB);
    CHECK(c.within(1_MiB).bytes_per_chunk(1000, 1_GiB) == (1 << 20) / 1000 * 1000);
    CHECK(c.within(1_GiB).bytes_per_chunk(0, 1_GiB) == 16_MiB);
    CHECK(c.within(0).bytes_per_chunk(0, 1_GiB) == 128);
}

TEST_CASE("one policy an axis is picked, in any order, or the default") {
    using namespace ps;
    static_assert(picks<axis::memory, memory::pinned>(memory::pinned{}));
    static_assert(picks<axis::memory, memory::pinned, chunking::whole, memory::device, prefetch::none>(memory::device{}));
    static_assert(picks<axis::memory, memory::pinned, prefetch::none, memory::device, chunking::whole>(memory::device{}));
    static_assert(picks<axis::chunking, chunking::whole, prefetch::none, memory::device>(chunking::whole{}));
    static_assert(picks<axis::prefetch, prefetch::depth<24>, prefetch::depth<3>>(prefetch::depth<3>{}));
    static_assert(picks<axis::eviction, eviction::lru, scheduler::fifo>(eviction::lru{}));
    CHECK(ps::detail::axis_count<axis::memory, memory::pinned, prefetch::none, memory::pinned> == 2);
    CHECK(ps::detail::axis_count<axis::memory, not_a_policy, int> == 0);
    CHECK(ps::detail::all_policies<memory::pinned, scheduler::fifo>);
    CHECK(ps::detail::all_policies<>);
    CHECK_FALSE(ps::detail::all_policies<memory::pinned, not_a_policy>);
    CHECK_FALSE(ps::detail::all_policies<int>);
}

TEST_CASE("the concepts of the axes accept the library's policies and nothing else") {
    using namespace ps;
    static_assert(memory_policy<memory::pageable> && memory_policy<memory::pinned> && memory_policy<memory::write_combined>);
    static_assert(memory_policy<memory::registered> && memory_policy<memory::device> && memory_policy<memory::peer>);
    static_assert(memory_policy<memory::tiered<memory::device, memory::pinned>>);
    static_assert(allocating_memory<memory::pageable> && allocating_memory<memory::pinned> && allocating_memory<memory::device>);
    static_assert(!allocating_memory<memory::registered> && !allocating_memory<memory::peer>);
    static_assert(!memory_policy<stingy_memory> && !memory_policy<chunking::whole>);
    static_assert(chunking_policy<chunking::whole> && chunking_policy<chunking::fixed<1_MiB>> && chunking_policy<chunking::rows<4>> &&
                  chunking_policy<chunking::run_time>);
    static_assert(!chunking_policy<prefetch::none>);
    static_assert(prefetch_policy<prefetch::none> && prefetch_policy<prefetch::depth<2>> && prefetch_policy<prefetch::budget<1_GiB>> &&
                  prefetch_policy<prefetch::run_time>);
    static_assert(host_scheduler<scheduler::fifo> && device_scheduler<scheduler::fifo>);
    static_assert(host_scheduler<scheduler::round_robin> && device_scheduler<scheduler::round_robin>);
    static_assert(host_scheduler<scheduler::priority<3>> && !device_scheduler<scheduler::priority<3>>);
    static_assert(!scheduling_policy<queue_without_next>);
    static_assert(eviction_policy<eviction::lru> && !eviction_policy<scheduler::fifo>);
    CHECK(std::is_same_v<memory::pinned, memory::basic_pinned<memory::write_combining::no>>);
}

TEST_CASE("memory kinds say who can reach them") {
    using namespace ps::memory;
    CHECK(pageable::host_accessible);
    CHECK_FALSE(pageable::device_accessible);
    CHECK(pinned::device_accessible);
    CHECK(registered::device_accessible);
    CHECK_FALSE(device::host_accessible);
    CHECK(tiered<device, pinned>::device_accessible);
    CHECK_FALSE(tiered<device, pinned>::host_accessible);
    CHECK_FALSE(tiered<device, pageable>::device_accessible);
}

TEST_CASE("pageable memory is exact, aligned to a page, and nothing for nothing") {
    void* p = ps::memory::pageable::allocate(1000);
    CHECK(reinterpret_cast<std::uintptr_t>(p) % ps::memory::page_bytes == 0);
    ps::memory::pageable::deallocate(p, 1000);
    CHECK(ps::memory::pageable::allocate(0) == nullptr);
    ps::memory::pageable::deallocate(nullptr, 0);
    CHECK(ps::memory::pinned::allocate(0) == nullptr);
    CHECK(ps::memory::device::allocate(0) == nullptr);
    CHECK_THROWS_AS(static_cast<void>(ps::memory::pageable::allocate(std::size_t{1} << 62)), ps::out_of_memory);
}

TEST_CASE("fixed chunks hold whole rows where they fit and cut a longer row at multiples of 128 bytes") {
    constexpr ps::chunking::fixed<4096_B> c;
    CHECK(c.bytes_per_chunk(0, 1000000) == 4096);     // no rows
    CHECK(c.bytes_per_chunk(1000, 1000000) == 4000);  // four rows
    CHECK(c.bytes_per_chunk(4096, 1000000) == 4096);
    CHECK(c.bytes_per_chunk(4097, 1000000) == 4096);  // a longer row is cut
    CHECK(ps::chunking::fixed<1000_B>{}.bytes_per_chunk(5000, 1000000) == 896);
    CHECK(ps::chunking::fixed<128_B>{}.bytes_per_chunk(129, 1000000) == 128);
    CHECK(ps::chunking::run_time{1000_B}.bytes_per_chunk(5000, 1000000) == 896);
    CHECK(ps::chunking::run_time{1_B}.bytes_per_chunk(5000, 1000000) == 128);
    for (std::uint64_t row = 0; row < 300; ++row) {
        CHECK(ps::chunking::run_time{777_B}.bytes_per_chunk(row, 1000) == ps::chunking::fixed<777_B>{}.bytes_per_chunk(row, 1000));
    }
}

TEST_CASE("whole and row chunks are never empty where there are bytes") {
    CHECK(ps::chunking::whole{}.bytes_per_chunk(77, 123456789012u) == 123456789012u);
    CHECK(ps::chunking::whole{}.bytes_per_chunk(0, 0) == 1);
    CHECK(ps::chunking::rows<3>{}.bytes_per_chunk(100, 1000) == 300);
    CHECK(ps::chunking::rows<3>{}.bytes_per_chunk(0, 1000) == 1000);
    CHECK(ps::chunking::rows<4000000000u>{}.bytes_per_chunk(4096, 1) == 4000000000u * std::uint64_t{4096});
}

TEST_CASE("prefetch depths are at least one") {
    CHECK(ps::prefetch::none{}.chunks_ahead(8_MiB) == 1);
    CHECK(ps::prefetch::depth<24>{}.chunks_ahead(8_MiB) == 24);
    CHECK(ps::prefetch::budget<64_MiB>{}.chunks_ahead(8_MiB) == 8);
    CHECK(ps::prefetch::budget<64_MiB>{}.chunks_ahead(65_MiB) == 1);
    CHECK(ps::prefetch::budget<64_MiB>{}.chunks_ahead(0) == 1u << 20);
    CHECK(ps::prefetch::run_time{}.chunks_ahead(1) == 24);
    CHECK(ps::prefetch::run_time{0}.chunks_ahead(1) == 1);
}

TEST_CASE("fifo finishes one request before the next") {
    ps::scheduler::fifo::queue q;
    CHECK(q.next() == std::nullopt);
    q.push({.id = 7, .chunks = 2});
    q.push({.id = 8, .chunks = 0});
    q.push({.id = 9, .chunks = 3, .level = ps::urgency::on_demand});
    CHECK(drain(q) == std::vector<ps::chunk>{{7, 0}, {7, 1}, {9, 0}, {9, 1}, {9, 2}});
    q.push({.id = 1, .chunks = 1});
    CHECK(drain(q) == std::vector<ps::chunk>{{1, 0}});
}

TEST_CASE("round robin gives each request one chunk in turn") {
    ps::scheduler::round_robin::queue q;
    q.push({.id = 1, .chunks = 3});
    q.push({.id = 2, .chunks = 1});
    q.push({.id = 3, .chunks = 0});
    q.push({.id = 4, .chunks = 2});
    CHECK(drain(q) == std::vector<ps::chunk>{{1, 0}, {2, 0}, {4, 0}, {1, 1}, {4, 1}, {1, 2}});
}

TEST_CASE("priority lets the urgent pass at the next chunk, and goes on where it was") {
    ps::scheduler::priority<3>::queue q;
    q.push({.id = 1, .chunks = 3, .level = ps::urgency::background});
    q.push({.id = 2, .chunks = 2, .level = ps::urgency::prefetch});
    CHECK(q.next() == ps::chunk{2, 0});
    q.push({.id = 3, .chunks = 2, .level = ps::urgency::on_demand});
    q.push({.id = 4, .chunks = 1, .level = ps::urgency::on_demand});
    CHECK(drain(q) == std::vector<ps::chunk>{{3, 0}, {3, 1}, {4, 0}, {2, 1}, {1, 0}, {1, 1}, {1, 2}});

    ps::scheduler::priority<2>::queue two;  // background counts as the last level there is
    two.push({.id = 1, .chunks = 1, .level = ps::urgency::background});
    two.push({.id = 2, .chunks = 1, .level = ps::urgency::prefetch});
    two.push({.id = 3, .chunks = 1, .level = ps::urgency::on_demand});
    CHECK(drain(two) == std::vector<ps::chunk>{{3, 0}, {1, 0}, {2, 0}});
}

TEST_CASE("device orders hand out each tile exactly once") {
    for (const std::uint32_t scopes : {1u, 2u, 7u, 32u}) {
        for (const std::uint32_t tiles : {0u, 1u, 6u, 7u, 8u, 100u}) {
            check_order<ps::scheduler::fifo::order>(scopes, tiles);
            check_order<ps::scheduler::round_robin::order>(scopes, tiles);
        }
    }
    CHECK(ps::scheduler::fifo::order::tile(0, 1, 2, 8) == 4);         // a contiguous run
    CHECK(ps::scheduler::round_robin::order::tile(1, 1, 2, 8) == 3);  // like cards
    CHECK(ps::scheduler::round_robin::order::tile(4000000000u, 1, 4000000000u, 8) == 8);
}

TEST_CASE("the least recently used has the lowest score") {
    const ps::residency_entry old{.last_used = 3, .uses = 100, .filled = 1};
    const ps::residency_entry young{.last_used = 4, .uses = 1, .filled = 4};
    CHECK(ps::eviction::lru::score(old, 10) < ps::eviction::lru::score(young, 10));
    CHECK(ps::eviction::lru::score(old, 10) == ps::eviction::lru::score(old, 11));
}

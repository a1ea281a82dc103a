#include <penstock/buffer/ring.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

namespace {

using namespace penstock;
using namespace penstock::literals;
using namespace std::chrono_literals;

using small_ring = ring<memory::pageable, chunking::fixed<1000_B>, prefetch::depth<3>>;

static_assert(std::is_same_v<small_ring, ring<prefetch::depth<3>, memory::pageable, chunking::fixed<1000_B>>>);
static_assert(std::is_same_v<ring<>, ring<memory::pinned>>);
static_assert(std::is_same_v<small_ring::memory, memory::pageable>);
static_assert(small_ring::bytes_needed() == 3 * 4096);

constexpr ring_state after(std::uint32_t steps, std::uint32_t stages) {
    ring_state s;
    for (std::uint32_t i = 0; i < steps; ++i) {
        s.advance(stages);
    }
    return s;
}

}  // namespace

TEST_CASE("a ring state wraps and flips its phase at each wrap") {
    static_assert(after(0, 3) == ring_state{0, 0});
    static_assert(after(2, 3) == ring_state{2, 0});
    static_assert(after(3, 3) == ring_state{0, 1});
    static_assert(after(7, 3) == ring_state{1, 0});
    static_assert(after(5, 1) == ring_state{0, 1});
    static_assert(std::is_trivially_copyable_v<ring_state>);
    for (std::uint32_t stages = 1; stages < 9; ++stages) {
        for (std::uint32_t n = 0; n < 50; ++n) {
            CHECK(after(n, stages).index == n % stages);
            CHECK(after(n, stages).phase == n / stages % 2);
        }
    }
}

TEST_CASE("slots are filled and copied in turn, and come back when they die") {
    small_ring r;
    CHECK(r.slots() == 3);
    CHECK(r.slot_bytes() == 1000);
    std::vector<std::byte> out(1000 * 10);
    std::vector<std::byte*> seen;
    for (std::size_t i = 0; i < 10; ++i) {
        auto slot = r.acquire();
        REQUIRE(slot);
        CHECK(slot.bytes().size() == 1000);
        seen.push_back(slot.bytes().data());
        std::fill(slot.bytes().begin(), slot.bytes().end(), static_cast<std::byte>(i));
        slot.copy_to(out.data() + i * 1000);
    }
    CHECK(std::set(seen.begin(), seen.end()).size() == 3);
    for (std::size_t i = 0; i < 10; ++i) {
        CHECK(seen[i] == seen[i % 3]);
        CHECK(out[i * 1000] == static_cast<std::byte>(i));
        CHECK(out[i * 1000 + 999] == static_cast<std::byte>(i));
    }
    r.close();
    CHECK_FALSE(r.acquire());
}

TEST_CASE("acquire waits for the oldest slot, and close releases who waits") {
    small_ring r;
    auto first = r.acquire();
    auto second = r.acquire();
    auto third = r.acquire();
    std::byte* oldest = first.bytes().data();
    std::atomic<std::byte*> got{nullptr};
    std::thread waiter([&] { got = r.acquire().bytes().data(); });
    second = {};  // not the oldest: the waiter stays
    std::this_thread::sleep_for(20ms);
    CHECK(got.load() == nullptr);
    first = {};
    waiter.join();
    CHECK(got.load() == oldest);
    second = r.acquire();
    std::thread last([&] {
        CHECK_FALSE(r.acquire());  // the third is still out
        CHECK_FALSE(r.acquire());
    });
    std::this_thread::sleep_for(20ms);
    r.close();
    last.join();
    CHECK(third.bytes().size() == 1000);
}

TEST_CASE("many threads share a ring without sharing a slot") {
    ring<memory::pageable, chunking::fixed<128_B>, prefetch::depth<4>> r;
    std::atomic<int> wrong{0};
    {
        std::vector<std::jthread> threads;
        for (int n = 0; n < 8; ++n) {
            threads.emplace_back([&, n] {
                for (int i = 0; i < 500; ++i) {
                    auto slot = r.acquire();
                    std::fill(slot.bytes().begin(), slot.bytes().end(), static_cast<std::byte>(n));
                    wrong += static_cast<int>(std::count(slot.bytes().begin(), slot.bytes().end(), static_cast<std::byte>(n))) != 128;
                }
            });
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE("a ring over the caller's memory says how much it needs") {
    using r = ring<memory::pageable, chunking::fixed<1000_B>, prefetch::depth<2>>;
    std::vector<std::byte> memory(r::bytes_needed());
    {
        r over(std::span<std::byte>{memory});
        auto slot = over.acquire();
        CHECK(slot.bytes().data() == memory.data());
        CHECK(over.acquire().bytes().data() == memory.data() + 4096);
    }
    CHECK_THROWS_WITH_AS(r(std::span(memory).first(memory.size() - 1)), doctest::Contains("needs 8192 bytes, 8191 were given"),
                         configuration_error);
    using over_registered = ring<memory::registered, chunking::fixed<1000_B>, prefetch::depth<2>>;
    static_assert(!std::is_default_constructible_v<over_registered>);
    CHECK(over_registered(std::span<std::byte>{memory}).slots() == 2);
}

TEST_CASE("a ring of whole rows is told the size of a row") {
    using rows = ring<memory::pageable, chunking::rows<4>, prefetch::budget<64_KiB>>;
    CHECK_THROWS_AS(rows{}, configuration_error);
    rows r(1500);
    CHECK(r.slot_bytes() == 6000);
    CHECK(r.slots() == 10);
    CHECK(rows::bytes_needed(1500) == 10 * 8192);
    CHECK(ring<memory::pageable, chunking::fixed<4000_B>, prefetch::none>(1500).slot_bytes() == 3000);
}

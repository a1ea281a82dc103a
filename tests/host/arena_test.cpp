#include "../fault_injection.hpp"

#include <penstock/buffer/arena.hpp>
#include <penstock/stream/staging.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

namespace {

using namespace penstock;
using namespace penstock::literals;

using faults::had_by;
using faults::ledger;
using shim_arena = basic_arena<faults::pinning>;
constexpr arena_options pinned_there{.device = 0};

}  // namespace

TEST_CASE("M05 whole-region registration fails, segments succeed") {
    ledger books;
    books.locking.largest = 64 << 20;
    {
        shim_arena a(200'000'001, pinned_there, {&books});
        CHECK(a.pinned());
        CHECK(a.how() == "huge pages, registered in pieces of 64.0 MiB");
        CHECK(books.blocks(had_by::locking) == 3);
        CHECK(books.bytes() == 200'003'584);
        a.data()[200'000'000] = std::byte{1};
        auto moved = std::move(a);
        CHECK(books.blocks(had_by::locking) == 3);
    }
    CHECK(books.clean());
}

TEST_CASE("M05 one segment fails: earlier ones are unregistered once, and the runtime's memory takes their place") {
    ledger books;
    books.locking.largest = 64 << 20;
    books.locking.failing_call = 1 + 2;  // the whole, then the third of four pieces
    {
        shim_arena a(256 << 20, pinned_there, {&books});
        CHECK(a.pinned());
        CHECK(a.how().find("cudaHostAlloc (cudaHostRegister of 64.0 MiB") == 0);
        CHECK(books.blocks(had_by::locking) == 0);
        CHECK(books.blocks(had_by::allocating) == 1);
        CHECK(books.bytes() == 256 << 20);
    }
    CHECK(books.clean());
    ledger stingy;
    stingy.locking.largest = 64 << 20;
    stingy.locking.failing_call = 1 + 2;
    stingy.allocating.largest = 0;
    {
        shim_arena a(256 << 20, pinned_there, {&stingy});
        CHECK_FALSE(a.pinned());
        CHECK(a.how().find("huge pages, pageable (cudaHostRegister of 64.0 MiB") == 0);
        CHECK(a.how().find("; cudaHostAlloc:") != std::string::npos);
        a.data()[(256 << 20) - 1] = std::byte{1};
    }
    CHECK(stingy.clean());
}

TEST_CASE("an arena is registered whole when it can be, and rounded up to a page only") {
    ledger books;
    {
        const shim_arena a(5'000'001, pinned_there, {&books});
        CHECK(a.how() == "huge pages, registered");
        CHECK(books.blocks(had_by::locking) == 1);
        CHECK(books.bytes() == shim_arena::bytes_needed(5'000'001));
        CHECK(shim_arena::bytes_needed(5'000'001) - 5'000'001 < 4096);
        CHECK(a.size() == 5'000'001);
        CHECK(reinterpret_cast<std::uintptr_t>(a.data()) % (2 << 20) == 0);
        const shim_arena small(100, {.device = 0, .huge_pages = false}, {&books});
        CHECK(small.how() == "pages of 4 KiB, registered");
    }
    CHECK(books.clean());
}

TEST_CASE("M06 small hard limit on pinned memory: staging makes do with fewer slots, smaller ones, then without pinning") {
    ledger books;
    books.in_all = 64 << 20;
    {
        detail::staging<memory::pinned, faults::pinning> s;
        s.allocate(8 << 20, 24, 0, {&books});
        CHECK(s.slots() == 6);
        CHECK(s.how() == "huge pages, registered");
        CHECK(books.bytes() == s.bytes());
    }
    CHECK(books.clean());
    books.in_all = 5 << 20;
    {
        detail::staging<memory::pinned, faults::pinning> s;
        s.allocate(8 << 20, 24, 0, {&books});
        CHECK(s.slots() == 1);
        CHECK(s.slot_bytes() == 4 << 20);
        CHECK(s.how() == "huge pages, registered");
    }
    CHECK(books.clean());
    books.in_all = 1 << 20;
    {
        detail::staging<memory::pinned, faults::pinning> s;
        s.allocate(8 << 20, 24, 0, {&books});
        CHECK(s.slots() == 24);
        CHECK(s.slot_bytes() == 8 << 20);
        CHECK(s.how().find("pageable (cudaHostRegister of 1.0 MiB") != std::string::npos);
    }
    CHECK(books.clean());
}

TEST_CASE("staging takes at most half of the memory that is left, and an arena is not begun that would not fit") {
    ledger books;
    detail::staging<memory::pinned, faults::pinning> s;
    s.allocate(8 << 20, 12, 0, {&books}, 70 << 20);
    CHECK(s.slots() == 4);
    detail::staging<memory::pinned, faults::pinning> least;
    least.allocate(8 << 20, 12, 0, {&books}, 1 << 20);
    CHECK(least.slots() == 1);
    using tested = basic_arena<faults::pinning>;
    CHECK_THROWS_WITH_AS(tested(available_host_memory() + (std::uint64_t{8} << 30), {.device = 0}, {&books}),
                         doctest::Contains("page-locked host memory ran out"), out_of_memory);
}

TEST_CASE("without a device an arena is pageable and says so; zero bytes are legal") {
    arena a(10'000);
    CHECK_FALSE(a.pinned());
    CHECK(a.how() == "pages of 4 KiB, pageable");
    arena none(0);
    CHECK(none.size() == 0);
    CHECK(none.how() == "empty");
    CHECK(none.take(0).size() == 0);
    CHECK_THROWS_AS(static_cast<void>(none.take(1)), out_of_memory);
    CHECK_THROWS_AS(arena(std::size_t{1} << 60), out_of_memory);
    ledger books;
    { const shim_arena empty(0, pinned_there, {&books}); }
    CHECK(books.locking.calls == 0);
}

TEST_CASE("an arena over the caller's memory gives that out") {
    alignas(256) static std::byte memory[4096];
    arena a{std::span<std::byte>(memory)};
    CHECK(a.how() == "memory of the caller");
    CHECK_FALSE(a.pinned());
    lease l = a.take(100);
    CHECK(l.data() == memory);
    CHECK(a.take(100).data() == memory + 256);
    CHECK(a.free_bytes() == 4096 - 100);
}

TEST_CASE("leases do not overlap, come back, and join") {
    arena a(1 << 20);
    std::mt19937 random(5);
    std::vector<lease> held;
    for (int i = 0; i < 5000; ++i) {
        if (held.size() < 40 && random() % 3 != 0) {
            if (auto l = a.try_take(1 + random() % 60'000)) {
                CHECK(reinterpret_cast<std::uintptr_t>(l->data()) % 256 == 0);
                std::fill(l->bytes().begin(), l->bytes().end(), static_cast<std::byte>(l->size() % 251));
                held.push_back(std::move(*l));
            }
        } else if (!held.empty()) {
            const std::size_t n = random() % held.size();
            const auto whole = std::count(held[n].bytes().begin(), held[n].bytes().end(), static_cast<std::byte>(held[n].size() % 251));
            CHECK(static_cast<std::size_t>(whole) == held[n].size());
            std::swap(held[n], held.back());
            held.pop_back();
        }
    }
    held.clear();
    CHECK(a.free_bytes() == 1 << 20);
    CHECK(a.take(1 << 20).size() == 1 << 20);  // all in one piece again
    const lease most = a.take((1 << 20) - 1000);
    CHECK_THROWS_WITH_AS(static_cast<void>(a.take(2000)), doctest::Contains("1000 B are free"), out_of_memory);
}

TEST_CASE("a lease keeps its arena's memory") {
    lease kept;
    {
        arena a(100'000);
        kept = a.take(50'000);
    }
    std::fill(kept.bytes().begin(), kept.bytes().end(), std::byte{3});
    CHECK(kept.bytes()[49'999] == std::byte{3});
}

TEST_CASE("threads take and return parts at once") {
    arena a(1 << 20);
    {
        std::vector<std::jthread> threads;
        for (int n = 0; n < 8; ++n) {
            threads.emplace_back([&, n] {
                for (std::size_t i = 0; i < 1000; ++i) {
                    lease l = a.take(1 + (i * 37 + static_cast<std::size_t>(n)) % 10'000);
                    std::fill(l.bytes().begin(), l.bytes().end(), static_cast<std::byte>(n));
                }
            });
        }
    }
    CHECK(a.free_bytes() == 1 << 20);
}

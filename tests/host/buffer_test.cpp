#include "../fault_injection.hpp"

#include <penstock/buffer/buffer.hpp>

#include <doctest/doctest.h>

#include <array>
#include <numeric>

/// Under AddressSanitizer a request that is too large fails as it does elsewhere, instead of ending the program.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }  // NOLINT: the sanitizer's name

namespace {

using namespace penstock;

template <class B>
concept can_be_looked_into = requires(B b) {
    b.span();
    b[0];
    b.begin();
};

static_assert(can_be_looked_into<buffer<float, memory::pageable>> && can_be_looked_into<buffer<float>> &&
              can_be_looked_into<buffer<float, memory::registered>>);
static_assert(!can_be_looked_into<buffer<float, memory::device>> && !can_be_looked_into<buffer<float, memory::peer>>);
static_assert(std::is_same_v<buffer<float>, buffer<float, memory::pinned>>);
static_assert(!std::is_copy_constructible_v<buffer<int>> && std::is_nothrow_move_constructible_v<buffer<int>>);
static_assert(!std::is_constructible_v<buffer<int, memory::registered>, std::size_t>);
static_assert(buffer<double>::bytes_needed(3) == 24);

using counting = faults::rationed<memory::pageable>;

/// Counts what is held while it lives.
struct counted : faults::ledger {
    counted() { counting::books = this; }
    ~counted() { counting::books = nullptr; }
};

}  // namespace

TEST_CASE("a buffer has exactly the elements asked for, at a multiple of 256 bytes") {
    const counted held;
    buffer<int, counting> b(1001);
    CHECK(b.size() == 1001);
    CHECK(b.size_bytes() == 4004);
    CHECK(held.bytes() == 4004);
    CHECK(reinterpret_cast<std::uintptr_t>(b.data()) % 256 == 0);
    std::iota(b.begin(), b.end(), 0);
    CHECK(b.span()[1000] == 1000);
    CHECK(std::as_const(b)[7] == 7);
    CHECK(std::accumulate(std::as_const(b).begin(), std::as_const(b).end(), 0) == 500500);
}

TEST_CASE("a buffer is moved, never copied, and freed once") {
    const counted held;
    {
        buffer<int, counting> a(10);
        int* p = a.data();
        buffer<int, counting> b = std::move(a);
        CHECK(b.data() == p);
        CHECK(a.empty());  // NOLINT: a moved-from buffer is empty
        buffer<int, counting> c(5);
        c = std::move(b);
        CHECK(c.data() == p);
        CHECK(held.bytes() == 40);
        buffer<int, counting>& same = c;
        c = std::move(same);
        CHECK(c.data() == p);
        CHECK(c.size() == 10);
    }
    CHECK(held.clean());
}

TEST_CASE("M02 a buffer of no elements is legal in every kind of memory") {
    const buffer<int, memory::pageable> a(0);
    const buffer<int, memory::pinned> b(0);
    const buffer<int> nothing;
    CHECK(a.empty());
    CHECK(b.data() == nullptr);
    CHECK(nothing.span().empty());
    buffer<int, memory::pageable> c(0);
    c.copy_async(nullptr, nullptr);
    c.copy_from_async({}, nullptr);
    c.wait();
}

TEST_CASE("a buffer over the caller's memory does not own it") {
    const counted held;
    std::array<int, 4> memory{1, 2, 3, 4};
    {
        auto b = buffer<int, counting>::over(memory);
        CHECK(b.size() == 4);
        b[2] = 7;
        auto moved = std::move(b);
        CHECK(moved[2] == 7);
    }
    CHECK(memory[2] == 7);
    CHECK(held.clean());
    CHECK((buffer<int, memory::registered>::over(memory).span().size()) == 4);
}

TEST_CASE("a size that overflows is out of memory, not a small buffer") {
    CHECK_THROWS_AS((buffer<double, memory::pageable>(std::size_t{1} << 61)), out_of_memory);
    CHECK_THROWS_AS((buffer<std::byte, memory::pageable>(std::size_t{1} << 62)), out_of_memory);
}

#include <penstock/buffer/registration.hpp>
#include <penstock/policy/memory.hpp>

#include <doctest/doctest.h>

#include <array>
#include <limits>

/// Under AddressSanitizer a request that is too large fails as it does elsewhere, instead of ending the program.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }  // NOLINT: the sanitizer's name

namespace {

using namespace penstock;

static_assert(allocating_memory<memory::pageable> && allocating_memory<memory::pinned> && allocating_memory<memory::write_combined> &&
              allocating_memory<memory::device>);
static_assert(memory_policy<memory::registered> && !allocating_memory<memory::registered>);
static_assert(memory_policy<memory::peer> && !allocating_memory<memory::peer>);
static_assert(!std::is_same_v<memory::pinned, memory::write_combined>);
static_assert(std::is_same_v<memory::pinned, memory::basic_pinned<memory::write_combining::no>>);

using near_and_far = memory::tiered<memory::device, memory::pinned>;
static_assert(memory_policy<near_and_far> && !near_and_far::host_accessible && near_and_far::device_accessible &&
              !near_and_far::page_aligned);
static_assert(memory::tiered<memory::pinned, memory::pageable>::host_accessible &&
              !memory::tiered<memory::pinned, memory::pageable>::device_accessible);
static_assert(!memory_policy<int>);

/// Without a driver every call answers with that, so there is nothing to look at.
bool nothing_sticks() { return device_count() == 0 || cudaPeekAtLastError() == cudaSuccess; }

}  // namespace

TEST_CASE("pageable memory starts on a page and takes any size") {
    for (const std::size_t size : {std::size_t{1}, std::size_t{4095}, std::size_t{4097}, std::size_t{10'000'000}}) {
        auto* p = static_cast<std::byte*>(memory::pageable::allocate(size));
        CHECK(reinterpret_cast<std::uintptr_t>(p) % 4096 == 0);
        p[0] = p[size - 1] = std::byte{1};
        memory::pageable::deallocate(p, size);
    }
    CHECK_THROWS_WITH_AS(static_cast<void>(memory::pageable::allocate(std::numeric_limits<std::size_t>::max() / 2)),
                         doctest::Contains("host memory ran out"), out_of_memory);
}

TEST_CASE("M02 zero bytes are legal for every kind of memory") {
    CHECK(memory::pageable::allocate(0) == nullptr);
    CHECK(memory::pinned::allocate(0) == nullptr);
    CHECK(memory::write_combined::allocate(0) == nullptr);
    CHECK(memory::device::allocate(0) == nullptr);
    memory::pageable::deallocate(nullptr, 0);
    memory::pinned::deallocate(nullptr, 0);
    memory::write_combined::deallocate(nullptr, 0);
    memory::device::deallocate(nullptr, 0);
    const registration none{std::span<std::byte>{}};
    CHECK_FALSE(none.pinned());
    CHECK(none.how() == "empty");
    CHECK(nothing_sticks());
}

TEST_CASE("without a GPU, pinned and device memory are a clear error and a registration steps down") {
    if (device_count() > 0) {
        return;
    }
    CHECK_THROWS_AS(static_cast<void>(memory::pinned::allocate(1)), cuda_error);
    CHECK_THROWS_AS(static_cast<void>(memory::device::allocate(1)), cuda_error);
    std::array<std::byte, 100> bytes{};
    registration r{std::span<std::byte>(bytes)};
    CHECK_FALSE(r.pinned());
    CHECK(r.how() == "pageable (no CUDA device)");
    CHECK(r.bytes().data() == bytes.data());
    registration moved = std::move(r);
    CHECK(moved.bytes().size() == 100);
    CHECK(r.bytes().empty());  // NOLINT: a moved-from registration is empty
    CHECK(nothing_sticks());
}

TEST_CASE("device handles need no GPU until they are used") {
    CHECK(device_count() >= 0);
    CHECK(numa_node(-1) == -1);
    CHECK_THROWS_AS(require_device(-1, "test"), configuration_error);
    CHECK_THROWS_AS(require_device(1000, "test"), configuration_error);
    const device_guard current(-1);
    CHECK(nothing_sticks());
}

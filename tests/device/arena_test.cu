#include "gpu_work.hpp"

#include <penstock/buffer/arena.hpp>
#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/stream.hpp>

#include <doctest/doctest.h>

#include <optional>

namespace {

using namespace penstock;
using namespace penstock::literals;

std::optional<arena> arena_that_outlives_main;

static __global__ void copy_words(const unsigned* from, unsigned* to, unsigned count) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        to[i] = from[i];
    }
}

}  // namespace

TEST_CASE("an arena is pinned, says how, and is read by copies and in place by kernels") {
    arena a(100'000'001, {.device = 0});
    MESSAGE("arena: " << a.how());
    REQUIRE(a.pinned());
    CHECK(a.size() == 100'000'001);
    const std::size_t part = 1 << 20;
    lease first = a.take(part);
    lease second = a.take(part);
    tests::fill(first.bytes(), 1);
    tests::fill(second.bytes(), 2);
    const stream s;
    buffer<std::byte, memory::device> there(2 * part);
    there.copy_from_async(first.bytes(), s.get());
    launch(copy_words, 16, 256, 0, s.get(), reinterpret_cast<const unsigned*>(second.data()),
           reinterpret_cast<unsigned*>(there.data() + part), static_cast<unsigned>(part / 4));
    s.synchronize();
    const std::vector<std::byte> back = tests::from_device(there.data(), 2 * part);
    CHECK(tests::holds(std::span(back).first(part), 1));
    CHECK(tests::holds(std::span(back).subspan(part), 2));
    cudaPointerAttributes about{};
    check(cudaPointerGetAttributes(&about, a.data() + a.size() - 1), "cudaPointerGetAttributes");
    CHECK(about.type == cudaMemoryTypeHost);
}

TEST_CASE("M01 an arena pins no more than a page over the request, and gives all back") {
    const std::size_t size = 129'500'001;
    std::byte* data = nullptr;
    {
        const arena a(size, {.device = 0});
        data = a.data();
        REQUIRE(a.pinned());
        CHECK(arena::bytes_needed(size) - size < 4096);
        cudaPointerAttributes about{};
        check(cudaPointerGetAttributes(&about, data + arena::bytes_needed(size)), "cudaPointerGetAttributes");
        CHECK(about.type == cudaMemoryTypeUnregistered);
    }
    cudaPointerAttributes about{};
    check(cudaPointerGetAttributes(&about, data), "cudaPointerGetAttributes");
    CHECK(about.type == cudaMemoryTypeUnregistered);
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("M02 an arena of no bytes") {
    const arena none(0, {.device = 0});
    CHECK(none.size() == 0);
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("arenas come and go without leaving pinned memory behind") {
    for (int i = 0; i < 20; ++i) {
        const arena a(50'000'000, {.device = 0, .huge_pages = i % 2 == 0});
        CHECK(a.pinned());
    }
}

TEST_CASE("M10 objects that outlive main: an arena") { arena_that_outlives_main.emplace(10'000'000, arena_options{.device = 0}); }

#include "gpu_work.hpp"

#include <penstock/buffer/buffer.hpp>
#include <penstock/buffer/ring.hpp>
#include <penstock/cuda/stream.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <optional>

namespace {

using namespace penstock;
using namespace penstock::literals;

using device_buffer = buffer<std::byte, memory::device>;
using pinned_ring = ring<memory::pinned, chunking::fixed<1_MiB>, prefetch::depth<3>>;

std::optional<pinned_ring> ring_that_outlives_main;

/// Many laps around the ring while the stream is held up: a slot that is handed out too early spoils what was in it.
template <class Ring>
void stream_through(Ring& r, std::size_t size) {
    const stream s;
    device_buffer there(size);
    check(cudaMemset(there.data(), 0xA5, size), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    tests::keep_busy(s.get(), 50);
    for (std::size_t at = 0; at < size; at += r.slot_bytes()) {
        auto slot = r.acquire();
        REQUIRE(slot);
        tests::fill(slot.bytes(), 2, at);
        slot.copy_async(there.data() + at, s.get(), std::min(r.slot_bytes(), size - at));
        if (at % (5 * r.slot_bytes()) == 0) {
            tests::keep_busy(s.get(), 2);
        }
    }
    s.synchronize();
    CHECK(tests::holds(tests::from_device(there.data(), size), 2));
}

}  // namespace

TEST_CASE("a ring brings every byte to the device, and no slot is handed out before its copy is done") {
    pinned_ring pinned;
    stream_through(pinned, 20'000'001);
    stream_through(pinned, 5);
    ring<memory::write_combined, chunking::fixed<1_MiB>, prefetch::none> combined;
    stream_through(combined, 5'000'000);
    ring<memory::pageable, chunking::fixed<1_MiB>, prefetch::depth<2>> pageable;
    stream_through(pageable, 5'000'000);
}

TEST_CASE("a slot is copied to several places before it comes back") {
    pinned_ring r;
    const stream one;
    const stream two;
    device_buffer a(1_MiB);
    device_buffer b(1_MiB);
    tests::keep_busy(one.get(), 30);
    {
        auto slot = r.acquire();
        tests::fill(slot.bytes(), 9);
        slot.copy_async(a.data(), one.get());
        slot.copy_async(b.data(), two.get());
    }
    for (int i = 0; i < 6; ++i) {
        auto slot = r.acquire();
        std::fill(slot.bytes().begin(), slot.bytes().end(), std::byte{0});
    }
    one.synchronize();
    two.synchronize();
    CHECK(tests::holds(tests::from_device(a.data(), a.size()), 9));
    CHECK(tests::holds(tests::from_device(b.data(), b.size()), 9));
}

TEST_CASE("M11 a ring that dies waits for its copies") {
    const stream s;
    device_buffer there(1_MiB);
    {
        pinned_ring r;
        tests::keep_busy(s.get(), 100);
        auto slot = r.acquire();
        tests::fill(slot.bytes(), 7);
        slot.copy_async(there.data(), s.get());
    }
    pinned_ring next;
    auto slot = next.acquire();
    std::fill(slot.bytes().begin(), slot.bytes().end(), std::byte{1});
    s.synchronize();
    CHECK(tests::holds(tests::from_device(there.data(), there.size()), 7));
}

TEST_CASE("M10 objects that outlive main: a ring") { ring_that_outlives_main.emplace(); }

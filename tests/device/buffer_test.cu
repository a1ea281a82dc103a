#include "gpu_work.hpp"

#include <penstock/buffer/buffer.hpp>
#include <penstock/buffer/host_memory.hpp>
#include <penstock/buffer/registration.hpp>
#include <penstock/cuda/stream.hpp>

#include <doctest/doctest.h>

#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

using namespace penstock;
using namespace penstock::literals;

using device_buffer = buffer<std::byte, memory::device>;

/// How much available host memory `hold()` takes, in bytes: the least of five tries, since other processes take and give too.
/// Neither the resident size (pinned pages are the driver's) nor the address space (it reserves in steps of 32 MiB) says it.
template <class Hold>
std::uint64_t memory_taken(Hold hold) {
    std::uint64_t least = ~std::uint64_t{0};
    for (int i = 0; i < 5; ++i) {
        const std::uint64_t before = available_host_memory();
        const auto held = hold();
        const std::uint64_t after = available_host_memory();
        least = std::min(least, before > after ? before - after : 0);
    }
    return least;
}

std::optional<buffer<std::byte>> pinned_that_outlives_main;
std::optional<device_buffer> device_that_outlives_main;
std::optional<stream> stream_that_outlives_main;

struct mapping {
    mapping(int protection, std::size_t size) : size(size) {
        std::string name = "/tmp/penstock-XXXXXX";
        const int file = ::mkstemp(name.data());
        REQUIRE(file >= 0);
        std::vector<std::byte> bytes(size);
        tests::fill(bytes, 3);
        REQUIRE(::write(file, bytes.data(), size) == static_cast<ssize_t>(size));
        data = static_cast<std::byte*>(::mmap(nullptr, size, protection, MAP_PRIVATE, file, 0));
        REQUIRE(data != MAP_FAILED);
        ::close(file);
        ::unlink(name.c_str());
    }
    ~mapping() { ::munmap(data, size); }
    std::byte* data;
    std::size_t size;
};

template <class Memory>
void round_trip(std::size_t size) {
    const stream s;
    buffer<std::byte, Memory> from(size);
    tests::fill(from.span(), 1);
    device_buffer there(size);
    from.copy_async(there.data(), s.get());
    buffer<std::byte, memory::pageable> back(size);
    back.copy_from_async({there.data(), size}, s.get());
    back.wait();
    CHECK(tests::holds(back.span(), 1));
    if (size > 0) {
        CHECK(reinterpret_cast<std::uintptr_t>(from.data()) % 256 == 0);
        CHECK(reinterpret_cast<std::uintptr_t>(there.data()) % 256 == 0);
    }
}

}  // namespace

TEST_CASE("bytes go to the device and back from every kind of host memory") {
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{1'000'003}}) {
        round_trip<memory::pinned>(size);
        round_trip<memory::write_combined>(size);
        round_trip<memory::pageable>(size);
    }
}

TEST_CASE("M01 pinned request rounded up to a power of two") {
    { const buffer<std::byte> warm(32_MiB); }
    const std::uint64_t granule = 8_MiB;  // for the driver's own books
    const std::uint64_t odd = 129_MiB + 512_KiB;
    CHECK(memory_taken([&] { return buffer<std::byte>(odd); }) <= odd + granule);
    CHECK(memory_taken([] {
              std::vector<buffer<std::byte>> many;
              for (int i = 0; i < 40; ++i) {
                  many.emplace_back(9_MiB);
              }
              return many;
          }) <= 40 * 9_MiB + granule);
}

TEST_CASE("M02 zero-byte pin, register, allocate, copy") {
    const stream s;
    buffer<int, memory::pinned> pinned(0);
    buffer<int, memory::device> there(0);
    pinned.copy_async(there.data(), s.get());
    there.copy_from_async({}, s.get());
    int one = 0;
    const registration nothing{std::span<std::byte>(reinterpret_cast<std::byte*>(&one), 0)};
    const registration null{std::span<std::byte>()};
    CHECK_FALSE(nothing.pinned());
    s.synchronize();
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("M03 registering a read-only file mapping") {
    int read_only = 0;
    check(cudaDeviceGetAttribute(&read_only, cudaDevAttrHostRegisterReadOnlySupported, 0), "cudaDeviceGetAttribute");
    MESSAGE("the driver " << (read_only != 0 ? "knows" : "does not know") << " read-only registration");
    for (const int protection : {PROT_READ, PROT_READ | PROT_WRITE}) {
        const mapping file(protection, 1'000'000);
        const std::span<const std::byte> bytes(file.data, file.size);
        const registration lock(bytes);
        MESSAGE("mapping with protection " << protection << ": " << lock.how());
        CHECK(lock.how() != "empty");
        CHECK(cudaPeekAtLastError() == cudaSuccess);
        const stream s;
        device_buffer there(file.size);
        there.copy_from_async(bytes, s.get());
        there.wait();
        CHECK(tests::holds(tests::from_device(there.data(), file.size), 3));
    }
    std::vector<std::byte> memory(1'000'000);
    {
        registration lock{std::span<std::byte>(memory)};
        CHECK(lock.how() == "registered");
        const registration again{std::span<std::byte>(memory)};  // twice is refused, and no more than that
        CHECK_FALSE(again.pinned());
        registration moved = std::move(lock);
        CHECK(moved.pinned());
    }
    const registration after{std::span<std::byte>(memory)};
    CHECK(after.pinned());
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("M08 pinned for one device only") {
    const int devices = device_count();
    if (devices < 2) {
        MESSAGE("one GPU here: copies to another one are not tested");
    }
    check(cudaSetDevice(0), "cudaSetDevice");
    std::optional<buffer<std::byte>> pinned(std::in_place, 1'000'000);
    tests::fill(pinned->span(), 4);
    for (int d = 0; d < devices; ++d) {
        check(cudaSetDevice(d), "cudaSetDevice");
        device_buffer there(1'000'000);
        check(cudaSetDevice(0), "cudaSetDevice");
        const stream s(d);
        tests::keep_busy(s.get(), 0);
        pinned->copy_async(there.data(), s.get());
        s.synchronize();
        CHECK(tests::holds(tests::from_device(there.data(), there.size()), 4));
        int now = -1;
        check(cudaGetDevice(&now), "cudaGetDevice");
        CHECK(now == 0);
    }
    std::thread other([&] {
        check(cudaSetDevice(devices - 1), "cudaSetDevice");
        pinned.reset();
        int now = -1;
        check(cudaGetDevice(&now), "cudaGetDevice");
        CHECK(now == devices - 1);
        CHECK(cudaGetLastError() == cudaSuccess);
    });
    other.join();
}

TEST_CASE("M11 freeing memory that a copy still reads") {
    const stream s;
    constexpr std::size_t size = 8 << 20;
    device_buffer there(size);
    tests::keep_busy(s.get(), 200);
    {
        buffer<std::byte> from(size);
        tests::fill(from.span(), 5);
        from.copy_async(there.data(), s.get());
    }
    buffer<std::byte> next(size);
    std::fill(next.begin(), next.end(), std::byte{0xEE});
    s.synchronize();
    CHECK(tests::holds(tests::from_device(there.data(), size), 5));

    // On two streams, and by assignment.
    const stream other;
    device_buffer there_too(size);
    buffer<std::byte> from(size);
    tests::fill(from.span(), 6);
    tests::keep_busy(other.get(), 100);
    from.copy_async(there_too.data(), other.get());
    from.copy_async(there.data(), s.get());
    from = buffer<std::byte>(size);
    std::fill(from.begin(), from.end(), std::byte{0xDD});
    s.synchronize();
    other.synchronize();
    CHECK(tests::holds(tests::from_device(there.data(), size), 6));
    CHECK(tests::holds(tests::from_device(there_too.data(), size), 6));
}

TEST_CASE("a copy can be captured into a graph while the buffer lives") {
    const stream s;
    buffer<std::byte> from(1000);
    device_buffer there(1000);
    check(cudaStreamBeginCapture(s.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    from.copy_async(there.data(), s.get());
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(s.get(), &graph), "cudaStreamEndCapture");
    cudaGraphExec_t runnable = nullptr;
    check(cudaGraphInstantiate(&runnable, graph, 0), "cudaGraphInstantiate");
    tests::fill(from.span(), 8);
    check(cudaGraphLaunch(runnable, s.get()), "cudaGraphLaunch");
    s.synchronize();
    CHECK(tests::holds(tests::from_device(there.data(), 1000), 8));
    check(cudaGraphExecDestroy(runnable), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

TEST_CASE("more GPU memory than there is, is out of memory, and leaves nothing behind") {
    CHECK_THROWS_WITH_AS(device_buffer(std::size_t{1} << 46), doctest::Contains("GPU memory ran out"), out_of_memory);
    CHECK(cudaGetLastError() == cudaSuccess);
    const device_buffer fine(1000);
}

TEST_CASE("M10 objects that outlive main: buffers with a copy that may still run") {
    stream_that_outlives_main.emplace();
    pinned_that_outlives_main.emplace(1 << 20);
    device_that_outlives_main.emplace(1 << 20);
    tests::keep_busy(stream_that_outlives_main->get(), 50);
    pinned_that_outlives_main->copy_async(device_that_outlives_main->data(), stream_that_outlives_main->get());
}

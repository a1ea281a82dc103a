#include "gpu_work.hpp"

#include <penstock/stream/weight_stream.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <thread>

namespace {

using namespace penstock;
using namespace penstock::literals;

using device_buffer = buffer<std::byte, memory::device>;

/// File number `which`, of bytes by formula.
std::filesystem::path write(const tests::temporary_directory& dir, std::uint64_t which, std::size_t size) {
    return tests::write_pattern(dir / std::to_string(which), which, size);
}

transfer make(std::uint64_t request, std::uint32_t file, std::uint64_t offset, std::byte* to, std::uint64_t size) {
    transfer t;
    t.request = request;
    t.file = file;
    t.offset = offset;
    t.bytes = size;
    t.destination = to;
    return t;
}

struct poisoned : device_buffer {
    explicit poisoned(std::size_t size) : device_buffer(size) {
        check(cudaMemset(data(), 0xA5, size), "cudaMemset");
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
};

bool untouched(std::span<const std::byte> bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0xA5}; });
}

/// Files, pageable and pinned memory to the device in one load, on a stream that is held up, so that staging runs full.
template <class Stream>
void everything_arrives(Stream& loader, const tests::temporary_directory& dir) {
    constexpr std::size_t a = 20'000'003;
    constexpr std::size_t b = 5'000'001;
    file_source files({write(dir, 0, a + 9), write(dir, 1, b)});
    std::vector<std::byte> pageable(b);
    buffer<std::byte> pinned(b);
    tests::fill(pageable, 2);
    tests::fill(pinned.span(), 3);
    const std::size_t gap = 100;
    poisoned there(a + 3 * b + 5 * gap);
    const stream s;
    std::byte* at = there.data() + gap;
    std::vector<transfer> list{make(10, 0, 7, at, a), make(11, 1, 0, at + a + gap, b), make(12, 0, 0, at + a + b + 2 * gap, b),
                               make(13, 0, 0, at + a + 2 * b + 3 * gap, b)};
    list[2].memory = pageable.data();
    list[3].memory = pinned.data();
    list[3].memory_is_pinned = true;
    tests::keep_busy(s.get(), 30);
    std::uint64_t last = 0;
    const stream_report report = loader.run(list, files, on_device(0, s.get()), [&](const progress& p) { last = p.bytes; });
    CHECK(report.bytes == a + 3 * b);
    CHECK(last == report.bytes);
    const std::vector<std::byte> back = tests::from_device(there.data(), there.size());
    const auto part = [&](std::size_t from, std::size_t size) { return std::span(back).subspan(from, size); };
    CHECK(tests::holds(part(gap, a), 0, 7));
    CHECK(tests::holds(part(a + 2 * gap, b), 1));
    CHECK(tests::holds(part(a + b + 3 * gap, b), 2));
    CHECK(tests::holds(part(a + 2 * b + 4 * gap, b), 3));
    for (const std::size_t from : {std::size_t{0}, a + gap, a + b + 2 * gap, a + 2 * b + 3 * gap, a + 3 * b + 4 * gap}) {
        CHECK(untouched(part(from, gap)));
    }
    CHECK(loader.staging_bytes() > 0);
    CHECK(loader.staging_bytes() <= loader.staging_bytes_needed());
}

std::optional<weight_stream<>> stream_that_outlives_main;

/// Memory of this process that no file stands behind.
std::uint64_t anonymous_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
        if (std::uint64_t kib = 0; word == "RssAnon:" && status >> kib) {
            return kib * 1024;
        }
    }
    FAIL("the system does not say how much anonymous memory there is");
    return 0;
}

}  // namespace

TEST_CASE("files, pageable and pinned memory arrive bit for bit, whatever chunk, depth and readers") {
    const tests::temporary_directory dir;
    for (const std::uint64_t chunk : {100'003ull, 1ull << 20, 8ull << 20}) {
        for (const std::uint32_t depth : {1u, 3u, 24u}) {
            weight_stream<chunking::run_time, prefetch::run_time> loader({.readers = depth == 3 ? 1 : 0}, {bytes{chunk}}, {depth});
            everything_arrives(loader, dir);
        }
    }
    weight_stream<chunking::whole, prefetch::depth<2>, scheduler::round_robin> whole;
    everything_arrives(whole, dir);
    weight_stream<memory::write_combined, chunking::fixed<2_MiB>, scheduler::priority<3>> combined;
    everything_arrives(combined, dir);
    MESSAGE("staging: " << whole.staging_how());
}

TEST_CASE("the naive way arrives too: pageable memory and a synchronous copy a chunk") {
    const tests::temporary_directory dir;
    weight_stream<memory::pageable, chunking::fixed<1_MiB>> loader;
    everything_arrives(loader, dir);
}

TEST_CASE("a ticket's wait returns when the copies are enqueued, in the order of the stream") {
    const tests::temporary_directory dir;
    file_source files({write(dir, 0, 3'000'000)});
    weight_stream<chunking::fixed<1_MiB>> loader;
    loader.reserve();  // pinning memory may wait for the device
    poisoned there(3'000'000);
    const stream s;
    tests::keep_busy(s.get(), 300);
    event busy;
    busy.record(s.get());
    ticket t = loader.start(std::vector{make(1, 0, 0, there.data(), there.size())}, files, on_device(0, s.get()));
    t.wait(1);
    t.wait();
    CHECK_FALSE(busy.ready());
    buffer<std::byte, memory::pageable> back(there.size());
    back.copy_from_async({there.data(), there.size()}, s.get());
    back.wait();
    CHECK(tests::holds(back.span(), 0));
}

TEST_CASE("M13 host peak stays at staging, and staging at its bound") {
    const tests::temporary_directory dir;
    file_source files({write(dir, 0, 64 << 20)});
    weight_stream<chunking::fixed<1_MiB>, prefetch::depth<4>> loader;
    CHECK(loader.staging_bytes() == 0);
    poisoned there(64 << 20);
    const stream s;
    const place where = on_device(0, s.get());
    loader.run(std::vector{make(1, 0, 0, there.data(), 1 << 20)}, files, where);  // the driver's own memory, and staging
    const std::uint64_t before = anonymous_bytes();
    std::uint64_t most = 0;
    const stream_report report = loader.run(std::vector{make(1, 0, 0, there.data(), there.size())}, files, where,
                                            [&](const progress&) { most = std::max(most, anonymous_bytes()); });
    CHECK(report.staging_bytes == loader.staging_bytes());
    CHECK(loader.staging_bytes() == 4 * ((1 << 20) + 4096));
    CHECK(most < before + (4 << 20));
    CHECK(tests::holds(tests::from_device(there.data(), there.size()), 0));
}

TEST_CASE("M16 error in the middle of a load: device memory is back, and the retry works") {
    const tests::temporary_directory dir;
    tensor_list list;
    list.files = {write(dir, 0, 30'000'000), write(dir, 1, 30'000'000)};
    list.tensors = {{"a", dtype::u8, {30'000'000}, 0, 0, 30'000'000}, {"b", dtype::u8, {30'000'000}, 1, 0, 30'000'000}};
    weight_stream<chunking::fixed<1_MiB>> loader;
    loader.reserve();
    CHECK(loader.staging_bytes() == loader.staging_bytes_needed());
    static_cast<void>(loader.load(list, on_device(0)));
    std::size_t before = 0;
    std::size_t after = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&before, &total), "cudaMemGetInfo");
    for (int i = 0; i < 5; ++i) {
        CHECK_THROWS_AS(static_cast<void>(loader.load(list, on_device(0),
                                                      [](const progress& p) {
                                                          if (p.bytes > p.total / 2) {
                                                              throw io_error("a test's error in the middle");
                                                          }
                                                      })),
                        io_error);
        std::filesystem::resize_file(list.files[1], 10'000'000);
        CHECK_THROWS_AS(static_cast<void>(loader.load(list, on_device(0))), io_error);
        write(dir, 1, 30'000'000);
        std::stop_source stop;
        CHECK_THROWS_AS(static_cast<void>(loader.load(
                            list, on_device(0), [&](const progress&) { stop.request_stop(); }, stop.get_token())),
                        cancelled);
    }
    check(cudaMemGetInfo(&after, &total), "cudaMemGetInfo");
    CHECK(after == before);
    const loaded_tensors good = loader.load(list, on_device(0));
    CHECK(tests::holds(tests::from_device(good["b"].data, 30'000'000), 1));
    CHECK(good.report().source.find("pread") == 0);
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("loads of several threads share a stream") {
    const tests::temporary_directory dir;
    file_source files({write(dir, 0, 8'000'000)});
    weight_stream<chunking::fixed<256_KiB>, prefetch::depth<6>, scheduler::priority<3>> loader;
    poisoned there(8 * 8'000'000);
    {
        std::vector<std::jthread> threads;
        for (std::size_t n = 0; n < 8; ++n) {
            threads.emplace_back([&, n] {
                const stream s(0);
                transfer t = make(n % 3, 0, 0, there.data() + n * 8'000'000, 8'000'000);
                t.level = static_cast<urgency>(n % 3);
                loader.run(std::span(&t, 1), files, on_device(0, s.get()));
            });
        }
    }
    for (std::size_t n = 0; n < 8; ++n) {
        CHECK(tests::holds(tests::from_device(there.data() + n * 8'000'000, 8'000'000), 0));
    }
}

TEST_CASE("a load is not capturable, and says so without spoiling the capture") {
    const tests::temporary_directory dir;
    file_source files({write(dir, 0, 1000)});
    weight_stream<> loader;
    poisoned there(1000);
    const stream s;
    check(cudaStreamBeginCapture(s.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    CHECK_THROWS_WITH_AS(static_cast<void>(loader.start(std::vector{make(1, 0, 0, there.data(), 1000)}, files, on_device(0, s.get()))),
                         doctest::Contains("cannot be captured"), configuration_error);
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(s.get(), &graph), "cudaStreamEndCapture");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    CHECK_THROWS_AS(static_cast<void>(loader.start({}, files, on_device(device_count()))), configuration_error);
}

TEST_CASE("the caller's device is unchanged by loads to every device") {
    const tests::temporary_directory dir;
    file_source files({write(dir, 0, 3'000'000)});
    weight_stream<chunking::fixed<1_MiB>> loader;
    for (int d = 0; d < device_count(); ++d) {
        check(cudaSetDevice(device_count() - 1 - d), "cudaSetDevice");
        const stream s(d);
        std::optional<poisoned> there;
        {
            const device_guard on(d);
            there.emplace(3'000'000);
        }
        loader.run(std::vector{make(1, 0, 0, there->data(), there->size())}, files, on_device(d, s.get()));
        int now = -1;
        check(cudaGetDevice(&now), "cudaGetDevice");
        CHECK(now == device_count() - 1 - d);
        CHECK(tests::holds(tests::from_device(there->data(), there->size()), 0));
    }
    check(cudaSetDevice(0), "cudaSetDevice");
}

TEST_CASE("M10 objects that outlive main: a weight stream with staging") {
    stream_that_outlives_main.emplace(stream_options{.readers = 2});
    stream_that_outlives_main->reserve();
}

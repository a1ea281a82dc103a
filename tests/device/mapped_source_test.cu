#include "gpu_work.hpp"

#include <penstock/stream/weight_stream.hpp>

#include <doctest/doctest.h>

namespace {

using namespace penstock;
using namespace penstock::literals;

using device_buffer = buffer<std::byte, memory::device>;

/// File number `which`, of bytes by formula.
std::filesystem::path write(const tests::temporary_directory& dir, std::uint64_t which, std::size_t size) {
    return tests::write_pattern(dir / std::to_string(which), which, size);
}

transfer make(std::uint64_t request, std::uint64_t offset, std::byte* to, std::uint64_t size, urgency level = urgency::on_demand) {
    transfer t;
    t.request = request;
    t.offset = offset;
    t.bytes = size;
    t.destination = to;
    t.level = level;
    return t;
}

/// Whether this machine's driver locks the pages of files; says why where it does not.
bool locks_files(byte_source& files) {
    if (files.in_place(0, 0, 1).data != nullptr) {
        return true;
    }
    MESSAGE("no mapping here: " << files.condition(0));
    return false;
}

__global__ void copy_bytes(const uint4* from, uint4* to, std::size_t count) {
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += std::size_t{gridDim.x} * blockDim.x) {
        to[i] = from[i];
    }
}

}  // namespace

TEST_CASE("a registered mapping reaches the device bit for bit, without staging, across its pieces") {
    const tests::temporary_directory dir;
    constexpr std::size_t size = 70'000'003;
    for (const std::uint64_t piece : {1ull << 20, 16ull << 20, 256ull << 20}) {
        mapped_source files({write(dir, 0, size)}, {.segment_bytes = piece});
        weight_stream<scheduler::priority<3>> loader;
        device_buffer there(size);
        const stream s;
        for (const urgency level : {urgency::on_demand, urgency::background}) {
            check(cudaMemset(there.data(), 0xA5, size), "cudaMemset");
            check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            // Starts and ends anywhere; the first bytes stay as they are.
            const std::vector<transfer> list{make(1, 4099, there.data() + 4099, 20'000'001, level),
                                             make(2, 20'004'100, there.data() + 20'004'100, size - 20'004'100, level)};
            std::uint64_t last = 0;
            const stream_report report = loader.run(list, files, on_device(0, s.get()), [&](const progress& p) { last = p.bytes; });
            CHECK(report.bytes == size - 4099);
            CHECK(last == report.bytes);
            const std::vector<std::byte> back = tests::from_device(there.data(), size);
            CHECK(tests::holds(std::span(back).subspan(4099), 0, 4099));
            CHECK(back[4098] == std::byte{0xA5});
            if (locks_files(files)) {
                CHECK(loader.staging_bytes() == 0);
                CHECK(report.reads == 0);
                CHECK(report.source.find("registered mapping") == 0);
            }
            MESSAGE("pieces of " << (piece >> 20) << " MiB: " << report.source);
        }
    }
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("kernels read a mapped file in place") {
    const tests::temporary_directory dir;
    constexpr std::size_t size = 40 << 20;
    chosen_source files({write(dir, 3, size)}, {.use = source_use::in_place}, {.segment_bytes = 16 << 20});
    if (!locks_files(files)) {
        return;
    }
    const std::byte* from = files.pinned(0, 16, size - 16);
    device_buffer there(size - 16);
    const stream s;
    launch(copy_bytes, 32, 256, 0, s.get(), reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(there.data()), (size - 16) / 16);
    s.synchronize();
    CHECK(tests::holds(tests::from_device(there.data(), there.size()), 3, 16));
    CHECK_THROWS_AS(static_cast<void>(files.pinned(0, 8, 16)), configuration_error);
}

TEST_CASE("a file that is cut under its mapping ends a load with an io_error, and the next load of good files works") {
    const tests::temporary_directory dir;
    const auto path = write(dir, 0, 30'000'000);
    weight_stream<> loader;
    device_buffer there(30'000'000);
    const stream s;
    const transfer all = make(1, 0, there.data(), there.size());
    {
        mapped_source files({path});
        loader.run(std::span(&all, 1), files, on_device(0, s.get()));
        std::filesystem::resize_file(path, 10'000'000);
        CHECK_THROWS_AS(loader.run(std::span(&all, 1), files, on_device(0, s.get())), io_error);
    }
    write(dir, 0, 30'000'000);
    mapped_source files({path});
    loader.run(std::span(&all, 1), files, on_device(0, s.get()));
    CHECK(tests::holds(tests::from_device(there.data(), there.size()), 0));
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("load with a source for repeated use: the same bytes each time, from the mapping where there is one") {
    const tests::temporary_directory dir;
    tensor_list list;
    list.files = {write(dir, 0, 30'000'000)};
    list.tensors = {{"a", dtype::u8, {10'000'001}, 0, 17, 10'000'001}, {"b", dtype::u8, {15'000'000}, 0, 15'000'000, 15'000'000}};
    weight_stream<> loader;
    chosen_source files(list.files, {.use = source_use::repeated});
    for (int i = 0; i < 3; ++i) {
        const loaded_tensors tensors = loader.load(list, files, on_device(0));
        CHECK(tests::holds(tests::from_device(tensors["a"].data, 10'000'001), 0, 17));
        CHECK(tests::holds(tests::from_device(tensors["b"].data, 15'000'000), 0, 15'000'000));
        MESSAGE("load " << i << ": " << tensors.report().source << ", " << tensors.report().gb_per_s() << " GB/s");
    }
}

TEST_CASE("an urgent load passes a background load on the same device") {
    const tests::temporary_directory dir;
    constexpr std::size_t large = 512 << 20;
    buffer<std::byte> pinned(large);
    tests::fill(pinned.span().first(64 << 20), 5);
    device_buffer there(large);
    device_buffer small(4 << 20);
    weight_stream<scheduler::priority<3>> loader;
    file_source none({});
    const stream slow;
    const stream fast;
    transfer background = make(1, 0, there.data(), large, urgency::background);
    background.memory = pinned.data();
    background.memory_is_pinned = true;
    transfer urgent = background;
    urgent.request = 2;
    urgent.destination = small.data();
    urgent.bytes = small.size();
    urgent.level = urgency::on_demand;
    ticket whole = loader.start(std::span(&background, 1), none, on_device(0, slow.get()));
    loader.run(std::span(&urgent, 1), none, on_device(0, fast.get()));
    const stream_report behind = whole.report();
    CHECK(tests::holds(tests::from_device(small.data(), small.size()), 5));
    MESSAGE("the urgent load was done when " << behind.chunks << " of " << large / (4 << 20) << " background chunks were enqueued");
    CHECK(behind.chunks < large / (4 << 20));
    whole.wait();
    slow.synchronize();
    CHECK(tests::holds(tests::from_device(there.data(), 64 << 20), 5));
}

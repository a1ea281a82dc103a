#include "gpu_work.hpp"

#include <penstock/stream/weight_stream.hpp>

#include <doctest/doctest.h>

#include <thread>

namespace {

using namespace penstock;
using namespace penstock::literals;
using namespace std::chrono_literals;

constexpr std::size_t size = 256_MiB;

struct nothing final : byte_source {
    void read(std::uint32_t, std::uint64_t, std::span<std::byte>) override {}
    [[nodiscard]] std::string name(std::uint32_t) const override { return "nothing"; }
};

transfer from(const arena& memory, std::byte* to, urgency level) {
    transfer t;
    t.memory = memory.data();
    t.memory_is_pinned = memory.pinned();
    t.bytes = size;
    t.destination = to;
    t.level = level;
    return t;
}

/// Says that it misses until it is told that it does not.
__global__ void miss_until(miss_word word, const volatile std::uint32_t* enough) {
    word.post(1000);
    while (*enough == 0) {
    }
    word.post(0);
}

/// Lets nothing go while it sees a miss.
struct strict : governor::none {
    void look(std::chrono::nanoseconds, const link_sight& s) noexcept { missing = s.missing; }
    [[nodiscard]] std::chrono::nanoseconds may_go(std::chrono::nanoseconds now) const noexcept { return missing > 0 ? now + 1h : now; }
    std::uint64_t missing = 0;
};

}  // namespace

TEST_CASE("background copies stop while a running kernel posts that it misses, and go on when it has all") {
    arena memory(size, {.device = 0});
    REQUIRE(memory.pinned());
    tests::fill(memory.bytes(), 5);
    buffer<std::byte, memory::device> to(size);
    check(cudaMemset(to.data(), 0, size), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    buffer<std::uint32_t, memory::pinned> enough(1);
    *static_cast<volatile std::uint32_t*>(enough.data()) = 0;
    link_watch watch;
    nothing source;
    weight_stream<throttled<scheduler::priority<3>, strict>, chunking::fixed<1_MiB>> loader({.watch = &watch});
    const stream kernels, copies;
    miss_until<<<1, 1, 0, kernels.get()>>>(watch.misses(1), enough.data());
    check(cudaGetLastError(), "miss_until");
    while (watch.sight().missing == 0) {
    }
    const transfer t = from(memory, to.data(), urgency::background);
    ticket load = loader.start(std::span(&t, 1), source, on_device(0, copies.get()));
    std::this_thread::sleep_for(30ms);
    CHECK(load.report().bytes == 0);
    *static_cast<volatile std::uint32_t*>(enough.data()) = 1;
    load.wait();
    copies.synchronize();
    kernels.synchronize();
    CHECK(watch.sight().missing == 0);
    CHECK(tests::holds(tests::from_device(to.data(), size), 5));
}

TEST_CASE("a timeline has the times of copies on the device, one after another, at the speed of a link") {
    arena memory(size, {.device = 0});
    REQUIRE(memory.pinned());
    buffer<std::byte, memory::device> to(size);
    nothing source;
    for (const urgency level : {urgency::on_demand, urgency::prefetch}) {
        timeline kept;
        weight_stream<scheduler::priority<3>, chunking::fixed<8_MiB>> loader({.kept_in = &kept});
        const stream copies;
        const transfer t = from(memory, to.data(), level);
        loader.run(std::span(&t, 1), source, on_device(0, copies.get()));
        const auto now = std::chrono::steady_clock::now().time_since_epoch();
        const std::vector<timeline_entry> all = kept.entries();
        REQUIRE(all.size() == 32);
        for (std::size_t i = 0; i < all.size(); ++i) {
            CHECK(all[i].chunk == i);
            CHECK(all[i].level == level);
            const double gb_per_s = static_cast<double>(all[i].bytes) / static_cast<double>((all[i].end - all[i].start).count());
            CHECK(gb_per_s > 1);
            CHECK(gb_per_s < 1000);
            CHECK((i == 0 || all[i].start >= all[i - 1].end - 2us));
        }
        CHECK(all.front().start >= all.front().asked - 200us);  // two clocks
        CHECK(all.back().end <= now + 200us);
    }
}

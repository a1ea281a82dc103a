#include <penstock/stream/read_depth.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

using namespace penstock;
using detail::read_depth;

/// A disk that gives `rate(depth)` bytes/s. Runs `windows` windows at whatever depth is chosen, and says which was used how often.
template <class Rate>
std::vector<int> run(read_depth& depth, int windows, Rate&& rate) {
    constexpr std::uint64_t piece = 1 << 20;
    static read_depth::clock::time_point now{};
    std::vector<int> used(2000, 0);
    for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(windows) * (read_depth::window_bytes / piece + 1); ++i) {
        now += std::chrono::nanoseconds(static_cast<std::int64_t>(1e9 * piece / rate(depth.limit())));
        ++used[depth.limit()];
        depth.count(piece, true, now);
    }
    return used;
}

}  // namespace

TEST_CASE("a disk that gains nothing from depth gets four reads at a time, one that loses gets two") {
    read_depth flat, losing;
    const std::vector<int> of_flat = run(flat, 100, [](std::uint32_t) { return 2e9; });
    CHECK(of_flat[4] > 9 * (of_flat[2] + of_flat[8]));
    CHECK(of_flat[16] == 0);
    run(losing, 100, [](std::uint32_t d) { return 2e9 / std::sqrt(d); });
    CHECK(losing.limit() == 2);
}

TEST_CASE("a seventh more from the third and fourth read is not given up for noise of a tenth") {
    read_depth depth;
    std::mt19937 random(7);
    std::uniform_real_distribution<double> noise(0.9, 1.1);
    const auto disk = [&](std::uint32_t d) { return (d < 4 ? 2.5e9 : 2.9e9) * noise(random); };
    int fours = 0;
    for (int i = 0; i < 200; ++i) {
        run(depth, 5, disk);
        fours += depth.limit() >= 4 ? 1 : 0;
    }
    CHECK(fours > 180);
}

TEST_CASE("a disk that gains from depth gets as much as it gains from") {
    read_depth depth;
    const auto array = [](std::uint32_t d) { return 1e9 * std::min(d, 32u); };
    run(depth, 20, array);
    CHECK(depth.limit() == 32);
    const std::vector<int> used = run(depth, 200, array);
    CHECK(used[32] > 9 * (used[16] + used[64]));
    run(depth, 200, [](std::uint32_t) { return 1e9; });  // others use it now
    CHECK(depth.limit() < 32);
}

TEST_CASE("rates at which readers did not wait for the disk say nothing") {
    read_depth depth;
    read_depth::clock::time_point now{};
    for (int i = 0; i < 10'000; ++i) {
        now += std::chrono::microseconds(100);
        depth.count(1 << 20, false, now);
    }
    CHECK(depth.limit() == 4);
}

TEST_CASE("a depth that there are not enough readers for is given up") {
    for (const std::uint32_t readers : {6u, 12u}) {
        read_depth depth;
        read_depth::clock::time_point now{};
        const std::uint32_t best = readers == 6 ? 4 : 8;  // more than that halves the rate
        int above = 0, all = 0;
        for (int i = 0; i < 100'000; ++i) {
            const std::uint32_t under_way = std::min(depth.limit(), readers);
            const double rate = under_way <= best ? 1e9 * under_way : 0.5e9 * best;
            now += std::chrono::nanoseconds(static_cast<std::int64_t>(1e9 * (1 << 20) / rate));
            depth.count(1 << 20, under_way >= depth.limit(), now);
            above += i > 10'000 && under_way > best;
            all += i > 10'000;
        }
        CHECK(above < all / 10);
    }
}

TEST_CASE("reads of several threads are watched, and an error goes out") {
    detail::read_meter meter;
    std::atomic<int> reads{0};
    {
        std::vector<std::jthread> readers;
        for (int t = 0; t < 4; ++t) {
            readers.emplace_back([&] {
                for (int i = 0; i < 100; ++i) {
                    meter.watch(1 << 20, [&] { ++reads; });
                }
            });
        }
    }
    CHECK(reads == 400);
    CHECK(meter.limit() >= 2);
    CHECK_THROWS_AS(meter.watch(1, [] { throw std::runtime_error("no"); }), std::runtime_error);
}

#include <penstock/dispatch/thread_pool.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace ps = penstock;

TEST_CASE("thread pool: every item once, errors come back, calls from several threads") {
    ps::thread_pool pool{3};
    CHECK(pool.size() == 3);
    for (std::size_t items : {0u, 1u, 2u, 1000u}) {
        std::vector<std::atomic<int>> seen(items);
        pool.run(items, [&](std::size_t item, unsigned worker) {
            CHECK(worker < 3);
            ++seen[item];
        });
        CHECK(std::all_of(seen.begin(), seen.end(), [](const auto& n) { return n == 1; }));
    }
    for (int round = 0; round < 20; ++round) {
        CHECK_THROWS_AS(pool.run(50,
                                 [](std::size_t item, unsigned) {
                                     if (item == 20) {
                                         throw std::runtime_error("twenty");
                                     }
                                 }),
                        std::runtime_error);
    }
    std::atomic<int> sum{0};
    std::vector<std::thread> callers;
    for (int c = 0; c < 4; ++c) {
        callers.emplace_back([&] {
            for (int n = 0; n < 100; ++n) {
                pool.run(10, [&](std::size_t, unsigned) { ++sum; });
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
    CHECK(sum == 4000);
}

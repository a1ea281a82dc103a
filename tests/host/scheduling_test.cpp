#include <penstock/policy/scheduling.hpp>

#include <doctest/doctest.h>

#include <vector>

namespace {

using namespace penstock;

static_assert(host_scheduler<scheduler::fifo> && device_scheduler<scheduler::fifo>);
static_assert(host_scheduler<scheduler::round_robin> && device_scheduler<scheduler::round_robin>);
static_assert(host_scheduler<scheduler::priority<3>> && !device_scheduler<scheduler::priority<3>>);
static_assert(scheduling_policy<scheduler::priority<1>> && !scheduling_policy<int>);

template <class Queue>
std::vector<chunk> drain(Queue& q) {
    std::vector<chunk> all;
    while (const auto c = q.next()) {
        all.push_back(*c);
    }
    return all;
}

using order = std::vector<chunk>;

template <class Order>
void covers_every_tile_once() {
    for (const std::uint32_t tiles : {0u, 1u, 7u, 64u, 65u}) {
        for (const std::uint32_t scopes : {1u, 2u, 8u, 100u}) {
            std::vector<int> times(tiles);
            for (std::uint32_t s = 0; s < scopes; ++s) {
                std::uint32_t i = 0;
                for (std::uint32_t t; (t = Order::tile(i, s, scopes, tiles)) < tiles; ++i) {
                    ++times[t];
                }
                CHECK(Order::tile(i, s, scopes, tiles) == tiles);
                CHECK(Order::tile(i + 1, s, scopes, tiles) == tiles);
            }
            CHECK(times == std::vector<int>(tiles, 1));
        }
    }
}

}  // namespace

TEST_CASE("fifo finishes a request before it begins the next") {
    scheduler::fifo::queue q;
    CHECK_FALSE(q.next());
    q.push({7, 2});
    q.push({8, 0});
    q.push({3, 1, urgency::on_demand});
    CHECK(drain(q) == order{{7, 0}, {7, 1}, {3, 0}});
    q.push({1, 1});
    CHECK(drain(q) == order{{1, 0}});
}

TEST_CASE("round robin gives every request one chunk in turn") {
    scheduler::round_robin::queue q;
    q.push({1, 3});
    q.push({2, 1});
    CHECK(q.next() == chunk{1, 0});
    q.push({3, 2});
    CHECK(drain(q) == order{{2, 0}, {1, 1}, {3, 0}, {1, 2}, {3, 1}});
}

TEST_CASE("priority lets the urgent pass at a chunk boundary, and keeps order within a level") {
    scheduler::priority<3>::queue q;
    q.push({1, 3, urgency::background});
    q.push({2, 2, urgency::prefetch});
    CHECK(q.next() == chunk{2, 0});
    q.push({3, 2, urgency::on_demand});
    q.push({4, 1, urgency::on_demand});
    CHECK(drain(q) == order{{3, 0}, {3, 1}, {4, 0}, {2, 1}, {1, 0}, {1, 1}, {1, 2}});
    scheduler::priority<1>::queue one;
    one.push({1, 1, urgency::background});
    one.push({2, 1, urgency::on_demand});
    CHECK(drain(one) == order{{1, 0}, {2, 0}});
}

TEST_CASE("the orders of kernels hand out every tile once") {
    covers_every_tile_once<scheduler::fifo::order>();
    covers_every_tile_once<scheduler::round_robin::order>();
    CHECK(scheduler::fifo::order::tile(1, 1, 2, 8) == 5);
    CHECK(scheduler::round_robin::order::tile(1, 1, 2, 8) == 3);
}

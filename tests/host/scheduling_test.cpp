#include <penstock/policy/scheduling.hpp>

#include <doctest/doctest.h>

#include <vector>

namespace {

using namespace penstock;

static_assert(host_scheduler<scheduler::fifo> && device_scheduler<scheduler::fifo>);
static_assert(host_scheduler<scheduler::round_robin> && device_scheduler<scheduler::round_robin>);
static_assert(host_scheduler<scheduler::priority<3>> && !device_scheduler<scheduler::priority<3>>);
static_assert(host_scheduler<scheduler::weighted_fair> && !device_scheduler<scheduler::weighted_fair>);
static_assert(claiming_scheduler<scheduler::first_come<4>> && !device_scheduler<scheduler::first_come<4>> &&
              !host_scheduler<scheduler::first_come<4>>);
static_assert(changeable_queue<scheduler::fifo::queue> && cancellable_queue<scheduler::weighted_fair::queue>);
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

TEST_CASE("a deadline decides within a level, and only there") {
    scheduler::priority<3>::queue q;
    q.push({1, 1});
    q.push({2, 2, urgency::on_demand, 70});
    q.push({3, 1, urgency::prefetch, 1});
    q.push({4, 1, urgency::on_demand, 70});
    CHECK(q.next() == chunk{2, 0});
    q.push({5, 1, urgency::on_demand, 60});
    CHECK(drain(q) == order{{5, 0}, {2, 1}, {4, 0}, {1, 0}, {3, 0}});
}

TEST_CASE("a request that waits can be raised, lowered, extended, shortened and cancelled") {
    scheduler::priority<3>::queue q;
    q.push({1, 3, urgency::prefetch});
    CHECK(q.next() == chunk{1, 0});
    q.push({2, 2});
    q.push({3, 2, urgency::background});
    q.push({4, 1, urgency::background});
    CHECK(q.change({1, 3, urgency::on_demand}));  // behind who is there, and not from its beginning
    CHECK(q.next() == chunk{2, 0});
    CHECK(q.change({2, 2, urgency::background}));  // behind 3 and 4
    CHECK(q.next() == chunk{1, 1});
    CHECK(q.change({1, 5, urgency::on_demand}));
    CHECK(q.next() == chunk{1, 2});
    CHECK(q.change({1, 4, urgency::on_demand}));
    CHECK(q.cancel(3));
    CHECK_FALSE(q.cancel(3));
    CHECK_FALSE(q.change({9, 1}));
    CHECK(drain(q) == order{{1, 3}, {4, 0}, {2, 1}});
    CHECK_FALSE(q.change({1, 9}));
    q.push({1, 3});
    CHECK(q.next() == chunk{1, 0});
    CHECK(q.change({1, 1}));
    CHECK_FALSE(q.next());
}

TEST_CASE("requests with one number are changed and cancelled together, and end one by one") {
    scheduler::fifo::queue q;
    q.push({1, 2});
    q.push({2, 1});
    q.push({1, 3});
    CHECK(q.next() == chunk{1, 0});
    CHECK(q.change({1, 2}));
    CHECK(drain(q) == order{{1, 1}, {2, 0}, {1, 0}, {1, 1}});
    q.push({1, 2});
    q.push({1, 2});
    CHECK(q.cancel(1));
    CHECK_FALSE(q.next());
}

TEST_CASE("weighted fair gives more to whom more tokens wait for, and finishes what is nearly whole") {
    const auto first_of = [](std::size_t chunks, request a, request b) {
        scheduler::weighted_fair::queue q;
        q.push(a);
        q.push(b);
        std::uint32_t got = 0;
        for (std::size_t i = 0; i < chunks; ++i) {
            got += q.next()->request == a.id ? 1 : 0;
        }
        return got;
    };
    const request equal{.id = 1, .chunks = 1000, .chunk_bytes = 4096};
    request other = equal;
    other.id = 2;
    CHECK(first_of(40, equal, other) == 20);
    request three = equal;
    three.weight = 3;
    CHECK(first_of(40, three, other) == 30);
    request small = equal;  // in chunks of a quarter: as many bytes at first, and more the less is left
    small.chunk_bytes = 1024;
    small.chunks = 4000;
    CHECK(first_of(50, small, other) == 40);
    request nearly_whole = equal;  // has a tenth of the bytes left, so that its 10 chunks go while the other gets one
    nearly_whole.chunks = 10;
    CHECK(first_of(11, nearly_whole, other) == 10);

    request background = three;
    background.level = urgency::background;
    CHECK(first_of(40, background, other) == 0);
    request nothing = equal;
    nothing.weight = 0;
    nothing.chunk_bytes = 0;
    other.chunk_bytes = 1;
    CHECK(first_of(40, nothing, other) == 20);
}

TEST_CASE("what waits in a weighted fair queue gets its new share when its weight changes") {
    scheduler::weighted_fair::queue q;
    request a{.id = 1, .chunks = 1000};
    q.push(a);
    q.push({.id = 2, .chunks = 1000});
    a.weight = 9;
    CHECK(q.change(a));
    std::uint32_t got = 0;
    for (int i = 0; i < 50; ++i) {
        got += q.next()->request == 1 ? 1 : 0;
    }
    CHECK(got == 45);
}

TEST_CASE("the orders of kernels hand out every tile once") {
    covers_every_tile_once<scheduler::fifo::order>();
    covers_every_tile_once<scheduler::round_robin::order>();
    CHECK(scheduler::fifo::order::tile(1, 1, 2, 8) == 5);
    CHECK(scheduler::round_robin::order::tile(1, 1, 2, 8) == 3);
}

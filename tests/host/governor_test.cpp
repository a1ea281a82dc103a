#include <penstock/policy/governor.hpp>

#include <doctest/doctest.h>

#include <cmath>

namespace {

using namespace penstock;
using namespace penstock::literals;
using namespace std::chrono_literals;
using governor::adaptive;
using std::chrono::nanoseconds;

constexpr std::uint64_t chunk_bytes = 2_MiB;
constexpr nanoseconds chunk_time = 40us;

/// Says that chunks arrive at this part of the link, one after another, from `now` on.
void arrive(adaptive& g, nanoseconds& now, double share, int chunks, bool alone = false) {
    for (int i = 0; i < chunks; ++i) {
        const nanoseconds took(static_cast<std::int64_t>(static_cast<double>(chunk_time.count()) / share));
        g.went(now, chunk_bytes);
        now += took;
        g.arrived(now, chunk_bytes, alone ? took + 10us : took, alone);
    }
}

}  // namespace

TEST_CASE("S10 a bandwidth estimate is not spoilt by samples that say nothing") {
    bandwidth_estimate e;
    const auto depth = [&] { return e.chunks_within(10ms, 1_MiB, 2, 8); };
    e.add(0, 0ns);
    CHECK(depth() == 2);
    e.add(1_MiB, 0ns);
    CHECK(e.bytes_per_second() == 0);
    CHECK(depth() == 2);
    e.add(1_MiB, 1ms);
    CHECK(e.bytes_per_second() == doctest::Approx(1.048576e9));  // the first real one initialises
    e.add(1_MiB, 1ms);
    e.add(1_MiB, 1ms);
    CHECK(e.bytes_per_second() == doctest::Approx(1.048576e9));
    CHECK(depth() == 8);
    e.add(0, 5ms);
    e.add(1_MiB, -1ms);
    CHECK(e.bytes_per_second() == doctest::Approx(1.048576e9));
    CHECK(e.chunks_within(5ms + 100us, 1_MiB, 2, 8) == 5);
    CHECK(e.chunks_within(1us, 1_MiB, 2, 8) == 2);
    CHECK(e.chunks_within(nanoseconds::max(), 0, 2, 8) == 8);
    CHECK(e.chunks_within(-1s, 1_MiB, 2, 8) == 2);
}

TEST_CASE("S10 the governor's measure of the link is as robust") {
    adaptive g;
    g.arrived(0ns, 0, 0ns, false);
    g.arrived(0ns, 1_MiB, 0ns, false);
    g.arrived(0ns, 1_MiB, -1ms, true);
    CHECK(g.share() == 1);
    CHECK(g.pace(0ns) == 1);
}

TEST_CASE("a cap spaces chunks by their bytes, and does not save up while nothing goes") {
    governor::cap<1'000_B> g;
    CHECK(g.may_go(5s) <= 5s);
    g.went(5s, 500);
    CHECK(g.may_go(5s) == 5s + 500ms);
    g.went(6s, 250);
    CHECK(g.may_go(6s) == 6s + 250ms);
    g.went(20s, 1);
    CHECK(g.may_go(20s) == 20s + 1ms);
}

TEST_CASE("the adaptive governor holds what is not on demand while a kernel misses, save for the floor, and comes back") {
    for (const link_sight busy : {link_sight{.missing = 1}, link_sight{.on_demand = 1}}) {
        adaptive g;
        nanoseconds now = 1ms;
        arrive(g, now, 1, 60);
        CHECK(g.may_go(now) == now);
        g.went(now, chunk_bytes);
        const nanoseconds went = now;
        nanoseconds last_pace_change = now;
        double before = g.pace(now);
        int falls = 0, rises = 0;
        for (int i = 0; i < 2000; ++i, now += 1us) {
            g.look(now, i < 1000 ? busy : link_sight{});
            const double p = g.pace(now);
            falls += p < before;
            rises += p > before;
            last_pace_change = p == before ? last_pace_change : now;
            before = p;
            if (i < 1000) {
                CHECK(p == adaptive::floor);
                CHECK(static_cast<double>((g.may_go(now) - went).count()) == doctest::Approx(64. * chunk_time.count()));
            }
        }
        CHECK(falls == 1);  // at once
        CHECK(rises == 3);  // a quarter, a half, all
        CHECK(last_pace_change - (went + 1ms) < adaptive::calm + 3 * adaptive::step);
        CHECK(g.may_go(now) == now);
    }
}

TEST_CASE("the adaptive governor gives way to bytes that come from the device, and does not swing") {
    adaptive g;
    nanoseconds now = 1ms;
    arrive(g, now, 1, 60);
    for (int i = 0; i < 100; ++i) {
        g.look(now, {.device_to_host = 1});
        CHECK(g.pace(now) == 0.75);
        arrive(g, now, 0.6, 1);  // both ways at once are slower, which is seen already
    }
    g.look(now, {});
    CHECK(g.pace(now) == 1);
}

TEST_CASE("the adaptive governor gives way to what it does not see by what its copies achieve, settles, and comes back") {
    adaptive g;
    nanoseconds now = 1ms;
    arrive(g, now, 1, 60);
    arrive(g, now, 0.9, 200);
    CHECK(g.pace(now) == 1);  // nobody
    for (int i = 0; i < 1000; ++i) {
        const double before = g.pace(now);
        arrive(g, now, 0.7, 1, before < 1);
        CHECK(g.pace(now) <= before);  // falls to where it stays
    }
    CHECK(g.pace(now) == doctest::Approx(0.4).epsilon(0.001));
    for (int i = 0; i < 1000; ++i) {
        const double before = g.pace(now);
        arrive(g, now, 1, 1, before < 1);
        CHECK(g.pace(now) >= before);
    }
    CHECK(g.pace(now) == 1);
    arrive(g, now, 0.1, 100);
    CHECK(g.pace(now) == adaptive::floor);
}

TEST_CASE("a small chunk, or one beside a miss, does not pass for a slow link") {
    adaptive g;
    nanoseconds now = 1ms;
    arrive(g, now, 1, 60);
    for (int i = 0; i < 20; ++i) {
        g.went(now, 64_KiB);
        now += 10us;
        g.arrived(now, 64_KiB, 10us, true);
    }
    CHECK(g.share() == 1);
    for (int i = 0; i < 20; ++i) {
        g.look(now, {.missing = 1});
        now += 80us;
        g.arrived(now, chunk_bytes, 80us, false);
    }
    CHECK(g.share() == 1);
}

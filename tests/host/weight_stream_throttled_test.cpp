#include "engine_fakes.hpp"

using namespace stream_fakes;

namespace {

using governor::adaptive;

/// Lets nothing go while it sees a miss.
struct strict : governor::none {
    void look(std::chrono::nanoseconds, const link_sight& s) noexcept { missing = s.missing; }
    [[nodiscard]] std::chrono::nanoseconds may_go(std::chrono::nanoseconds now) const noexcept { return missing > 0 ? now + 1h : now; }
    std::uint64_t missing = 0;
};

using strict_engine = engine_of<throttled<scheduler::priority<3>, strict>>;

template <class Engine>
std::shared_ptr<Engine> watched(const link_watch& watch, int readers) {
    return std::make_shared<Engine>(readers, chunk_bytes, 8, -1, 2, 1'000'000, detail::engine_options{.watch = &watch});
}

}  // namespace

TEST_CASE("a throttled scheduler is one, with the order of what it throttles") {
    using policy = throttled<scheduler::weighted_fair, adaptive>;
    static_assert(host_scheduler<policy> && ranked_scheduler<policy> && policy_for<policy, axis::scheduling>);
    static_assert(!ranked_scheduler<throttled<scheduler::fifo, adaptive>>);
    static_assert(std::is_same_v<policy::queue, scheduler::weighted_fair::queue>);
    using stream = weight_stream<policy, memory::pageable>;
    static_assert(std::is_same_v<stream::scheduler, policy>);
    CHECK(precedence{0, 5} < precedence{1, 0});
}

TEST_CASE("background copies stop at the next chunk when a kernel posts that it misses, and go on when it has all") {
    for (const int readers : {1, 3}) {
        for (const bool staged : {false, true}) {
            link_watch watch;
            slow_copies device;
            device.allow(0);
            slow_source source;
            const auto stream = watched<strict_engine>(watch, readers);
            const std::vector<std::byte> memory = known_bytes(200'000);
            std::vector<std::byte> to(memory.size());
            const transfer t =
                staged ? from_file(1, 77, 0, to, urgency::background) : from_memory(1, memory, to.data(), urgency::background);
            ticket load = start(stream, std::span(&t, 1), source, on(device));
            device.wait_for_enqueued(2);
            watch.misses(3).post(1);
            device.allow(1000);
            std::this_thread::sleep_for(20ms);
            CHECK(device.enqueued() <= 3);  // those on the engine, and one that was on its way there
            watch.misses(3).post(0);
            load.wait();
            slow_link::finish(on(device));
            CHECK(tests::holds(to, 77, 0));
            CHECK(device.enqueued() == 200);
            stream->stop();
        }
    }
}

TEST_CASE("while a governor holds what is not on demand, its readers read ahead and bring what is on demand") {
    for (const int readers : {1, 3}) {
        for (const bool pinned : {false, true}) {
            link_watch watch;
            slow_copies device, urgent_stream;
            slow_source source;
            watch.misses().post(5000);
            const auto stream = watched<strict_engine>(watch, readers);
            const std::vector<std::byte> memory = known_bytes(20'000);
            std::vector<std::byte> to(memory.size()), fast(4'000), host(3'000);
            const transfer slow =
                pinned ? from_memory(1, memory, to.data(), urgency::prefetch) : from_file(1, 77, 0, to, urgency::prefetch);
            ticket load = start(stream, std::span(&slow, 1), source, on(device));
            if (!pinned) {
                source.wait_for_reads(7);  // all slots but the one that is kept
            }
            const transfer quick = from_file(2, 78, 0, fast);
            ticket urgent = start(stream, std::span(&quick, 1), source, on(urgent_stream));
            urgent.wait();
            const transfer here = from_file(3, 79, 0, host);
            ticket to_host = start(stream, std::span(&here, 1), source, penstock::on_host());
            to_host.wait();
            slow_link::finish(on(urgent_stream));
            CHECK(tests::holds(fast, 78, 0));
            CHECK(tests::holds(host, 79, 0));
            CHECK(device.enqueued() == 0);
            load.promote(1);  // is held no longer
            load.wait();
            slow_link::finish(on(device));
            CHECK(tests::holds(to, 77, 0));
            stream->stop();
        }
    }
}

TEST_CASE("a load that a governor holds can be cancelled, and the stream can go") {
    link_watch watch;
    slow_copies device;
    slow_source source;
    watch.misses().post(1);
    const auto stream = watched<engine_of<throttled<scheduler::fifo, strict>>>(watch, 2);
    const std::vector<std::byte> memory = known_bytes(5'000);
    std::vector<std::byte> to(memory.size());
    const transfer slow = from_memory(1, memory, to.data(), urgency::prefetch);
    {
        ticket load = start(stream, std::span(&slow, 1), source, on(device));
        std::this_thread::sleep_for(2ms);
    }
    ticket again = start(stream, std::span(&slow, 1), source, on(device));
    stream->stop();
    CHECK_THROWS_AS(again.wait(), cancelled);
    CHECK(device.enqueued() == 0);
}

TEST_CASE("a cap spaces copies in time") {
    slow_copies device;
    slow_source source;
    const auto stream = std::make_shared<engine_of<throttled<scheduler::fifo, governor::cap<1'000'000_B>>>>(2, chunk_bytes, 8, -1);
    const std::vector<std::byte> memory = known_bytes(30'000);
    std::vector<std::byte> to(memory.size());
    const transfer slow = from_memory(1, memory, to.data(), urgency::prefetch);
    const auto begin = std::chrono::steady_clock::now();
    ticket load = start(stream, std::span(&slow, 1), source, on(device));
    load.wait();
    CHECK(std::chrono::steady_clock::now() - begin >= 29ms);
    slow_link::finish(on(device));
    CHECK(tests::holds(to, 77, 0));
    stream->stop();
}

TEST_CASE("what a watch sees is the sum of what is posted") {
    link_watch watch(3);
    CHECK(watch.sight().missing == 0);
    watch.misses(0).post(10);
    watch.misses(2).post(5);
    CHECK(watch.sight().missing == 15);
    watch.misses(0).post(0);
    CHECK(watch.sight().missing == 5);
    watch.from_device_begins(100);
    watch.from_device_begins(20);
    watch.from_device_ended(100);
    CHECK(watch.sight().device_to_host == 20);
}

#include "stream_fakes.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>

namespace {

using namespace stream_fakes;

}  // namespace

namespace {

/// Queues background requests, then an urgent one, on one lane; returns the place at which the urgent one was read, and how many reads there were.
template <class Stream>
std::pair<std::size_t, std::size_t> urgent_among_background(bool promote) {
    slow_source source;
    source.allow(0);
    Stream stream({.readers = 1});
    constexpr std::uint32_t background = 100;
    std::vector<std::byte> to(128 * (background + 1));
    std::vector<transfer> list;
    for (std::uint32_t i = 0; i < background; ++i) {
        list.push_back(from_file(i, i, 0, std::span(to).subspan(i * 128, 128), urgency::prefetch));
    }
    ticket slow = stream.start(list, source, on_host());
    source.wait_for_reads(1);
    const std::uint32_t wanted = promote ? background - 1 : background;
    if (promote) {
        slow.promote(wanted);
        source.allow(1000);
        slow.wait(wanted);
    } else {
        ticket urgent =
            stream.start(std::vector{from_file(wanted, wanted, 0, std::span(to).subspan(background * 128, 128))}, source, on_host());
        source.allow(1000);
        urgent.wait();
        CHECK(tests::holds(std::span(to).subspan(background * 128, 128), wanted, 0));
    }
    slow.wait();
    const std::vector<std::uint32_t> order = source.reads();
    return {static_cast<std::size_t>(std::find(order.begin(), order.end(), wanted) - order.begin()), order.size()};
}

using chunk128 = chunking::fixed<128_B>;

}  // namespace

TEST_CASE("S07 demand waits behind prefetch: priority serves it after at most the chunks in flight") {
    const auto [place, reads] = urgent_among_background<weight_stream<memory::pageable, chunk128, scheduler::priority<3>>>(false);
    CHECK(place == 1);  // behind the one in flight
    CHECK(reads == 101);
}

TEST_CASE("a request can be lowered, and cancelled while the others go on") {
    slow_source source;
    source.allow(0);
    weight_stream<memory::pageable, chunk128, scheduler::priority<3>> stream({.readers = 1});
    std::vector<std::byte> to(128 * 9);
    std::vector<transfer> list;
    for (std::uint32_t i = 0; i < 9; ++i) {  // three requests of three chunks
        list.push_back(from_file(i / 3, i / 3, i % 3 * 128, std::span(to).subspan(i * 128, 128), urgency::prefetch));
    }
    ticket load = stream.start(list, source, on_host());
    source.wait_for_reads(1);
    load.change(0, urgency::background);
    load.cancel(1);
    load.cancel(1);
    CHECK_THROWS_AS(load.cancel(9), configuration_error);
    CHECK_THROWS_AS(load.change(9, urgency::prefetch), configuration_error);
    source.allow(1000);
    load.wait(2);
    CHECK_THROWS_WITH_AS(load.wait(1), doctest::Contains("request 1"), cancelled);
    load.wait();
    CHECK(source.reads() == std::vector<std::uint32_t>{0, 2, 2, 2, 0, 0});
    CHECK(load.report().bytes == 6 * 128);
    load.cancel(0);  // there already
    load.wait(0);
    CHECK(tests::holds(std::span(to).first(3 * 128), 0, 0));
}

TEST_CASE("S07 a queued prefetch for the same expert is promoted, not repeated") {
    const auto [place, reads] = urgent_among_background<weight_stream<memory::pageable, chunk128, scheduler::priority<3>>>(true);
    CHECK(place == 1);  // behind the one in flight
    CHECK(reads == 100);
}

TEST_CASE("S07 fifo keeps strict order") {
    const auto [place, reads] = urgent_among_background<weight_stream<memory::pageable, chunk128, scheduler::fifo>>(false);
    CHECK(place == 100);
    CHECK(reads == 101);
    const auto [place_promoted, reads_promoted] = urgent_among_background<weight_stream<memory::pageable, chunk128, scheduler::fifo>>(true);
    CHECK(place_promoted == 99);
    CHECK(reads_promoted == 100);
}

TEST_CASE("S07 an urgent request pre-empts a large one at a chunk boundary") {
    slow_source source;
    source.allow(1);
    weight_stream<memory::pageable, chunk128, scheduler::priority<3>> stream({.readers = 1});
    std::vector<std::byte> large(128 * 200);
    std::vector<std::byte> small(128);
    ticket background = stream.start(std::vector{from_file(1, 1, 0, large, urgency::background)}, source, on_host());
    source.wait_for_reads(2);
    ticket urgent = stream.start(std::vector{from_file(1, 2, 0, small)}, source, on_host());  // the same number on purpose
    source.allow(3);
    urgent.wait(1);
    CHECK(source.reads()[2] == 2);
    CHECK_FALSE(background.done());
    CHECK(tests::holds(small, 2, 0));
    source.allow(1000);
    background.wait();
    CHECK(tests::holds(large, 1, 0));
    CHECK(source.reads().size() == 201);
}

TEST_CASE("of two loads that share a request number, the more urgent is served first") {
    slow_source source;
    source.allow(0);
    weight_stream<memory::pageable, chunk128, scheduler::priority<3>> stream({.readers = 1});
    std::vector<std::byte> to(128 * 4);
    ticket blocker = stream.start(std::vector{from_file(9, 9, 0, std::span(to).first(128))}, source, on_host());
    source.wait_for_reads(1);
    ticket background =
        stream.start(std::vector{from_file(1, 1, 0, std::span(to).subspan(128, 256), urgency::background)}, source, on_host());
    ticket urgent = stream.start(std::vector{from_file(1, 2, 0, std::span(to).subspan(384, 128))}, source, on_host());
    source.allow(1000);
    background.wait();
    urgent.wait();
    CHECK(source.reads() == std::vector<std::uint32_t>{9, 2, 1, 1});
    CHECK(tests::holds(std::span(to).subspan(128, 256), 1, 0));
    CHECK(tests::holds(std::span(to).subspan(384, 128), 2, 0));
}

TEST_CASE("round robin takes turns between requests") {
    slow_source source(1ms);
    weight_stream<memory::pageable, chunk128, scheduler::round_robin> stream({.readers = 1});
    std::vector<std::byte> to(128 * 20);
    stream.run(std::vector{from_file(1, 1, 0, std::span(to).first(1280)), from_file(2, 2, 0, std::span(to).subspan(1280))}, source,
               on_host());
    const std::vector<std::uint32_t> order = source.reads();
    for (std::size_t i = 0; i < order.size(); ++i) {
        CHECK(order[i] == 1 + i % 2);
    }
}

TEST_CASE("S05 different experts asked for by many at once overlap") {
    slow_source source;
    source.want_company(8);  // no read ends before all eight have begun
    weight_stream<memory::pageable> stream({.readers = 8});
    std::vector<std::byte> to(8 * 1000);
    {
        std::vector<std::jthread> threads;
        for (std::uint32_t i = 0; i < 8; ++i) {
            threads.emplace_back([&, i] {
                ticket t = stream.start(std::vector{from_file(i, i, 0, std::span(to).subspan(i * 1000, 1000))}, source, on_host());
                t.wait(i);
            });
        }
    }
    CHECK(source.most_at_once() == 8);
    for (std::uint32_t i = 0; i < 8; ++i) {
        CHECK(tests::holds(std::span(to).subspan(i * 1000, 1000), i, 0));
    }
}

namespace {

/// Names one request and then forgets the rest.
struct forgetful {
    using policy_axis = axis::scheduling;
    struct queue {
        void push(request r) { last = r; }
        std::optional<chunk> next() {
            if (last.chunks == 0) {
                return std::nullopt;
            }
            return chunk{last.id, --last.chunks};
        }
        request last;
    };
};

/// The last request first: a policy of one's own that sees the caller's request numbers.
struct highest_number_first {
    using policy_axis = axis::scheduling;
    struct queue {
        void push(request r) { waiting.push_back(r); }
        std::optional<chunk> next() {
            const auto best =
                std::max_element(waiting.begin(), waiting.end(), [](const request& a, const request& b) { return a.id < b.id; });
            if (best == waiting.end()) {
                return std::nullopt;
            }
            const chunk c{best->id, --best->chunks};
            if (best->chunks == 0) {
                waiting.erase(best);
            }
            return c;
        }
        std::vector<request> waiting;
    };
};

}  // namespace

TEST_CASE("a scheduler that loses requests is an error, not a hang") {
    slow_source source;
    weight_stream<memory::pageable, forgetful> stream({.readers = 1});
    std::vector<std::byte> to(20);
    CHECK_THROWS_AS(stream.run(std::vector{from_file(1, 1, 0, std::span(to).first(10)), from_file(2, 2, 0, std::span(to).subspan(10))},
                               source, on_host()),
                    configuration_error);
}

TEST_CASE("a scheduler of one's own decides by the caller's numbers, in any order of chunks") {
    slow_source source;
    weight_stream<memory::pageable, chunk128, highest_number_first> stream({.readers = 1});
    std::vector<std::byte> to(3 * 300);
    std::vector<transfer> list;
    for (std::uint32_t i = 0; i < 3; ++i) {
        list.push_back(from_file(i, i, 0, std::span(to).subspan(i * 300, 300)));
    }
    stream.run(list, source, on_host());
    CHECK(source.reads() == std::vector<std::uint32_t>{2, 2, 2, 1, 1, 1, 0, 0, 0});
    CHECK(tests::holds(std::span(to).first(300), 0, 0));
}

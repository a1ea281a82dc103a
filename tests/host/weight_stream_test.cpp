#include "stream_fakes.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include <sys/wait.h>
#include <unistd.h>

namespace {

using namespace stream_fakes;

static_assert(std::is_same_v<weight_stream<>, weight_stream<scheduler::fifo, memory::pinned>>);
static_assert(std::is_same_v<weight_stream<prefetch::depth<4>, chunking::fixed<4_MiB>, memory::pageable>,
                             weight_stream<memory::pageable, prefetch::depth<4>, chunking::fixed<4_MiB>>>);
static_assert(std::is_same_v<weight_stream<memory::pageable>::memory, memory::pageable>);
static_assert(!std::is_copy_constructible_v<ticket> && std::is_nothrow_move_constructible_v<ticket>);

using small_stream = weight_stream<memory::pageable, chunking::run_time, scheduler::fifo>;

}  // namespace

TEST_CASE("a stream brings the exact bytes for any chunk size, and no others") {
    const temporary_directory dir;
    write_pattern(dir / "a", 0, 100'003);
    write_pattern(dir / "b", 1, 1);
    write_pattern(dir / "c", 2, 0);
    file_source files({dir / "a", dir / "b", dir / "c"});
    for (const std::uint64_t size : {128ull, 1000ull, 4096ull, 65'537ull, 100'003ull, 1ull << 20}) {
        for (const int readers : {1, 2, 5}) {
            small_stream stream({.readers = readers}, {bytes{size}});
            std::vector<std::byte> to(200'000, guard);
            const std::vector<std::byte> memory(to.begin(), to.begin() + 777);
            const std::span<std::byte> all(to);
            std::vector<transfer> list{from_file(7, 0, 3, all.subspan(16, 99'999)), from_file(8, 1, 0, all.subspan(110'000, 1)),
                                       from_file(9, 2, 0, all.subspan(120'000, 0))};
            transfer t;
            t.request = 8;
            t.memory = memory.data();
            t.bytes = memory.size();
            t.destination = to.data() + 130'000;
            std::fill_n(to.data() + 130'000, 777, std::byte{0});
            list.push_back(t);
            const stream_report report = stream.run(list, files, on_host());
            CHECK(report.bytes == 99'999 + 1 + 777);
            CHECK(report.chunks == ceil_div(99'999, size) + 1 + ceil_div(777, size));
            CHECK(report.reads == ceil_div(99'999, size) + 1);
            CHECK(report.source.find("page cache") != std::string::npos);
            CHECK(tests::holds(all.subspan(16, 99'999), 0, 3));
            CHECK(tests::holds(all.subspan(110'000, 1), 1, 0));
            std::size_t spoilt = 0;
            for (std::size_t i = 0; i < to.size(); ++i) {
                spoilt += (i < 16 || (i >= 100'015 && i != 110'000)) && to[i] != guard;
            }
            CHECK(spoilt == 0);
        }
    }
}

TEST_CASE("nothing to bring is legal, and the callback hears of it once") {
    slow_source source;
    small_stream stream;
    int calls = 0;
    CHECK(stream.run({}, source, on_host(), [&](const progress& p) { calls += p.bytes == 0 && p.total == 0; }).bytes == 0);
    CHECK(calls == 1);
    std::vector<transfer> empty{from_file(3, 0, 0, {})};
    ticket t = stream.start(empty, source, on_host());
    t.wait(3);
    t.wait();
    CHECK_THROWS_AS(t.wait(4), configuration_error);
    CHECK(source.reads().empty());
    CHECK(stream.staging_bytes() == 0);
}

TEST_CASE("requests are waited for one by one") {
    slow_source source;
    source.allow(31);
    weight_stream<memory::pageable, chunking::fixed<128_B>> stream({.readers = 1});
    std::vector<std::byte> to(128 * 60);
    std::vector<transfer> list;
    for (std::uint32_t i = 0; i < 60; ++i) {
        list.push_back(from_file(100 + i, i, 0, std::span(to).subspan(i * 128, 128)));
    }
    ticket t = stream.start(list, source, on_host());
    t.wait(100);
    CHECK(tests::holds(std::span(to).first(128), 0, 0));
    CHECK_FALSE(t.done());
    t.wait(130);
    CHECK(tests::holds(std::span(to).subspan(30 * 128, 128), 30, 0));
    CHECK_FALSE(t.done());
    source.allow(60);
    ticket moved = std::move(t);
    moved.wait();
    CHECK(moved.done());
    CHECK(moved.report().chunks == 60);
}

TEST_CASE("progress grows and ends with the total") {
    slow_source source(100us);
    small_stream stream({.readers = 4}, {bytes{1000}});
    std::vector<std::byte> to(100'500);
    const std::vector<transfer> list{from_file(1, 0, 0, to)};
    std::vector<std::uint64_t> seen;
    std::atomic<int> inside{0};
    bool alone = true;
    stream.run(list, source, on_host(), [&](const progress& p) {
        alone = alone && ++inside == 1;
        seen.push_back(p.bytes);
        CHECK(p.total == 100'500);
        --inside;
    });
    CHECK(alone);
    CHECK(std::is_sorted(seen.begin(), seen.end()));
    CHECK(seen.back() == 100'500);
    CHECK(std::count(seen.begin(), seen.end(), 100'500u) == 1);
}

TEST_CASE("a callback that throws ends the load and reaches who waits") {
    slow_source source(100us);
    small_stream stream({.readers = 2}, {bytes{1000}});
    std::vector<std::byte> to(100'000);
    const std::vector<transfer> list{from_file(1, 0, 0, to)};
    CHECK_THROWS_AS(stream.run(list, source, on_host(), [](const progress&) { throw std::logic_error("enough"); }), std::logic_error);
    CHECK(source.reads().size() < 20);
    CHECK_THROWS_AS(stream.run(list, source, on_host(),
                               [](const progress& p) {
                                   if (p.bytes == p.total)
                                       throw std::logic_error("late");
                               }),
                    std::logic_error);
    CHECK(stream.run(list, source, on_host()).bytes == 100'000);
}

TEST_CASE("cancellation takes effect within two chunks and leaves the stream usable") {
    slow_source source(1ms);
    weight_stream<memory::pageable, chunking::fixed<128_B>> stream({.readers = 1});
    std::vector<std::byte> to(128 * 1000);
    const std::vector<transfer> list{from_file(1, 0, 0, to)};
    std::stop_source stop;
    std::uint64_t at_stop = 0;
    const auto callback = [&](const progress& p) {
        if (p.bytes == 128 * 5) {
            at_stop = p.bytes;
            stop.request_stop();
        }
    };
    CHECK_THROWS_AS(stream.run(list, source, on_host(), callback, stop.get_token()), cancelled);
    CHECK(at_stop == 128 * 5);
    CHECK(source.reads().size() <= 7);
    // A stop from outside, while someone waits.
    std::stop_source other;
    ticket t = stream.start(list, source, on_host(), {}, other.get_token());
    std::thread stopper([&] {
        std::this_thread::sleep_for(10ms);
        other.request_stop();
    });
    CHECK_THROWS_AS(t.wait(), cancelled);
    stopper.join();
    CHECK(t.report().bytes < to.size());
    // A stop that was requested before: nothing is read.
    const std::size_t reads = source.reads().size();
    CHECK_THROWS_AS(stream.run(list, source, on_host(), {}, other.get_token()), cancelled);
    CHECK(source.reads().size() == reads);
    CHECK(stream.run(std::span(&list[0], 1), source, on_host()).bytes == to.size());
    CHECK(tests::holds(to, 0, 0));
}

TEST_CASE("a ticket that dies stops its load, and nothing is written afterwards") {
    slow_source source(500us);
    weight_stream<memory::pageable, chunking::fixed<128_B>> stream({.readers = 3});
    std::vector<std::byte> to(128 * 400);
    const std::vector<transfer> list{from_file(1, 0, 0, to)};
    {
        ticket t = stream.start(list, source, on_host());
        std::this_thread::sleep_for(5ms);
    }
    std::fill(to.begin(), to.end(), guard);
    std::this_thread::sleep_for(5ms);
    CHECK(std::all_of(to.begin(), to.end(), [](std::byte b) { return b == guard; }));
    CHECK(source.reads().size() < 400);
}

TEST_CASE("a stream that dies ends its loads, and their tickets say so") {
    slow_source source(1ms);
    std::vector<std::byte> to(128 * 400);
    const std::vector<transfer> list{from_file(1, 0, 0, to)};
    ticket t;
    {
        weight_stream<memory::pageable, chunking::fixed<128_B>> stream({.readers = 2});
        t = stream.start(list, source, on_host());
    }
    CHECK_THROWS_AS(t.wait(), cancelled);
}

TEST_CASE("an error of a reader reaches the ticket, and a retry works (M16)") {
    const temporary_directory dir;
    write_pattern(dir / "good", 0, 10'000);
    write_pattern(dir / "short", 1, 4'000);
    file_source files({dir / "good", dir / "short", dir / "none"});
    small_stream stream({.readers = 2}, {bytes{1024}});
    std::vector<std::byte> to(10'000);
    const auto message = [&](std::uint32_t file) {
        const std::vector<transfer> list{from_file(1, 0, 0, std::span(to).first(3000)),
                                         from_file(2, file, 0, std::span(to).subspan(3000, 4096))};
        try {
            stream.run(list, files, on_host());
        } catch (const io_error& e) {
            return std::string(e.what());
        }
        return std::string("no error");
    };
    const std::string short_file = message(1);
    CHECK(short_file.find((dir / "short").string()) != std::string::npos);
    CHECK(short_file.find("offset 3072") != std::string::npos);
    CHECK(short_file.find("1024 bytes were wanted") != std::string::npos);
    CHECK(short_file.find("928 were got") != std::string::npos);
    const std::string missing = message(2);
    CHECK(missing.find((dir / "none").string()) != std::string::npos);
    CHECK(missing.find("No such file") != std::string::npos);
    CHECK_THROWS_AS(stream.run(std::vector{from_file(1, 3, 0, std::span(to).first(1))}, files, on_host()), configuration_error);
    // The request that was whole before the other failed is not taken back.
    slow_source source;
    source.broken_file = 5;
    weight_stream<memory::pageable> one({.readers = 1});
    ticket t = one.start(std::vector{from_file(1, 0, 0, std::span(to).first(3000)), from_file(2, 5, 0, std::span(to).subspan(3000, 5000))},
                         source, on_host());
    t.wait(1);
    CHECK_THROWS_AS(t.wait(2), io_error);
    CHECK_THROWS_AS(t.wait(), io_error);
    CHECK(stream.run(std::vector{from_file(1, 0, 0, std::span(to).first(3000))}, files, on_host()).bytes == 3000);
    CHECK(tests::holds(std::span(to).first(3000), 0, 0));
}

TEST_CASE("a file that is cut after it was opened gives an io_error, not a crash") {
    const temporary_directory dir;
    write_pattern(dir / "a", 0, 50'000);
    file_source files({dir / "a"});
    std::vector<std::byte> to(50'000);
    CHECK(files.size(0) == 50'000);
    std::filesystem::resize_file(dir / "a", 20'000);
    small_stream stream({.readers = 2}, {bytes{1024}});
    CHECK_THROWS_AS(stream.run(std::vector{from_file(1, 0, 0, to)}, files, on_host()), io_error);
}

TEST_CASE("a device that is not there is refused by name") {
    if (device_count() > 0) {
        return;
    }
    slow_source source;
    weight_stream<> stream;
    std::vector<std::byte> to(1);
    CHECK_THROWS_WITH_AS(static_cast<void>(stream.start(std::vector{from_file(1, 0, 0, to)}, source, on_device(0))),
                         doctest::Contains("no CUDA device"), configuration_error);
    stream.reserve();
    CHECK(stream.staging_bytes() == 0);
    CHECK(stream.staging_bytes_needed() == 4u * ((16u << 20) + 4096u));
}

TEST_CASE("a transfer without a destination is refused") {
    slow_source source;
    weight_stream<memory::pageable> stream;
    transfer t;
    t.bytes = 1;
    CHECK_THROWS_AS(static_cast<void>(stream.start(std::vector{t}, source, on_host())), configuration_error);
}

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

TEST_CASE("64 threads load, cancel and fail on one stream at once") {
    slow_source source;
    source.broken_file = 1000;
    weight_stream<memory::pageable, chunking::fixed<1_KiB>, scheduler::priority<3>> stream({.readers = 4});
    std::atomic<int> right{0};
    std::atomic<int> failed{0};
    {
        std::vector<std::jthread> threads;
        for (std::uint32_t n = 0; n < 64; ++n) {
            threads.emplace_back([&, n] {
                for (std::uint32_t round = 0; round < 20; ++round) {
                    std::vector<std::byte> to(10'000 + n * 37 + round);
                    std::vector<transfer> list;
                    const std::size_t half = to.size() / 2;
                    list.push_back(from_file(round, n, 0, std::span(to).first(half), static_cast<urgency>(round % 3)));
                    list.push_back(from_file(n, n % 8 == 7 ? 1000 : n, half, std::span(to).subspan(half), static_cast<urgency>(n % 3)));
                    std::stop_source stop;
                    ticket t = stream.start(list, source, on_host(), {}, stop.get_token());
                    if (n % 8 == 5) {
                        stop.request_stop();
                    }
                    if (n % 8 == 3 && round % 2 == 0) {
                        continue;  // the ticket dies running
                    }
                    if (n % 8 == 2) {
                        t.promote(n);
                    }
                    try {
                        t.wait();
                        right += tests::holds(to, n, 0);
                    } catch (const error&) {
                        ++failed;
                    }
                }
            });
        }
    }
    // Eight threads fail always, eight let half of their tickets die, eight may or may not be stopped in time; the rest is right.
    CHECK(right >= 64 * 20 - 8 * 20 - 8 * 10 - 8 * 20);
    CHECK(failed >= 8 * 20);
    CHECK(right + failed == 64 * 20 - 8 * 10);
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

TEST_CASE("load puts every tensor at a multiple of 256 bytes and finds it by name") {
    const temporary_directory dir;
    write_pattern(dir / "a", 0, 9'000'000);
    write_pattern(dir / "b", 1, 5'000);
    tensor_list list;
    list.files = {dir / "a", dir / "b"};
    list.tensors = {{"third", dtype::u8, {999}, 1, 11, 999},
                    {"first", dtype::bf16, {2000, 1000}, 0, 100, 4'000'000},
                    {"second", dtype::f32, {1000, 1000}, 0, 4'000'100, 4'000'000},
                    {"nothing", dtype::f32, {0, 4}, 1, 5000, 0}};
    weight_stream<> stream;
    std::uint64_t total = 0;
    const loaded_tensors tensors = stream.load(list, on_host(), [&](const progress& p) { total = p.total; });
    CHECK(total == 8'000'999);
    CHECK(tensors.size() == 4);
    CHECK(tensors.report().bytes == 8'000'999);
    for (const tensor_info& t : list.tensors) {
        const tensor_view& v = tensors[t.name];
        CHECK(reinterpret_cast<std::uintptr_t>(v.data) % 256 == 0);
        CHECK(v.type == t.type);
        CHECK(v.shape == t.shape);
        CHECK(v.bytes == t.bytes);
        CHECK(tests::holds({v.data, v.bytes}, t.file, t.offset));
    }
    CHECK_THROWS_WITH_AS(static_cast<void>(tensors["fourth"]), doctest::Contains("\"fourth\""), configuration_error);
    list.tensors.push_back({"beyond", dtype::u8, {10}, 1, 4'991, 10});
    CHECK_THROWS_WITH_AS(static_cast<void>(stream.load(list, on_host())), doctest::Contains("\"beyond\" ends at byte 5001"), io_error);
    list.tensors.back() = {"third", dtype::u8, {10}, 1, 0, 10};
    CHECK_THROWS_WITH_AS(static_cast<void>(stream.load(list, on_host())), doctest::Contains("\"third\" is twice"), configuration_error);
    CHECK(stream.load({}, on_host()).size() == 0);
}

TEST_CASE("small tensors that are neighbours share chunks, in whatever order they are listed") {
    const temporary_directory dir;
    constexpr std::uint64_t tensor_bytes = 64 << 10;
    constexpr std::uint64_t count = 150;
    write_pattern(dir / "a", 0, 100 + count * tensor_bytes);
    write_pattern(dir / "b", 1, count * tensor_bytes);
    tensor_list list;
    list.files = {dir / "a", dir / "b"};
    for (std::uint64_t i = 0; i < 2 * count; ++i) {
        const std::uint64_t n = i * 7 % (2 * count);
        const auto file = static_cast<std::uint32_t>(n / count);
        list.tensors.push_back(
            {std::to_string(n), dtype::bf16, {128, 256}, file, (file == 0 ? 100 : 0) + n % count * tensor_bytes, tensor_bytes});
    }
    weight_stream<> stream;
    const loaded_tensors tensors = stream.load(list, on_host());
    CHECK(tensors.report().chunks == 2 * ceil_div(count * tensor_bytes, 16u << 20));
    CHECK(tensors.report().reads == ceil_div(100 + count * tensor_bytes, 1u << 20) + ceil_div(count * tensor_bytes, 1u << 20));
    for (const tensor_info& t : list.tensors) {
        CHECK(tests::holds({tensors[t.name].data, t.bytes}, t.file, t.offset));
    }
}

TEST_CASE("tensors are loaded into room that was made for them, again and again") {
    const temporary_directory dir;
    write_pattern(dir / "a", 0, 5'000);
    tensor_list list;
    list.files = {dir / "a"};
    list.tensors = {{"x", dtype::u8, {1'000}, 0, 3'000, 1'000}, {"y", dtype::u8, {300}, 0, 10, 300}, {"z", dtype::u8, {7}, 0, 310, 7}};
    weight_stream<> stream;
    file_source files(list.files);
    loaded_tensors room(list, on_host());
    const std::byte* const data = room["y"].data;
    for (int i = 0; i < 3; ++i) {
        std::fill_n(room["x"].data, 1'000, guard);
        room = stream.load(list, std::move(room), files);
        CHECK(room["y"].data == data);
        for (const tensor_info& t : list.tensors) {
            CHECK(tests::holds({room[t.name].data, t.bytes}, 0, t.offset));
        }
        CHECK(room.report().bytes == 1'307);
    }
    const auto refused = [&](auto&& change) {
        tensor_list other = list;
        change(other);
        CHECK_THROWS_WITH_AS(static_cast<void>(stream.load(other, loaded_tensors(list, on_host()), files)),
                             doctest::Contains("was not made for this list"), configuration_error);
    };
    refused([](tensor_list& l) { l.tensors.pop_back(); });
    refused([](tensor_list& l) { l.tensors[0].bytes = 2'000; });
    refused([](tensor_list& l) { std::swap(l.tensors[0].name, l.tensors[1].name); });
    refused([](tensor_list& l) { l.tensors[1].type = dtype::i8; });
}

TEST_CASE("the default chunk follows the source, one that is fixed does not") {
    struct of_small_blocks final : byte_source {
        void read(std::uint32_t, std::uint64_t, std::span<std::byte> into) override { std::ranges::fill(into, std::byte{7}); }
        [[nodiscard]] std::string name(std::uint32_t) const override { return "blocks"; }
        [[nodiscard]] std::uint64_t chunk_bytes(std::uint32_t) const noexcept override { return 1 << 20; }
    } source;
    std::vector<std::byte> to(5 << 20);
    const std::vector<transfer> list{from_file(1, 0, 0, to)};
    CHECK(weight_stream<>().run(list, source, on_host()).chunks == 5);
    CHECK(weight_stream<chunking::fixed<16_MiB>>().run(list, source, on_host()).chunks == 1);
}

TEST_CASE("an error names the tensor whose bytes did not come") {
    const temporary_directory dir;
    write_pattern(dir / "a", 0, 5'000);
    tensor_list list;
    list.files = {dir / "a"};
    list.tensors = {{"first", dtype::u8, {1'000}, 0, 100, 1'000}, {"second", dtype::u8, {900}, 0, 1'100, 900}};
    weight_stream<> stream;
    file_source files(list.files);
    loaded_tensors room(list, on_host());
    struct cut_after_its_size final : byte_source {
        explicit cut_after_its_size(byte_source& f) : from(f) {}
        void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override { from.read(file, offset, into); }
        [[nodiscard]] std::string name(std::uint32_t file) const override { return from.name(file); }
        [[nodiscard]] std::uint64_t size(std::uint32_t) override { return 5'000; }
        byte_source& from;
    } cut(files);
    std::filesystem::resize_file(dir / "a", 1'500);
    CHECK_THROWS_WITH_AS(
        static_cast<void>(stream.load(list, cut, on_host())),
        doctest::Contains("900 bytes were wanted at offset 1100, 400 were got: the file ends there (in tensor \"second\")"), io_error);
    write_pattern(dir / "a", 0, 5'000);
    const loaded_tensors again = stream.load(list, cut, on_host());
    CHECK(tests::holds({again["second"].data, 900}, 0, 1'100));
}

namespace {

/// Ends the process from a second thread while a load runs into objects of static storage; never returns.
[[noreturn]] void exit_with_a_load_running(bool ticket_outlives_stream) {
    static slow_source source(1ms);
    static std::vector<std::byte> to(128 * 100'000);
    static ticket outlives;
    static weight_stream<memory::pageable, chunk128> stream({.readers = 2});
    static ticket dies_first;
    (ticket_outlives_stream ? outlives : dies_first) = stream.start(std::vector{from_file(1, 1, 0, to)}, source, on_host());
    source.wait_for_reads(10);
    std::thread([] { std::exit(0); }).detach();
    for (;;) {
        ::pause();
    }
}

}  // namespace

TEST_CASE("M10 objects that outlive main: exit from a second thread with a load running") {
    for (const bool ticket_outlives_stream : {false, true}) {
        std::fflush(nullptr);
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            exit_with_a_load_running(ticket_outlives_stream);
        }
        int status = -1;
        REQUIRE(::waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 0);
    }
}

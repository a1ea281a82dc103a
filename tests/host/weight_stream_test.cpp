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

/// Ends the process from a second thread while a load runs into objects of static storage; never returns.
[[noreturn]] void exit_with_a_load_running(bool ticket_outlives_stream) {
    static slow_source source(1ms);
    static std::vector<std::byte> to(128 * 100'000);
    static ticket outlives;
    static weight_stream<memory::pageable, chunking::fixed<128_B>> stream({.readers = 2});
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

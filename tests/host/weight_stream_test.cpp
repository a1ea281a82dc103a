#include <penstock/stream/weight_stream.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <fstream>

#include <sys/wait.h>
#include <unistd.h>

namespace {

using namespace penstock;
using namespace penstock::literals;
using namespace std::chrono_literals;

static_assert(std::is_same_v<weight_stream<>, weight_stream<scheduler::fifo, memory::pinned>>);
static_assert(std::is_same_v<weight_stream<prefetch::depth<4>, chunking::fixed<4_MiB>, memory::pageable>,
                             weight_stream<memory::pageable, prefetch::depth<4>, chunking::fixed<4_MiB>>>);
static_assert(std::is_same_v<weight_stream<memory::pageable>::memory, memory::pageable>);
static_assert(!std::is_copy_constructible_v<ticket> && std::is_nothrow_move_constructible_v<ticket>);

using small_stream = weight_stream<memory::pageable, chunking::run_time, scheduler::fifo>;

/// A directory that is gone with the test.
struct temporary_directory {
    temporary_directory() {
        std::string name = (std::filesystem::temp_directory_path() / "penstock-XXXXXX").string();
        REQUIRE(::mkdtemp(name.data()) != nullptr);
        path = name;
    }
    ~temporary_directory() { std::filesystem::remove_all(path); }
    std::filesystem::path path;
};

std::byte pattern(std::uint64_t file, std::uint64_t offset) {
    std::uint64_t x = (file + 1) * 0x9e3779b97f4a7c15u + offset;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return static_cast<std::byte>(x >> 56);
}

void write_pattern(const std::filesystem::path& path, std::uint64_t file, std::size_t size) {
    std::vector<std::byte> data(size);
    for (std::size_t i = 0; i < size; ++i) {
        data[i] = pattern(file, i);
    }
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(size));
}

/// Bytes by formula. Reads take `delay`, or as long as the test holds them back; which file was read when is remembered.
class slow_source final : public byte_source {
public:
    explicit slow_source(std::chrono::microseconds delay = 0us) : delay_(delay) {}

    void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override {
        std::unique_lock lock(mutex_);
        order_.push_back(file);
        const std::size_t number = order_.size();
        most_at_once_ = std::max(most_at_once_, ++now_);
        changed_.notify_all();
        changed_.wait(lock, [&] { return number <= allowed_; });
        changed_.wait_for(lock, 10s, [&] { return most_at_once_ >= company_; });
        lock.unlock();
        if (delay_ > 0us) {
            std::this_thread::sleep_for(delay_);
        }
        for (std::size_t i = 0; i < into.size(); ++i) {
            into[i] = pattern(file, offset + i);
        }
        lock.lock();
        --now_;
        if (file == broken_file) {
            throw io_error("file number " + std::to_string(file) + ": broken at offset " + std::to_string(offset));
        }
    }

    [[nodiscard]] std::string name(std::uint32_t file) const override { return "number " + std::to_string(file); }

    /// Lets the first `reads` reads pass and holds back the others.
    void allow(std::size_t reads) {
        const std::lock_guard lock(mutex_);
        allowed_ = reads;
        changed_.notify_all();
    }

    /// Holds back every read until `readers` of them have been there at once.
    void want_company(int readers) { company_ = readers; }

    void wait_for_reads(std::size_t reads) {
        std::unique_lock lock(mutex_);
        REQUIRE(changed_.wait_for(lock, 10s, [&] { return order_.size() >= reads; }));
    }

    [[nodiscard]] std::vector<std::uint32_t> reads() const {
        const std::lock_guard lock(mutex_);
        return order_;
    }

    [[nodiscard]] int most_at_once() const {
        const std::lock_guard lock(mutex_);
        return most_at_once_;
    }

    std::uint32_t broken_file = ~0u;

private:
    const std::chrono::microseconds delay_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::uint32_t> order_;
    std::size_t allowed_ = ~std::size_t{0};
    int company_ = 0;
    int most_at_once_ = 0;
    int now_ = 0;
};

transfer from_file(std::uint64_t request, std::uint32_t file, std::uint64_t offset, std::span<std::byte> to, urgency level = urgency::on_demand) {
    transfer t;
    t.request = request;
    t.file = file;
    t.offset = offset;
    t.bytes = to.size();
    t.destination = to.data();
    t.level = level;
    return t;
}

bool holds_pattern(std::span<const std::byte> data, std::uint64_t file, std::uint64_t offset) {
    for (std::size_t i = 0; i < data.size(); ++i) {
        if (data[i] != pattern(file, offset + i)) {
            return false;
        }
    }
    return true;
}

constexpr std::byte guard{0xA5};

}  // namespace

TEST_CASE("a stream brings the exact bytes for any chunk size, and no others") {
    const temporary_directory dir;
    write_pattern(dir.path / "a", 0, 100'003);
    write_pattern(dir.path / "b", 1, 1);
    write_pattern(dir.path / "c", 2, 0);
    file_source files({dir.path / "a", dir.path / "b", dir.path / "c"});
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
            CHECK(holds_pattern(all.subspan(16, 99'999), 0, 3));
            CHECK(holds_pattern(all.subspan(110'000, 1), 1, 0));
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
    CHECK(holds_pattern(std::span(to).first(128), 0, 0));
    CHECK_FALSE(t.done());
    t.wait(130);
    CHECK(holds_pattern(std::span(to).subspan(30 * 128, 128), 30, 0));
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
    CHECK_THROWS_AS(stream.run(list, source, on_host(), [](const progress& p) { if (p.bytes == p.total) throw std::logic_error("late"); }), std::logic_error);
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
    CHECK(holds_pattern(to, 0, 0));
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
    write_pattern(dir.path / "good", 0, 10'000);
    write_pattern(dir.path / "short", 1, 4'000);
    file_source files({dir.path / "good", dir.path / "short", dir.path / "none"});
    small_stream stream({.readers = 2}, {bytes{1024}});
    std::vector<std::byte> to(10'000);
    const auto message = [&](std::uint32_t file) {
        const std::vector<transfer> list{from_file(1, 0, 0, std::span(to).first(3000)), from_file(2, file, 0, std::span(to).subspan(3000, 4096))};
        try {
            stream.run(list, files, on_host());
        } catch (const io_error& e) {
            return std::string(e.what());
        }
        return std::string("no error");
    };
    const std::string short_file = message(1);
    CHECK(short_file.find((dir.path / "short").string()) != std::string::npos);
    CHECK(short_file.find("offset 3072") != std::string::npos);
    CHECK(short_file.find("1024 bytes were wanted") != std::string::npos);
    CHECK(short_file.find("928 were got") != std::string::npos);
    const std::string missing = message(2);
    CHECK(missing.find((dir.path / "none").string()) != std::string::npos);
    CHECK(missing.find("No such file") != std::string::npos);
    CHECK_THROWS_AS(stream.run(std::vector{from_file(1, 3, 0, std::span(to).first(1))}, files, on_host()), configuration_error);
    // The request that was whole before the other failed is not taken back.
    slow_source source;
    source.broken_file = 5;
    weight_stream<memory::pageable> one({.readers = 1});
    ticket t = one.start(std::vector{from_file(1, 0, 0, std::span(to).first(3000)), from_file(2, 5, 0, std::span(to).subspan(3000, 5000))}, source, on_host());
    t.wait(1);
    CHECK_THROWS_AS(t.wait(2), io_error);
    CHECK_THROWS_AS(t.wait(), io_error);
    CHECK(stream.run(std::vector{from_file(1, 0, 0, std::span(to).first(3000))}, files, on_host()).bytes == 3000);
    CHECK(holds_pattern(std::span(to).first(3000), 0, 0));
}

TEST_CASE("a file that is cut after it was opened gives an io_error, not a crash") {
    const temporary_directory dir;
    write_pattern(dir.path / "a", 0, 50'000);
    file_source files({dir.path / "a"});
    std::vector<std::byte> to(50'000);
    CHECK(files.size(0) == 50'000);
    std::filesystem::resize_file(dir.path / "a", 20'000);
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
    CHECK(stream.staging_bytes_needed() == 24u * (8u << 20));
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
        ticket urgent = stream.start(std::vector{from_file(wanted, wanted, 0, std::span(to).subspan(background * 128, 128))}, source, on_host());
        source.allow(1000);
        urgent.wait();
        CHECK(holds_pattern(std::span(to).subspan(background * 128, 128), wanted, 0));
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
    CHECK(holds_pattern(small, 2, 0));
    source.allow(1000);
    background.wait();
    CHECK(holds_pattern(large, 1, 0));
    CHECK(source.reads().size() == 201);
}

TEST_CASE("of two loads that share a request number, the more urgent is served first") {
    slow_source source;
    source.allow(0);
    weight_stream<memory::pageable, chunk128, scheduler::priority<3>> stream({.readers = 1});
    std::vector<std::byte> to(128 * 4);
    ticket blocker = stream.start(std::vector{from_file(9, 9, 0, std::span(to).first(128))}, source, on_host());
    source.wait_for_reads(1);
    ticket background = stream.start(std::vector{from_file(1, 1, 0, std::span(to).subspan(128, 256), urgency::background)}, source, on_host());
    ticket urgent = stream.start(std::vector{from_file(1, 2, 0, std::span(to).subspan(384, 128))}, source, on_host());
    source.allow(1000);
    background.wait();
    urgent.wait();
    CHECK(source.reads() == std::vector<std::uint32_t>{9, 2, 1, 1});
    CHECK(holds_pattern(std::span(to).subspan(128, 256), 1, 0));
    CHECK(holds_pattern(std::span(to).subspan(384, 128), 2, 0));
}

TEST_CASE("round robin takes turns between requests") {
    slow_source source(1ms);
    weight_stream<memory::pageable, chunk128, scheduler::round_robin> stream({.readers = 1});
    std::vector<std::byte> to(128 * 20);
    stream.run(std::vector{from_file(1, 1, 0, std::span(to).first(1280)), from_file(2, 2, 0, std::span(to).subspan(1280))}, source, on_host());
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
        CHECK(holds_pattern(std::span(to).subspan(i * 1000, 1000), i, 0));
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
                        right += holds_pattern(to, n, 0);
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
            const auto best = std::max_element(waiting.begin(), waiting.end(), [](const request& a, const request& b) { return a.id < b.id; });
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
    CHECK_THROWS_AS(stream.run(std::vector{from_file(1, 1, 0, std::span(to).first(10)), from_file(2, 2, 0, std::span(to).subspan(10))}, source, on_host()),
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
    CHECK(holds_pattern(std::span(to).first(300), 0, 0));
}

TEST_CASE("load puts every tensor at a multiple of 256 bytes and finds it by name") {
    const temporary_directory dir;
    write_pattern(dir.path / "a", 0, 9'000'000);
    write_pattern(dir.path / "b", 1, 5'000);
    tensor_list list;
    list.files = {dir.path / "a", dir.path / "b"};
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
        CHECK(holds_pattern({v.data, v.bytes}, t.file, t.offset));
    }
    CHECK_THROWS_WITH_AS(static_cast<void>(tensors["fourth"]), doctest::Contains("\"fourth\""), configuration_error);
    list.tensors.push_back({"beyond", dtype::u8, {10}, 1, 4'991, 10});
    CHECK_THROWS_WITH_AS(static_cast<void>(stream.load(list, on_host())), doctest::Contains("\"beyond\" ends at byte 5001"), io_error);
    list.tensors.back() = {"third", dtype::u8, {10}, 1, 0, 10};
    CHECK_THROWS_WITH_AS(static_cast<void>(stream.load(list, on_host())), doctest::Contains("\"third\" is twice"), configuration_error);
    CHECK(stream.load({}, on_host()).size() == 0);
}

namespace {

/// A copy engine in slow motion: copies of one stream run one after another in a thread of its own, each after a while.
class slow_copies {
public:
    slow_copies() : thread_([this](std::stop_token stop) { run(stop); }) {}

    std::uint64_t enqueue(std::byte* to, const std::byte* from, std::uint64_t size) {
        const std::lock_guard lock(mutex_);
        queue_.push_back({to, from, size});
        changed_.notify_all();
        return ++enqueued_;
    }
    void wait(std::uint64_t number) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return done_ >= number; });
    }
    std::uint64_t enqueued() {
        const std::lock_guard lock(mutex_);
        return enqueued_;
    }

private:
    struct copy {
        std::byte* to;
        const std::byte* from;
        std::uint64_t size;
    };
    void run(std::stop_token stop) {
        std::unique_lock lock(mutex_);
        while (changed_.wait(lock, stop, [&] { return !queue_.empty(); })) {
            const copy next = queue_.front();
            queue_.pop_front();
            lock.unlock();
            std::this_thread::sleep_for(200us);
            std::copy_n(next.from, next.size, next.to);
            lock.lock();
            ++done_;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable_any changed_;
    std::deque<copy> queue_;
    std::uint64_t enqueued_ = 0;
    std::uint64_t done_ = 0;
    std::jthread thread_;
};

struct slow_link {
    struct guard {
        explicit guard(int) {}
        ~guard() {}
    };
    class marker {
    public:
        explicit marker(waiting) {}
        void record(cudaStream_t stream) {
            copies_ = reinterpret_cast<slow_copies*>(stream);
            number_ = copies_->enqueued();
        }
        void synchronize() const {
            if (copies_ != nullptr) {
                copies_->wait(number_);
            }
        }
        void synchronize_quietly() const noexcept { synchronize(); }

    private:
        slow_copies* copies_ = nullptr;
        std::uint64_t number_ = 0;
    };
    static void copy(const place& where, std::byte* to, const std::byte* from, std::uint64_t size) {
        reinterpret_cast<slow_copies*>(where.stream)->enqueue(to, from, size);
    }
    static void finish(const place& where) {
        auto* copies = reinterpret_cast<slow_copies*>(where.stream);
        copies->wait(copies->enqueued());
    }
};

/// Pageable memory that says it can be copied from asynchronously, as pinned memory can.
struct as_if_pinned : memory::pageable {
    static constexpr bool device_accessible = true;
};

template <class Memory>
void load_through_staging(std::uint64_t chunk_bytes, std::size_t slot_bytes, std::uint32_t slots, int readers) {
    using engine = detail::stream_engine<Memory, scheduler::priority<3>, slow_link>;
    slow_copies device;
    slow_source source;
    const auto stream = std::make_shared<engine>(readers, slot_bytes, slots, -1);
    const place where = on_device(0, reinterpret_cast<cudaStream_t>(&device));
    std::vector<std::byte> to(30'000, guard);
    std::vector<std::byte> memory(5'000);
    for (std::size_t i = 0; i < memory.size(); ++i) {
        memory[i] = pattern(77, i);
    }
    std::vector<transfer> list{from_file(1, 1, 5, std::span(to).first(12'345)), from_file(2, 2, 0, std::span(to).subspan(13'000, 6'000), urgency::background)};
    for (const bool pinned : {false, true}) {
        transfer t;
        t.request = 3;
        t.memory = memory.data();
        t.memory_is_pinned = pinned;
        t.bytes = memory.size();
        t.destination = to.data() + (pinned ? 20'000 : 25'000);
        list.push_back(t);
    }
    const transfer_plan plan(std::span<const transfer>(list), chunking::run_time{bytes{chunk_bytes}});
    const auto load = std::make_shared<detail::load_state>(plan.chunks(), plan.requests(), source, where, nullptr, std::stop_token{});
    stream->start(load);
    ticket t(stream, load);
    t.wait();
    slow_link::finish(where);
    CHECK(stream->staging_bytes() == detail::staging<Memory>::bytes_needed(slot_bytes, slots));
    CHECK(t.report().bytes == 12'345 + 6'000 + 10'000);
    CHECK(holds_pattern(std::span(to).first(12'345), 1, 5));
    CHECK(holds_pattern(std::span(to).subspan(13'000, 6'000), 2, 0));
    CHECK(holds_pattern(std::span(to).subspan(20'000, 5'000), 77, 0));
    CHECK(holds_pattern(std::span(to).subspan(25'000, 5'000), 77, 0));
    CHECK(to[12'345] == guard);
    CHECK(to[19'000] == guard);
    stream->stop();
}

}  // namespace

TEST_CASE("a staging slot is not filled again before its copy is over, whatever chunk and ring") {
    for (const int readers : {1, 4}) {
        load_through_staging<as_if_pinned>(1000, 1000, 3, readers);
        load_through_staging<as_if_pinned>(1000, 1000, 1, readers);
        load_through_staging<as_if_pinned>(997, 997, 8, readers);
        load_through_staging<as_if_pinned>(30'000, 1000, 2, readers);  // a chunk passes through several slots
        load_through_staging<memory::pageable>(1000, 1000, 2, readers);
    }
}

TEST_CASE("an error between two staged chunks returns the slots") {
    using engine = detail::stream_engine<as_if_pinned, scheduler::fifo, slow_link>;
    slow_copies device;
    slow_source source;
    source.broken_file = 9;
    const auto stream = std::make_shared<engine>(3, 500, 2, -1);
    const place where = on_device(0, reinterpret_cast<cudaStream_t>(&device));
    std::vector<std::byte> to(20'000);
    for (int round = 0; round < 5; ++round) {
        const std::vector<transfer> list{from_file(1, 1, 0, std::span(to).first(8'000)), from_file(2, round % 2 == 0 ? 9 : 3, 0, std::span(to).subspan(10'000, 8'000))};
        const transfer_plan plan(std::span<const transfer>(list), chunking::run_time{500_B});
        const auto load = std::make_shared<detail::load_state>(plan.chunks(), plan.requests(), source, where, nullptr, std::stop_token{});
        stream->start(load);
        ticket t(stream, load);
        if (round % 2 == 0) {
            CHECK_THROWS_AS(t.wait(), io_error);
        } else {
            t.wait();
            slow_link::finish(where);
            CHECK(holds_pattern(std::span(to).first(8'000), 1, 0));
            CHECK(holds_pattern(std::span(to).subspan(10'000, 8'000), 3, 0));
        }
    }
    stream->stop();
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

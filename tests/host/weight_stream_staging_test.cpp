#include "../fault_injection.hpp"
#include "stream_fakes.hpp"

#include <atomic>

using namespace stream_fakes;

namespace {

template <class Memory>
void load_through_staging(std::uint64_t chunk_bytes, std::size_t slot_bytes, std::uint32_t slots, int readers) {
    using engine = detail::stream_engine<Memory, scheduler::priority<3>, slow_link>;
    slow_copies device;
    slow_source source;
    const auto stream = std::make_shared<engine>(readers, slot_bytes, slots, -1);
    const place where = on_device(0, reinterpret_cast<cudaStream_t>(&device));
    std::vector<std::byte> to(30'000, guard);
    std::vector<std::byte> memory(5'000);
    tests::fill(memory, 77);
    std::vector<transfer> list{from_file(1, 1, 5, std::span(to).first(12'345)),
                               from_file(2, 2, 0, std::span(to).subspan(13'000, 6'000), urgency::background)};
    for (const bool pinned : {false, true}) {
        transfer t;
        t.request = 3;
        t.memory = memory.data();
        t.memory_is_pinned = pinned;
        t.bytes = memory.size();
        t.destination = to.data() + (pinned ? 20'000 : 25'000);
        list.push_back(t);
    }
    transfer_plan plan(std::span<const transfer>(list), chunking::run_time{bytes{chunk_bytes}});
    const auto load = std::make_shared<detail::load_state>(std::move(plan).take(), source, where, nullptr, std::stop_token{});
    stream->start(load);
    ticket t(stream, load);
    t.wait();
    slow_link::finish(where);
    CHECK(stream->staging_bytes() == detail::staging<Memory>::bytes_needed(slot_bytes, slots));
    CHECK(t.report().bytes == 12'345 + 6'000 + 10'000);
    CHECK(tests::holds(std::span(to).first(12'345), 1, 5));
    CHECK(tests::holds(std::span(to).subspan(13'000, 6'000), 2, 0));
    CHECK(tests::holds(std::span(to).subspan(20'000, 5'000), 77, 0));
    CHECK(tests::holds(std::span(to).subspan(25'000, 5'000), 77, 0));
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
        const std::vector<transfer> list{from_file(1, 1, 0, std::span(to).first(8'000)),
                                         from_file(2, round % 2 == 0 ? 9 : 3, 0, std::span(to).subspan(10'000, 8'000))};
        transfer_plan plan(std::span<const transfer>(list), chunking::run_time{500_B});
        const auto load = std::make_shared<detail::load_state>(std::move(plan).take(), source, where, nullptr, std::stop_token{});
        stream->start(load);
        ticket t(stream, load);
        if (round % 2 == 0) {
            CHECK_THROWS_AS(t.wait(), io_error);
        } else {
            t.wait();
            slow_link::finish(where);
            CHECK(tests::holds(std::span(to).first(8'000), 1, 0));
            CHECK(tests::holds(std::span(to).subspan(10'000, 8'000), 3, 0));
        }
    }
    stream->stop();
}

TEST_CASE("a chunk is filled by several readers and copied once, at the offset in a page that it has in its file") {
    using engine = detail::stream_engine<as_if_pinned, scheduler::fifo, slow_link>;
    constexpr std::uint64_t slot = 64 << 10;
    for (const std::uint64_t chunk : {slot, 5 * slot}) {  // a chunk a slot, and one chunk through all of them
        slow_copies device;
        slow_source source;
        const auto stream = std::make_shared<engine>(4, slot, 3, -1, 2, slot / 4);
        source.want_company(4);  // or a read waits for ten seconds
        const place where = on_device(0, reinterpret_cast<cudaStream_t>(&device));
        std::vector<std::byte> to(5 * slot + 2, guard);
        const transfer t = from_file(1, 1, 100, std::span(to).subspan(1, to.size() - 2));
        transfer_plan plan(std::span<const transfer>(&t, 1), chunking::run_time{bytes{chunk}});
        const auto load = std::make_shared<detail::load_state>(std::move(plan).take(), source, where, nullptr, std::stop_token{});
        const auto begin = std::chrono::steady_clock::now();
        stream->start(load);
        ticket ticket_of_load(stream, load);
        ticket_of_load.wait();
        slow_link::finish(where);
        CHECK(std::chrono::steady_clock::now() - begin < 5s);
        CHECK(source.most_at_once() == 4);
        CHECK(tests::holds(std::span(to).subspan(1, to.size() - 2), 1, 100));
        CHECK(to.front() == guard);
        CHECK(to.back() == guard);
        CHECK(device.enqueued() == 5);
        CHECK(ticket_of_load.report().reads == 5 * (4 + 1));  // parts end at multiples of their size in the file
        stream->stop();
    }
}

TEST_CASE("bytes lie in staging as far behind a page as in their file") {
    struct looks_where final : byte_source {
        void read(std::uint32_t, std::uint64_t offset, std::span<std::byte> into) override {
            elsewhere += (reinterpret_cast<std::uintptr_t>(into.data()) - offset) % memory::page_bytes != 0;
            ++reads;
        }
        [[nodiscard]] std::string name(std::uint32_t) const override { return "where"; }
        std::atomic<int> reads{0}, elsewhere{0};
    } source;
    slow_copies device;
    const auto stream = std::make_shared<detail::stream_engine<as_if_pinned, scheduler::fifo, slow_link>>(2, 10'000, 3, -1, 2, 4096);
    std::vector<std::byte> to(50'000);
    const transfer t = from_file(1, 1, 12'345, to);
    for (const std::uint64_t chunk : {10'000u, 50'000u}) {
        transfer_plan plan(std::span(&t, 1), chunking::run_time{bytes{chunk}});
        auto load = std::make_shared<detail::load_state>(std::move(plan).take(), source,
                                                         on_device(0, reinterpret_cast<cudaStream_t>(&device)), nullptr, std::stop_token{});
        stream->start(load);
        ticket(stream, std::move(load)).wait();
    }
    CHECK(source.reads > 20);
    CHECK(source.elsewhere == 0);
    slow_link::finish(on_device(0, reinterpret_cast<cudaStream_t>(&device)));
    stream->stop();
}

TEST_CASE("a chunk of many pieces is read, staged and copied whole, scattered or padded") {
    using engine = detail::stream_engine<as_if_pinned, scheduler::fifo, slow_link>;
    for (const std::uint64_t chunk : {1000u, 4096u, 100'000u}) {
        for (const bool host : {false, true}) {
            slow_copies device;
            slow_source source;
            const auto stream = std::make_shared<engine>(3, 4096, 3, -1, 2, 700);
            const place where = host ? on_host() : on_device(0, reinterpret_cast<cudaStream_t>(&device));
            std::vector<std::byte> to(30'000, guard);
            std::vector<transfer> list;
            for (std::uint64_t i = 0; i < 50; ++i) {
                list.push_back(from_file(1, 3, 9 + i * 333, std::span(to).subspan(i * 37 % 50 * 256, 150)));  // rows with gaps
                list.push_back(from_file(2, 4, 11 + i * 250, std::span(to).subspan(13'000 + i * 256, 250)));  // padded neighbours
                list.back().padding = 6;
            }
            transfer_plan plan(std::span<const transfer>(list), chunking::run_time{bytes{chunk}});
            const auto load = std::make_shared<detail::load_state>(std::move(plan).take(), source, where, nullptr, std::stop_token{});
            stream->start(load);
            ticket t(stream, load);
            t.wait();
            if (!host) {
                slow_link::finish(where);
            }
            CHECK(t.report().bytes == 50 * 150 + 50 * 250);
            for (const transfer& one : list) {
                CHECK(tests::holds(std::span(one.destination, one.bytes), one.file, one.offset));
            }
            for (std::uint64_t i = 0; i < 50; ++i) {
                CHECK(to[i * 256 + 150] == guard);
            }
            CHECK(to[13'000 + 50 * 256] == guard);
            stream->stop();
        }
    }
}

TEST_CASE("of small chunks there are more in a ring, in its lowest memory, and whole ones find room again") {
    slow_copies device;
    detail::staging<as_if_pinned, detail::cuda_pinning, slow_link::marker> ring;
    ring.allocate(1 << 20, 2, -1);
    std::vector<decltype(ring)::slot*> small;
    while (ring.available(true)) {
        auto* const s = ring.take(true);
        REQUIRE(s != nullptr);
        ring.cut(*s, 100'000);
        CHECK(s->bytes == 102'400);
        std::fill_n(s->data, s->bytes, guard);
        small.push_back(s);
    }
    CHECK(small.size() == 11);  // one whole slot is always asked for
    CHECK(ring.take(true) == nullptr);
    std::byte* const lowest = small[0]->data;
    for (auto* const s : small) {
        ring.give_back(s);
    }
    for (int i = 0; i < 3; ++i) {
        auto* const s = ring.take(true);
        REQUIRE(s != nullptr);
        CHECK(s->bytes > 1 << 20);
        ring.cut(*s, 1000);
        CHECK(s->data == lowest);
        ring.give_back_unused(s);
    }
}

TEST_CASE("a source gets no more reads at a time than it says are worth having, and others go on beside it") {
    using engine = detail::stream_engine<as_if_pinned, scheduler::fifo, slow_link>;
    slow_copies device;
    slow_source few(200us), many;
    few.at_a_time = 2;
    const auto stream = std::make_shared<engine>(6, 4000, 4, -1, 2, 500);
    const place where = on_device(0, reinterpret_cast<cudaStream_t>(&device));
    std::vector<std::byte> first(40'000), second(40'000);
    const transfer a = from_file(1, 1, 0, first), b = from_file(2, 2, 0, second);
    const auto begin = [&](const transfer& t, byte_source& source) {
        transfer_plan plan(std::span(&t, 1), chunking::run_time{4000_B});
        auto load = std::make_shared<detail::load_state>(std::move(plan).take(), source, where, nullptr, std::stop_token{});
        stream->start(load);
        return ticket(stream, std::move(load));
    };
    ticket slow = begin(a, few);
    ticket quick = begin(b, many);
    quick.wait();
    slow.wait();
    slow_link::finish(where);
    CHECK(few.most_at_once() == 2);
    CHECK(tests::holds(first, 1, 0));
    CHECK(tests::holds(second, 2, 0));
    few.at_a_time = 0;  // as good as one
    ticket again = begin(a, few);
    again.wait();
    slow_link::finish(where);
    stream->stop();
}

TEST_CASE("a stream that is held up keeps its own slots, and another goes on with the rest") {
    using engine = detail::stream_engine<as_if_pinned, scheduler::fifo, slow_link>;
    slow_copies held, other;
    held.allow(0);
    slow_source source;
    const auto stream = std::make_shared<engine>(2, 1000, 4, -1);
    std::vector<std::byte> first(2'000), second(20'000);
    const transfer a = from_file(1, 1, 0, first), b = from_file(2, 2, 0, second);
    const auto begin = [&](const transfer& t, slow_copies& device) {
        transfer_plan plan(std::span(&t, 1), chunking::run_time{1000_B});
        auto load = std::make_shared<detail::load_state>(std::move(plan).take(), source,
                                                         on_device(0, reinterpret_cast<cudaStream_t>(&device)), nullptr, std::stop_token{});
        stream->start(load);
        return ticket(stream, std::move(load));
    };
    ticket waits = begin(a, held);
    held.wait_for_enqueued(2);
    ticket goes = begin(b, other);
    goes.wait();
    slow_link::finish(on_device(0, reinterpret_cast<cudaStream_t>(&other)));
    CHECK(tests::holds(second, 2, 0));
    held.allow(100);
    waits.wait();
    slow_link::finish(on_device(0, reinterpret_cast<cudaStream_t>(&held)));
    CHECK(tests::holds(first, 1, 0));
    stream->stop();
}

TEST_CASE("M06 a model of 256 MiB through a user's own memory of 64 MiB at most, with the default chunk and depth") {
    using memory_of_the_user = faults::rationed<as_if_pinned>;
    using stream_type = weight_stream<memory_of_the_user>;
    using engine = detail::stream_engine<memory_of_the_user, stream_type::scheduler, slow_link>;
    const auto slot_bytes = static_cast<std::size_t>(stream_type::chunking{}.bytes_per_chunk(0, 1_GiB));
    const std::uint32_t slots = stream_type::prefetch{}.chunks_ahead(slot_bytes);
    REQUIRE(detail::staging<memory_of_the_user>::bytes_needed(slot_bytes, slots) > 64_MiB);
    std::vector<std::byte> to(256_MiB);
    std::vector<transfer> list;
    for (std::uint32_t i = 0; i < 64; ++i) {
        list.push_back(from_file(i, i, 7, std::span(to).subspan(i * 4_MiB, 4_MiB)));
    }
    for (const std::size_t limit : {std::size_t{64_MiB}, std::size_t{1_MiB}}) {
        std::fill(to.begin(), to.end(), guard);
        faults::ledger books;
        books.in_all = limit;
        memory_of_the_user::books = &books;
        {
            slow_copies device;
            slow_source source;
            const place where = on_device(0, reinterpret_cast<cudaStream_t>(&device));
            const auto stream = std::make_shared<engine>(2, slot_bytes, slots, -1);
            transfer_plan plan(std::span<const transfer>(list), stream_type::chunking{});
            const auto load = std::make_shared<detail::load_state>(std::move(plan).take(), source, where, nullptr, std::stop_token{});
            if (limit < slot_bytes) {  // not one slot can be had: an error before anything is read
                CHECK_THROWS_WITH_AS(stream->start(load), doctest::Contains("a test's memory ran out"), out_of_memory);
                CHECK(source.reads().empty());
            } else {
                stream->start(load);
                ticket t(stream, load);
                t.wait();
                slow_link::finish(where);
                for (std::uint32_t i = 0; i < 64; ++i) {
                    CHECK(tests::holds(std::span(to).subspan(i * 4_MiB, 4_MiB), i, 7));
                }
                CHECK(stream->staging_bytes() == books.bytes());
                CHECK(books.bytes() > limit / 4);
            }
            stream->stop();
        }
        CHECK(books.peak() <= limit);
        CHECK(books.clean());
    }
    memory_of_the_user::books = nullptr;
}

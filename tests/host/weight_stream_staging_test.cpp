#include "stream_fakes.hpp"

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
    for (std::size_t i = 0; i < memory.size(); ++i) {
        memory[i] = pattern(77, i);
    }
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
        const std::vector<transfer> list{from_file(1, 1, 0, std::span(to).first(8'000)),
                                         from_file(2, round % 2 == 0 ? 9 : 3, 0, std::span(to).subspan(10'000, 8'000))};
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

TEST_CASE("the first slots of a load are copied by parts, so that the link is not idle while they fill") {
    using engine = detail::stream_engine<as_if_pinned, scheduler::fifo, slow_link>;
    constexpr std::uint64_t slot = 1 << 20;
    slow_copies device;
    slow_source source;
    const auto stream = std::make_shared<engine>(2, slot, 4, -1);
    const place where = on_device(0, reinterpret_cast<cudaStream_t>(&device));
    std::vector<std::byte> to(5 * slot + slot / 2 + 2);
    for (const std::uint64_t chunk : {slot, to.size()}) {  // a chunk a slot, and one chunk through all of them
        const std::uint64_t before = device.enqueued();
        std::fill(to.begin(), to.end(), guard);
        const transfer t = from_file(1, 1, 3, std::span(to).subspan(1, to.size() - 2));
        const transfer_plan plan(std::span<const transfer>(&t, 1), chunking::run_time{bytes{chunk}});
        const auto load = std::make_shared<detail::load_state>(plan.chunks(), plan.requests(), source, where, nullptr, std::stop_token{});
        stream->start(load);
        ticket ticket_of_load(stream, load);
        ticket_of_load.wait();
        slow_link::finish(where);
        CHECK(holds_pattern(std::span(to).subspan(1, to.size() - 2), 1, 3));
        CHECK(to.front() == guard);
        CHECK(to.back() == guard);
        CHECK(device.enqueued() - before == 6 + (chunk == slot ? 2 * 3 : 3));
        CHECK(ticket_of_load.report().reads == device.enqueued() - before);
    }
    stream->stop();
}

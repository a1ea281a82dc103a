#include "engine_fakes.hpp"

#include <atomic>

using namespace stream_fakes;

TEST_CASE("of a load that is not on demand, no more chunks than the window are on the copy engine") {
    for (const int readers : {1, 4}) {
        for (const std::uint32_t window : {1u, 2u}) {
            for (const bool pinned : {false, true}) {
                slow_copies device;
                device.allow(0);
                slow_source source;
                const auto stream = std::make_shared<engine>(readers, chunk_bytes, 8, -1, window);
                const std::vector<std::byte> memory = known_bytes(20'500);
                std::vector<std::byte> to(memory.size());
                const transfer t =
                    pinned ? from_memory(1, memory, to.data(), urgency::background) : from_file(1, 77, 0, to, urgency::background);
                ticket load = start(stream, std::span(&t, 1), source, on(device));
                device.wait_for_enqueued(window);
                std::this_thread::sleep_for(5ms);
                CHECK(device.enqueued() == window);
                CHECK_FALSE(load.done());
                device.allow(1000);
                load.wait();
                CHECK(load.report().chunks == 21);
                slow_link::finish(on(device));
                CHECK(tests::holds(to, 77, 0));
                CHECK(device.most_at_once() == window);
                stream->stop();
            }
        }
    }
}

TEST_CASE("an urgent load of the same device stands behind the window alone, whatever waits there") {
    for (const bool pinned_background : {false, true}) {
        for (const bool pinned_urgent : {false, true}) {
            slow_copies background_stream;
            slow_copies urgent_stream;
            background_stream.allow(0);
            slow_source source;
            const auto stream = std::make_shared<engine>(3, chunk_bytes, 16, -1);
            const std::vector<std::byte> memory = known_bytes(100'000);
            std::vector<std::byte> to(memory.size());
            std::vector<std::byte> fast(4'000);
            // With staging, more slots than chunks: readers would wait for those that a stream holds up.
            const std::size_t size = pinned_background ? to.size() : 5'000;
            const transfer slow = pinned_background ? from_memory(1, memory, to.data(), urgency::prefetch)
                                                    : from_file(1, 77, 0, std::span(to).first(size), urgency::prefetch);
            const transfer quick = pinned_urgent ? from_memory(2, std::span(memory).first(fast.size()), fast.data(), urgency::on_demand)
                                                 : from_file(2, 77, 0, fast);
            ticket background = start(stream, std::span(&slow, 1), source, on(background_stream));
            background_stream.wait_for_enqueued(2);
            ticket urgent = start(stream, std::span(&quick, 1), source, on(urgent_stream));
            if (pinned_urgent) {
                CHECK(urgent_stream.enqueued() == 4);  // by start() itself
            }
            urgent.wait();
            slow_link::finish(on(urgent_stream));
            CHECK(tests::holds(fast, 77, 0));
            CHECK(background_stream.enqueued() == 2);
            background_stream.allow(1000);
            background.wait();
            slow_link::finish(on(background_stream));
            CHECK(tests::holds(std::span(to).first(size), 77, 0));
            stream->stop();
        }
    }
}

TEST_CASE("loads on demand are enqueued without a window") {
    slow_copies device;
    device.allow(0);
    slow_source source;
    const auto stream = std::make_shared<engine>(4, chunk_bytes, 16, -1);
    std::vector<std::byte> to(10'000);
    const transfer t = from_file(1, 77, 0, to);
    ticket load = start(stream, std::span(&t, 1), source, on(device));
    load.wait();
    CHECK(device.enqueued() == 10);
    device.allow(1000);
    slow_link::finish(on(device));
    CHECK(tests::holds(to, 77, 0));
    stream->stop();
}

TEST_CASE("a promoted request passes what waits in the window") {
    slow_copies device;
    device.allow(0);
    slow_source source;
    const auto stream = std::make_shared<engine>(2, chunk_bytes, 8, -1);
    const std::vector<std::byte> memory = known_bytes(8'000);
    std::vector<std::byte> to(memory.size());
    std::vector<transfer> list;
    for (std::uint32_t i = 0; i < 8; ++i) {
        list.push_back(from_memory(i, std::span(memory).subspan(i * 1000, 1000), to.data() + i * 1000, urgency::background));
    }
    ticket load = start(stream, list, source, on(device));
    device.wait_for_enqueued(2);
    std::this_thread::sleep_for(5ms);  // the others wait in the window by now, or in the queue: both know urgency
    load.promote(6);
    device.allow(1);
    device.wait_for_enqueued(3);
    CHECK(device.targets()[2] == to.data() + 6'000);
    device.allow(1000);
    load.wait();
    slow_link::finish(on(device));
    CHECK(tests::holds(to, 77, 0));
    stream->stop();
}

namespace {

/// One chunk of each of six requests at the places of `to`, all of one level, with these deadlines.
std::vector<transfer> six(std::span<const std::byte> memory, std::byte* to, urgency level, const std::vector<std::uint64_t>& deadlines) {
    std::vector<transfer> list;
    for (std::uint32_t i = 0; i < 6; ++i) {
        list.push_back(from_memory(i, memory.subspan(i * 1000, 1000), to + i * 1000, level));
        list.back().deadline = deadlines[i];
    }
    return list;
}

/// The numbers of the chunks that were copied to the places of `to`, in their order.
std::vector<std::ptrdiff_t> order_of(slow_copies& device, const std::byte* to) {
    std::vector<std::ptrdiff_t> order;
    for (const std::byte* target : device.targets()) {
        order.push_back((target - to) / 1000);
    }
    return order;
}

}  // namespace

TEST_CASE("of what has been read and waits for its turn on the link the earliest deadline goes first, and a promoted request passes all") {
    slow_copies device;
    device.allow(0);
    slow_source source;
    const auto stream = std::make_shared<engine>(2, chunk_bytes, 8, -1, 1);
    std::vector<std::byte> to(6'000);
    std::vector<transfer> list;
    for (std::uint32_t i = 0; i < 6; ++i) {
        list.push_back(from_file(i, 77, i * 1000, std::span(to).subspan(i * 1000, 1000), urgency::prefetch));
        list.back().deadline = 10;
    }
    ticket load = start(stream, list, source, on(device));
    device.wait_for_enqueued(1);
    source.wait_for_reads(6);
    std::this_thread::sleep_for(5ms);
    const std::ptrdiff_t first = order_of(device, to.data())[0];
    load.change(first == 4 ? 0 : 4, urgency::prefetch, 5);
    load.promote(first == 5 ? 1 : 5);
    device.allow(1000);
    load.wait();
    slow_link::finish(on(device));
    const std::vector<std::ptrdiff_t> order = order_of(device, to.data());
    CHECK(order[1] == (first == 5 ? 1 : 5));
    CHECK(order[2] == (first == 4 ? 0 : 4));
    CHECK(tests::holds(to, 77, 0));
    stream->stop();
}

TEST_CASE("what is copied as it lies is chosen when its turn comes: a later request with an earlier deadline passes all but the next") {
    slow_copies device;
    device.allow(0);
    slow_source source;
    const auto stream = std::make_shared<engine>(2, chunk_bytes, 8, -1, 1);
    const std::vector<std::byte> memory = known_bytes(12'000);
    std::vector<std::byte> to(12'000);
    ticket load = start(stream, six(memory, to.data(), urgency::prefetch, {9, 9, 9, 9, 9, 9}), source, on(device));
    device.wait_for_enqueued(1);
    std::this_thread::sleep_for(5ms);
    std::vector<transfer> late = six(std::span(memory).subspan(6'000), to.data() + 6'000, urgency::prefetch, {8, 7, 6, 5, 4, 3});
    ticket later = start(stream, late, source, on(device));
    device.allow(1000);
    load.wait();
    later.wait();
    slow_link::finish(on(device));
    CHECK(order_of(device, to.data()) == std::vector<std::ptrdiff_t>{0, 1, 11, 10, 9, 8, 7, 6, 2, 3, 4, 5});
    CHECK(tests::holds(to, 77, 0));
    stream->stop();
}

TEST_CASE("while something on demand is on the link nothing else goes there, and then it goes on") {
    for (const bool staged : {false, true}) {
        slow_copies background_stream;
        slow_copies urgent_stream;
        background_stream.allow(0);
        urgent_stream.allow(0);
        slow_source source;
        const auto stream = std::make_shared<engine>(3, chunk_bytes, 16, -1);
        const std::vector<std::byte> memory = known_bytes(20'000);
        std::vector<std::byte> to(memory.size());
        std::vector<std::byte> fast(3'000);
        const transfer slow = from_memory(1, memory, to.data(), urgency::prefetch);
        const transfer quick =
            staged ? from_file(2, 77, 0, fast) : from_memory(2, std::span(memory).first(fast.size()), fast.data(), urgency::on_demand);
        ticket background = start(stream, std::span(&slow, 1), source, on(background_stream));
        background_stream.wait_for_enqueued(2);
        ticket urgent = start(stream, std::span(&quick, 1), source, on(urgent_stream));
        urgent.wait();
        CHECK(urgent_stream.enqueued() == 3);
        background_stream.allow(1000);
        std::this_thread::sleep_for(20ms);
        CHECK(background_stream.enqueued() == 2);  // though there is room
        urgent_stream.allow(2);
        std::this_thread::sleep_for(5ms);
        CHECK(background_stream.enqueued() == 2);
        urgent_stream.allow(1000);
        background.wait();
        slow_link::finish(on(background_stream));
        slow_link::finish(on(urgent_stream));
        CHECK(tests::holds(to, 77, 0));
        CHECK(tests::holds(fast, 77, 0));
        stream->stop();
    }
}

TEST_CASE("loads on demand that are to wait for their turn share the link as the scheduler says") {
    slow_copies device;
    device.allow(0);
    slow_source source;
    const auto stream = std::make_shared<engine_of<scheduler::round_robin>>(2, chunk_bytes, 8, -1, 2, 1'000'000,
                                                                            detail::engine_options{.on_demand_waits = true});
    const std::vector<std::byte> memory = known_bytes(10'000);
    std::vector<std::byte> to(memory.size());
    const transfer one = from_memory(1, std::span(memory).first(5'000), to.data(), urgency::on_demand);
    const transfer two = from_memory(2, std::span(memory).subspan(5'000), to.data() + 5'000, urgency::on_demand);
    ticket first = start(stream, std::span(&one, 1), source, on(device));
    device.wait_for_enqueued(2);
    std::this_thread::sleep_for(5ms);
    ticket second = start(stream, std::span(&two, 1), source, on(device));
    std::this_thread::sleep_for(5ms);
    CHECK(device.enqueued() == 2);
    device.allow(1000);
    first.wait();
    second.wait();
    slow_link::finish(on(device));
    CHECK(order_of(device, to.data()) == std::vector<std::ptrdiff_t>{0, 1, 2, 3, 5, 4, 6, 7, 8, 9});
    CHECK(device.most_at_once() == 2);
    CHECK(tests::holds(to, 77, 0));
    stream->stop();
}

TEST_CASE("slots are kept for what is on demand: a background load that waits for its turn never holds the last") {
    for (const std::uint32_t kept : {1u, 2u, 100u}) {
        slow_copies held, other;
        held.allow(0);
        slow_source source;
        constexpr std::uint32_t slots = 4;
        const auto stream = std::make_shared<engine>(3, chunk_bytes, slots, -1, 1, 1'000'000, detail::engine_options{.slots_kept = kept});
        std::vector<std::byte> slow(20'000), fast(5'000), host(2'000);
        const transfer background = from_file(1, 7, 0, slow, urgency::background);
        const transfer urgent = from_file(2, 77, 0, fast);
        ticket waiting = start(stream, std::span(&background, 1), source, on(held));
        held.wait_for_enqueued(1);
        const std::size_t theirs = slots - std::min(kept, slots - 1);
        source.wait_for_reads(theirs);
        std::this_thread::sleep_for(20ms);
        CHECK(source.reads().size() == theirs);  // one in the copy that is held up, the others wait for their turn
        ticket quick = start(stream, std::span(&urgent, 1), source, on(other));
        quick.wait();
        slow_link::finish(on(other));
        CHECK(tests::holds(fast, 77, 0));
        const transfer to_host = from_file(3, 78, 0, host);
        ticket on_the_host = start(stream, std::span(&to_host, 1), source, penstock::on_host());
        on_the_host.wait();  // needs no slot, and does not stand behind what does
        CHECK(tests::holds(host, 78, 0));
        held.allow(1000);
        waiting.wait();
        slow_link::finish(on(held));
        CHECK(tests::holds(slow, 7, 0));
        stream->stop();
    }
}

TEST_CASE("cancelling a load that waits in the window does not wait for the device, and its slots come back") {
    slow_copies device;
    device.allow(0);
    slow_source source;
    const auto stream = std::make_shared<engine>(3, chunk_bytes, 8, -1);
    std::vector<std::byte> to(6'000);
    const transfer t = from_file(1, 77, 0, to, urgency::background);
    {
        ticket load = start(stream, std::span(&t, 1), source, on(device));
        device.wait_for_enqueued(2);
        source.wait_for_reads(6);
    }  // returns while the device is held up
    CHECK(device.enqueued() == 2);
    device.allow(1000);
    for (int round = 0; round < 3; ++round) {
        ticket again = start(stream, std::span(&t, 1), source, on(device));
        again.wait();
    }
    slow_link::finish(on(device));
    CHECK(tests::holds(to, 77, 0));
    stream->stop();
}

TEST_CASE("loads of all levels from several threads arrive whole") {
    slow_copies device;
    slow_copies own[8];  // live until the stream stops, as a device does: its markers stand for their copies
    slow_source source;
    const auto stream = std::make_shared<engine>(4, chunk_bytes, 6, -1);
    const std::vector<std::byte> memory = known_bytes(3'700);
    std::atomic<int> right{0};
    {
        std::vector<std::jthread> threads;
        for (std::uint32_t n = 0; n < 8; ++n) {
            threads.emplace_back([&, n] {
                for (std::uint32_t round = 0; round < 6; ++round) {
                    slow_copies& there = n % 2 == 0 ? own[n] : device;
                    std::vector<std::byte> to(3'700 * 2);
                    const std::vector<transfer> list{
                        from_file(round, 77, 0, std::span(to).first(3'700), static_cast<urgency>((n + round) % 3)),
                        from_memory(50, memory, to.data() + 3'700, static_cast<urgency>(n % 3))};
                    ticket load = start(stream, list, source, on(there));
                    if (round == 3) {
                        load.promote(50);
                    }
                    load.wait();
                    slow_link::finish(on(there));
                    right += tests::holds(std::span(to).first(3'700), 77, 0) && tests::holds(std::span(to).subspan(3'700), 77, 0);
                }
            });
        }
    }
    CHECK(right == 48);
    stream->stop();
}

namespace {

/// A device that takes no bytes from where the source has them.
struct refusing_link : slow_link {
    static inline const std::byte* refused = nullptr;
    static inline std::size_t refused_bytes = 0;
    static void copy(const place& where, std::byte* to, const std::byte* from, std::uint64_t size) {
        if (from >= refused && from < refused + refused_bytes) {
            throw cuda_error(cudaErrorNotSupported, "no");
        }
        slow_link::copy(where, to, from, size);
    }
};

struct mapped_by_hand final : byte_source {
    explicit mapped_by_hand(std::vector<std::byte> bytes) : data(std::move(bytes)) {}
    void read(std::uint32_t, std::uint64_t offset, std::span<std::byte> into) override {
        std::copy_n(data.data() + offset, into.size(), into.data());
    }
    [[nodiscard]] std::string name(std::uint32_t) const override { return "by hand"; }
    [[nodiscard]] std::string condition(std::uint32_t) const override { return refusals == 0 ? "in place" : "read"; }
    [[nodiscard]] bytes_in_place in_place(std::uint32_t, std::uint64_t offset, std::uint64_t) override {
        return {data.data() + offset, 0, this};
    }
    void refuse_in_place(std::uint32_t, const std::string&) override { ++refusals; }
    std::vector<std::byte> data;
    std::atomic<int> refusals{0};
};

}  // namespace

TEST_CASE("bytes of a source are copied from where they lie, and read where the device does not take them") {
    for (const urgency level : {urgency::on_demand, urgency::background}) {
        for (const bool refused : {false, true}) {
            slow_copies device;
            mapped_by_hand source(known_bytes(10'000));
            refusing_link::refused = source.data.data();
            refusing_link::refused_bytes = refused ? source.data.size() : 0;
            const auto stream = std::make_shared<engine_of<scheduler::fifo, refusing_link>>(2, 400, 4, -1);
            std::vector<std::byte> to(9'000);
            const transfer t = from_file(1, 0, 500, to, level);
            const std::vector<transfer> list = detail::taken_in_place(std::span(&t, 1), source);
            ticket load = start(stream, list, source, on(device));
            load.wait();
            slow_link::finish(on(device));
            CHECK(tests::holds(to, 77, 500));
            CHECK(stream->staging_bytes() == 0);
            CHECK(load.report().source == (refused ? "read" : "in place"));
            CHECK(load.report().reads == (refused ? 9u * 3u : 0u));
            CHECK(source.refusals == (refused ? 9 : 0));
            stream->stop();
        }
    }
}

#include <penstock/stream/transfer_plan.hpp>

#include <doctest/doctest.h>

#include <array>
#include <map>
#include <random>
#include <sstream>

namespace {

using namespace penstock;
using namespace penstock::literals;

std::array<std::byte, 1 << 16> there;

transfer from_file(std::uint64_t request, std::uint32_t file, std::uint64_t offset, std::uint64_t size, std::uint64_t to,
                   std::uint64_t row_bytes = 0) {
    transfer t;
    t.request = request;
    t.file = file;
    t.offset = offset;
    t.bytes = size;
    t.destination = there.data() + to;
    t.row_bytes = row_bytes;
    return t;
}

template <class Chunking>
transfer_plan<Chunking> plan(const std::vector<transfer>& list, Chunking chunking) {
    return transfer_plan(std::span<const transfer>(list), chunking);
}

}  // namespace

TEST_CASE("neighbours in source and destination are one, whatever their order") {
    const auto p = plan({from_file(1, 0, 300, 100, 200), from_file(1, 0, 100, 100, 0), from_file(1, 0, 200, 100, 100)}, chunking::whole{});
    REQUIRE(p.chunks().size() == 1);
    REQUIRE(p.pieces().size() == 1);
    CHECK(p.pieces()[0].offset == 100);
    CHECK(p.chunks()[0].bytes == 300);
    CHECK(p.pieces()[0].destination == there.data());
    CHECK(p.bytes() == 300);
    CHECK(p.largest_chunk() == 300);
}

TEST_CASE("what is apart in file, source, destination, request or rows stays apart") {
    const transfer a = from_file(1, 0, 100, 100, 0);
    CHECK(plan({a, from_file(1, 1, 200, 100, 100)}, chunking::whole{}).chunks().size() == 2);
    CHECK(plan({a, from_file(1, 0, 201, 100, 100)}, chunking::whole{}).chunks().size() == 2);
    CHECK(plan({a, from_file(1, 0, 200, 100, 101)}, chunking::whole{}).chunks().size() == 2);
    CHECK(plan({a, from_file(2, 0, 200, 100, 100)}, chunking::whole{}).chunks().size() == 2);
    CHECK(plan({a, from_file(1, 0, 200, 100, 100, 10)}, chunking::whole{}).chunks().size() == 2);
    transfer memory = from_file(1, 0, 200, 100, 100);
    memory.memory = there.data() + 500;
    CHECK(plan({a, memory}, chunking::whole{}).chunks().size() == 2);
    transfer pinned = memory;
    pinned.memory += 100;
    pinned.destination += 100;
    CHECK(plan({memory, pinned}, chunking::whole{}).chunks().size() == 1);
    pinned.memory_is_pinned = true;
    CHECK(plan({memory, pinned}, chunking::whole{}).chunks().size() == 2);
}

TEST_CASE("chunks keep whole rows, and cover every byte once in any chunking") {
    const auto p = plan({from_file(1, 0, 7, 1000, 0, 100)}, chunking::fixed<350_B>{});
    REQUIRE(p.chunks().size() == 4);
    CHECK(p.chunks()[0].bytes == 300);
    CHECK(p.chunks()[3].bytes == 100);
    CHECK(p.pieces_of(p.chunks()[3])[0].offset == 907);
    CHECK(p.pieces_of(p.chunks()[3])[0].destination == there.data() + 900);
    CHECK(plan({from_file(1, 0, 0, 1000, 0, 500)}, chunking::fixed<300_B>{}).chunks()[0].bytes == 256);
    CHECK(plan({from_file(1, 0, 0, 1000, 0, 100)}, chunking::rows<3>{}).chunks()[0].bytes == 300);

    std::mt19937 random(3);
    for (int round = 0; round < 200; ++round) {
        std::vector<transfer> list;
        std::uint64_t at = 0;
        for (int i = 0; i < 10; ++i) {
            const std::uint64_t size = random() % 3 == 0 ? 0 : random() % 3000;
            const std::uint64_t gap = random() % 2 * 16;
            list.push_back(from_file(random() % 4, random() % 2, at, size, at, random() % 2 * 96));
            at += size + gap;
        }
        std::shuffle(list.begin(), list.end(), random);
        const auto q = plan(list, chunking::run_time{bytes{128 + random() % 1000}});
        std::map<std::uint64_t, int> times;
        for (const transfer& t : list) {
            for (std::uint64_t b = 0; b < t.bytes; ++b) {
                times[t.offset + b] = 0;
            }
        }
        std::uint64_t sum = 0;
        for (const planned_request& r : q.requests()) {
            std::uint64_t of_request = 0;
            for (std::uint32_t i = 0; i < r.what.chunks; ++i) {
                const planned_chunk& c = q.chunks()[r.first_chunk + i];
                CHECK(c.index == i);
                CHECK(q.requests()[c.request].what.id == r.what.id);
                CHECK(c.span <= q.largest_chunk());
                std::uint64_t of_chunk = 0, reached = 0;
                for (const planned_piece& piece : q.pieces_of(c)) {
                    CHECK(piece.destination == there.data() + piece.offset);
                    CHECK(piece.at >= reached);
                    for (std::uint64_t b = 0; b < piece.bytes; ++b) {
                        ++times[piece.offset + b];
                    }
                    of_chunk += piece.bytes;
                    reached = piece.at + piece.bytes;
                }
                CHECK(of_chunk == c.bytes);
                CHECK(reached == c.span);
                of_request += c.bytes;
            }
            CHECK(of_request == r.bytes);
            sum += of_request;
        }
        CHECK(sum == q.bytes());
        CHECK(std::all_of(times.begin(), times.end(), [](const auto& t) { return t.second == 1; }));
    }
}

TEST_CASE("requests come in their order, empty ones too, with their most urgent level, earliest deadline and greatest weight") {
    transfer late = from_file(5, 0, 0, 10, 0);
    late.level = urgency::background;
    late.deadline = 7;
    late.weight = 2;
    transfer urgent = from_file(5, 0, 100, 10, 100);
    urgent.level = urgency::prefetch;
    urgent.weight = 3;
    const auto p = plan({late, from_file(3, 0, 50, 0, 0), from_file(4, 0, 20, 10, 20), urgent}, chunking::whole{});
    REQUIRE(p.requests().size() == 3);
    CHECK(p.requests()[0].what.id == 5);
    CHECK(p.requests()[0].what.chunks == 2);
    CHECK(p.requests()[0].what.level == urgency::prefetch);
    CHECK(p.requests()[0].what.deadline == 7);
    CHECK(p.requests()[0].what.weight == 3);
    CHECK(p.requests()[0].what.chunk_bytes == 10);
    CHECK(p.requests()[1].what.id == 3);
    CHECK(p.requests()[1].what.chunks == 0);
    CHECK(p.requests()[1].what.deadline == no_deadline);
    CHECK(p.requests()[2].first_chunk == 2);
    CHECK(plan({}, chunking::whole{}).chunks().empty());
    std::ostringstream text;
    p.print(text);
    CHECK(text.str().find("30 bytes in 3 chunks for 3 requests: 3 reads of 30 bytes, 0 of them discarded; 3 copies\n"
                          "request 5, prefetch: 20 bytes\n  chunk 0: 10 bytes from file 0 at 0 to ") == 0);
}

TEST_CASE("what is smaller than a chunk shares one, and the plan's cost says so") {
    std::vector<transfer> list;
    for (std::uint64_t i = 0; i < 100; ++i) {  // every second 100 bytes of the file, one behind the other
        list.push_back(from_file(1, 0, 7 + i * 200, 100, i * 100));
    }
    const auto rows = plan(list, chunking::fixed<4096_B>{});
    CHECK(rows.chunks().size() == 3);
    CHECK(rows.pieces().size() == 102);  // two are cut
    CHECK(rows.cost().reads == 3);
    CHECK(rows.cost().bytes_discarded == 99 * 100);
    CHECK(rows.cost().bytes_read == rows.bytes() + 99 * 100);
    CHECK(rows.cost().copies == 3);

    for (transfer& t : list) {  // further apart than is read in vain
        t.offset = 7 + (t.offset - 7) * 25;
    }
    const auto apart = plan(list, chunking::fixed<4096_B>{});
    CHECK(apart.cost().reads == 102);
    CHECK(apart.cost().bytes_discarded == 0);
    CHECK(apart.cost().copies == 3);

    std::reverse(list.begin(), list.end());
    for (std::uint64_t i = 0; i < 100; ++i) {  // neighbours in the file, scattered
        list[i] = from_file(1, 0, 7 + i * 100, 100, (i * 37 % 100) * 256);
    }
    const auto scattered = plan(list, chunking::fixed<4096_B>{});
    CHECK(scattered.chunks().size() == 3);
    CHECK(scattered.cost().reads == 3);
    CHECK(scattered.cost().bytes_read == 10'000);
    CHECK(scattered.cost().copies == 102);

    for (transfer& t : list) {  // the same with each in a chunk of its own
        t.request = static_cast<std::uint64_t>(t.offset);
    }
    CHECK(plan(list, chunking::fixed<4096_B>{}).cost().reads == 100);
}

TEST_CASE("padding that belongs to nobody lets neighbours go as one copy") {
    std::vector<transfer> list;
    for (std::uint64_t i = 0; i < 8; ++i) {
        list.push_back(from_file(1, 0, i * 250, 250, i * 256));
        list.back().padding = 6;
    }
    const auto p = plan(list, chunking::fixed<1024_B>{});
    CHECK(p.chunks().size() == 2);
    CHECK(p.chunks()[0].bytes == 1000);
    CHECK(p.chunks()[0].span == 3 * 256 + 250);
    CHECK(p.bytes() == 2000);
    CHECK(p.cost().reads == 2);
    CHECK(p.cost().copies == 2);
    list[1].padding = 5;  // the next begins behind it
    CHECK(plan(list, chunking::fixed<1024_B>{}).cost().copies == 3);
}

TEST_CASE("large chunks end on pages of their file") {
    constexpr std::uint64_t mib = 1 << 20;
    std::vector<std::byte> room(5 * mib);
    transfer t = from_file(1, 0, 1000, 4 * mib + 500, 0);
    t.destination = room.data();
    const auto p = plan({t}, chunking::fixed<1_MiB>{});
    REQUIRE(p.chunks().size() == 5);
    CHECK(p.chunks()[0].bytes == mib - 1000);
    for (std::size_t i = 1; i < 5; ++i) {
        CHECK(p.pieces()[i].offset % 4096 == 0);
    }
    CHECK(p.chunks()[4].bytes == 1500);
    const auto q = plan({t}, chunking::fixed<4_MiB>{});  // and the largest on what may be a block of a disk
    REQUIRE(q.chunks().size() == 2);
    CHECK(q.pieces()[1].offset == 4 * mib);
    t.row_bytes = 500;  // whole rows are worth more
    CHECK(plan({t}, chunking::fixed<1_MiB>{}).chunks()[0].bytes == mib / 500 * 500);
}

TEST_CASE("everything at once is one chunk, from inside a page and with padding too") {
    std::vector<std::byte> room(3 << 20);
    transfer t = from_file(1, 0, 100, room.size(), 0);
    t.destination = room.data();
    CHECK(plan({t}, chunking::whole{}).chunks().size() == 1);
    CHECK(plan({t}, chunking::rows<4>{}).chunks().size() == 1);
    std::vector<transfer> padded{from_file(1, 0, 0, 100, 0), from_file(1, 0, 100, 100, 256)};
    padded[0].padding = 156;
    CHECK(plan(padded, chunking::whole{}).chunks().size() == 1);
}

TEST_CASE("a plan refuses what cannot be brought") {
    transfer t = from_file(9, 0, 0, 10, 0);
    t.destination = nullptr;
    CHECK_THROWS_WITH_AS(plan({t}, chunking::whole{}), doctest::Contains("request 9) has no destination"), configuration_error);
    CHECK_THROWS_AS(plan({from_file(9, 0, ~std::uint64_t{0} - 5, 10, 0)}, chunking::whole{}), configuration_error);
}

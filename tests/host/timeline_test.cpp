#include "engine_fakes.hpp"

#include <penstock/stream/timeline.hpp>

#include <nlohmann/json.hpp>

#include <map>
#include <set>
#include <sstream>

using namespace stream_fakes;

namespace {

/// A clock that says what it was told when it was made.
struct known_clock final : copy_clock {
    known_clock(time from, time to) : when(from, to) {}
    void begin() override {}
    void end() override {}
    [[nodiscard]] std::pair<time, time> times() override { return when; }
    std::pair<time, time> when;
};

nlohmann::json written(timeline& t) {
    std::ostringstream out;
    out.precision(1);
    t.write(out);
    return nlohmann::json::parse(out.str());
}

}  // namespace

TEST_CASE("a timeline is JSON in which each chunk has its request, class, start, end and wait") {
    timeline t;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    t.note({7, urgency::prefetch, 3, 4096, 1, now, now + 10us, now + 15us, now + 40us});
    t.note({18446744073709551615u, static_cast<urgency>(9), 0, 1, -1, now, now, now + 1us, now + 2us});
    t.note({8, urgency::on_demand, 0, 5, 1, now, now, now, now}, std::make_unique<known_clock>(now + 1'000'001us, now + 1'000'003us));
    const nlohmann::json j = written(t);
    std::vector<nlohmann::json> copies;
    std::map<std::string, double> waits;
    std::set<std::string> tracks;
    for (const nlohmann::json& e : j["traceEvents"]) {
        CHECK(e["pid"] == 1);
        if (e["ph"] == "X") {
            copies.push_back(e);
        } else if (e["ph"] == "b" || e["ph"] == "e") {
            waits[e["name"].get<std::string>()] += e["ts"].get<double>() * (e["ph"] == "e" ? 1 : -1);
        } else if (e["name"] == "thread_name") {
            tracks.insert(e["args"]["name"]);
        }
    }
    REQUIRE(copies.size() == 3);
    CHECK(copies[0]["args"]["request"] == 7);
    CHECK(copies[0]["args"]["class"] == "prefetch");
    CHECK(copies[0]["args"]["chunk"] == 3);
    CHECK(copies[0]["args"]["bytes"] == 4096);
    CHECK(copies[0]["args"]["waited_us"].get<double>() == doctest::Approx(15).epsilon(1e-3));
    CHECK(copies[0]["args"]["chosen_us_before"].get<double>() == doctest::Approx(5).epsilon(1e-3));
    CHECK(copies[0]["dur"].get<double>() == doctest::Approx(25).epsilon(1e-3));
    CHECK(copies[0]["tid"] == 2);
    CHECK(copies[1]["args"]["request"].get<std::uint64_t>() == ~std::uint64_t{0});
    CHECK(copies[1]["args"]["class"] == "background");
    CHECK(copies[1]["tid"] == 0);
    CHECK(copies[2]["dur"].get<double>() == doctest::Approx(2).epsilon(1e-3));
    CHECK(copies[2]["ts"].get<double>() - copies[0]["ts"].get<double>() == doctest::Approx(999'986).epsilon(1e-7));
    CHECK(waits["request 7, chunk 3"] == doctest::Approx(15).epsilon(1e-3));
    CHECK(tracks == std::set<std::string>{"link to GPU 1", "to host memory"});
    t.clear();
    CHECK(written(t)["traceEvents"].size() == 1);
}

TEST_CASE("what a stream did is in its timeline: every chunk once, to the device and to the host") {
    for (const bool on_demand_waits : {false, true}) {
        timeline kept;
        slow_copies device;
        slow_source source;
        const auto stream = std::make_shared<engine>(3, chunk_bytes, 8, -1, 2, 1'000'000,
                                                     detail::engine_options{.on_demand_waits = on_demand_waits, .kept = &kept});
        const std::vector<std::byte> memory = known_bytes(5'000);
        std::vector<std::byte> pinned(5'000), prefetched(5'000), staged(4'000), host(3'500);
        std::vector<transfer> list{from_memory(1, memory, pinned.data(), urgency::on_demand),
                                   from_memory(2, memory, prefetched.data(), urgency::prefetch), from_file(3, 77, 0, staged)};
        const auto before = std::chrono::steady_clock::now().time_since_epoch();
        ticket load = start(stream, list, source, on(device));
        const transfer here = from_file(4, 77, 0, host, urgency::background);
        ticket to_host = start(stream, std::span(&here, 1), source, on_host());
        load.wait();
        to_host.wait();
        slow_link::finish(on(device));
        std::map<std::uint64_t, std::set<std::uint32_t>> chunks;
        std::map<std::uint64_t, std::uint64_t> bytes;
        for (const timeline_entry& e : kept.entries()) {
            CHECK(chunks[e.request].insert(e.chunk).second);
            bytes[e.request] += e.bytes;
            CHECK(e.device == (e.request == 4 ? -1 : 0));
            CHECK(e.level == (e.request == 2 ? urgency::prefetch : e.request == 4 ? urgency::background : urgency::on_demand));
            CHECK(before <= e.asked);
            CHECK(e.asked <= e.chosen);
            CHECK(e.chosen <= e.start);
            CHECK(e.start <= e.end);
            CHECK(e.end <= std::chrono::steady_clock::now().time_since_epoch());
        }
        CHECK(bytes == std::map<std::uint64_t, std::uint64_t>{{1, 5000}, {2, 5000}, {3, 4000}, {4, 3500}});
        CHECK(written(kept)["traceEvents"].size() == 1 + 2 + 3 * (5 + 5 + 4 + 4));
        stream->stop();
    }
}

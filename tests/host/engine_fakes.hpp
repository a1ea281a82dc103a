#pragma once

#include "stream_fakes.hpp"

/// Engines over a copy engine in slow motion, without a weight stream around them.

namespace stream_fakes {

template <class Scheduler = scheduler::priority<3>, class Link = slow_link>
using engine_of = detail::stream_engine<as_if_pinned, Scheduler, Link>;
using engine = engine_of<>;

inline place on(slow_copies& stream) { return on_device(0, reinterpret_cast<cudaStream_t>(&stream)); }

constexpr std::uint64_t chunk_bytes = 1000;

template <class Engine>
ticket start(const std::shared_ptr<Engine>& stream, std::span<const transfer> list, byte_source& source, place where) {
    transfer_plan plan(list, chunking::run_time{bytes{chunk_bytes}});
    auto load = std::make_shared<detail::load_state>(std::move(plan).take(), source, where, nullptr, std::stop_token{});
    stream->start(load);
    return ticket(stream, std::move(load));
}

inline transfer from_memory(std::uint64_t request, std::span<const std::byte> from, std::byte* to, urgency level) {
    transfer t;
    t.request = request;
    t.memory = from.data();
    t.memory_is_pinned = true;
    t.bytes = from.size();
    t.destination = to;
    t.level = level;
    return t;
}

inline std::vector<std::byte> known_bytes(std::size_t size) {
    std::vector<std::byte> data(size);
    for (std::size_t i = 0; i < size; ++i) {
        data[i] = pattern(77, i);
    }
    return data;
}

}  // namespace stream_fakes

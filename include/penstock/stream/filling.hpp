#pragma once

#include <penstock/stream/load_queue.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>

namespace penstock::inline v0_1::detail {

/// A chunk on its way, in one filling or, where it is larger than a slot, in several.
struct moving_chunk {
    moving_chunk(chunk_job j, std::chrono::nanoseconds now) : what(std::move(j)), chosen(now), unsettled(span()) {}

    [[nodiscard]] const planned_chunk& chunk() const noexcept { return what.load->chunks[what.chunk]; }
    [[nodiscard]] std::uint64_t span() const noexcept { return chunk().span; }

    chunk_job what;
    std::chrono::nanoseconds chosen;  ///< when, for a timeline
    std::uint64_t opened = 0;         ///< bytes of the span that fillings have been made for
    std::uint64_t unsettled;          ///< bytes of the span that have not arrived
    std::uint64_t reads = 0;
    std::exception_ptr error;
};

/// [begin, end) of a chunk's span, which readers bring part by part: to a slot, or to where they belong in host memory.
template <class Slot>
struct filling {
    filling(std::shared_ptr<moving_chunk> of, Slot* into, std::uint64_t to)
        : chunk(std::move(of)), slot(into), begin(chunk->opened), end(to), next(begin) {
        chunk->opened = end;
    }

    [[nodiscard]] load_state& load() const noexcept { return *chunk->what.load; }
    [[nodiscard]] const planned_chunk& plan() const noexcept { return chunk->chunk(); }
    [[nodiscard]] bool handed_out() const noexcept { return next == end; }
    [[nodiscard]] bool over() const noexcept { return handed_out() && busy == 0; }

    // What a window asks.
    [[nodiscard]] const request& wanted() const noexcept { return load().requests[plan().request].what; }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return end - begin; }
    [[nodiscard]] bool failed() const noexcept { return load().error != nullptr; }
    [[nodiscard]] bool as_it_lies() const noexcept { return slot == nullptr; }

    std::shared_ptr<moving_chunk> chunk;
    Slot* slot;  ///< null: host memory, or a copy from where the bytes lie
    std::uint64_t begin, end;
    std::uint64_t next;      ///< what comes before it is in the hands of readers, or there
    std::uint32_t busy = 0;  ///< readers that bring a part
    std::uint64_t reads = 0;
    bool copied = false;       ///< a copy out of the slot may run
    std::exception_ptr error;  ///< the first of its parts
};

}  // namespace penstock::inline v0_1::detail

#pragma once

#include <penstock/stream/filling.hpp>
#include <penstock/stream/move_bytes.hpp>

namespace penstock::inline v0_1::detail {

/// Where the next part of a filling ends. Parts of a file end at multiples of their size in it.
template <class Slot>
std::uint64_t part_end(const filling<Slot>& f, std::uint64_t part_bytes) noexcept {
    const planned_chunk& c = f.plan();
    const std::uint64_t begins = (c.from == bytes_from::file ? f.load().pieces[c.first_piece].offset : 0) % part_bytes;
    return smaller(f.end, round_down(f.next + begins, part_bytes) + part_bytes - begins);
}

/// Where the chunk's span would begin, of which the filling's part is in its slot.
template <class Slot>
std::byte* base_of(const filling<Slot>& f) noexcept {
    return f.slot->data + (phase_of(f.load(), f.plan()) + f.begin) % memory::page_bytes - f.begin;
}

/// A slot must not be filled while copies out of it run.
template <class Link, bool CopiesRunOn, class Slot>
void mark_copied(filling<Slot>& f) {
    const place& where = f.load().where;
    if constexpr (CopiesRunOn) {
        try {
            f.slot->copied.record(where.stream);
        } catch (...) {
            Link::finish(where);
            throw;
        }
    } else {
        Link::finish(where);
    }
}

/// Enqueues the copies of chunks from where their bytes lie. @return calls of the source
template <class Link, bool CopiesRunOn>
std::uint64_t copy_in_place(const load_state& load, std::span<const std::uint32_t> chunks, std::uint64_t aside_bytes) {
    const std::uint64_t reads = copy_as_they_lie<Link>(load, chunks, aside_bytes);
    if constexpr (!CopiesRunOn) {
        Link::finish(load.where);
    }
    return reads;
}

/// Enqueues what a filling holds, or, without a slot, what its chunk is to be copied from as it lies.
/// @tparam CopiesRunOn whether copies run by themselves after they are enqueued; else they are waited for
template <class Link, bool CopiesRunOn, class Slot>
void copy_filling(filling<Slot>& f, std::uint64_t aside_bytes) {
    const load_state& load = f.load();
    if (f.slot == nullptr) {
        f.reads += copy_in_place<Link, CopiesRunOn>(load, std::span<const std::uint32_t>(&f.chunk->what.chunk, 1), aside_bytes);
        return;
    }
    f.copied = CopiesRunOn;
    f.slot->stream = load.where.stream;
    f.slot->device = load.where.device;
    try {
        copy_staged<Link>(load, f.plan(), f.begin, f.end, base_of(f));
    } catch (...) {  // some of its copies may run
        mark_copied<Link, CopiesRunOn>(f);
        throw;
    }
    mark_copied<Link, CopiesRunOn>(f);
}

}  // namespace penstock::inline v0_1::detail

#pragma once

#include <penstock/stream/link.hpp>
#include <penstock/stream/ticket.hpp>

#include <algorithm>
#include <cstring>
#include <exception>

/// How the bytes of a part of a chunk get from where they are to a staging slot or to host memory, and from there to a device. A part is
/// [from, to) of the chunk's span.

namespace penstock::inline v0_1::detail {

/// Bytes of a chunk lie in a staging slot as many bytes behind a page border as they do in their file, so that reads of whole pages,
/// direct ones above all, go straight to the slot.
inline std::uint64_t phase_of(const load_state& load, const planned_chunk& c) noexcept {
    return c.from == bytes_from::file ? load.pieces[c.first_piece].offset % memory::page_bytes : 0;
}

/// Calls `work(piece, skipped, at, size)` for what of each piece lies in the part: `size` bytes from `skipped` on, at `at` of the span.
template <class Work>
void for_each_piece(const load_state& load, const planned_chunk& c, std::uint64_t from, std::uint64_t to, Work&& work) {
    const std::span<const planned_piece> pieces = load.pieces_of(c);
    auto p = std::upper_bound(pieces.begin(), pieces.end(), from, [](std::uint64_t at, const planned_piece& q) { return at < q.at; });
    for (--p; p != pieces.end() && p->at < to; ++p) {
        const std::uint64_t begin = larger(from, p->at), end = smaller(to, p->at + p->bytes);
        if (begin < end) {
            work(*p, begin - p->at, begin, end - begin);
        }
    }
}

/// Brings a part to `base + from` and on, or, without a base, to the destinations in host memory. Adds to `reads` calls of the source.
inline void fetch(const load_state& load, const planned_chunk& c, std::uint64_t from, std::uint64_t to, std::byte* base,
                  std::uint64_t& reads) {
    if (c.from == bytes_from::file) {
        ++reads;
        if (c.pieces == 1) {
            const planned_piece& p = load.pieces[c.first_piece];
            std::byte* into = base == nullptr ? p.destination + from : base + from;
            load.source->read(c.file, p.offset + from, std::span<std::byte>(into, to - from));
            return;
        }
        std::vector<read_piece> pieces;
        for_each_piece(load, c, from, to, [&](const planned_piece& p, std::uint64_t skipped, std::uint64_t at, std::uint64_t size) {
            std::byte* into = base == nullptr ? p.destination + skipped : base + at;
            pieces.push_back({p.offset + skipped, std::span<std::byte>(into, size)});
        });
        load.source->read_pieces(c.file, pieces);
        return;
    }
    for_each_piece(load, c, from, to, [&](const planned_piece& p, std::uint64_t skipped, std::uint64_t at, std::uint64_t size) {
        std::memcpy(base == nullptr ? p.destination + skipped : base + at, p.memory + skipped, size);
    });
}

template <class Link>
void copy_all(const place& where, std::span<const copy_range> ranges) {
    if constexpr (requires { Link::copy(where, ranges); }) {
        if (ranges.size() > 1) {
            Link::copy(where, ranges);
            return;
        }
    }
    for (const copy_range& r : ranges) {
        Link::copy(where, r.to, r.from, r.bytes);
    }
}

/// Enqueues the copies of a part that lies at `base + from` and on. Pieces that are as far from each other there as in the destination, which
/// is so for neighbours and where padding is between them, go as one.
template <class Link>
void copy_staged(const load_state& load, const planned_chunk& c, std::uint64_t from, std::uint64_t to, const std::byte* base) {
    std::vector<copy_range> ranges;
    for_each_piece(load, c, from, to, [&](const planned_piece& p, std::uint64_t skipped, std::uint64_t at, std::uint64_t size) {
        std::byte* const into = p.destination + skipped;
        if (!ranges.empty() && into - ranges.back().to == base + at - ranges.back().from) {
            ranges.back().bytes = static_cast<std::uint64_t>(into - ranges.back().to) + size;
        } else {
            ranges.push_back({into, base + at, size});
        }
    });
    copy_all<Link>(load.where, ranges);
}

/// Reads bytes of a source that a device does not take from where they lie, and copies them one by one. @return calls of the source
template <class Link>
std::uint64_t read_instead(const load_state& load, const planned_chunk& c, std::uint64_t aside_bytes) {
    std::uint64_t reads = 0;
    std::vector<std::byte> aside(smaller<std::uint64_t>(c.bytes, aside_bytes));
    for (const planned_piece& p : load.pieces_of(c)) {
        for (std::uint64_t at = 0; at < p.bytes; ++reads) {
            const std::span<std::byte> part(aside.data(), smaller<std::uint64_t>(aside.size(), p.bytes - at));
            load.source->read(c.file, p.offset + at, part);
            Link::copy(load.where, p.destination + at, part.data(), part.size());
            Link::finish(load.where);
            at += part.size();
        }
    }
    return reads;
}

/// Enqueues the copies of chunks from where their bytes lie, all in one call where that works. Bytes of a source that the device does not
/// take from there are read instead, through `aside_bytes` of memory, and the source is told so. @return calls of the source
template <class Link>
std::uint64_t copy_as_they_lie(const load_state& load, std::span<const std::uint32_t> chunks, std::uint64_t aside_bytes) {
    std::vector<copy_range> ranges;
    for (const std::uint32_t number : chunks) {
        for (const planned_piece& p : load.pieces_of(load.chunks[number])) {
            ranges.push_back({p.destination, p.memory, p.bytes});
        }
    }
    try {
        copy_all<Link>(load.where, ranges);
        return 0;
    } catch (const cuda_error& refusal) {
        const planned_chunk& first = load.chunks[chunks.front()];
        if (loses_device(refusal.code()) || (chunks.size() == 1 && first.from != bytes_from::source_memory)) {
            throw;
        }
        if (chunks.size() == 1) {
            load.source->refuse_in_place(first.file, refusal.what());
            return read_instead<Link>(load, first, aside_bytes);
        }
    }
    std::uint64_t reads = 0;
    for (const std::uint32_t& number : chunks) {
        reads += copy_as_they_lie<Link>(load, std::span(&number, 1), aside_bytes);
    }
    return reads;
}

}  // namespace penstock::inline v0_1::detail

#pragma once

#include <penstock/error.hpp>
#include <penstock/policy/chunking.hpp>
#include <penstock/policy/memory.hpp>
#include <penstock/policy/scheduling.hpp>
#include <penstock/stream/byte_source.hpp>
#include <penstock/units.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

/// What is to be brought, from where, to where, in which pieces: decided before the first byte moves, the same for every destination.

namespace penstock::inline v0_1 {

/// One byte range and where it goes. The range lies in a file of a byte source, or in host memory.
struct transfer {
    std::uint64_t request = 0;          ///< transfers with one number belong together (an expert, a tensor) and are waited for together
    std::uint32_t file = 0;             ///< number of the file in the byte source, unless `memory` is set
    std::uint64_t offset = 0;           ///< from the start of that file
    const std::byte* memory = nullptr;  ///< host memory to take the bytes from instead of the file
    bool memory_is_pinned = false;      ///< page-locked: the copy engine reads it without staging
    std::uint64_t bytes = 0;
    std::byte* destination = nullptr;  ///< in the memory of the place
    std::uint64_t row_bytes = 0;       ///< of the matrix that the range is part of; 0: it has no rows to keep whole
    urgency level = urgency::on_demand;
    const void* lock = nullptr;  ///< set where the stream takes bytes of `file` from where the source has them: see bytes_in_place
    std::uint64_t padding = 0;   ///< bytes behind the destination that belong to nobody: what follows them may come by the same copy
    std::uint64_t deadline = no_deadline;  ///< in ticks of a clock of the caller's, for schedulers that go by it
    std::uint32_t weight = 1;              ///< tokens that wait for it, for schedulers that go by them
};

/// Where the bytes of a chunk are before they are moved.
enum class bytes_from : std::uint8_t {
    file,          ///< a reader reads them
    memory,        ///< of the caller, pageable
    pinned,        ///< of the caller, page-locked
    source_memory  ///< page-locked, of the byte source: bytes_in_place
};

/// A run of bytes in source and destination.
struct planned_piece {
    std::uint64_t offset = 0;           ///< in the file
    const std::byte* memory = nullptr;  ///< instead of the file
    std::uint64_t bytes = 0;
    std::uint64_t at = 0;  ///< from the start of the chunk, where it lies while it is staged
    std::byte* destination = nullptr;
};

/// A chunk of a plan: the unit of copy, progress and pre-emption. Its pieces are pieces()[first_piece, first_piece + pieces), by growing
/// place in the source. One piece, unless ranges that are near each other in the plan, but not neighbours, share it.
struct planned_chunk {
    std::uint32_t request = 0;  ///< index into requests(), not the caller's number
    std::uint32_t index = 0;    ///< among the chunks of its request
    std::uint32_t file = 0;
    bytes_from from = bytes_from::file;
    std::uint64_t bytes = 0;  ///< of its pieces
    std::uint64_t span = 0;   ///< while it is staged: bytes, and padding between pieces
    std::uint32_t first_piece = 0;
    std::uint32_t pieces = 0;
};

/// A request of a plan and its run of chunks: chunks()[first_chunk, first_chunk + what.chunks).
struct planned_request {
    request what;  ///< with the caller's number
    std::uint32_t first_chunk = 0;
    std::uint64_t bytes = 0;
};

/// What it takes to carry a plan out.
struct plan_cost {
    std::uint64_t bytes_read = 0;       ///< from files
    std::uint64_t bytes_discarded = 0;  ///< read in small gaps (byte_source::bridged_gap), not asked for
    std::uint64_t reads = 0;            ///< of a file, where no chunk is shared among readers
    std::uint64_t copies = 0;           ///< to a device: runs of destination bytes
};

namespace detail {

/// What an engine needs of a plan.
struct plan_parts {
    std::vector<planned_chunk> chunks;
    std::vector<planned_piece> pieces;
    std::vector<planned_request> requests;

    [[nodiscard]] std::span<const planned_piece> pieces_of(const planned_chunk& c) const noexcept {
        return std::span<const planned_piece>(pieces).subspan(c.first_piece, c.pieces);
    }
};

/// Where a chunk of a file had best end, if it is as large as that: chunks that begin and end on pages need no detour by direct reads, and
/// disks are the faster for reads that cross none of the blocks they are made of.
inline constexpr std::uint64_t chunk_that_ends_on_a_page = std::uint64_t{256} << 10;
inline constexpr std::uint64_t chunk_that_ends_on_a_block = disk_block_bytes;

}  // namespace detail

/// Transfers, ordered by request (first come first) and by where they lie in the source; neighbours in source and destination made one; the
/// whole cut into chunks. What is smaller than a chunk shares one with what follows it in the same request and file: small tensors, the
/// rows of a slice. Transfers of zero bytes bring nothing, but their request exists. Of its transfers, a request has the most urgent level,
/// the earliest deadline and the greatest weight.
template <chunking_policy Chunking>
class transfer_plan {
public:
    /// @throws configuration_error for a transfer without a destination, or a range that wraps
    explicit transfer_plan(std::span<const transfer> transfers, Chunking chunking = {}) {
        std::unordered_map<std::uint64_t, std::uint32_t> number_of;
        std::vector<std::uint32_t> request_of(transfers.size());
        std::vector<std::uint32_t> order;
        order.reserve(transfers.size());
        bool in_order = true;  // as lists of neighbouring tensors are, of which there may be 100,000
        for (std::uint32_t i = 0; i < transfers.size(); ++i) {
            const transfer& t = transfers[i];
            check_range(t);
            if (i > 0 && t.request == transfers[i - 1].request) {
                request_of[i] = request_of[i - 1];
            } else {
                const auto [at, is_new] = number_of.try_emplace(t.request, static_cast<std::uint32_t>(parts_.requests.size()));
                if (is_new) {
                    parts_.requests.push_back({{t.request, 0, t.level}, 0, 0});
                }
                request_of[i] = at->second;
            }
            request& what = parts_.requests[request_of[i]].what;
            what.level = std::min(what.level, t.level);
            what.deadline = std::min(what.deadline, t.deadline);
            what.weight = std::max(what.weight, t.weight);
            if (t.bytes > 0) {
                in_order = in_order && (order.empty() || !comes_before(transfers, request_of, i, order.back()));
                order.push_back(i);
            }
        }
        if (!in_order) {
            std::stable_sort(order.begin(), order.end(),
                             [&](std::uint32_t a, std::uint32_t b) { return comes_before(transfers, request_of, a, b); });
        }
        for (std::size_t i = 0; i < order.size();) {
            const std::uint32_t number = request_of[order[i]];
            std::uint64_t run = transfers[order[i]].bytes;
            std::size_t j = i + 1;
            for (; j < order.size() && request_of[order[j]] == number && continues(transfers[order[j - 1]], transfers[order[j]]); ++j) {
                run = static_cast<std::uint64_t>(transfers[order[j]].destination - transfers[order[i]].destination) +
                      transfers[order[j]].bytes;
            }
            const std::uint64_t row_bytes = transfers[order[i]].row_bytes;
            const std::uint64_t step = larger<std::uint64_t>(chunking.bytes_per_chunk(row_bytes, run), 1);
            for (; i < j; ++i) {
                cut(transfers[order[i]], number, step, step >= run);
            }
        }
        close();
        // Chunks came request by request, so that each has one run of them; an empty request has an empty run.
        std::uint32_t first = 0;
        for (planned_request& r : parts_.requests) {
            r.first_chunk = first;
            first += r.what.chunks;
            r.what.chunk_bytes = r.what.chunks == 0 ? 0 : ceil_div(r.bytes, std::uint64_t{r.what.chunks});
        }
    }

    /// Bytes to move in all.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] std::span<const planned_chunk> chunks() const noexcept { return parts_.chunks; }
    [[nodiscard]] std::span<const planned_piece> pieces() const noexcept { return parts_.pieces; }
    [[nodiscard]] std::span<const planned_piece> pieces_of(const planned_chunk& c) const noexcept { return parts_.pieces_of(c); }
    [[nodiscard]] std::span<const planned_request> requests() const noexcept { return parts_.requests; }

    /// Bytes of the largest chunk, for which staging needs room; 0 for an empty plan.
    [[nodiscard]] std::uint64_t largest_chunk() const noexcept { return largest_; }

    /// Reads, copies and bytes, so that a test can hold a plan to them.
    [[nodiscard]] plan_cost cost() const noexcept {
        plan_cost sum;
        for (const planned_chunk& c : parts_.chunks) {
            const planned_piece* last = nullptr;
            for (const planned_piece& p : pieces_of(c)) {
                if (c.from == bytes_from::file) {
                    const bool bridged = last != nullptr && p.offset >= last->offset + last->bytes &&
                                         p.offset - (last->offset + last->bytes) <= byte_source::bridged_gap;
                    const std::uint64_t gap = bridged ? p.offset - (last->offset + last->bytes) : 0;
                    sum.reads += bridged ? 0 : 1;
                    sum.bytes_read += p.bytes + gap;
                    sum.bytes_discarded += gap;
                }
                const bool same_copy = last != nullptr && (c.from == bytes_from::file || c.from == bytes_from::memory) &&
                                       p.destination - last->destination == static_cast<std::ptrdiff_t>(p.at - last->at);
                sum.copies += same_copy ? 0 : 1;
                last = &p;
            }
        }
        return sum;
    }

    /// One line for each request and each chunk.
    void print(std::ostream& out) const {
        const plan_cost all = cost();
        out << bytes_ << " bytes in " << parts_.chunks.size() << " chunks for " << parts_.requests.size() << " requests: " << all.reads
            << " reads of " << all.bytes_read << " bytes, " << all.bytes_discarded << " of them discarded; " << all.copies << " copies\n";
        constexpr const char* level[] = {"on demand", "prefetch", "background"};
        for (const planned_request& r : parts_.requests) {
            out << "request " << r.what.id << ", " << level[static_cast<int>(r.what.level)] << ": " << r.bytes << " bytes\n";
            for (std::uint32_t i = r.first_chunk; i < r.first_chunk + r.what.chunks; ++i) {
                const planned_chunk& c = parts_.chunks[i];
                const planned_piece& p = parts_.pieces[c.first_piece];
                out << "  chunk " << c.index << ": " << c.bytes << " bytes from ";
                if (c.from == bytes_from::file) {
                    out << "file " << c.file << " at " << p.offset;
                } else {
                    out << (c.from == bytes_from::memory ? "memory " : "pinned memory ") << static_cast<const void*>(p.memory);
                }
                out << " to " << static_cast<const void*>(p.destination);
                if (c.pieces > 1) {
                    out << " and on, in " << c.pieces << " pieces";
                }
                out << '\n';
            }
        }
    }

    /// The plan without its chunking, for an engine; nothing is left here.
    [[nodiscard]] detail::plan_parts take() && noexcept { return std::move(parts_); }

private:
    static void check_range(const transfer& t) {
        if (t.bytes > 0 && t.destination == nullptr) {
            throw configuration_error("penstock: a transfer of " + std::to_string(t.bytes) + " bytes (request " +
                                      std::to_string(t.request) + ") has no destination");
        }
        if (t.offset + t.bytes < t.offset) {
            throw configuration_error("penstock: a transfer of " + std::to_string(t.bytes) + " bytes at offset " +
                                      std::to_string(t.offset) + " (request " + std::to_string(t.request) +
                                      ") reaches beyond the last byte of a file");
        }
    }

    static bool comes_before(std::span<const transfer> t, const std::vector<std::uint32_t>& request_of, std::uint32_t a,
                             std::uint32_t b) noexcept {
        return request_of[a] != request_of[b] ? request_of[a] < request_of[b] : lies_before(t[a], t[b]);
    }

    static bool lies_before(const transfer& a, const transfer& b) noexcept {
        if ((a.memory == nullptr) != (b.memory == nullptr)) {
            return a.memory == nullptr;
        }
        if (a.memory != nullptr) {
            return std::less<>{}(a.memory, b.memory);
        }
        return a.file != b.file ? a.file < b.file : a.offset < b.offset;
    }

    static bytes_from kind(const transfer& t) noexcept {
        return t.memory == nullptr  ? bytes_from::file
               : t.lock != nullptr  ? bytes_from::source_memory
               : t.memory_is_pinned ? bytes_from::pinned
                                    : bytes_from::memory;
    }

    /// Whether `b` begins where `a` ends, in the source, and in the destination or behind the padding of `a` there.
    static bool continues(const transfer& a, const transfer& b) noexcept {
        const bool source = kind(a) == kind(b) && (a.memory != nullptr ? b.memory == a.memory + a.bytes && a.lock == b.lock
                                                                       : a.file == b.file && b.offset == a.offset + a.bytes);
        return source && a.row_bytes == b.row_bytes && b.destination >= a.destination + a.bytes &&
               b.destination <= a.destination + a.bytes + a.padding;
    }

    /// Appends a range to the open chunk, as much as it holds, and the rest to new ones.
    void cut(transfer t, std::uint32_t number, std::uint64_t step, bool all_at_once) {
        while (t.bytes > 0) {
            const bool joins = open_.pieces > 0 && open_.request == number && open_.file == t.file && open_.from == kind(t) &&
                               step_ == step && row_bytes_ == t.row_bytes;
            const bool next = joins && continues(last_, t);
            const std::uint64_t at =
                joins ? open_.span + (next ? static_cast<std::uint64_t>(t.destination - last_.destination) - last_.bytes : 0) : 0;
            const std::uint64_t limit = joins ? limit_ : all_at_once ? step : limit_of(t, step);
            const std::uint64_t size = at < limit ? fitting(t, limit - at, step, at == 0) : 0;
            if (!joins || size == 0) {
                close();
                open_ = {number, 0, t.file, kind(t), 0, 0, static_cast<std::uint32_t>(parts_.pieces.size()), 0};
                step_ = step;
                limit_ = all_at_once ? step : limit_of(t, step);
                row_bytes_ = t.row_bytes;
                if (joins) {
                    continue;
                }
            }
            append(t, size, open_.pieces == 0 ? 0 : at, next);
            last_ = t;
            last_.bytes = size;
            last_.padding = size == t.bytes ? t.padding : 0;
            t.offset += size;
            t.memory += t.memory == nullptr ? 0 : size;
            t.destination += size;
            t.bytes -= size;
        }
    }

    /// A chunk that begins inside a page, or block, of its file is so much shorter that the next one does not.
    static std::uint64_t limit_of(const transfer& t, std::uint64_t step) noexcept {
        return step - (t.memory == nullptr && t.row_bytes == 0 ? t.offset % end_of_chunks(step) : 0);
    }

    static std::uint64_t end_of_chunks(std::uint64_t step) noexcept {
        return step >= detail::chunk_that_ends_on_a_block  ? detail::disk_block_bytes
               : step >= detail::chunk_that_ends_on_a_page ? memory::page_bytes
                                                           : 1;
    }

    /// How much of a range goes into `room` bytes of a chunk: whole rows, up to a page border of the file; all of `room` where the chunk is
    /// empty and there is no better place to cut.
    static std::uint64_t fitting(const transfer& t, std::uint64_t room, std::uint64_t step, bool empty) noexcept {
        if (t.bytes <= room) {
            return t.bytes;
        }
        if (t.row_bytes > 0) {
            const std::uint64_t whole = round_down(room, t.row_bytes);
            return whole > 0 ? whole : empty ? room : 0;
        }
        if (t.memory == nullptr && step >= detail::chunk_that_ends_on_a_page) {
            const std::uint64_t end = round_down(t.offset + room, memory::page_bytes);
            return end > t.offset ? end - t.offset : 0;
        }
        return room;
    }

    void append(const transfer& t, std::uint64_t size, std::uint64_t at, bool next) {
        planned_piece* last = open_.pieces == 0 ? nullptr : &parts_.pieces.back();
        if (last != nullptr && next && last->at + last->bytes == at && last->destination + last->bytes == t.destination) {
            last->bytes += size;
        } else {
            parts_.pieces.push_back({t.offset, t.memory, size, at, t.destination});
            ++open_.pieces;
        }
        open_.bytes += size;
        open_.span = at + size;
    }

    void close() {
        if (open_.pieces > 0) {
            planned_request& owner = parts_.requests[open_.request];
            open_.index = owner.what.chunks++;
            owner.bytes += open_.bytes;
            bytes_ += open_.bytes;
            largest_ = larger(largest_, open_.span);
            parts_.chunks.push_back(std::exchange(open_, {}));
        }
    }

    detail::plan_parts parts_;
    std::uint64_t bytes_ = 0;
    std::uint64_t largest_ = 0;

    planned_chunk open_;  ///< being filled, while there are transfers
    std::uint64_t step_ = 0;
    std::uint64_t limit_ = 0;  ///< of its span
    std::uint64_t row_bytes_ = 0;
    transfer last_;  ///< what was appended to it last
};

template <chunking_policy Chunking>
transfer_plan(std::span<const transfer>, Chunking) -> transfer_plan<Chunking>;

}  // namespace penstock::inline v0_1

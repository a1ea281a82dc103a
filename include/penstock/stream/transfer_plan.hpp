#pragma once

#include <penstock/error.hpp>
#include <penstock/policy/chunking.hpp>
#include <penstock/policy/scheduling.hpp>
#include <penstock/units.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <span>
#include <string>
#include <unordered_map>
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
};

/// A chunk of a plan: the unit of read, copy, progress and pre-emption.
struct planned_chunk {
    std::uint32_t request = 0;  ///< index into requests(), not the caller's number
    std::uint32_t index = 0;    ///< among the chunks of its request
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    const std::byte* memory = nullptr;
    bool memory_is_pinned = false;
    std::uint64_t bytes = 0;
    std::byte* destination = nullptr;
    bool of_source = false;  ///< `memory` is where the source has these bytes of the file
};

/// A request of a plan and its run of chunks: chunks()[first_chunk, first_chunk + what.chunks).
struct planned_request {
    request what;  ///< with the caller's number
    std::uint32_t first_chunk = 0;
    std::uint64_t bytes = 0;
};

/// Transfers, ordered by request (first come first) and by where they lie in it; neighbours in source and destination made one; the whole
/// cut into chunks. Transfers of zero bytes bring nothing, but their request exists. The most urgent level of its transfers is a request's.
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
                const auto [at, is_new] = number_of.try_emplace(t.request, static_cast<std::uint32_t>(requests_.size()));
                if (is_new) {
                    requests_.push_back({{t.request, 0, t.level}, 0, 0});
                }
                request_of[i] = at->second;
            }
            urgency& level = requests_[request_of[i]].what.level;
            level = t.level < level ? t.level : level;
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
            transfer run = transfers[order[i]];
            const std::uint32_t number = request_of[order[i]];
            for (++i; i < order.size() && request_of[order[i]] == number && continues(run, transfers[order[i]]); ++i) {
                run.bytes += transfers[order[i]].bytes;
            }
            cut(run, number, chunking);
        }
        // Chunks came request by request, so that each has one run of them; an empty request has an empty run.
        std::uint32_t first = 0;
        for (planned_request& r : requests_) {
            r.first_chunk = first;
            first += r.what.chunks;
        }
    }

    /// Bytes to move in all.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] std::span<const planned_chunk> chunks() const noexcept { return chunks_; }
    [[nodiscard]] std::span<const planned_request> requests() const noexcept { return requests_; }

    /// Bytes of the largest chunk, for which staging needs room; 0 for an empty plan.
    [[nodiscard]] std::uint64_t largest_chunk() const noexcept { return largest_; }

    /// One line for each request and each chunk.
    void print(std::ostream& out) const {
        out << bytes_ << " bytes in " << chunks_.size() << " chunks for " << requests_.size() << " requests\n";
        constexpr const char* level[] = {"on demand", "prefetch", "background"};
        for (const planned_request& r : requests_) {
            out << "request " << r.what.id << ", " << level[static_cast<int>(r.what.level)] << ": " << r.bytes << " bytes\n";
            for (std::uint32_t c = r.first_chunk; c < r.first_chunk + r.what.chunks; ++c) {
                const planned_chunk& k = chunks_[c];
                out << "  chunk " << k.index << ": " << k.bytes << " bytes from ";
                if (k.memory != nullptr) {
                    out << (k.memory_is_pinned ? "pinned memory " : "memory ") << static_cast<const void*>(k.memory);
                } else {
                    out << "file " << k.file << " at " << k.offset;
                }
                out << " to " << static_cast<const void*>(k.destination) << '\n';
            }
        }
    }

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

    /// Whether `b` begins where `a` ends, in source and destination.
    static bool continues(const transfer& a, const transfer& b) noexcept {
        const bool source = a.memory != nullptr
                                ? b.memory == a.memory + a.bytes && a.memory_is_pinned == b.memory_is_pinned && a.lock == b.lock
                                : b.memory == nullptr && a.file == b.file && b.offset == a.offset + a.bytes;
        return source && a.row_bytes == b.row_bytes && b.destination == a.destination + a.bytes;
    }

    void cut(const transfer& run, std::uint32_t number, const Chunking& chunking) {
        planned_request& owner = requests_[number];
        const std::uint64_t step = larger<std::uint64_t>(chunking.bytes_per_chunk(run.row_bytes, run.bytes), 1);
        for (std::uint64_t done = 0; done < run.bytes;) {
            const std::uint64_t size = smaller(step, run.bytes - done);
            chunks_.push_back({number, owner.what.chunks++, run.file, run.offset + done,
                               run.memory == nullptr ? nullptr : run.memory + done, run.memory_is_pinned, size, run.destination + done,
                               run.lock != nullptr});
            largest_ = larger(largest_, size);
            done += size;
        }
        owner.bytes += run.bytes;
        bytes_ += run.bytes;
    }

    std::vector<planned_chunk> chunks_;
    std::vector<planned_request> requests_;
    std::uint64_t bytes_ = 0;
    std::uint64_t largest_ = 0;
};

template <chunking_policy Chunking>
transfer_plan(std::span<const transfer>, Chunking) -> transfer_plan<Chunking>;

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/policy/axis.hpp>
#include <penstock/units.hpp>

#include <concepts>

/// The chunking axis: the granule of a ring, the unit of read, copy, progress and pre-emption of a stream, the tile of a kernel.

namespace penstock::inline v0_1 {

/// `c.bytes_per_chunk(row_bytes, total_bytes)` is the size of every chunk but the last, at least 1 where total_bytes is.
template <class C>
concept chunking_policy = policy_for<C, axis::chunking> && std::copyable<C> && requires(const C c, std::uint64_t n) {
    { c.bytes_per_chunk(n, n) } -> std::convertible_to<std::uint64_t>;
};

namespace chunking {

/// Everything at once.
struct whole {
    using policy_axis = axis::chunking;

    PENSTOCK_HD constexpr std::uint64_t bytes_per_chunk(std::uint64_t, std::uint64_t total_bytes) const noexcept {
        return larger<std::uint64_t>(total_bytes, 1);
    }
};

namespace detail {

/// As many whole rows as fit in `limit`; a longer row is cut at a multiple of 128 bytes.
PENSTOCK_HD constexpr std::uint64_t rows_within(std::uint64_t limit, std::uint64_t row_bytes) noexcept {
    return row_bytes == 0 ? limit : row_bytes <= limit ? round_down(limit, row_bytes) : larger<std::uint64_t>(round_down(limit, 128), 1);
}

}  // namespace detail

/// At most `Size` bytes: as many whole rows as fit; a longer row is cut at multiples of 128 bytes.
template <bytes Size>
struct fixed {
    static_assert(Size >= 128, "penstock: chunking::fixed needs at least 128 bytes, the smallest piece a row is cut into");
    using policy_axis = axis::chunking;
    static constexpr bytes size = Size;

    PENSTOCK_HD constexpr std::uint64_t bytes_per_chunk(std::uint64_t row_bytes, std::uint64_t) const noexcept {
        return detail::rows_within(Size.count, row_bytes);
    }
};

/// As `fixed`, but less where the source of the bytes is the faster for it (see byte_source::chunk_bytes). For weight streams.
template <bytes Size>
struct suited {
    static_assert(Size >= 128, "penstock: chunking::suited needs at least 128 bytes, the smallest piece a row is cut into");
    using policy_axis = axis::chunking;
    std::uint64_t most = Size.count;

    constexpr std::uint64_t bytes_per_chunk(std::uint64_t row_bytes, std::uint64_t) const noexcept {
        return detail::rows_within(most, row_bytes);
    }

    /// The same with no more than `limit` bytes, and no less than 128.
    [[nodiscard]] constexpr suited within(std::uint64_t limit) const noexcept { return {smaller(most, larger<std::uint64_t>(limit, 128))}; }
};

/// `N` whole rows.
template <std::uint32_t N>
struct rows {
    static_assert(N > 0, "penstock: chunking::rows needs at least one row");
    using policy_axis = axis::chunking;

    PENSTOCK_HD constexpr std::uint64_t bytes_per_chunk(std::uint64_t row_bytes, std::uint64_t total_bytes) const noexcept {
        return row_bytes == 0 ? larger<std::uint64_t>(total_bytes, 1) : N * row_bytes;
    }
};

/// As `fixed`, with the size known at run time only (a command line, a tuner). Not for kernels.
struct run_time {
    using policy_axis = axis::chunking;
    bytes size{8u << 20};

    constexpr std::uint64_t bytes_per_chunk(std::uint64_t row_bytes, std::uint64_t) const noexcept {
        return detail::rows_within(larger<std::uint64_t>(size.count, 128), row_bytes);
    }
};

}  // namespace chunking
}  // namespace penstock::inline v0_1

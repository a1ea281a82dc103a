#pragma once

#include <penstock/error.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace penstock::inline v0_1 {

/// Bytes of a source that lie in page-locked memory: the copy engine of every device takes them from where they are.
struct bytes_in_place {
    const std::byte* data = nullptr;  ///< null: they have to be read
    std::uint64_t bytes = 0;          ///< how many of those asked for, from the first on, the answer holds for; 0: for all
    const void* lock = nullptr;       ///< stands for the page lock they lie under: one copy does not cross from one lock into another
};

namespace detail {

/// Reads that cross no multiple of this suit disks.
inline constexpr std::uint64_t disk_block_bytes = std::uint64_t{1} << 20;

}  // namespace detail

/// Bytes of a file from `offset` on, and where they are to be put: `into.size()` of them, in host memory.
struct read_piece {
    std::uint64_t offset = 0;
    std::span<std::byte> into;
};

/// A read that ended early or failed. `at()` is the offset in the file of the first byte that did not come.
class read_error : public io_error {
public:
    read_error(const std::string& text, std::uint64_t at) : io_error(text), at_(at) {}

    [[nodiscard]] std::uint64_t at() const noexcept { return at_; }

private:
    std::uint64_t at_;
};

/// Something that bytes can be read from by many threads at once: files, or a test's stand-in for them.
class byte_source {
public:
    static constexpr std::uint64_t unknown_size = ~std::uint64_t{0};

    byte_source() = default;
    byte_source(const byte_source&) = delete;
    byte_source& operator=(const byte_source&) = delete;
    virtual ~byte_source() = default;

    /// Gaps of at most this many bytes between the pieces of a read may be read, too, and thrown away: one call costs more than that. The
    /// pages that they lie in are brought anyhow.
    static constexpr std::uint64_t bridged_gap = 4096;

    /// Fills `into` with the bytes of file number `file` from `offset` on. Synchronous; called by several threads at a time.
    /// @throws read_error (or another io_error) naming the file, the offset, what was wanted and what was got
    virtual void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) = 0;

    /// The same for pieces by growing offset, few or thousands. @throws as read()
    virtual void read_pieces(std::uint32_t file, std::span<const read_piece> pieces) {
        for (const read_piece& p : pieces) {
            read(file, p.offset, p.into);
        }
    }

    /// What to call a file in messages and reports.
    [[nodiscard]] virtual std::string name(std::uint32_t file) const = 0;

    /// How the file's bytes come, for reports: "read, in the page cache". Empty where there is nothing to say.
    [[nodiscard]] virtual std::string condition(std::uint32_t /*file*/) const { return {}; }

    /// How many reads of this file by one load are worth having under way at a time, now. Asked often: it does not wait for anything.
    [[nodiscard]] virtual std::uint32_t reads_at_a_time(std::uint32_t /*file*/) const noexcept { return ~std::uint32_t{0}; }

    /// Chunks of no more than this suit the file, as far as the source knows; for chunking that follows its source.
    [[nodiscard]] virtual std::uint64_t chunk_bytes(std::uint32_t /*file*/) const noexcept { return ~std::uint64_t{0}; }

    /// Bytes of the file now; unknown_size where the source does not know. @throws io_error
    [[nodiscard]] virtual std::uint64_t size(std::uint32_t /*file*/) { return unknown_size; }

    /// Whether these bytes can be copied to a device from where they lie, asked when a load to a device starts. May take the time of
    /// locking their pages. What it gives stays valid as long as the source lives. By several threads at a time.
    [[nodiscard]] virtual bytes_in_place in_place(std::uint32_t /*file*/, std::uint64_t /*offset*/, std::uint64_t /*bytes*/) { return {}; }

    /// Says that a device did not take the bytes of a file from where they lie: from now on they are to be read.
    virtual void refuse_in_place(std::uint32_t /*file*/, const std::string& /*why*/) {}
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/policy/memory.hpp>
#include <penstock/stream/byte_source.hpp>
#include <penstock/units.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/// Reading files by the calls of the system, which give less than was asked for, are interrupted, and want whole pages.

namespace penstock::inline v0_1 {

namespace detail {

/// Linux returns at most 2,147,479,552 bytes from one call, so no call asks for more than this.
inline constexpr std::size_t read_call_bytes = std::size_t{1} << 30;

/// The file system does not serve direct I/O on this file, by this errno.
struct direct_refused {
    int why = EINVAL;
};

/// Whether an errno of a direct read is about reading directly, so that a read through the page cache may succeed.
constexpr bool refuses_direct(int code) noexcept {
    return code == EINVAL || code == EFAULT || code == EPERM || code == ENOMEM || code == ENODEV || code == EOPNOTSUPP;
}

inline std::string short_read(const std::string& name, std::uint64_t offset, std::uint64_t wanted, std::uint64_t got, const char* why) {
    return name + ": " + std::to_string(wanted) + " bytes were wanted at offset " + std::to_string(offset) + ", " + std::to_string(got) +
           " were got: " + why;
}

/// Fills `into` by calls of `read_at(descriptor, buffer, bytes, offset)`, which answers as pread does: short reads are continued and
/// interrupted ones repeated. `name()` makes the file's name for a message.
template <class ReadAt, class Name>
void read_fully(ReadAt&& read_at, int descriptor, std::uint64_t offset, std::span<std::byte> into, Name&& name) {
    std::size_t got = 0;
    while (got < into.size()) {
        const ssize_t n =
            read_at(descriptor, into.data() + got, std::min(into.size() - got, read_call_bytes), static_cast<off_t>(offset + got));
        if (n > 0) {
            got += static_cast<std::size_t>(n);
            continue;
        }
        if (n < 0 && errno == EINTR) {
            continue;
        }
        throw read_error(short_read(name(), offset, into.size(), got, n == 0 ? "the file ends there" : std::strerror(errno)), offset + got);
    }
}

/// As read_fully for a descriptor opened with O_DIRECT, which wants file offset, memory and length at multiples of a page: whole pages go
/// straight to `into` where its address allows it, all else through a buffer of this call. The end of the file may be anywhere.
template <class ReadAt, class Name>
void read_direct(ReadAt&& read_at, int descriptor, std::uint64_t offset, std::span<std::byte> into, Name&& name) {
    constexpr std::uint64_t page = memory::page_bytes;
    constexpr std::uint64_t most = std::uint64_t{1} << 20;
    const std::uint64_t end = offset + into.size();
    const bool pages_fit = (reinterpret_cast<std::uintptr_t>(into.data()) - offset) % page == 0;
    struct free_pages {
        void operator()(std::byte* p) const noexcept { memory::pageable::deallocate(p, 0); }
    };
    std::unique_ptr<std::byte[], free_pages> aside;
    for (std::uint64_t at = offset; at < end;) {
        const std::uint64_t first = round_down(at, page);
        const bool straight = pages_fit && at == first && end - at >= page;
        const std::uint64_t size = straight    ? round_down(smaller<std::uint64_t>(end - at, read_call_bytes), page)
                                   : pages_fit ? page
                                               : smaller(round_up(end - first, page), most);
        if (!straight && aside == nullptr) {
            aside.reset(static_cast<std::byte*>(memory::pageable::allocate(smaller(round_up(end - round_down(offset, page), page), most))));
        }
        std::byte* to = straight ? into.data() + (at - offset) : aside.get();
        const ssize_t n = read_at(descriptor, to, size, static_cast<off_t>(first));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && refuses_direct(errno)) {
            throw direct_refused{errno};
        }
        if (n <= static_cast<ssize_t>(at - first)) {
            throw read_error(short_read(name(), offset, into.size(), at - offset, n < 0 ? std::strerror(errno) : "the file ends there"),
                             at);
        }
        const std::uint64_t got = smaller<std::uint64_t>(static_cast<std::uint64_t>(n) - (at - first), end - at);
        if (!straight) {
            std::memcpy(into.data() + (at - offset), aside.get() + (at - first), got);
        }
        at += got;
    }
}

/// The pieces from the first on that one call brings: gaps of at most byte_source::bridged_gap, at most `most` bytes with them (or one
/// piece), at most `count`.
inline std::size_t pieces_of_one_read(std::span<const read_piece> pieces, std::uint64_t most, std::size_t count) noexcept {
    std::size_t n = 1;
    for (; n < pieces.size() && n < count; ++n) {
        const std::uint64_t reached = pieces[n - 1].offset + pieces[n - 1].into.size();
        if (pieces[n].offset < reached || pieces[n].offset - reached > byte_source::bridged_gap ||
            pieces[n].offset + pieces[n].into.size() - pieces[0].offset > most) {
            break;
        }
    }
    return n;
}

/// Brings pieces by calls of `readv_at(descriptor, vectors, count, offset)`, which answers as preadv does; what lies in small gaps between
/// them is read into a page that nobody looks at.
template <class ReadvAt, class Name>
void read_scattered(ReadvAt&& readv_at, int descriptor, std::span<const read_piece> pieces, Name&& name) {
    constexpr std::size_t most_vectors = 1024;  // of one call, on Linux
    std::byte unwanted[byte_source::bridged_gap];
    std::array<struct iovec, most_vectors> vectors;
    while (!pieces.empty()) {
        const std::size_t n = pieces_of_one_read(pieces, read_call_bytes, most_vectors / 2);
        const std::uint64_t begin = pieces[0].offset;
        const std::uint64_t end = pieces[n - 1].offset + pieces[n - 1].into.size();
        std::size_t used = 0;
        std::uint64_t at = begin;
        for (const read_piece& p : pieces.first(n)) {
            if (p.offset > at) {
                vectors[used++] = {unwanted, p.offset - at};
            }
            vectors[used++] = {p.into.data(), p.into.size()};
            at = p.offset + p.into.size();
        }
        std::size_t first = 0;
        for (at = begin; at < end;) {
            const ssize_t got = readv_at(descriptor, vectors.data() + first, static_cast<int>(used - first), static_cast<off_t>(at));
            if (got < 0 && errno == EINTR) {
                continue;
            }
            if (got <= 0) {
                throw read_error(
                    short_read(name(), begin, end - begin, at - begin, got == 0 ? "the file ends there" : std::strerror(errno)), at);
            }
            at += static_cast<std::uint64_t>(got);
            for (auto left = static_cast<std::size_t>(got); left > 0;) {
                const std::size_t here = smaller(left, vectors[first].iov_len);
                vectors[first].iov_base = static_cast<std::byte*>(vectors[first].iov_base) + here;
                vectors[first].iov_len -= here;
                left -= here;
                first += vectors[first].iov_len == 0 ? 1 : 0;
            }
            while (first < used && vectors[first].iov_len == 0) {
                ++first;
            }
        }
        pieces = pieces.subspan(n);
    }
}

/// The same by direct reads: pieces that are near each other come in one read of the pages that they lie in.
template <class ReadAt, class Name>
void read_scattered_direct(ReadAt&& read_at, int descriptor, std::span<const read_piece> pieces, Name&& name) {
    constexpr std::uint64_t most = std::uint64_t{1} << 20;
    std::vector<std::byte> aside;
    while (!pieces.empty()) {
        const std::size_t n = pieces_of_one_read(pieces, most, pieces.size());
        if (n == 1) {
            read_direct(read_at, descriptor, pieces[0].offset, pieces[0].into, name);
        } else {
            const std::uint64_t begin = pieces[0].offset;
            aside.resize(pieces[n - 1].offset + pieces[n - 1].into.size() - begin);
            read_direct(read_at, descriptor, begin, aside, name);
            for (const read_piece& p : pieces.first(n)) {
                std::memcpy(p.into.data(), aside.data() + (p.offset - begin), p.into.size());
            }
        }
        pieces = pieces.subspan(n);
    }
}

/// Part of a mapping's pages that lie in the page cache, of up to 256 of them, evenly spread; 0 where the system does not say.
inline double cached_part(const void* mapping, std::uint64_t size) noexcept {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t pages = ceil_div(size, page);
    const std::uint64_t samples = smaller<std::uint64_t>(pages, 256);
    std::uint64_t present = 0;
    for (std::uint64_t i = 0; i < samples; ++i) {
        unsigned char there = 0;
        auto* at = static_cast<std::byte*>(const_cast<void*>(mapping)) + pages * i / samples * page;
        present += ::mincore(at, 1, &there) == 0 && (there & 1) != 0;
    }
    return samples == 0 ? 0 : static_cast<double>(present) / static_cast<double>(samples);
}

/// The same of an open file.
inline double cached_part(int descriptor) noexcept {
    struct stat about {};
    if (::fstat(descriptor, &about) != 0 || about.st_size <= 0) {
        return 0;
    }
    const auto size = static_cast<std::uint64_t>(about.st_size);
    void* mapping = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapping == MAP_FAILED) {
        return 0;
    }
    const double part = cached_part(mapping, size);
    ::munmap(mapping, size);
    return part;
}

/// More of a file than this in the page cache counts as all of it, less than the other as none.
inline constexpr double nearly_all = 0.95;
inline constexpr double hardly_any = 0.05;

}  // namespace detail
}  // namespace penstock::inline v0_1

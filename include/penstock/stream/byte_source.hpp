#pragma once

#include <penstock/error.hpp>
#include <penstock/policy/memory.hpp>
#include <penstock/units.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace penstock::inline v0_1 {

/// Bytes of a source that lie in page-locked memory: the copy engine of every device takes them from where they are.
struct bytes_in_place {
    const std::byte* data = nullptr;  ///< null: they have to be read
    std::uint64_t bytes = 0;          ///< how many of those asked for, from the first on, the answer holds for; 0: for all
    const void* lock = nullptr;       ///< stands for the page lock they lie under: one copy does not cross from one lock into another
};

/// Something that bytes can be read from by many threads at once: files, or a test's stand-in for them.
class byte_source {
public:
    static constexpr std::uint64_t unknown_size = ~std::uint64_t{0};

    byte_source() = default;
    byte_source(const byte_source&) = delete;
    byte_source& operator=(const byte_source&) = delete;
    virtual ~byte_source() = default;

    /// Fills `into` with the bytes of file number `file` from `offset` on. Synchronous; called by several threads at a time.
    /// @throws io_error naming the file, the offset, what was wanted and what was got
    virtual void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) = 0;

    /// What to call a file in messages and reports.
    [[nodiscard]] virtual std::string name(std::uint32_t file) const = 0;

    /// How the file's bytes come, for reports: "read, in the page cache". Empty where there is nothing to say.
    [[nodiscard]] virtual std::string condition(std::uint32_t /*file*/) const { return {}; }

    /// Bytes of the file now; unknown_size where the source does not know. @throws io_error
    [[nodiscard]] virtual std::uint64_t size(std::uint32_t /*file*/) { return unknown_size; }

    /// Whether these bytes can be copied to a device from where they lie, asked when a load to a device starts. May take the time of
    /// locking their pages. What it gives stays valid as long as the source lives. By several threads at a time.
    [[nodiscard]] virtual bytes_in_place in_place(std::uint32_t /*file*/, std::uint64_t /*offset*/, std::uint64_t /*bytes*/) { return {}; }

    /// Says that a device did not take the bytes of a file from where they lie: from now on they are to be read.
    virtual void refuse_in_place(std::uint32_t /*file*/, const std::string& /*why*/) {}
};

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
        throw io_error(short_read(name(), offset, into.size(), got, n == 0 ? "the file ends there" : std::strerror(errno)));
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
            throw io_error(short_read(name(), offset, into.size(), at - offset, n < 0 ? std::strerror(errno) : "the file ends there"));
        }
        const std::uint64_t got = smaller<std::uint64_t>(static_cast<std::uint64_t>(n) - (at - first), end - at);
        if (!straight) {
            std::memcpy(into.data() + (at - offset), aside.get() + (at - first), got);
        }
        at += got;
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

/// How a file's bytes are read: through the page cache, past it (worth it for files that are not in it), or by what is found: directly
/// unless at least half of the file is in the page cache when it is opened.
enum class file_access : std::uint8_t { buffered, direct, as_found };

/// What becomes of the pages that reading brings into the page cache: left to the system, or dropped again.
enum class page_cache : std::uint8_t { keep, drop };

/// Files read by pread. A file is opened when it is first read and stays open as long as the source lives. Where a file system does not
/// serve direct I/O, at open or at a read, that file is read through the page cache, and condition() says so.
class file_source final : public byte_source {
public:
    explicit file_source(std::vector<std::filesystem::path> paths, file_access access = file_access::buffered,
                         page_cache cache = page_cache::keep)
        : access_(access), cache_(cache), files_(paths.size()) {
        for (std::size_t i = 0; i < paths.size(); ++i) {
            files_[i].path = std::move(paths[i]);
        }
    }

    ~file_source() override {
        for (const entry& f : files_) {
            if (f.descriptor >= 0) {
                if (cache_ == page_cache::drop) {
                    static_cast<void>(::posix_fadvise(f.descriptor, 0, 0, POSIX_FADV_DONTNEED));
                }
                ::close(f.descriptor);
            }
        }
    }

    /// With page_cache::drop, the pages that lie wholly in the range are dropped at once, all others of the file with the source.
    void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override {
        const auto [descriptor, direct] = open(file);
        const auto called = [&] { return name(file); };
        if (direct) {
            try {
                detail::read_direct(::pread, descriptor, offset, into, called);
                return;
            } catch (const detail::direct_refused& refusal) {
                step_down(file, refusal.why);
            }
        }
        detail::read_fully(::pread, descriptor, offset, into, called);
        if (cache_ == page_cache::drop) {
            static_cast<void>(
                ::posix_fadvise(descriptor, static_cast<off_t>(offset), static_cast<off_t>(into.size()), POSIX_FADV_DONTNEED));
        }
    }

    [[nodiscard]] std::string name(std::uint32_t file) const override {
        return file < files_.size() ? files_[file].path.string() : "file number " + std::to_string(file);
    }

    /// How the file is read and whether it was in the page cache when this source opened it; empty before.
    [[nodiscard]] std::string condition(std::uint32_t file) const override {
        const std::lock_guard lock(mutex_);
        if (file >= files_.size() || files_[file].descriptor < 0) {
            return {};
        }
        const entry& f = files_[file];
        const std::string found = f.cached > detail::nearly_all   ? "in the page cache"
                                  : f.cached < detail::hardly_any ? "from the disk"
                                                                  : "in part in the page cache";
        if (f.direct) {
            return access_ == file_access::as_found ? "direct reads, " + found : "direct reads";
        }
        const std::string refusal = f.refusal == 0 ? "" : std::string("direct reads refused (") + std::strerror(f.refusal) + "); ";
        return refusal + "pread, " + found;
    }

    /// Opens the file.
    [[nodiscard]] std::uint64_t size(std::uint32_t file) override {
        struct stat about {};
        if (::fstat(open(file).first, &about) != 0) {
            throw io_error(name(file) + ": its size cannot be read: " + std::strerror(errno));
        }
        return static_cast<std::uint64_t>(about.st_size);
    }

    /// Whether most of the file's pages are in the page cache now (up to 256 of them, evenly spread, are asked). Opens it. @throws io_error
    [[nodiscard]] bool in_page_cache(std::uint32_t file) { return detail::cached_part(open(file).first) > detail::nearly_all; }

private:
    struct entry {
        std::filesystem::path path;
        int descriptor = -1;
        bool direct = false;
        int refusal = 0;    ///< errno of the direct read or open that was refused
        double cached = 0;  ///< part of the file that was in the page cache when it was opened
    };

    /// Its descriptor, and whether it is read directly.
    std::pair<int, bool> open(std::uint32_t file) {
        const std::lock_guard lock(mutex_);
        if (file >= files_.size()) {
            throw configuration_error("penstock: file number " + std::to_string(file) + " was asked for, but the source has " +
                                      std::to_string(files_.size()) + " files");
        }
        entry& f = files_[file];
        if (f.descriptor < 0) {
            f.descriptor = ::open(f.path.c_str(), O_RDONLY | O_CLOEXEC);
            if (f.descriptor < 0) {
                throw io_error(f.path.string() + ": cannot be opened: " + std::strerror(errno));
            }
            f.cached = detail::cached_part(f.descriptor);
            if (access_ == file_access::direct || (access_ == file_access::as_found && f.cached < 0.5)) {
                f.direct = set_direct(f, true);
            }
        }
        return {f.descriptor, f.direct};
    }

    static bool set_direct(entry& f, bool on) {
        const int flags = ::fcntl(f.descriptor, F_GETFL);
        if (flags >= 0 && ::fcntl(f.descriptor, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0) {
            return true;
        }
        f.refusal = on ? errno : f.refusal;
        return false;
    }

    void step_down(std::uint32_t file, int why) {
        const std::lock_guard lock(mutex_);
        entry& f = files_[file];
        if (f.direct && !set_direct(f, false)) {
            throw io_error(f.path.string() + ": direct reads cannot be given up: " + std::strerror(errno));
        }
        f.direct = false;
        f.refusal = why;
    }

    file_access access_;
    page_cache cache_;
    mutable std::mutex mutex_;
    std::vector<entry> files_;
};

}  // namespace penstock::inline v0_1

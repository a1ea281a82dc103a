#pragma once

#include <penstock/error.hpp>
#include <penstock/units.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
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

/// Something that bytes can be read from by many threads at once: files, or a test's stand-in for them.
class byte_source {
public:
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
};

namespace detail {

/// Linux returns at most 2,147,479,552 bytes from one call, so no call asks for more than this.
inline constexpr std::size_t read_call_bytes = std::size_t{1} << 30;

/// Fills `into` by calls of `read_at(descriptor, buffer, bytes, offset)`, which answers as pread does: short reads are continued and
/// interrupted ones repeated. `name()` makes the file's name for a message.
template <class ReadAt, class Name>
void read_fully(ReadAt&& read_at, int descriptor, std::uint64_t offset, std::span<std::byte> into, Name&& name) {
    std::size_t got = 0;
    while (got < into.size()) {
        const ssize_t n = read_at(descriptor, into.data() + got, std::min(into.size() - got, read_call_bytes),
                                  static_cast<off_t>(offset + got));
        if (n > 0) {
            got += static_cast<std::size_t>(n);
            continue;
        }
        if (n < 0 && errno == EINTR) {
            continue;
        }
        const std::string why = n == 0 ? std::string("the file ends there") : std::string(std::strerror(errno));
        throw io_error(name() + ": " + std::to_string(into.size()) + " bytes were wanted at offset " + std::to_string(offset) + ", " +
                       std::to_string(got) + " were got: " + why);
    }
}

}  // namespace detail

/// Files read by pread. A file is opened when it is first read and stays open as long as the source lives.
class file_source final : public byte_source {
public:
    explicit file_source(std::vector<std::filesystem::path> paths) : files_(paths.size()) {
        for (std::size_t i = 0; i < paths.size(); ++i) {
            files_[i].path = std::move(paths[i]);
        }
    }

    ~file_source() override {
        for (const entry& f : files_) {
            if (f.descriptor >= 0) {
                ::close(f.descriptor);
            }
        }
    }

    void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override {
        const int descriptor = open(file);
        detail::read_fully(::pread, descriptor, offset, into, [&] { return name(file); });
    }

    [[nodiscard]] std::string name(std::uint32_t file) const override {
        return file < files_.size() ? files_[file].path.string() : "file number " + std::to_string(file);
    }

    /// Whether the file was in the page cache when this source opened it.
    [[nodiscard]] std::string condition(std::uint32_t file) const override {
        const std::lock_guard lock(mutex_);
        if (file >= files_.size() || files_[file].descriptor < 0) {
            return {};
        }
        const double part = files_[file].cached;
        return part > 0.95 ? "pread, in the page cache" : part < 0.05 ? "pread, from the disk" : "pread, in part in the page cache";
    }

    /// Bytes of the file now. Opens it. @throws io_error
    [[nodiscard]] std::uint64_t size(std::uint32_t file) {
        struct stat about {};
        if (::fstat(open(file), &about) != 0) {
            throw io_error(name(file) + ": its size cannot be read: " + std::strerror(errno));
        }
        return static_cast<std::uint64_t>(about.st_size);
    }

    /// Whether most of the file's pages are in the page cache now (up to 256 of them, evenly spread, are asked). Opens it. @throws io_error
    [[nodiscard]] bool in_page_cache(std::uint32_t file) { return cached_part(open(file)) > 0.95; }

private:
    struct entry {
        std::filesystem::path path;
        int descriptor = -1;
        double cached = 0;  ///< part of the file that was in the page cache when it was opened
    };

    int open(std::uint32_t file) {
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
            f.cached = cached_part(f.descriptor);
        }
        return f.descriptor;
    }

    /// Part of the sampled pages that lie in the page cache; 0 where the system does not say.
    static double cached_part(int descriptor) noexcept {
        struct stat about {};
        if (::fstat(descriptor, &about) != 0 || about.st_size <= 0) {
            return 0;
        }
        const auto size = static_cast<std::uint64_t>(about.st_size);
        void* mapping = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
        if (mapping == MAP_FAILED) {
            return 0;
        }
        const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
        const std::uint64_t pages = ceil_div(size, page);
        const std::uint64_t samples = smaller<std::uint64_t>(pages, 256);
        std::uint64_t present = 0;
        for (std::uint64_t i = 0; i < samples; ++i) {
            unsigned char there = 0;
            const std::uint64_t at = pages * i / samples * page;
            present += ::mincore(static_cast<std::byte*>(mapping) + at, 1, &there) == 0 && (there & 1) != 0;
        }
        ::munmap(mapping, size);
        return static_cast<double>(present) / static_cast<double>(samples);
    }

    mutable std::mutex mutex_;
    std::vector<entry> files_;
};

}  // namespace penstock::inline v0_1

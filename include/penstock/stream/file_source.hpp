#pragma once

#include <penstock/stream/file_reads.hpp>
#include <penstock/stream/read_depth.hpp>

#include <filesystem>
#include <mutex>
#include <utility>

namespace penstock::inline v0_1 {

/// How a file's bytes are read: through the page cache, past it (worth it for files that are not in it), or by what is found: directly
/// unless at least half of the file is in the page cache when it is opened.
enum class file_access : std::uint8_t { buffered, direct, as_found };

/// What becomes of the pages that reading brings into the page cache: left to the system, or dropped again.
enum class page_cache : std::uint8_t { keep, drop };

/// Files read by pread: through the page cache, where every reader helps, or directly, where reads_at_a_time() follows the disk. A file is
/// opened when it is first read and stays open as long as the source lives. Where a file system does not serve direct I/O, at open or at a
/// read, that file is read through the page cache, and condition() says so.
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
                meter_.watch(into.size(), [&, d = descriptor] { detail::read_direct(::pread, d, offset, into, called); });
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

    void read_pieces(std::uint32_t file, std::span<const read_piece> pieces) override {
        const auto [descriptor, direct] = open(file);
        const auto called = [&] { return name(file); };
        if (direct) {
            try {
                std::uint64_t bytes = 0;
                for (const read_piece& p : pieces) {
                    bytes += p.into.size();
                }
                meter_.watch(bytes, [&, d = descriptor] { detail::read_scattered_direct(::pread, d, pieces, called); });
                return;
            } catch (const detail::direct_refused& refusal) {
                step_down(file, refusal.why);
            }
        }
        detail::read_scattered(::preadv, descriptor, pieces, called);
        if (cache_ == page_cache::drop && !pieces.empty()) {
            const std::uint64_t begin = pieces.front().offset, end = pieces.back().offset + pieces.back().into.size();
            static_cast<void>(::posix_fadvise(descriptor, static_cast<off_t>(begin), static_cast<off_t>(end - begin), POSIX_FADV_DONTNEED));
        }
    }

    [[nodiscard]] std::uint32_t reads_at_a_time(std::uint32_t file) const noexcept override {
        if (access_ == file_access::buffered) {
            return byte_source::reads_at_a_time(file);
        }
        const std::unique_lock lock(mutex_, std::try_to_lock);  // a file that is being opened may take its time
        const bool direct = !lock.owns_lock() || (file < files_.size() && (files_[file].direct || files_[file].descriptor < 0));
        return direct ? meter_.limit() : byte_source::reads_at_a_time(file);
    }

    /// Of a disk 1 MiB, once the file is open: it is the link's least concern, and a virtual disk copies into small buffers up to a third
    /// faster, since its host's cache holds them.
    [[nodiscard]] std::uint64_t chunk_bytes(std::uint32_t file) const noexcept override {
        const std::lock_guard lock(mutex_);
        return file < files_.size() && files_[file].direct ? detail::disk_block_bytes : byte_source::chunk_bytes(file);
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
    detail::read_meter meter_;  ///< of direct reads
    mutable std::mutex mutex_;
    std::vector<entry> files_;
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/buffer/registration.hpp>
#include <penstock/stream/file_reads.hpp>

#include <algorithm>
#include <filesystem>
#include <map>
#include <mutex>

namespace penstock::inline v0_1 {

/// How the files of a mapped source are locked.
struct mapping_options {
    /// Pages are locked by pieces of this many bytes (a power of two, at least a page), each when it is first asked for. The first copies
    /// then run while later pieces are locked, and a load of a part locks no more than that part.
    std::uint64_t segment_bytes = std::uint64_t{256} << 20;
};

/// Files mapped read-only whose pages in the page cache are locked for the GPUs: copy engines, and kernels, take the bytes from there, and
/// there is no second copy in RAM. The first use of a piece costs about what one copy of it costs; every later one runs at the speed of the
/// link.
///
/// Where a piece cannot be locked as read-only, it is locked plainly; else in parts of a quarter, down to 16 MiB; what cannot be locked at
/// all is read. condition() says which. Zero-byte files are legal.
///
/// read() never touches the mapping: it is a pread of the same pages, so a file that is cut short under it is an io_error and not a SIGBUS.
/// in_place() compares the file's size and time of modification with those at its opening and gives nothing of a file that has changed.
/// What remains: a file that is cut after that question. Locked pages outlive it, so that a copy brings the bytes of before and no fault;
/// but host code that reads through the pointers of in_place() beyond the new end is stopped by SIGBUS. Do not cut files in use.
/// The source outlives all copies and kernels that read its bytes.
template <class Locking>
class basic_mapped_source final : public byte_source {
public:
    explicit basic_mapped_source(std::vector<std::filesystem::path> paths, mapping_options options = {}, Locking locking = {})
        : locking_(std::move(locking)), files_(paths.size()) {
        if (options.segment_bytes < memory::page_bytes || (options.segment_bytes & (options.segment_bytes - 1)) != 0) {
            throw configuration_error("penstock: mapped_source locks pieces of a power of two of at least " +
                                      std::to_string(memory::page_bytes) + " bytes, not of " + std::to_string(options.segment_bytes));
        }
        for (std::size_t i = 0; i < paths.size(); ++i) {
            files_[i].path = std::move(paths[i]);
            files_[i].step = options.segment_bytes;
        }
    }

    ~basic_mapped_source() override {
        for (entry& f : files_) {
            f.pieces.clear();  // before the memory goes
            if (f.data != nullptr) {
                ::munmap(f.data, f.bytes);
            }
            if (f.descriptor >= 0) {
                ::close(f.descriptor);
            }
        }
    }

    void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override {
        detail::read_fully(::pread, open(file).descriptor, offset, into, [&] { return name(file); });
    }

    void read_pieces(std::uint32_t file, std::span<const read_piece> pieces) override {
        detail::read_scattered(::preadv, open(file).descriptor, pieces, [&] { return name(file); });
    }

    [[nodiscard]] std::string name(std::uint32_t file) const override {
        return file < files_.size() ? files_[file].path.string() : "file number " + std::to_string(file);
    }

    [[nodiscard]] std::uint64_t size(std::uint32_t file) override { return static_cast<std::uint64_t>(about(open(file)).st_size); }

    /// "registered mapping (registered, read-only)", "pread (registered mapping refused: why)", ...; "pread" before anything was locked.
    [[nodiscard]] std::string condition(std::uint32_t file) const override {
        if (file >= files_.size()) {
            return {};
        }
        const entry& f = files_[file];
        const std::lock_guard lock(f.locking);
        const bool some = std::any_of(f.pieces.begin(), f.pieces.end(), [](const auto& p) { return p.second.lock.pinned(); });
        const std::string refusal = f.refusal.empty() ? "" : "registered mapping refused: " + f.refusal;
        if (!some || f.given_up) {
            return refusal.empty() ? "pread" : "pread (" + refusal + ")";
        }
        return "registered mapping (" + f.how + ")" + (refusal.empty() ? "" : "; in part pread (" + refusal + ")");
    }

    /// Locks the first piece of the range and answers for it. Nothing of a file that changed since it was opened.
    /// @throws io_error for a file that cannot be opened; device_lost
    [[nodiscard]] bytes_in_place in_place(std::uint32_t file, std::uint64_t offset, std::uint64_t bytes) override {
        entry& f = open(file);
        const std::lock_guard lock(f.locking);
        if (f.given_up || bytes == 0 || f.data == nullptr || offset >= f.bytes || bytes > f.bytes - offset) {
            return {};
        }
        if (changed(f)) {
            f.refusal = "the file changed after it was mapped";
            f.given_up = true;
            return {};
        }
        const auto at = piece_at(f, offset);
        const std::uint64_t here = smaller(bytes, at->first + at->second.bytes - offset);
        if (!at->second.lock.pinned()) {
            return {nullptr, here, nullptr};
        }
        return {f.data + offset, here, &at->second};
    }

    void refuse_in_place(std::uint32_t file, const std::string& why) override {
        entry& f = open(file);
        const std::lock_guard lock(f.locking);
        f.given_up = true;
        f.refusal = why;
    }

    /// Where kernels of every device can read these bytes: nothing is copied. Pieces that follow one another are one range to a kernel.
    /// @throws configuration_error naming the file, when the bytes do not begin at a multiple of `alignment` or cannot be locked; io_error
    [[nodiscard]] const std::byte* pinned(std::uint32_t file, std::uint64_t offset, std::uint64_t bytes, std::uint64_t alignment = 16) {
        const auto refuse = [&](const std::string& why) {
            throw configuration_error("penstock: " + name(file) + ": " + std::to_string(bytes) + " bytes at offset " +
                                      std::to_string(offset) + " cannot be used in place: " + why);
        };
        if (offset % alignment != 0) {
            refuse("they do not begin at a multiple of " + std::to_string(alignment));
        }
        const std::byte* first = nullptr;
        for (std::uint64_t done = 0; done < bytes;) {
            const bytes_in_place part = in_place(file, offset + done, bytes - done);
            if (part.data == nullptr) {
                refuse(condition(file));
            }
            first = first == nullptr ? part.data : first;
            done += part.bytes;
        }
        return first;
    }

private:
    struct piece {
        std::uint64_t bytes = 0;
        basic_registration<Locking> lock;
    };
    using piece_map = std::map<std::uint64_t, piece>;  ///< by offset

    struct entry {
        std::filesystem::path path;
        std::mutex opening;
        int descriptor = -1;
        std::byte* data = nullptr;  ///< null where the file cannot be mapped, or is empty
        std::uint64_t bytes = 0;    ///< mapped
        struct timespec modified {};

        mutable std::mutex locking;  ///< what follows; also while pages are locked, which reads do not wait for
        std::uint64_t step = 0;
        int failures = 0;  ///< smallest pieces that could not be locked
        bool given_up = false;
        std::string how;
        std::string refusal;
        piece_map pieces;
    };

    static constexpr std::uint64_t smallest_step = std::uint64_t{16} << 20;
    static constexpr int enough_failures = 4;  ///< of the smallest pieces: then a limit is reached, and no further piece is tried

    entry& open(std::uint32_t file) {
        if (file >= files_.size()) {
            throw configuration_error("penstock: file number " + std::to_string(file) + " was asked for, but the source has " +
                                      std::to_string(files_.size()) + " files");
        }
        entry& f = files_[file];
        const std::lock_guard lock(f.opening);
        if (f.descriptor >= 0) {
            return f;
        }
        f.descriptor = ::open(f.path.c_str(), O_RDONLY | O_CLOEXEC);
        if (f.descriptor < 0) {
            throw io_error(f.path.string() + ": cannot be opened: " + std::strerror(errno));
        }
        const struct stat now = about(f);
        f.modified = now.st_mtim;
        if (now.st_size > 0) {
            f.bytes = static_cast<std::uint64_t>(now.st_size);
            void* p = ::mmap(nullptr, f.bytes, PROT_READ, MAP_SHARED, f.descriptor, 0);
            f.data = p == MAP_FAILED ? nullptr : static_cast<std::byte*>(p);
            if (p == MAP_FAILED) {
                const std::lock_guard pieces(f.locking);
                f.given_up = true;
                f.refusal = std::string("mmap: ") + std::strerror(errno);
            }
        }
        return f;
    }

    static struct stat about(const entry& f) {
        struct stat now {};
        if (::fstat(f.descriptor, &now) != 0) {
            throw io_error(f.path.string() + ": its size cannot be read: " + std::strerror(errno));
        }
        return now;
    }

    static bool changed(const entry& f) {
        const struct stat now = about(f);
        return static_cast<std::uint64_t>(now.st_size) != f.bytes || now.st_mtim.tv_sec != f.modified.tv_sec ||
               now.st_mtim.tv_nsec != f.modified.tv_nsec;
    }

    /// Pieces lie on a grid of their size, a power of two that only shrinks, so that a new one never overlaps an older one.
    typename piece_map::const_iterator piece_at(entry& f, std::uint64_t offset) {
        auto next = f.pieces.upper_bound(offset);
        if (next != f.pieces.begin()) {
            if (const auto before = std::prev(next); offset - before->first < before->second.bytes) {
                return before;
            }
        }
        for (;; f.step /= 4) {
            const std::uint64_t begin = round_down(offset, f.step);
            const std::uint64_t size = smaller(f.step, f.bytes - begin);
            if (f.failures >= enough_failures) {
                return f.pieces.emplace(begin, piece{size, {}}).first;
            }
            const std::span<const std::byte> memory(f.data + begin, size);
            if (detail::cached_part(memory.data(), size) < detail::nearly_all) {
                static_cast<void>(::madvise(f.data + begin, size, MADV_WILLNEED));
            }
            basic_registration<Locking> lock(memory, locking_);
            const bool last_try = f.step / 4 < smallest_step || !locking_.available();
            if (lock.pinned()) {
                f.how = lock.how();
            } else {
                f.refusal = lock.how();
                if (!last_try) {
                    continue;
                }
                ++f.failures;
            }
            return f.pieces.emplace(begin, piece{size, std::move(lock)}).first;
        }
    }

    Locking locking_;
    std::vector<entry> files_;
};

/// See basic_mapped_source.
using mapped_source = basic_mapped_source<detail::cuda_locking>;

}  // namespace penstock::inline v0_1

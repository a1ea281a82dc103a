#pragma once

#include <penstock/stream/file_source.hpp>
#include <penstock/stream/mapped_source.hpp>
#include <penstock/stream/transfer_plan.hpp>

#include <chrono>

namespace penstock::inline v0_1 {

/// What the bytes of a source are wanted for.
enum class source_use : std::uint8_t {
    once,      ///< one load
    repeated,  ///< several loads of the same bytes
    in_place   ///< kernels read them where they lie, too
};

/// What a source is chosen by, beside what is found.
struct source_options {
    source_use use = source_use::once;
    page_cache cache = page_cache::keep;  ///< kept or dropped after reading; what is mapped stays
};

/// Files from which every byte comes the fastest way that works. Read once: a file that is in the page cache by buffered reads, one that is
/// not by direct I/O. Read repeatedly, or in place by kernels: by a mapping whose pages are locked for the devices; but what is read
/// repeatedly and is not in the page cache yet is brought there by buffered reads first. Steps down when something fails: from the mapping
/// to reads, from direct to buffered ones; condition() names what was used and why.
template <class Locking>
class basic_chosen_source final : public byte_source {
public:
    explicit basic_chosen_source(std::vector<std::filesystem::path> paths, source_options options = {}, mapping_options mapping = {},
                                 Locking locking = {})
        : options_(options),
          mapped_(options.use == source_use::once ? std::vector<std::filesystem::path>() : paths, mapping, std::move(locking)),
          looked_(paths.size()),
          files_(std::move(paths), options.use == source_use::once ? file_access::as_found : file_access::buffered, options.cache) {}

    void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override { files_.read(file, offset, into); }
    void read_pieces(std::uint32_t file, std::span<const read_piece> pieces) override { files_.read_pieces(file, pieces); }
    [[nodiscard]] std::string name(std::uint32_t file) const override { return files_.name(file); }
    [[nodiscard]] std::uint32_t reads_at_a_time(std::uint32_t file) const noexcept override { return files_.reads_at_a_time(file); }
    [[nodiscard]] std::uint64_t chunk_bytes(std::uint32_t file) const noexcept override { return files_.chunk_bytes(file); }
    [[nodiscard]] std::uint64_t size(std::uint32_t file) override { return files_.size(file); }

    /// What is used and why: "pread, in the page cache (read once)", "registered mapping (registered, read-only; read repeatedly)", ...
    [[nodiscard]] std::string condition(std::uint32_t file) const override {
        if (options_.use == source_use::once) {
            const std::string how = files_.condition(file);
            return how.empty() ? how : how + " (read once)";
        }
        const std::string wish = options_.use == source_use::repeated ? "read repeatedly" : "used in place";
        const std::string mapping = mapped_.condition(file);
        if (mapping.starts_with("registered mapping")) {
            return mapping + " (" + wish + ")";
        }
        const std::string how = files_.condition(file);
        const std::string refusal =
            mapping.starts_with("pread (") ? mapping.substr(6) : std::string(" (") + wish + ": to be mapped when it is in the page cache)";
        return how.empty() ? how : how + (refusal.front() == ' ' ? refusal : " " + refusal);
    }

    [[nodiscard]] bytes_in_place in_place(std::uint32_t file, std::uint64_t offset, std::uint64_t bytes) override {
        if (options_.use == source_use::once || (options_.use == source_use::repeated && !warm(file))) {
            return {};
        }
        return mapped_.in_place(file, offset, bytes);
    }

    void refuse_in_place(std::uint32_t file, const std::string& why) override { mapped_.refuse_in_place(file, why); }

    /// See mapped_source::pinned(). @throws configuration_error where it cannot be; io_error
    [[nodiscard]] const std::byte* pinned(std::uint32_t file, std::uint64_t offset, std::uint64_t bytes, std::uint64_t alignment = 16) {
        if (options_.use == source_use::once) {
            throw configuration_error("penstock: " + name(file) + ": bytes of a source that is read once cannot be used in place");
        }
        return mapped_.pinned(file, offset, bytes, alignment);
    }

private:
    struct look {
        bool warm = false;
        std::chrono::steady_clock::time_point next{};
    };

    /// Whether the file is in the page cache: once it was, for good; until then it is looked at ten times a second at most.
    bool warm(std::uint32_t file) {
        const std::lock_guard lock(mutex_);
        look& l = looked_.at(file);
        if (const auto now = std::chrono::steady_clock::now(); !l.warm && now >= l.next) {
            l.warm = files_.in_page_cache(file);
            l.next = now + std::chrono::milliseconds(100);
        }
        return l.warm;
    }

    source_options options_;
    basic_mapped_source<Locking> mapped_;
    std::mutex mutex_;
    std::vector<look> looked_;
    file_source files_;
};

/// See basic_chosen_source.
using chosen_source = basic_chosen_source<detail::cuda_locking>;

namespace detail {

/// The transfers, those whose bytes the source has in locked memory turned into copies from there, piece by piece. Empty if there are none.
/// The source is asked once for transfers that follow one another in a file.
inline std::vector<transfer> taken_in_place(std::span<const transfer> transfers, byte_source& source) {
    std::vector<transfer> result;
    bool any = false;
    bytes_in_place there;
    std::uint32_t file = 0;
    std::uint64_t begin = 0, end = 0;  // what `there` holds for
    std::uint64_t run_end = 0;         // of the transfers that follow one another
    for (std::size_t i = 0; i < transfers.size(); ++i) {
        const transfer& t = transfers[i];
        if (t.memory != nullptr || t.bytes == 0) {
            if (any) {
                result.push_back(t);
            }
            continue;
        }
        for (std::uint64_t done = 0; done < t.bytes;) {
            const std::uint64_t at = t.offset + done;
            if (t.file != file || at < begin || at >= end) {
                if (t.file != file || at < begin || at >= run_end) {
                    run_end = t.offset + t.bytes;
                    for (std::size_t j = i + 1; j < transfers.size() && transfers[j].memory == nullptr && transfers[j].file == t.file &&
                                                transfers[j].offset == run_end;
                         ++j) {
                        run_end += transfers[j].bytes;
                    }
                }
                there = source.in_place(t.file, at, run_end - at);
                file = t.file;
                begin = at;
                end = there.bytes == 0 ? run_end : smaller(at + there.bytes, run_end);
            }
            if (!any && there.data != nullptr) {
                any = true;
                result.reserve(transfers.size());
                result.assign(transfers.begin(), transfers.begin() + static_cast<std::ptrdiff_t>(i));
                if (done > 0) {
                    result.push_back(t);
                    result.back().bytes = done;
                }
            }
            transfer part = t;
            part.offset = at;
            part.bytes = smaller(end - at, t.bytes - done);
            part.destination += done;
            if (there.data != nullptr) {
                part.memory = there.data + (at - begin);
                part.memory_is_pinned = true;
                part.lock = there.lock;
            }
            done += part.bytes;
            if (any) {
                result.push_back(part);
            }
        }
    }
    return result;
}

}  // namespace detail
}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/policy/memory.hpp>
#include <penstock/stream/byte_source.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include <sys/types.h>

/// Things that fail on purpose: a source of bytes, a driver that pins memory, and a kind of memory, each as a user of the library would write
/// one of their own; and what they hold.
namespace faults {

using namespace penstock;

inline constexpr std::size_t no_limit = ~std::size_t{0};

/// How memory that must be given back was had; what was locked is not freed, and what was allocated is not unlocked.
enum class had_by : bool { locking, allocating };

/// Which requests for memory are refused, and what is held. By several threads at once.
class ledger {
public:
    struct rule {
        std::size_t largest = no_limit;  ///< more than this in one request is refused
        int failing_call = -1;           ///< and this request, counted from 0
        int calls = 0;                   ///< so far
    };

    rule locking, allocating;
    std::size_t in_all = no_limit;  ///< more than this altogether is refused

    /// Whether the request is granted, and counts it.
    [[nodiscard]] bool grants(had_by way, std::size_t size) {
        const std::lock_guard lock(mutex_);
        rule& r = way == had_by::locking ? locking : allocating;
        return r.calls++ != r.failing_call && size <= r.largest && size <= in_all && bytes_ <= in_all - size;
    }

    void took(had_by way, void* p, std::size_t size) {
        const std::lock_guard lock(mutex_);
        twice_ += !held_.emplace(p, block{way, size}).second;
        bytes_ += size;
        peak_ = std::max(peak_, bytes_);
    }

    /// Whether that was held, and had in this way.
    bool gave_back(had_by way, void* p) noexcept {
        const std::lock_guard lock(mutex_);
        const auto found = held_.find(p);
        if (found == held_.end() || found->second.way != way) {
            ++wrong_releases_;
            return false;
        }
        bytes_ -= found->second.size;
        held_.erase(found);
        return true;
    }

    [[nodiscard]] std::size_t bytes() const {
        const std::lock_guard lock(mutex_);
        return bytes_;
    }
    [[nodiscard]] std::size_t peak() const {
        const std::lock_guard lock(mutex_);
        return peak_;
    }
    [[nodiscard]] std::size_t blocks(had_by way) const {
        const std::lock_guard lock(mutex_);
        return static_cast<std::size_t>(std::count_if(held_.begin(), held_.end(), [&](const auto& b) { return b.second.way == way; }));
    }

    /// Everything was given back, once, by the call that belongs to it, and nothing was locked twice.
    [[nodiscard]] bool clean() const {
        const std::lock_guard lock(mutex_);
        return held_.empty() && bytes_ == 0 && wrong_releases_ == 0 && twice_ == 0;
    }

private:
    struct block {
        had_by way;
        std::size_t size;
    };

    mutable std::mutex mutex_;
    std::map<void*, block> held_;
    std::size_t bytes_ = 0;
    std::size_t peak_ = 0;
    int wrong_releases_ = 0;
    int twice_ = 0;
};

/// The driver as a basic_arena asks it for pinned memory.
struct pinning {
    ledger* books = nullptr;

    cudaError_t register_memory(void* p, std::size_t size) const {
        if (!books->grants(had_by::locking, size)) {
            return cudaErrorMemoryAllocation;
        }
        books->took(had_by::locking, p, size);
        return cudaSuccess;
    }
    void unregister_memory(void* p) const noexcept { books->gave_back(had_by::locking, p); }
    cudaError_t allocate(void** p, std::size_t size) const {
        if (!books->grants(had_by::allocating, size)) {
            return cudaErrorMemoryAllocation;
        }
        *p = memory::pageable::allocate(size);
        books->took(had_by::allocating, *p, size);
        return cudaSuccess;
    }
    void deallocate(void* p) const noexcept {
        if (books->gave_back(had_by::allocating, p)) {
            memory::pageable::deallocate(p, 0);
        }
    }
};

/// The driver as a basic_registration asks it to lock memory that is there. Without books it locks nothing.
struct locking {
    ledger* books = nullptr;
    bool knows_read_only = true;
    bool has_device = true;

    [[nodiscard]] bool available() const noexcept { return has_device; }
    cudaError_t lock(void* p, std::size_t size, unsigned flags) const {
        if (books == nullptr || ((flags & cudaHostRegisterReadOnly) != 0 && !knows_read_only)) {
            return cudaErrorNotSupported;
        }
        if (!books->grants(had_by::locking, size)) {
            return cudaErrorMemoryAllocation;
        }
        books->took(had_by::locking, p, size);
        return cudaSuccess;
    }
    void unlock(void* p) const noexcept { books->gave_back(had_by::locking, p); }
};

/// A kind of memory of the user's own, that of `Base` under the rules of `books`. @pre books is set while any of it is held
template <class Base>
struct rationed : Base {
    static inline ledger* books = nullptr;

    [[nodiscard]] static void* allocate(std::size_t size) {
        if (size == 0) {
            return nullptr;
        }
        if (!books->grants(had_by::allocating, size)) {
            throw out_of_memory("a test's memory ran out: " + std::to_string(size) + " bytes were asked for");
        }
        void* p = Base::allocate(size);
        books->took(had_by::allocating, p, size);
        return p;
    }
    static void deallocate(void* p, std::size_t size) noexcept {
        if (p != nullptr && books->gave_back(had_by::allocating, p)) {
            Base::deallocate(p, size);
        }
    }
};

/// A pread over another one that gives at most `most` bytes a call and is interrupted every third time.
struct hesitant {
    std::function<ssize_t(int, void*, std::size_t, off_t)> read_at;
    std::size_t most = 7;
    int calls = 0;

    ssize_t operator()(int descriptor, void* to, std::size_t wanted, off_t offset) {
        if (++calls % 3 == 0) {
            errno = EINTR;
            return -1;
        }
        return read_at(descriptor, to, std::min(wanted, most), offset);
    }
};

/// The bytes of another source, late, in small pieces, or not at all.
class faulty_source final : public byte_source {
public:
    explicit faulty_source(byte_source& from) : from_(from) {}

    std::size_t most = no_limit;                 ///< bytes asked of the other source at once
    std::chrono::microseconds delay{0};          ///< of each read
    std::atomic<std::int64_t> failing_read{-1};  ///< this read ends in an error after half of its bytes, counted from 0
    std::atomic<std::int64_t> reads{0};          ///< so far
    std::atomic<std::uint64_t> bytes{0};         ///< so far

    void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override {
        std::this_thread::sleep_for(delay);
        const bool fails = reads++ == failing_read;
        const std::size_t wanted = fails ? into.size() / 2 : into.size();
        for (std::size_t done = 0; done < wanted;) {
            const std::size_t part = std::min(most, wanted - done);
            from_.read(file, offset + done, into.subspan(done, part));
            done += part;
            bytes += part;
        }
        if (fails) {
            throw io_error(name(file) + ": " + std::to_string(into.size()) + " bytes were wanted at offset " + std::to_string(offset) +
                           ", " + std::to_string(wanted) + " were got: a fault was injected");
        }
    }

    [[nodiscard]] std::string name(std::uint32_t file) const override { return from_.name(file); }
    [[nodiscard]] std::string condition(std::uint32_t file) const override { return from_.condition(file); }
    [[nodiscard]] std::uint64_t size(std::uint32_t file) override { return from_.size(file); }

private:
    byte_source& from_;
};

/// Bytes of this process in memory that no file stands behind.
inline std::uint64_t anonymous_memory() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with("RssAnon:")) {
            return std::stoull(line.substr(8)) << 10;
        }
    }
    throw io_error("/proc/self/status does not say how much anonymous memory there is");
}

}  // namespace faults

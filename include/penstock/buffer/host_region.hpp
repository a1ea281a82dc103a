#pragma once

#include <penstock/buffer/host_cores.hpp>
#include <penstock/buffer/host_memory.hpp>
#include <penstock/cuda/device.hpp>
#include <penstock/error.hpp>
#include <penstock/units.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/// How an arena gets its memory, step by step.

namespace penstock::inline v0_1 {

/// How memory of an arena is to be had.
struct arena_options {
    int device = -1;         ///< pinned, near this GPU; negative: pageable
    bool huge_pages = true;  ///< ask for transparent huge pages
    unsigned threads = 0;    ///< that touch the pages first; 0: one for each usable core, at most 16
};

namespace detail {

/// The calls that pin memory; a test puts its own in their place.
struct cuda_pinning {
    static cudaError_t register_memory(void* p, std::size_t size) {
        return clean(cudaHostRegister(p, size, cudaHostRegisterPortable | cudaHostRegisterMapped));
    }
    static void unregister_memory(void* p) noexcept {
        if (cuda_usable()) {
            clean(cudaHostUnregister(p));
        }
    }
    static cudaError_t allocate(void** p, std::size_t size) {
        return clean(cudaHostAlloc(p, size, cudaHostAllocPortable | cudaHostAllocMapped));
    }
    static void deallocate(void* p) noexcept {
        if (cuda_usable()) {
            clean(cudaFreeHost(p));
        }
    }

private:
    static cudaError_t clean(cudaError_t code) noexcept {
        if (code != cudaSuccess && cuda_usable()) {
            static_cast<void>(cudaGetLastError());
        }
        return code;
    }
};

inline constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

/// Prefers pages of `node` for memory that has not been touched; no more than a wish.
inline void prefer_node(void* p, std::size_t size, int node) noexcept {
    constexpr int preferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h, which needs a package of its own
    if (node >= 0 && node < 64) {
        const unsigned long mask = 1ul << node;
        static_cast<void>(::syscall(SYS_mbind, p, size, preferred, &mask, 65ul, 0u));
    }
}

/// Writes one byte of each page, so that the system finds the pages now and by all threads at once.
inline void touch_pages(std::byte* p, std::size_t size, unsigned threads) {
    constexpr std::size_t page = 4096;
    constexpr std::size_t worth_a_thread = std::size_t{32} << 20;
    const std::size_t most = threads > 0 ? threads : std::min(usable_cores(), 16u);
    const std::size_t count = std::min<std::size_t>(most, size / worth_a_thread + 1);
    const std::size_t share = round_up(ceil_div(size, count), huge_page_bytes);
    const auto touch = [&](std::size_t i) {
        for (std::size_t at = i * share; at < std::min(size, (i + 1) * share); at += page) {
            *const_cast<volatile std::byte*>(p + at) = std::byte{0};
        }
    };
    std::vector<std::jthread> helpers;
    for (std::size_t i = 1; i < count; ++i) {
        try {
            helpers.emplace_back(touch, i);
        } catch (const std::system_error&) {  // no more threads to be had: do its share here
            touch(i);
        }
    }
    touch(0);
}

/// Host memory that is pinned if it can be. The steps, each taken when the one before fails: a mapping with huge pages, touched by several
/// threads and registered as a whole; registered in pieces of 1 GiB, 256 MiB, 64 MiB; memory of cudaHostAlloc; pageable memory. Each block
/// is released once, by the call that matches how it was made. Move-only.
template <class Pinning>
class host_region {
public:
    host_region() = default;

    /// @throws out_of_memory when not even pageable memory is left
    host_region(std::size_t size, const arena_options& options, Pinning pinning) : pinning_(std::move(pinning)), size_(size) {
        if (size == 0) {
            how_ = "empty";
            return;
        }
        try {
            if (const std::uint64_t left = options.device < 0 ? size : available_host_memory(); size > left) {
                throw out_of_memory("penstock: page-locked host memory ran out: an arena of " + to_string(bytes{size}) +
                                    " was asked for, and this process can have " + to_string(bytes{left}) +
                                    " (free memory of the machine, or what a container's limit leaves)");
            }
            map(options);
            if (options.device < 0) {
                how_ = pages_ + ", pageable";
            } else if (!register_pieces()) {
                allocate_pinned();
            }
        } catch (...) {
            release();
            throw;
        }
    }

    host_region(host_region&& other) noexcept { swap(other); }
    host_region& operator=(host_region&& other) noexcept {
        host_region taken(std::move(other));
        swap(taken);
        return *this;
    }
    ~host_region() { release(); }

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] bool pinned() const noexcept { return from_runtime_ || !pieces_.empty(); }
    [[nodiscard]] const std::string& how() const noexcept { return how_; }

private:
    /// The mapping starts on a huge page and ends on the page of its last byte: the request is not rounded up any further.
    void map(const arena_options& options) {
        const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
        const std::size_t wanted = round_up(size_, page);
        const std::size_t slack = wanted >= huge_page_bytes ? huge_page_bytes : 0;
        void* p = ::mmap(nullptr, wanted + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) {
            throw out_of_memory("penstock: host memory ran out: an arena of " + to_string(bytes{size_}) +
                                " was asked for: " + std::strerror(errno));
        }
        auto* begin = static_cast<std::byte*>(p);
        std::byte* aligned =
            begin + (slack > 0 ? (huge_page_bytes - reinterpret_cast<std::uintptr_t>(begin) % huge_page_bytes) % huge_page_bytes : 0);
        if (aligned > begin) {
            ::munmap(begin, static_cast<std::size_t>(aligned - begin));
        }
        if (const std::size_t rest = wanted + slack - static_cast<std::size_t>(aligned - begin) - wanted; rest > 0) {
            ::munmap(aligned + wanted, rest);
        }
        data_ = aligned;
        mapped_ = wanted;
        const bool huge = options.huge_pages && slack > 0 && ::madvise(data_, mapped_, MADV_HUGEPAGE) == 0;
        pages_ = huge ? "huge pages" : "pages of 4 KiB";
        if (options.device >= 0) {
            prefer_node(data_, mapped_, numa_node(options.device));
            touch_pages(data_, mapped_, options.threads);
        }
    }

    bool register_pieces() {
        for (const std::size_t piece : {mapped_, std::size_t{1} << 30, std::size_t{256} << 20, std::size_t{64} << 20}) {
            if (piece > mapped_ || (piece == mapped_ && !refusal_.empty())) {
                continue;
            }
            for (std::size_t at = 0; at < mapped_; at += piece) {
                const cudaError_t code = pinning_.register_memory(data_ + at, std::min(piece, mapped_ - at));
                if (code != cudaSuccess) {
                    refusal_ = std::string("cudaHostRegister of ") + to_string(bytes{std::min(piece, mapped_ - at)}) + ": " +
                               cudaGetErrorString(code);
                    unregister_pieces();
                    break;
                }
                pieces_.push_back(data_ + at);
            }
            if (!pieces_.empty()) {
                how_ = pages_ + ", registered" + (piece == mapped_ ? std::string() : " in pieces of " + to_string(bytes{piece}));
                return true;
            }
        }
        return false;
    }

    /// Keeps the pageable mapping if the runtime gives no memory either.
    void allocate_pinned() {
        void* p = nullptr;
        const cudaError_t code = pinning_.allocate(&p, size_);
        if (code != cudaSuccess) {
            how_ = pages_ + ", pageable (" + refusal_ + "; cudaHostAlloc: " + cudaGetErrorString(code) + ")";
            return;
        }
        ::munmap(data_, mapped_);
        mapped_ = 0;
        data_ = static_cast<std::byte*>(p);
        from_runtime_ = true;
        how_ = "cudaHostAlloc (" + refusal_ + ")";
    }

    void unregister_pieces() noexcept {
        for (std::byte* piece : pieces_) {
            pinning_.unregister_memory(piece);
        }
        pieces_.clear();
    }

    void release() noexcept {
        unregister_pieces();
        if (from_runtime_) {
            pinning_.deallocate(data_);
        } else if (mapped_ > 0) {
            ::munmap(data_, mapped_);
        }
        data_ = nullptr;
        size_ = mapped_ = 0;
        from_runtime_ = false;
    }

    void swap(host_region& other) noexcept {
        std::swap(pinning_, other.pinning_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(mapped_, other.mapped_);
        std::swap(from_runtime_, other.from_runtime_);
        std::swap(pieces_, other.pieces_);
        std::swap(pages_, other.pages_);
        std::swap(refusal_, other.refusal_);
        std::swap(how_, other.how_);
    }

    Pinning pinning_{};
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
    std::size_t mapped_ = 0;  ///< bytes of our own mapping; 0 where the memory is the runtime's
    bool from_runtime_ = false;
    std::vector<std::byte*> pieces_;  ///< registered
    std::string pages_;
    std::string refusal_;
    std::string how_ = "empty";
};

}  // namespace detail
}  // namespace penstock::inline v0_1

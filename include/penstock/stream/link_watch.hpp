#pragma once

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/device.hpp>
#include <penstock/policy/governor.hpp>

#include <cuda/atomic>

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>

namespace penstock::inline v0_1 {

/// A word in host memory that kernels reach, in which one order of execution (the kernels of one stream) says how many bytes it still has to
/// read from host memory: a plain store, since PCIe has no atomics that one can rely on. Trivially copyable, for kernels.
struct miss_word {
    std::uint64_t* word = nullptr;

    /// By one thread of a kernel before it begins to read host memory, with what it will read; again with less as it goes on, if it likes;
    /// with 0 when all of it is there. Seen by the host a microsecond later.
    PENSTOCK_HD void post(std::uint64_t bytes) const noexcept {
        cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system>(*word).store(bytes, cuda::memory_order_relaxed);
    }
};

/// What a governor watches beside the copies of its weight stream: misses that kernels post, and bytes that come from the device. The engine
/// makes one for each GPU and hands it to the weight streams of that GPU (stream_options::watch); it outlives them, and the kernels that post.
class link_watch {
public:
    /// @param words for so many orders of execution. Without a GPU, ordinary memory. @throws out_of_memory
    explicit link_watch(std::uint32_t words = 16) : count_(words) {
        if (device_count() > 0) {
            words_ = pinned_.emplace(words * stride).data();
        } else {
            words_ = pageable_.emplace(words * stride).data();
        }
        for (std::uint32_t i = 0; i < words; ++i) {
            words_[i * stride] = 0;
        }
    }

    link_watch(const link_watch&) = delete;
    link_watch& operator=(const link_watch&) = delete;

    /// For kernels: host memory that cudaHostAlloc gave is at the same address there. @pre n below the number of words
    [[nodiscard]] miss_word misses(std::uint32_t n = 0) noexcept { return {words_ + n * stride}; }

    /// Bytes begin, or have ended, their way from the device to the host. Any thread.
    void from_device_begins(std::uint64_t bytes) noexcept { from_device_.fetch_add(bytes, std::memory_order_relaxed); }
    void from_device_ended(std::uint64_t bytes) noexcept { from_device_.fetch_sub(bytes, std::memory_order_relaxed); }

    [[nodiscard]] link_sight sight() const noexcept {
        link_sight s;
        for (std::uint32_t i = 0; i < count_; ++i) {
            s.missing += cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system>(words_[i * stride]).load(cuda::memory_order_relaxed);
        }
        s.device_to_host = from_device_.load(std::memory_order_relaxed);
        return s;
    }

private:
    static constexpr std::uint32_t stride = 16;  ///< words between those of two writers: a pair of cache lines

    std::optional<buffer<std::uint64_t, memory::pinned>> pinned_;
    std::optional<buffer<std::uint64_t, memory::pageable>> pageable_;
    std::uint64_t* words_ = nullptr;
    std::uint32_t count_;
    std::atomic<std::uint64_t> from_device_{0};
};

}  // namespace penstock::inline v0_1

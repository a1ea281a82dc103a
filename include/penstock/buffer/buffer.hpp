#pragma once

#include <penstock/buffer/copies_in_flight.hpp>
#include <penstock/policy/memory.hpp>

#include <cstddef>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace penstock::inline v0_1 {

/// An array of `T` in one kind of memory: exactly the size asked for, at a multiple of 256 bytes, not initialised. Owning and move-only, or
/// over memory of the caller's. No elements are legal. It waits for the copies it knows of before it dies.
/// @tparam Memory where it lies; the host can look inside only where that is host-accessible.
template <class T, class Memory = memory::pinned>
class buffer {
    static_assert(memory_policy<Memory>, "penstock: the second argument of buffer is a memory kind");
    static_assert(std::is_trivially_copyable_v<T>,
                  "penstock: buffer holds trivially copyable elements only, since copies move their bytes");

public:
    using value_type = T;
    using memory = Memory;

    /// Bytes of memory that `count` elements take.
    [[nodiscard]] static constexpr penstock::bytes bytes_needed(std::size_t count) noexcept { return {count * sizeof(T)}; }

    buffer() = default;

    /// Device memory comes from the current device. @throws out_of_memory, cuda_error
    explicit buffer(std::size_t count) requires allocating_memory<Memory> : size_(count), owned_(true) {
        if (count > std::numeric_limits<std::size_t>::max() / sizeof(T)) {
            throw out_of_memory("penstock: a buffer of " + std::to_string(count) + " elements of " + std::to_string(sizeof(T)) +
                                " bytes does not exist");
        }
        data_ = static_cast<T*>(Memory::allocate(count * sizeof(T)));
        if constexpr (!Memory::host_accessible) {
            check(cudaGetDevice(&device_), "cudaGetDevice");
        }
    }

    /// Over memory that someone else owns and that outlives the buffer.
    [[nodiscard]] static buffer over(std::span<T> memory) noexcept {
        buffer b;
        b.data_ = memory.data();
        b.size_ = memory.size();
        return b;
    }

    buffer(buffer&& other) noexcept { swap(other); }
    buffer& operator=(buffer&& other) noexcept {
        buffer taken(std::move(other));
        swap(taken);
        return *this;
    }

    ~buffer() {
        copies_.wait_quietly();
        if constexpr (allocating_memory<Memory>) {
            if (owned_ && data_ != nullptr) {
                const detail::quiet_device_guard on(device_);
                Memory::deallocate(data_, size_ * sizeof(T));
            }
        }
    }

    [[nodiscard]] T* data() noexcept { return data_; }
    [[nodiscard]] const T* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
    [[nodiscard]] bool empty() const noexcept { return size_ == 0; }

    [[nodiscard]] std::span<T> span() noexcept requires(Memory::host_accessible) { return {data_, size_}; }
    [[nodiscard]] std::span<const T> span() const noexcept requires(Memory::host_accessible) { return {data_, size_}; }
    [[nodiscard]] T& operator[](std::size_t i) noexcept requires(Memory::host_accessible) { return data_[i]; }
    [[nodiscard]] const T& operator[](std::size_t i) const noexcept requires(Memory::host_accessible) { return data_[i]; }
    [[nodiscard]] T* begin() noexcept requires(Memory::host_accessible) { return data_; }
    [[nodiscard]] T* end() noexcept requires(Memory::host_accessible) { return data_ + size_; }
    [[nodiscard]] const T* begin() const noexcept requires(Memory::host_accessible) { return data_; }
    [[nodiscard]] const T* end() const noexcept requires(Memory::host_accessible) { return data_ + size_; }

    /// Enqueues a copy of all elements to `destination`, in host or device memory, on `stream`. Asynchronous where this memory is pinned or
    /// the device's. The elements must not change before it is done. @throws cuda_error
    void copy_async(T* destination, cudaStream_t stream) { copy_async(destination, 0, size_, stream); }

    /// As above, for elements [first, first + count). @pre first + count <= size()
    void copy_async(T* destination, std::size_t first, std::size_t count, cudaStream_t stream) {
        move(destination, data_ + first, count, stream);
    }

    /// Enqueues a copy of `source`, in host or device memory, into the first elements, on `stream`. @pre source.size() <= size()
    /// @throws cuda_error
    void copy_from_async(std::span<const T> source, cudaStream_t stream) { move(data_, source.data(), source.size(), stream); }

    /// Returns when the copies enqueued through this buffer are done. @throws cuda_error
    void wait() { copies_.wait(); }

private:
    void move(T* to, const T* from, std::size_t count, cudaStream_t stream) {
        if (count == 0) {
            return;
        }
        check(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDefault, stream), "cudaMemcpyAsync");
        copies_.remember(stream);
    }

    void swap(buffer& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(device_, other.device_);
        std::swap(owned_, other.owned_);
        std::swap(copies_, other.copies_);
    }

    T* data_ = nullptr;
    std::size_t size_ = 0;
    int device_ = -1;  ///< of memory that lies on a device; the host's is the same for all of them
    bool owned_ = false;
    copies_in_flight copies_;
};

}  // namespace penstock::inline v0_1

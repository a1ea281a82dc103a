#pragma once

#include <penstock/cuda/device.hpp>
#include <penstock/policy/axis.hpp>
#include <penstock/units.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

/// The memory axis: how bytes are allocated and who can reach them.

namespace penstock::inline v0_1 {

/// Properties of a kind of memory, as members: `host_accessible` (the host may read and write it), `device_accessible` (kernels may read it
/// where it lies), `page_aligned` (every allocation starts on a page, as direct I/O wants it).
template <class M>
concept memory_policy = policy_for<M, axis::memory> && requires {
    { M::host_accessible } -> std::convertible_to<bool>;
    { M::device_accessible } -> std::convertible_to<bool>;
    { M::page_aligned } -> std::convertible_to<bool>;
};

/// A kind of memory that can be asked for: `allocate(bytes)` gives exactly that many, at a multiple of 256 (0 bytes: nullptr) or throws
/// out_of_memory or cuda_error; `deallocate` takes them back and never throws.
template <class M>
concept allocating_memory = memory_policy<M> && requires(void* p, std::size_t n) {
    { M::allocate(n) } -> std::same_as<void*>;
    { M::deallocate(p, n) }
    noexcept;
};

namespace memory {

inline constexpr std::size_t page_bytes = 4096;

/// Ordinary host memory, from a page boundary. Kernels cannot read it and copies from it are staged by the driver.
struct pageable {
    using policy_axis = axis::memory;
    static constexpr bool host_accessible = true;
    static constexpr bool device_accessible = false;
    static constexpr bool page_aligned = true;

    [[nodiscard]] static void* allocate(std::size_t size) {
        if (size == 0) {
            return nullptr;
        }
        void* p = ::operator new (size, std::align_val_t{page_bytes}, std::nothrow);
        if (p == nullptr) {
            throw out_of_memory("penstock: host memory ran out: " + to_string(bytes{size}) + " were asked for");
        }
        return p;
    }

    static void deallocate(void* p, std::size_t) noexcept { ::operator delete (p, std::align_val_t{page_bytes}); }
};

/// Whether the processor writes through its write-combining buffers instead of the caches: reading such memory on the host is slow.
enum class write_combining : bool { no, yes };

/// Page-locked host memory of exactly the size asked for, portable (pinned for every device) and mapped (kernels read it in place).
template <write_combining Combine>
struct basic_pinned {
    using policy_axis = axis::memory;
    static constexpr bool host_accessible = true;
    static constexpr bool device_accessible = true;
    static constexpr bool page_aligned = false;  // true of today's drivers, promised by none

    [[nodiscard]] static void* allocate(std::size_t size) {
        if (size == 0) {
            return nullptr;
        }
        constexpr unsigned flags =
            cudaHostAllocPortable | cudaHostAllocMapped | (Combine == write_combining::yes ? cudaHostAllocWriteCombined : 0u);
        void* p = nullptr;
        const cudaError_t code = cudaHostAlloc(&p, size, flags);
        if (code == cudaErrorMemoryAllocation) {
            static_cast<void>(cudaGetLastError());
            throw out_of_memory("penstock: page-locked host memory (not GPU memory) ran out: " + to_string(bytes{size}) +
                                " were asked for and none were got; see `ulimit -l` and the limits of the container");
        }
        check(code, "cudaHostAlloc");
        return p;
    }

    static void deallocate(void* p, std::size_t) noexcept {
        if (p != nullptr && penstock::detail::cuda_usable() && cudaFreeHost(p) != cudaSuccess && penstock::detail::cuda_usable()) {
            static_cast<void>(cudaGetLastError());
        }
    }
};

using pinned = basic_pinned<write_combining::no>;
using write_combined = basic_pinned<write_combining::yes>;

/// Host memory that exists already (a buffer of the engine's, a file mapping) and is page-locked where it lies. It allocates nothing:
/// objects over it take a span. `penstock::registration` owns such a lock and steps down where the driver refuses.
struct registered {
    using policy_axis = axis::memory;
    static constexpr bool host_accessible = true;
    static constexpr bool device_accessible = true;
    static constexpr bool page_aligned = false;
};

/// Memory of the GPU that is current at the allocation.
struct device {
    using policy_axis = axis::memory;
    static constexpr bool host_accessible = false;
    static constexpr bool device_accessible = true;
    static constexpr bool page_aligned = false;

    [[nodiscard]] static void* allocate(std::size_t size) {
        if (size == 0) {
            return nullptr;
        }
        void* p = nullptr;
        const cudaError_t code = cudaMalloc(&p, size);
        if (code == cudaErrorMemoryAllocation) {
            static_cast<void>(cudaGetLastError());
            std::size_t free = 0;
            std::size_t total = 0;
            static_cast<void>(cudaMemGetInfo(&free, &total));
            throw out_of_memory("penstock: GPU memory ran out: " + to_string(bytes{size}) + " were asked for, " + to_string(bytes{free}) +
                                " of " + to_string(bytes{total}) + " are free");
        }
        check(code, "cudaMalloc");
        return p;
    }

    static void deallocate(void* p, std::size_t) noexcept {
        if (p != nullptr && penstock::detail::cuda_usable() && cudaFree(p) != cudaSuccess && penstock::detail::cuda_usable()) {
            static_cast<void>(cudaGetLastError());
        }
    }
};

/// Memory of another GPU that kernels of this one read over NVLink or PCIe. It allocates nothing: that is the other GPU's affair.
struct peer {
    using policy_axis = axis::memory;
    static constexpr bool host_accessible = false;
    static constexpr bool device_accessible = true;
    static constexpr bool page_aligned = false;
};

/// Bytes that lie partly here and partly there, nearest tier first: `tiered<device, pinned>`.
template <class... Tiers>
struct tiered {
    static_assert(sizeof...(Tiers) >= 2, "penstock: memory::tiered needs two tiers or more");
    static_assert((memory_policy<Tiers> && ...), "penstock: memory::tiered takes memory kinds only");
    using policy_axis = axis::memory;
    static constexpr bool host_accessible = (Tiers::host_accessible && ...);
    static constexpr bool device_accessible = (Tiers::device_accessible && ...);
    static constexpr bool page_aligned = (Tiers::page_aligned && ...);
};

}  // namespace memory
}  // namespace penstock::inline v0_1

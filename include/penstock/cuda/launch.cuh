#pragma once

#ifndef __CUDACC__
#error "penstock/cuda/launch.cuh launches kernels: compile this file with nvcc"
#endif

#include <penstock/cuda/device.hpp>

#include <cstddef>
#include <tuple>
#include <utility>

namespace penstock::inline v0_1 {
namespace detail {

/// Dynamic shared memory above this needs an opt-in wherever the kernel has no more than 42 KiB of static shared memory.
inline constexpr std::size_t shared_bytes_without_question = 6 << 10;

/// Lets `kernel` have `shared_bytes` of dynamic shared memory. The limit is raised to all that the device grants, so that threads which
/// launch one kernel with different sizes do not lower it for each other.
inline void allow_shared_bytes(const void* kernel, std::size_t shared_bytes) {
    cudaFuncAttributes now{};
    check(cudaFuncGetAttributes(&now, kernel), "cudaFuncGetAttributes");
    if (static_cast<std::size_t>(now.maxDynamicSharedSizeBytes) >= shared_bytes) {
        return;
    }
    int device = 0;
    int most = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
    const int granted = most - static_cast<int>(now.sharedSizeBytes);
    if (static_cast<int>(shared_bytes) > granted) {
        throw configuration_error("penstock: a kernel was launched with " + std::to_string(shared_bytes) +
                                  " bytes of dynamic shared memory, but the device grants it " + std::to_string(granted));
    }
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, granted), "cudaFuncSetAttribute");
}

/// Of the current device. @throws cuda_error
inline int multiprocessors() {
    int device = 0;
    int count = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return count;
}

}  // namespace detail

/// Enqueues `kernel` on `stream` with `shared_bytes` of dynamic shared memory, for which it opts in where that is more than a kernel gets
/// unasked. An empty grid launches nothing. Asynchronous; capturable. @throws cuda_error for a launch that the runtime refuses
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream, Args&&... args) {
    static_assert(sizeof...(Params) == sizeof...(Args), "penstock: launch takes as many arguments as the kernel has parameters");
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
        return;
    }
    if (shared_bytes > detail::shared_bytes_without_question) {
        detail::allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes);
    }
    std::tuple<Params...> values{static_cast<Params>(std::forward<Args>(args))...};
    std::apply(
        [&](Params&... value) {
            void* pointers[sizeof...(Params) + 1] = {const_cast<void*>(static_cast<const volatile void*>(&value))..., nullptr};
            check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers, shared_bytes, stream), "cudaLaunchKernel");
        },
        values);
}

}  // namespace penstock::inline v0_1

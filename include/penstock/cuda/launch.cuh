#pragma once

#ifndef __CUDACC__
#error "penstock/cuda/launch.cuh launches kernels: compile this file with nvcc"
#endif

#include <penstock/cuda/device.hpp>

#include <nv/target>

#include <cstddef>
#include <span>
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

/// Whether `kernel` was compiled for compute capability 9 or later, so that it has the instructions of clusters and of early launches. Loads
/// the kernel. @throws cuda_error
inline bool compiled_for_sm_90(const void* kernel) {
    cudaFuncAttributes about{};
    check(cudaFuncGetAttributes(&about, kernel), "cudaFuncGetAttributes");
    return about.ptxVersion >= 90;
}

/// Brings kernels to the current device now and not at their first launch, which could find the device at work or a stream captured.
/// @throws cuda_error
template <class... Kernels>
void load_kernels(Kernels*... kernels) {
    cudaFuncAttributes about{};
    (check(cudaFuncGetAttributes(&about, reinterpret_cast<const void*>(kernels)), "cudaFuncGetAttributes"), ...);
}

/// As `launch`, with attributes.
template <class... Params, class... Args>
void launch_with(std::span<cudaLaunchAttribute> attributes, void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
                 cudaStream_t stream, Args&&... args) {
    static_assert(sizeof...(Params) == sizeof...(Args), "penstock: launch takes as many arguments as the kernel has parameters");
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
        return;
    }
    if (shared_bytes > shared_bytes_without_question) {
        allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes);
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes.data();
    config.numAttrs = static_cast<unsigned>(attributes.size());
    std::tuple<Params...> values{static_cast<Params>(std::forward<Args>(args))...};
    std::apply(
        [&](Params&... value) {
            void* pointers[sizeof...(Params) + 1] = {const_cast<void*>(static_cast<const volatile void*>(&value))..., nullptr};
            check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers), "cudaLaunchKernelExC");
        },
        values);
}

/// As `launch`, for a kernel whose blocks all call wait_for_launch_before: they may start when those of the launch before have all called
/// let_next_launch_begin, or ended, so that a kernel's start is not waited for.
template <class... Params, class... Args>
void launch_early(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream, Args&&... args) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
        return;  // as launch_with does, before the device is asked for anything
    }
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const std::size_t attributes = compiled_for_sm_90(reinterpret_cast<const void*>(kernel)) ? 1 : 0;  // else it would not wait
    launch_with({&early, attributes}, kernel, grid, block, shared_bytes, stream, std::forward<Args>(args)...);
}

/// Returns when what was enqueued before this launch has ended, and its writes are seen.
__device__ inline void wait_for_launch_before() { NV_IF_TARGET(NV_PROVIDES_SM_90, (asm volatile("griddepcontrol.wait;" ::: "memory");)) }

/// Called after wait_for_launch_before: so the launch after the next finds ended what was enqueued before this one.
__device__ inline void let_next_launch_begin() {
    NV_IF_TARGET(NV_PROVIDES_SM_90, (asm volatile("griddepcontrol.launch_dependents;" ::: "memory");))
}

}  // namespace detail

/// Enqueues `kernel` on `stream` with `shared_bytes` of dynamic shared memory, for which it opts in where that is more than a kernel gets
/// unasked. An empty grid launches nothing. Asynchronous; capturable. @throws cuda_error for a launch that the runtime refuses
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream, Args&&... args) {
    detail::launch_with({}, kernel, grid, block, shared_bytes, stream, std::forward<Args>(args)...);
}

}  // namespace penstock::inline v0_1

#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/cluster.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>

#include <nv/target>

#include <cstdint>

/// Blocks that run at the same time and read one another's shared memory, from sm_90 on. For kernels whose grid is one cluster.

namespace penstock::inline v0_1::detail {

/// Blocks that a cluster may have on every device that knows clusters.
inline constexpr std::uint32_t portable_cluster = 8;

/// Whether `kernel` was compiled for an architecture that knows clusters; otherwise it can be launched as one block only.
inline bool knows_clusters(const void* kernel) {
    cudaFuncAttributes about{};
    check(cudaFuncGetAttributes(&about, kernel), "cudaFuncGetAttributes");
    return about.ptxVersion >= 90;
}

/// What every thread of the grid's blocks wrote to shared memory before is seen by those that return from `cluster_wait` after. All
/// threads call both, in turn.
__device__ inline void cluster_arrive() {
    NV_IF_TARGET(NV_PROVIDES_SM_90, (asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");))
}

__device__ inline void cluster_wait() {
    NV_IF_TARGET(NV_PROVIDES_SM_90, (asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");))
}

/// What lies at `mine`, an address of this block's shared memory, in block `block` of the cluster.
__device__ inline std::uint32_t load_of_block(const std::uint32_t* mine, std::uint32_t block) {
    std::uint32_t value = 0;
    NV_IF_ELSE_TARGET(NV_PROVIDES_SM_90,
                      (const auto here = static_cast<std::uint32_t>(__cvta_generic_to_shared(mine)); std::uint32_t there = 0;
                       asm("mapa.shared::cluster.u32 %0, %1, %2;"
                           : "=r"(there)
                           : "r"(here), "r"(block));
                       asm volatile("ld.shared::cluster.u32 %0, [%1];"
                                    : "=r"(value)
                                    : "r"(there)
                                    : "memory");),
                      (value = *mine; static_cast<void>(block);))
    return value;
}

/// As `launch`, with a grid of `blocks` blocks that form one cluster.
template <class... Params, class... Args>
void launch_cluster(void (*kernel)(Params...), std::uint32_t blocks, dim3 block, std::size_t shared_bytes, cudaStream_t stream,
                    Args&&... args) {
    if (blocks == 1) {
        launch(kernel, dim3(1), block, shared_bytes, stream, std::forward<Args>(args)...);
        return;
    }
    if (shared_bytes > shared_bytes_without_question) {
        allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes);
    }
    cudaLaunchAttribute together{};
    together.id = cudaLaunchAttributeClusterDimension;
    together.val.clusterDim.x = blocks;
    together.val.clusterDim.y = 1;
    together.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &together;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...), "cudaLaunchKernelEx");
}

}  // namespace penstock::inline v0_1::detail

#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/cluster.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/detail/shared_memory.cuh>

#include <nv/target>

#include <cstdint>

/// Blocks that run at the same time and read one another's shared memory, from sm_90 on. For kernels whose grid is one cluster.

namespace penstock::inline v0_1::detail {

/// Blocks that a cluster may have on every device that knows clusters.
inline constexpr std::uint32_t portable_cluster = 8;

/// Every block of the cluster is running, and has done what it did before `cluster_arrive`, when `cluster_wait` returns. That says nothing
/// of memory other than a `shared_inbox`. All threads call both, in turn.
__device__ inline void cluster_arrive() {
    NV_IF_TARGET(NV_PROVIDES_SM_90, (__syncwarp(); asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");))
}

__device__ inline void cluster_wait() {
    NV_IF_TARGET(NV_PROVIDES_SM_90, (__syncwarp(); asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");))
}

/// Counts what other blocks of the cluster write into this block's shared memory. To lie in shared memory, at the same place in all.
class shared_inbox {
public:
    /// By one thread, before `cluster_arrive`. @param bytes that the others are going to send, all together
    __device__ void open(std::uint32_t bytes) {
        NV_IF_TARGET(NV_PROVIDES_SM_90,
                     (asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrived_))
                                   : "memory");
                      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&arrived_)), "r"(bytes)
                                   : "memory");
                      asm volatile("fence.mbarrier_init.release.cluster;" ::
                                       : "memory");))
        static_cast<void>(bytes);
    }

    /// Writes to the place in `block` that `place` is in this block. @pre cluster_wait has returned
    __device__ void send(std::uint32_t block, const uint4* place, const uint4& value) const {
        NV_IF_TARGET(NV_PROVIDES_SM_90,
                     (asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                                       address_in(block, place)),
                                   "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(address_in(block, &arrived_))
                                   : "memory");))
        static_cast<void>(block), static_cast<void>(place), static_cast<void>(value);
    }

    /// Returns when all has come, and is seen by the calling thread.
    __device__ void wait() const {
        NV_IF_TARGET(
            NV_PROVIDES_SM_90, (std::uint32_t done = 0; while (done == 0) {
                asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                             : "=r"(done)
                             : "r"(shared_address(&arrived_))
                             : "memory");
            }))
    }

private:
    __device__ static std::uint32_t address_in(std::uint32_t block, const void* shared) {
        std::uint32_t there = 0;
        NV_IF_TARGET(NV_PROVIDES_SM_90, (asm("mapa.shared::cluster.u32 %0, %1, %2;"
                                             : "=r"(there)
                                             : "r"(shared_address(shared)), "r"(block));))
        static_cast<void>(block), static_cast<void>(shared);
        return there;
    }

    std::uint64_t arrived_;
};

/// As `launch`, with a grid of `blocks` blocks that form one cluster.
template <class... Params, class... Args>
void launch_cluster(void (*kernel)(Params...), std::uint32_t blocks, dim3 block, std::size_t shared_bytes, cudaStream_t stream,
                    Args&&... args) {
    cudaLaunchAttribute together{};
    together.id = cudaLaunchAttributeClusterDimension;
    together.val.clusterDim.x = blocks;
    together.val.clusterDim.y = 1;
    together.val.clusterDim.z = 1;
    launch_with({&together, blocks > 1 ? std::size_t{1} : 0}, kernel, dim3(blocks), block, shared_bytes, stream,
                std::forward<Args>(args)...);
}

}  // namespace penstock::inline v0_1::detail

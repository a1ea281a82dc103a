#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/prefill_copies.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/detail/shared_memory.cuh>
#include <penstock/error.hpp>
#include <penstock/model/record.hpp>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

/// The copy engine of sm_90 and what it takes: barriers that count bytes, bulk copies, and maps of matrices. A map of the driver is made
/// once for a layout, on the host; a kernel puts the address of each expert's record into a copy of it.

namespace penstock::inline v0_1::detail {

/// A ring's place: a stage and the lap's parity.
struct ring_place {
    std::uint32_t stage = 0;
    std::uint32_t lap = 0;

    __device__ void step(std::uint32_t stages) {
        if (++stage == stages) {
            stage = 0;
            lap ^= 1;
        }
    }

    [[nodiscard]] __device__ std::uint32_t before(std::uint32_t stages) const { return (stage == 0 ? stages : stage) - 1; }
};

__device__ inline void init_barrier(std::uint64_t* barrier, std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/// Barriers that this thread has made are seen by the copy engine.
__device__ inline void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(std::uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Arrives, and lets the phase last until so many bytes have come.
__device__ inline void arrive_and_expect(std::uint64_t* barrier, std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

/// Returns when the phase of that parity is over.
__device__ inline void wait_barrier(std::uint64_t* barrier, std::uint32_t parity) {
    std::uint32_t done = 0;
    while (done == 0) {
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    }
}

/// @param bytes a multiple of 16, as both addresses
__device__ inline void copy_bulk(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint64_t* full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(shared_address(full))
                 : "memory");
}

/// The box of a map that begins at byte `byte` of rows, with group `group` of eight rows.
__device__ inline void copy_box(std::uint32_t to, const CUtensorMap* map, std::uint32_t byte, std::uint32_t group, std::uint64_t* full) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];" ::"r"(to),
        "l"(map), "r"(byte), "r"(0), "r"(group), "r"(shared_address(full))
        : "memory");
}

/// A kernel before wrote the map: the copy engine is to see it.
__device__ inline void see_map(const CUtensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

/// Writes a copy of `form` with another address. Called by a warp. @param scratch in shared memory, at a multiple of 128 bytes
__device__ inline void place_map(const CUtensorMap& form, const void* address, CUtensorMap* scratch, CUtensorMap* to) {
    const std::uint32_t lane = threadIdx.x % 32;
    reinterpret_cast<std::uint32_t*>(scratch)[lane] = reinterpret_cast<const std::uint32_t*>(&form)[lane];
    __syncwarp();
    if (lane == 0) {
        asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(shared_address(scratch)), "l"(address)
                     : "memory");
    }
    __syncwarp();
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" ::"l"(to),
                 "r"(shared_address(scratch))
                 : "memory");
    __syncwarp();
}

/// The map of one matrix, or of two that are read together, in groups of eight rows: a box has `groups` groups of the first, each followed
/// by the same group of the second. What a box holds of bytes beyond a row, or of rows beyond the last, is zero.
/// @param bits of a weight @param box_bytes of a row: 128, swizzled, or 64 @throws configuration_error, cuda_error
inline CUtensorMap map_of(const matrix_layout& one, const matrix_layout* other, std::uint32_t bits, std::uint32_t box_bytes,
                          std::uint32_t groups) {
    using encode =
        CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                     const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
    const std::uint64_t pitch = one.row_stride * bits / 8;
    const std::uint64_t apart = other == nullptr             ? 16
                                : other->offset > one.offset ? other->offset - one.offset
                                                             : one.offset - other->offset;
    const cuuint32_t halves = other != nullptr ? 2 : 1;
    const cuuint64_t size[4] = {static_cast<std::uint64_t>(one.cols) * bits / 8, 8, halves, one.rows / 8};
    const cuuint64_t strides[3] = {pitch, apart, 8 * pitch};
    const cuuint32_t box[4] = {box_bytes, 8, halves, groups};
    const cuuint32_t every[4] = {1, 1, 1, 1};
    CUtensorMap map{};
    const CUresult result = entry == nullptr ? CUDA_ERROR_NOT_FOUND
                                             : reinterpret_cast<encode>(entry)(
                                                   &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, reinterpret_cast<void*>(std::uintptr_t{1} << 20),
                                                   size, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                                   box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw configuration_error("penstock: the driver maps no matrix of " + std::to_string(one.rows) + " rows of " +
                                  std::to_string(pitch) + " bytes (error " + std::to_string(static_cast<int>(result)) + ")");
    }
    return map;
}

}  // namespace penstock::inline v0_1::detail

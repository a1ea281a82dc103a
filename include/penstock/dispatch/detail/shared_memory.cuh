#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/shared_memory.cuh holds device code: compile this file with nvcc"
#endif

#include <cstdint>

/// Addresses in shared memory, and words there by which the warps of a block tell each other what they have done: what a thread wrote before
/// it stored or added is seen by who loads that value.

namespace penstock::inline v0_1::detail {

__device__ inline std::uint32_t shared_address(const void* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline std::uint32_t load_shared(const std::uint32_t* from) {
    std::uint32_t value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(shared_address(from)) : "memory");
    return value;
}

__device__ inline void store_shared(std::uint32_t* to, std::uint32_t value) {
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(to)), "r"(value) : "memory");
}

__device__ inline void add_shared(std::uint32_t* to, std::uint32_t value) {
    asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(shared_address(to)), "r"(value) : "memory");
}

}  // namespace penstock::inline v0_1::detail

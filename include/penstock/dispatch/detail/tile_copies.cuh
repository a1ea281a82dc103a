#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/tile_copies.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/detail/shared_memory.cuh>
#include <penstock/policy/axis.hpp>

#include <nv/target>

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

/// How the bytes of a tile get into shared memory while the kernel goes on.

namespace penstock::inline v0_1 {

namespace axis {

/// Of kernels alone: who moves the bytes of a tile.
struct copies {};
/// Of kernels alone: what becomes of the bytes in the L2 cache.
struct caching {};

}  // namespace axis

namespace copies {

/// The bulk copy engine, asked by one thread a tile. Below sm_90, which has none, as `by_lane`.
struct bulk {
    using policy_axis = axis::copies;
    static constexpr bool engine = true;
};

/// Every lane of the scope copies 16 bytes at a time, by loads that go to shared memory past the registers (cp.async, from
/// sm_80).
struct by_lane {
    using policy_axis = axis::copies;
    static constexpr bool engine = false;
};

}  // namespace copies

namespace caching {

/// As any load.
struct normal {
    using policy_axis = axis::caching;
    static constexpr bool evict_first = false;
};

/// The bytes are read once: they leave the L2 cache before others.
struct once {
    using policy_axis = axis::caching;
    static constexpr bool evict_first = true;
};

}  // namespace caching

namespace detail {

/// The asynchronous copy of aligned pieces into a ring: the bulk copy engine and one mbarrier a stage, or 16 bytes a lane and a group a stage.
/// Rule: a stage is filled again only after every lane has read it (the scope's sync); where lanes also wrote to it themselves, their
/// writes are fenced against the engine's first.
template <class Scope, class Copies, class Caching, std::uint32_t Stages>
class tile_copies {
public:
    /// @param full [Stages] mbarriers in shared memory
    __device__ explicit tile_copies(std::uint64_t* full) : full_(full) {
        if (by_engine() && Scope::lane() == 0) {
            for (std::uint32_t i = 0; i < Stages; ++i) {
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full_ + i)) : "memory");
            }
        }
        if constexpr (Caching::evict_first) {
            NV_IF_TARGET(NV_PROVIDES_SM_80, (asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));))
        }
        fence();  // the engine must see the barriers, and come after what the kernel did with this memory before
        Scope::sync();
    }

    /// Whether lane 0 starts a copy alone. A constant where this is compiled.
    __device__ static bool by_engine() { NV_IF_ELSE_TARGET(NV_PROVIDES_SM_90, (return Copies::engine;), (return false;)) }

    /// `bytes` is a multiple of 16, may be 0; both addresses are too. One call a stage of the ring: by lane 0 at least where by_engine(),
    /// else by all lanes.
    __device__ void copy(std::uint32_t stage, std::byte* to, const std::byte* from, std::uint32_t bytes) const {
        if (by_engine()) {
            NV_IF_TARGET(NV_PROVIDES_SM_90, (if (Scope::lane() == 0) { copy_by_engine(stage, to, from, bytes); }))
        } else {
            NV_IF_ELSE_TARGET(NV_PROVIDES_SM_80, (copy_by_lanes(to, from, bytes);), (load_by_lanes(to, from, bytes);))
        }
    }

    /// Until the copy of `stage`, the oldest, has landed. After it every lane sees what copies brought and what lane 0 wrote before it
    /// called copy(), not what other lanes wrote.
    __device__ void wait(std::uint32_t stage, std::uint32_t parity) const {
        if (by_engine()) {
            NV_IF_TARGET(NV_PROVIDES_SM_90, (std::uint32_t done = 0; while (done == 0) {
                             asm volatile(
                                 "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                                 : "=r"(done)
                                 : "r"(shared_address(full_ + stage)), "r"(parity)
                                 : "memory");
                         }))
        } else {
            NV_IF_TARGET(NV_PROVIDES_SM_80, (asm volatile("cp.async.wait_group %0;" ::"n"(Stages - 1) : "memory");))
            Scope::sync();
        }
    }

    /// Before lanes' own writes to a stage may be followed by the engine's.
    __device__ void fence() const {
        if (by_engine()) {
            NV_IF_TARGET(NV_PROVIDES_SM_90, (asm volatile("fence.proxy.async.shared::cta;" ::: "memory");))
        }
    }

    /// Gives the shared memory back. @pre every stage was waited for
    __device__ void finish() const {
        if (by_engine()) {
            NV_IF_TARGET(NV_PROVIDES_SM_90, (Scope::sync(); if (Scope::lane() == 0) {
                             for (std::uint32_t i = 0; i < Stages; ++i) {
                                 asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(full_ + i)) : "memory");
                             }
                         }))
        } else {
            NV_IF_TARGET(NV_PROVIDES_SM_80, (asm volatile("cp.async.wait_all;" ::: "memory");))
        }
        Scope::sync();
    }

private:
    __device__ void copy_by_engine(std::uint32_t stage, std::byte* to, const std::byte* from, std::uint32_t bytes) const {
        const std::uint32_t barrier = shared_address(full_ + stage);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
        if (bytes == 0) {
            return;
        }
        if constexpr (Caching::evict_first) {
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                             shared_address(to)),
                         "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier), "l"(policy_)
                         : "memory");
        } else {
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                : "memory");
        }
    }

    __device__ void copy_by_lanes(std::byte* to, const std::byte* from, std::uint32_t bytes) const {
        for (std::uint32_t at = Scope::lane() * 16; at < bytes; at += Scope::lanes() * 16) {
            if constexpr (Caching::evict_first) {
                asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to + at)),
                             "l"(__cvta_generic_to_global(from + at)), "l"(policy_)
                             : "memory");
            } else {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + at)),
                             "l"(__cvta_generic_to_global(from + at))
                             : "memory");
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");  // an empty one too, so that groups can be counted
    }

    /// Below sm_80: nothing is asynchronous.
    __device__ void load_by_lanes(std::byte* to, const std::byte* from, std::uint32_t bytes) const {
        for (std::uint32_t at = Scope::lane() * 16; at < bytes; at += Scope::lanes() * 16) {
            *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
        }
    }

    std::uint64_t* full_;
    std::uint64_t policy_ = 0;
};

}  // namespace detail
}  // namespace penstock::inline v0_1

#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/detail/tile_orders.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/policy/scheduling.hpp>
#include <penstock/units.hpp>

#include <cstdint>

/// Which tile a scope takes next, as its lane 0 goes through them.

namespace penstock::inline v0_1::detail {

/// By the formula of a device_scheduler.
template <class Scheduler>
class dealt_tiles {
public:
    __device__ dealt_tiles(std::uint32_t scope, std::uint32_t scopes, std::uint32_t tiles, tile_counter*)
        : scope_(scope), scopes_(scopes), tiles_(tiles) {}

    /// The number of a tile, or the number of tiles when this scope has no more.
    __device__ std::uint32_t next() { return Scheduler::order::tile(taken_++, scope_, scopes_, tiles_); }
    /// The scope asks for no more. Called once, after next() was called for each stage.
    __device__ void leave() {}

private:
    std::uint32_t scope_, scopes_, tiles_;
    std::uint32_t taken_ = 0;
};

/// By runs of `Scheduler::tiles_per_claim` neighbours: as many as fill a ring are dealt, so that no scope waits for its first ones, and the
/// others are claimed from the counter, each while the run before it is handed out.
///
/// Each scope claims until a claim finds nothing. So there are (runs to claim) + (scopes) claims in all, and the last of them wraps the
/// counter to zero, for the next launch.
template <class Scheduler, std::uint32_t Stages>
class claimed_tiles {
public:
    __device__ claimed_tiles(std::uint32_t scope, std::uint32_t scopes, std::uint32_t tiles, tile_counter* counter)
        : tiles_(tiles), run_(scope), scopes_(scopes), counter_(counter) {
        const std::uint64_t runs = ceil_div(tiles, run_tiles);
        const std::uint64_t dealt = std::uint64_t{laps} * scopes;
        to_claim_ = runs > dealt ? static_cast<std::uint32_t>(runs - dealt) : 0;
    }

    __device__ std::uint32_t next() {
        if (at_ == end_ && !begin_run()) {
            return tiles_;
        }
        return at_++;
    }

    /// A scope that has not claimed in vain yet ends the pass for all, and then does.
    __device__ void leave() {
        if (claim_ < to_claim_) {
            asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(word()), "r"(to_claim_) : "memory");
            claim();
        }
    }

private:
    static constexpr std::uint32_t run_tiles = Scheduler::tiles_per_claim;
    static constexpr std::uint32_t laps = (Stages + run_tiles - 1) / run_tiles;

    __device__ std::uint64_t word() const { return __cvta_generic_to_global(&counter_->state); }

    /// Returns at once; who reads claim_ waits.
    __device__ void claim() {
        asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(claim_) : "l"(word()), "r"(to_claim_ + scopes_ - 1) : "memory");
    }

    __device__ bool begin_run() {
        std::uint64_t run = run_;
        if (lap_ < laps) {
            run += std::uint64_t{lap_++} * scopes_;
        } else if (claim_ < to_claim_) {
            run = std::uint64_t{laps} * scopes_ + claim_;
        } else {
            return false;
        }
        if (lap_ == laps && to_claim_ > 0) {
            claim();
        }
        if (run * run_tiles >= tiles_) {
            return false;
        }
        at_ = static_cast<std::uint32_t>(run * run_tiles);
        end_ = static_cast<std::uint32_t>(smaller<std::uint64_t>(at_ + std::uint64_t{run_tiles}, tiles_));
        return true;
    }

    std::uint32_t tiles_;
    std::uint32_t run_;  ///< of the first lap
    std::uint32_t scopes_;
    std::uint32_t to_claim_ = 0;  ///< runs
    std::uint32_t at_ = 0;        ///< the rest of the run in hand
    std::uint32_t end_ = 0;
    std::uint32_t lap_ = 0;
    tile_counter* counter_;
    std::uint32_t claim_ = 0;  ///< the run of the claim that is under way, counted from those that are dealt
};

}  // namespace penstock::inline v0_1::detail

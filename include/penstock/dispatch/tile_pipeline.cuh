#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/tile_pipeline.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/model/tensor.hpp>
#include <penstock/policy/chunking.hpp>
#include <penstock/policy/memory.hpp>
#include <penstock/policy/prefetch.hpp>
#include <penstock/policy/scheduling.hpp>

#include <nv/target>

#include <cstddef>
#include <cstdint>
#include <type_traits>

/// A matrix in device, peer or mapped host memory, handed out tile by tile in shared memory while the next tiles are in flight.

namespace penstock::inline v0_1 {

namespace axis {

/// Of kernels alone: which threads share a tile.
struct scope {};

}  // namespace axis

/// The start of the dynamic shared memory of the block, a multiple of 128 bytes.
__device__ inline std::byte* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char penstock_dynamic_shared[];
    return reinterpret_cast<std::byte*>(penstock_dynamic_shared);
}

namespace scope {

/// Each warp has a ring and tiles of its own; warps never wait for each other.
struct warp {
    using policy_axis = axis::scope;

    static constexpr std::uint32_t per_block(std::uint32_t threads) { return threads / 32; }

    __device__ static std::uint32_t lane() { return thread() % 32; }
    __device__ static std::uint32_t lanes() { return 32; }
    __device__ static std::uint32_t number_in_block() { return thread() / 32; }
    __device__ static std::uint32_t number_per_block() { return blockDim.x * blockDim.y * blockDim.z / 32; }
    __device__ static void sync() { __syncwarp(); }

private:
    __device__ static std::uint32_t thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
};

/// The block has one ring; all its threads see each tile and go in step.
struct block {
    using policy_axis = axis::scope;

    static constexpr std::uint32_t per_block(std::uint32_t) { return 1; }

    __device__ static std::uint32_t lane() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
    __device__ static std::uint32_t lanes() { return blockDim.x * blockDim.y * blockDim.z; }
    __device__ static std::uint32_t number_in_block() { return 0; }
    __device__ static std::uint32_t number_per_block() { return 1; }
    __device__ static void sync() { __syncthreads(); }
};

}  // namespace scope

/// Rows and columns [first_row, first_row + rows) x [first_col, first_col + cols) of the matrix, in shared memory until the loop goes on.
struct tile {
    const std::byte* data = nullptr;
    std::uint32_t first_row = 0;
    std::uint32_t rows = 0;
    std::uint32_t first_col = 0;
    std::uint32_t cols = 0;
    std::uint32_t row_bytes = 0;  ///< from one row of the tile to the next

    /// Elements of row `r` of the tile, `cols` of them. T is the element type of the matrix. @pre r < rows
    template <class T>
    __device__ const T* row(std::uint32_t r) const {
        return reinterpret_cast<const T*>(data + r * row_bytes);
    }
};

namespace detail {

/// Of a chunking: `size`, a constant. Of a prefetch depth: no state.
template <class C>
concept sized_chunking = chunking_policy<C> && std::is_empty_v<C> && requires {
    typename std::integral_constant<std::uint64_t, C::size>;
};

template <class P>
concept constant_depth = prefetch_policy<P> && std::is_empty_v<P> && std::is_default_constructible_v<P>;

inline constexpr std::uint64_t shared_bytes_of_a_block = 227 << 10;

__device__ inline std::uint32_t shared_address(const void* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }

/// The asynchronous copy of aligned pieces into a ring: the bulk copy engine and one mbarrier a stage from sm_90, 16 bytes a lane below.
/// Rule: a stage is filled again only after every lane has read it (the scope's sync); where lanes also wrote to it themselves, their
/// writes are fenced against the engine's first.
template <class Scope, std::uint32_t Stages>
struct tile_copies {
    std::uint64_t* full;  ///< [Stages] mbarriers in shared memory

    __device__ void start() const {
        NV_IF_TARGET(NV_PROVIDES_SM_90, (if (Scope::lane() == 0) {
                         for (std::uint32_t i = 0; i < Stages; ++i) {
                             asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + i)) : "memory");
                         }
                     }))
        fence();  // the engine must see the barriers, and come after what the kernel did with this memory before
        Scope::sync();
    }

    /// `bytes` is a multiple of 16, may be 0; both addresses are too. Called by all lanes, one call a stage of the ring.
    __device__ void copy(std::uint32_t stage, std::byte* to, const std::byte* from, std::uint32_t bytes) const {
        NV_IF_ELSE_TARGET(
            NV_PROVIDES_SM_90, (if (Scope::lane() == 0) {
                const std::uint32_t barrier = shared_address(full + stage);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
                if (bytes > 0) {
                    asm volatile(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                        : "memory");
                }
            }),
            (for (std::uint32_t at = Scope::lane() * 16; at < bytes; at += Scope::lanes() * 16) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + at)),
                             "l"(__cvta_generic_to_global(from + at))
                             : "memory");
            } nothing();))
    }

    /// Closes the group of a stage that gets no tile, so that groups can be counted.
    __device__ void nothing() const { NV_IF_ELSE_TARGET(NV_PROVIDES_SM_90, (;), (asm volatile("cp.async.commit_group;" ::: "memory");)) }

    /// Until the oldest copy has landed. After it every lane sees what the copies brought, not what other lanes wrote.
    __device__ void wait(std::uint32_t stage, std::uint32_t parity) const {
        NV_IF_ELSE_TARGET(NV_PROVIDES_SM_90, (std::uint32_t done = 0; while (done == 0) {
                              asm volatile(
                                  "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                                  : "=r"(done)
                                  : "r"(shared_address(full + stage)), "r"(parity)
                                  : "memory");
                          }),
                          (asm volatile("cp.async.wait_group %0;" ::"n"(Stages - 1)
                                        : "memory");
                           Scope::sync();))
    }

    /// Before lanes' own writes to a stage may be followed by the engine's.
    __device__ void fence() const { NV_IF_TARGET(NV_PROVIDES_SM_90, (asm volatile("fence.proxy.async.shared::cta;" ::: "memory");)) }

    /// Gives the shared memory back. @pre every stage with a copy in flight was waited for
    __device__ void finish() const {
        NV_IF_ELSE_TARGET(NV_PROVIDES_SM_90, (Scope::sync(); if (Scope::lane() == 0) {
                              for (std::uint32_t i = 0; i < Stages; ++i) {
                                  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(full + i)) : "memory");
                              }
                          }),
                          (asm volatile("cp.async.wait_all;" ::
                                            : "memory");))
        Scope::sync();
    }
};

}  // namespace detail

/// What `tile_pipeline` names. Made by all threads of its scopes together, in a kernel that was launched with `shared_bytes<threads>` bytes
/// of dynamic shared memory; every loop step is a step of all threads of the scope. Its destructor waits for the tiles in flight.
template <class Memory, class Chunking, class Prefetch, class Scheduler, class Scope>
class basic_tile_pipeline {
public:
    using memory = Memory;
    using chunking = Chunking;
    using prefetch = Prefetch;
    using scheduler = Scheduler;
    using scope = Scope;

    /// Most bytes of a tile: as many whole rows as fit, or a part of a longer row, cut at a multiple of 128 bytes.
    static constexpr std::uint32_t tile_bytes = static_cast<std::uint32_t>(Chunking::size);
    /// Tiles of a scope in shared memory, the one in use among them.
    static constexpr std::uint32_t stages = Prefetch{}.chunks_ahead(tile_bytes);

private:
    static constexpr std::uint64_t stage_bytes = round_up(tile_bytes + 16, 128);  // a tile starts where its bytes do, modulo 16
    static constexpr std::uint64_t ring_bytes = stages * stage_bytes + round_up(stages * sizeof(std::uint64_t), 128);
    static_assert(ring_bytes <= detail::shared_bytes_of_a_block,
                  "penstock: tile_pipeline: the stages of the scopes exceed the shared memory of a block, 227 KiB; take smaller tiles or "
                  "fewer stages");

    template <std::uint32_t Threads>
    static constexpr std::size_t bytes_for() {
        static_assert(Threads > 0 && Threads % 32 == 0, "penstock: tile_pipeline runs in blocks of whole warps, a multiple of 32 threads");
        static_assert(Scope::per_block(Threads) * ring_bytes <= detail::shared_bytes_of_a_block,
                      "penstock: tile_pipeline: the stages of the scopes exceed the shared memory of a block, 227 KiB; take smaller tiles "
                      "or fewer stages");
        return static_cast<std::size_t>(Scope::per_block(Threads) * ring_bytes);
    }

public:
    /// Dynamic shared memory of a block of `Threads` threads.
    template <std::uint32_t Threads>
    static constexpr std::size_t shared_bytes = bytes_for<Threads>();

    /// Starts the first `stages` tiles of this scope. @param shared the block's `shared_bytes<threads>` bytes, at a multiple of 128
    /// @param matrix row-major without gaps, at any alignment; in memory of the pipeline's kind
    template <class T>
    __device__ basic_tile_pipeline(std::byte* shared, matrix_ref<T> matrix)
        : ring_(shared + Scope::number_in_block() * ring_bytes),
          copies_{reinterpret_cast<std::uint64_t*>(ring_ + stages * stage_bytes)},
          data_(reinterpret_cast<const std::byte*>(matrix.data)),
          row_bytes_(static_cast<std::uint64_t>(matrix.cols) * sizeof(T)),
          element_bytes_(sizeof(T)),
          rows_(matrix.rows) {
        static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0,
                      "penstock: tile_pipeline reads elements of 1, 2, 4, 8 or 16 bytes");
        const std::uint64_t chunk = Chunking{}.bytes_per_chunk(row_bytes_, row_bytes_ * rows_);
        if (row_bytes_ == 0 || rows_ == 0) {
            tiles_ = 0;
        } else if (chunk >= row_bytes_) {
            rows_per_tile_ = static_cast<std::uint32_t>(smaller<std::uint64_t>(chunk / row_bytes_, rows_));
            tiles_ = static_cast<std::uint32_t>(ceil_div(rows_, rows_per_tile_));
        } else {
            piece_bytes_ = static_cast<std::uint32_t>(chunk);
            pieces_ = static_cast<std::uint32_t>(ceil_div(row_bytes_, chunk));
            tiles_ = rows_ * pieces_;
        }
        ragged_ = reinterpret_cast<std::uintptr_t>(data_) % 16 != 0 || row_bytes_ % 16 != 0;
        number_ = static_cast<std::uint32_t>((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * Scope::number_per_block() +
                  Scope::number_in_block();
        scopes_ = gridDim.x * gridDim.y * gridDim.z * Scope::number_per_block();
        copies_.start();
        for (std::uint32_t stage = 0; stage < stages; ++stage) {
            issue(stage, stage);
        }
    }

    basic_tile_pipeline(const basic_tile_pipeline&) = delete;
    basic_tile_pipeline& operator=(const basic_tile_pipeline&) = delete;

    __device__ ~basic_tile_pipeline() {
        for (; tile_number(taken_) < tiles_; ++taken_) {  // of those, the issued ones
            if (taken_ >= issued_) {
                break;
            }
            copies_.wait(stage_, parity_);
            next_stage();
        }
        copies_.finish();
    }

    struct sentinel {};

    class iterator {
    public:
        __device__ explicit iterator(basic_tile_pipeline* pipeline) : pipeline_(pipeline) {}
        __device__ tile operator*() const { return pipeline_->current(); }
        __device__ iterator& operator++() {
            pipeline_->advance();
            return *this;
        }
        __device__ bool operator==(sentinel) const { return !pipeline_->has_tile(); }

    private:
        basic_tile_pipeline* pipeline_;
    };

    /// One pass over the scope's tiles, in the scheduler's order; a second loop goes on where the first left.
    __device__ iterator begin() {
        arrive();
        return iterator(this);
    }
    __device__ sentinel end() const { return {}; }

    /// Tiles of the matrix, over all scopes.
    __device__ std::uint32_t tiles() const { return tiles_; }

private:
    /// Where the bytes of tile `t` are, and what they hold.
    struct source {
        const std::byte* from;
        std::uint32_t bytes;
        std::uint32_t first_row, rows, first_col, cols;
    };

    __device__ source locate(std::uint32_t t) const {
        if (pieces_ == 1) {
            const std::uint32_t row = t * rows_per_tile_;
            const std::uint32_t rows = smaller(rows_per_tile_, rows_ - row);
            return {data_ + row * row_bytes_,
                    static_cast<std::uint32_t>(rows * row_bytes_),
                    row,
                    rows,
                    0,
                    static_cast<std::uint32_t>(row_bytes_ / element_bytes_)};
        }
        const std::uint32_t row = t / pieces_;
        const std::uint64_t begin = static_cast<std::uint64_t>(t % pieces_) * piece_bytes_;
        const auto size = static_cast<std::uint32_t>(smaller<std::uint64_t>(piece_bytes_, row_bytes_ - begin));
        return {data_ + row * row_bytes_ + begin, size, row, 1, static_cast<std::uint32_t>(begin / element_bytes_), size / element_bytes_};
    }

    __device__ std::uint32_t tile_number(std::uint32_t i) const { return Scheduler::order::tile(i, number_, scopes_, tiles_); }
    __device__ bool has_tile() const { return tile_number(taken_) < tiles_; }

    /// Starts the scope's i-th tile. Bytes before the first and after the last multiple of 16 come by plain loads of the lanes.
    __device__ void issue(std::uint32_t i, std::uint32_t stage) {
        const std::uint32_t t = tile_number(i);
        if (t >= tiles_) {
            copies_.nothing();
            return;
        }
        ++issued_;
        const source s = locate(t);
        const auto shift = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(s.from) % 16);
        std::byte* const to = ring_ + stage * stage_bytes + shift;
        const std::uint32_t head = smaller(s.bytes, (16 - shift) % 16);
        const std::uint32_t body = (s.bytes - head) / 16 * 16;
        copies_.copy(stage, to + head, s.from + head, body);
        if (ragged_) {
            for (std::uint32_t at = Scope::lane(); at < s.bytes - body; at += Scope::lanes()) {
                const std::uint32_t byte = at < head ? at : at + body;
                to[byte] = s.from[byte];
            }
        }
    }

    /// Waits for the current tile, if there is one.
    __device__ void arrive() {
        if (has_tile()) {
            copies_.wait(stage_, parity_);
            if (ragged_) {
                Scope::sync();  // other lanes' plain loads
            }
        }
    }

    __device__ tile current() const {
        const source s = locate(tile_number(taken_));
        const auto shift = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(s.from) % 16);
        return {ring_ + stage_ * stage_bytes + shift,
                s.first_row,
                s.rows,
                s.first_col,
                s.cols,
                s.rows > 1 ? static_cast<std::uint32_t>(row_bytes_) : s.bytes};
    }

    __device__ void next_stage() {
        if (++stage_ == stages) {
            stage_ = 0;
            parity_ ^= 1;
        }
    }

    __device__ void advance() {
        if (ragged_) {
            copies_.fence();
        }
        Scope::sync();  // every lane has read the tile
        issue(taken_ + stages, stage_);
        ++taken_;
        next_stage();
        arrive();
    }

    std::byte* ring_;
    detail::tile_copies<Scope, stages> copies_;
    const std::byte* data_;
    std::uint64_t row_bytes_;
    std::uint32_t element_bytes_;
    std::uint32_t rows_;
    std::uint32_t rows_per_tile_ = 1;
    std::uint32_t piece_bytes_ = 0;
    std::uint32_t pieces_ = 1;  ///< tiles of a row that is longer than a tile
    std::uint32_t tiles_ = 0;
    std::uint32_t number_ = 0;  ///< of this scope in the grid
    std::uint32_t scopes_ = 1;
    std::uint32_t taken_ = 0;
    std::uint32_t issued_ = 0;
    std::uint32_t stage_ = 0;
    std::uint32_t parity_ = 0;
    bool ragged_ = false;
};

namespace detail {

template <class... Ps>
struct make_tile_pipeline {
    PENSTOCK_CHECK_POLICIES("tile_pipeline", Ps...);
    static_assert(axis_count<axis::scope, Ps...> <= 1, "penstock: tile_pipeline takes one scope, two were given");
    static_assert(axis_count<axis::eviction, Ps...> == 0, "penstock: tile_pipeline keeps nothing, so it takes no eviction rule");

    using memory_kind = pick_policy<axis::memory, memory::device, Ps...>;
    using chunking_kind = pick_policy<axis::chunking, chunking::fixed<bytes{8 << 10}>, Ps...>;
    using prefetch_kind = pick_policy<axis::prefetch, prefetch::depth<2>, Ps...>;
    using scheduler_kind = pick_policy<axis::scheduling, scheduler::fifo, Ps...>;
    using scope_kind = pick_policy<axis::scope, scope::warp, Ps...>;

    static_assert(memory_kind::device_accessible,
                  "penstock: tile_pipeline reads where the bytes lie; memory::pageable is not reachable from a kernel");
    static_assert(sized_chunking<chunking_kind>, "penstock: tile_pipeline needs a tile size known at compile time, as chunking::fixed has");
    static_assert(constant_depth<prefetch_kind>,
                  "penstock: tile_pipeline needs a depth known at compile time: prefetch::none, depth or budget");
    static_assert(device_scheduler<scheduler_kind>,
                  "penstock: tile_pipeline needs a scheduler with a device facet, order: scheduler::fifo or round_robin");

    using type = basic_tile_pipeline<memory_kind, chunking_kind, prefetch_kind, scheduler_kind, scope_kind>;
};

}  // namespace detail

/// A kernel's way through a matrix that lies in global memory of some kind, by policies in any order, each axis at most once:
///   memory      device (default), peer, pinned, ...: read in place, no staging
///   chunking    the most bytes of a tile (default chunking::fixed<8_KiB>)
///   prefetch    tiles of a scope in shared memory (default prefetch::depth<2>)
///   scheduler   which tile a scope takes next (default scheduler::fifo: a run of neighbours each)
///   scope       scope::warp (default) or scope::block: the threads that share a tile
///
///     using pipe_t = tile_pipeline<memory::pinned, chunking::fixed<4_KiB>>;
///     pipe_t pipe{dynamic_shared(), matrix};
///     for (tile t : pipe) { ... t.row<float>(r)[c] ... }
template <class... Ps>
using tile_pipeline = typename detail::make_tile_pipeline<Ps...>::type;

}  // namespace penstock::inline v0_1

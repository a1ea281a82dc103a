#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/tile_pipeline.cuh holds device code: compile this file with nvcc"
#endif

#include <penstock/dispatch/detail/tile_copies.cuh>
#include <penstock/dispatch/detail/tile_orders.cuh>
#include <penstock/model/tensor.hpp>
#include <penstock/policy/chunking.hpp>
#include <penstock/policy/memory.hpp>
#include <penstock/policy/prefetch.hpp>
#include <penstock/policy/scheduling.hpp>

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

}  // namespace detail

/// What `tile_pipeline` names. Made by all threads of its scopes together, in a kernel that was launched with `shared_bytes<threads>` bytes
/// of dynamic shared memory; every loop step is a step of all threads of the scope. Its destructor waits for the tiles in flight.
template <class Memory, class Chunking, class Prefetch, class Scheduler, class Scope, class Copies, class Caching>
class basic_tile_pipeline {
public:
    using memory = Memory;
    using chunking = Chunking;
    using prefetch = Prefetch;
    using scheduler = Scheduler;
    using scope = Scope;
    using copies = Copies;
    using caching = Caching;

    /// Most bytes of a tile: as many whole rows as fit, or a part of a longer row, cut at a multiple of 128 bytes.
    static constexpr std::uint32_t tile_bytes = static_cast<std::uint32_t>(Chunking::size);
    /// Tiles of a scope in shared memory, the one in use among them.
    static constexpr std::uint32_t stages = Prefetch{}.chunks_ahead(tile_bytes);
    /// Whether the scopes claim their tiles from a counter, which the constructor then takes.
    static constexpr bool claims = claiming_scheduler<Scheduler>;

private:
    /// What lies in a stage. Written by lane 0, which alone goes through the order; no rows: the scope has no more tiles.
    struct alignas(16) entry {
        std::uint32_t first_row, rows, first_col, cols;
        std::uint64_t offset;  ///< of its bytes from the start of the matrix
        std::uint32_t bytes;
    };

    static constexpr std::uint64_t stage_bytes = round_up(tile_bytes + 16, 128);  // a tile starts where its bytes do, modulo 16
    static constexpr std::uint64_t ring_bytes = stages * stage_bytes + round_up(stages * (sizeof(entry) + sizeof(std::uint64_t)), 128);
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
    __device__ basic_tile_pipeline(std::byte* shared, matrix_ref<T> matrix) : basic_tile_pipeline(started{}, shared, matrix, nullptr) {
        static_assert(!claims || sizeof(T) == 0,
                      "penstock: tile_pipeline: scheduler::first_come claims tiles from a tile_counter; pass one");
    }

    /// The same with a scheduler that claims. Every scope of the grid makes one pipeline with the counter. @param counter in global memory
    template <class T>
    __device__ basic_tile_pipeline(std::byte* shared, matrix_ref<T> matrix, tile_counter* counter)
        : basic_tile_pipeline(started{}, shared, matrix, counter) {
        static_assert(claims && sizeof(T) > 0, "penstock: tile_pipeline takes a tile_counter with scheduler::first_come alone");
    }

    basic_tile_pipeline(const basic_tile_pipeline&) = delete;
    basic_tile_pipeline& operator=(const basic_tile_pipeline&) = delete;

    __device__ ~basic_tile_pipeline() {
        if (Scope::lane() == 0 || (!claims && every_lane_copies())) {
            order_.leave();
        }
        for (std::uint32_t i = 0; i < stages; ++i) {
            copies_.wait(stage_, parity_);
            next_stage();
        }
        copies_.finish();
    }

    struct sentinel {};

    class iterator {
    public:
        __device__ explicit iterator(basic_tile_pipeline* pipeline) : pipeline_(pipeline) {}
        __device__ tile operator*() const { return pipeline_->current_; }
        __device__ iterator& operator++() {
            pipeline_->advance();
            return *this;
        }
        __device__ bool operator==(sentinel) const { return pipeline_->current_.rows == 0; }

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
    __device__ std::uint32_t tiles() const { return cut_.tiles; }

private:
    struct started {};

    /// How the matrix is cut: into tiles of `rows_per_tile` whole rows, or each row into `pieces`.
    struct cut {
        std::uint32_t tiles = 0;
        std::uint32_t rows_per_tile = 1;
        std::uint32_t pieces = 1;
        std::uint32_t piece_bytes = 0;
    };

    __device__ static cut cut_of(std::uint32_t rows, std::uint64_t row_bytes) {
        if (row_bytes == 0 || rows == 0) {
            return {};
        }
        const std::uint64_t chunk = Chunking{}.bytes_per_chunk(row_bytes, row_bytes * rows);
        if (chunk >= row_bytes) {
            const auto rows_per_tile = static_cast<std::uint32_t>(smaller<std::uint64_t>(chunk / row_bytes, rows));
            return {static_cast<std::uint32_t>(ceil_div(rows, rows_per_tile)), rows_per_tile, 1, 0};
        }
        const auto pieces = static_cast<std::uint32_t>(ceil_div(row_bytes, chunk));
        return {rows * pieces, 1, pieces, static_cast<std::uint32_t>(chunk)};
    }

    template <class T>
    __device__ basic_tile_pipeline(started, std::byte* shared, matrix_ref<T> matrix, tile_counter* counter)
        : ring_(shared + Scope::number_in_block() * ring_bytes),
          entries_(reinterpret_cast<entry*>(ring_ + stages * stage_bytes)),
          copies_(reinterpret_cast<std::uint64_t*>(entries_ + stages)),
          data_(reinterpret_cast<const std::byte*>(matrix.data)),
          row_bytes_(static_cast<std::uint64_t>(matrix.cols) * sizeof(T)),
          element_bytes_(sizeof(T)),
          rows_(matrix.rows),
          cut_(cut_of(rows_, row_bytes_)),
          order_(static_cast<std::uint32_t>((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * Scope::number_per_block() +
                     Scope::number_in_block(),
                 gridDim.x * gridDim.y * gridDim.z * Scope::number_per_block(), cut_.tiles, counter),
          ragged_(reinterpret_cast<std::uintptr_t>(data_) % 16 != 0 || row_bytes_ % 16 != 0) {
        static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0,
                      "penstock: tile_pipeline reads elements of 1, 2, 4, 8 or 16 bytes");
        for (std::uint32_t stage = 0; stage < stages; ++stage) {
            issue(stage);
        }
    }

    __device__ entry locate(std::uint32_t t) const {
        if (t >= cut_.tiles) {
            return {};
        }
        if (cut_.pieces == 1) {
            const std::uint32_t row = t * cut_.rows_per_tile;
            const std::uint32_t rows = smaller(cut_.rows_per_tile, rows_ - row);
            return {row,
                    rows,
                    0,
                    static_cast<std::uint32_t>(row_bytes_ / element_bytes_),
                    row * row_bytes_,
                    static_cast<std::uint32_t>(rows * row_bytes_)};
        }
        const std::uint32_t row = t / cut_.pieces;
        const std::uint64_t begin = static_cast<std::uint64_t>(t - row * cut_.pieces) * cut_.piece_bytes;
        const auto size = static_cast<std::uint32_t>(smaller<std::uint64_t>(cut_.piece_bytes, row_bytes_ - begin));
        return {row, 1, static_cast<std::uint32_t>(begin / element_bytes_), size / element_bytes_, row * row_bytes_ + begin, size};
    }

    /// Else lane 0 alone starts a tile.
    __device__ bool every_lane_copies() const { return ragged_ || !copies_.by_engine(); }

    /// Where the first byte of a tile lies in its 16 bytes.
    __device__ std::uint32_t shift_of(const entry& e) const {
        return ragged_ ? static_cast<std::uint32_t>((reinterpret_cast<std::uintptr_t>(data_) + e.offset) % 16) : 0;
    }

    /// Starts the scope's next tile, if there is one, in a stage that every lane has read.
    __device__ void issue(std::uint32_t stage) {
        const bool every_lane = every_lane_copies();
        entry e{};
        if (Scope::lane() == 0 || (every_lane && !claims)) {
            e = locate(order_.next());
        }
        if (Scope::lane() == 0) {
            entries_[stage] = e;
        }
        if (claims && every_lane) {
            Scope::sync();
            e = entries_[stage];
        }
        if (Scope::lane() == 0 || every_lane) {
            start(stage, e);
        }
    }

    /// Bytes before the first and after the last multiple of 16 come by plain loads of the lanes.
    __device__ void start(std::uint32_t stage, const entry& e) {
        const std::byte* const from = data_ + e.offset;
        const std::uint32_t shift = shift_of(e);
        std::byte* const to = ring_ + stage * stage_bytes + shift;
        const std::uint32_t head = smaller(e.bytes, (16 - shift) % 16);
        const std::uint32_t body = (e.bytes - head) / 16 * 16;
        copies_.copy(stage, to + head, from + head, body);
        if (ragged_) {
            for (std::uint32_t at = Scope::lane(); at < e.bytes - body; at += Scope::lanes()) {
                const std::uint32_t byte = at < head ? at : at + body;
                to[byte] = from[byte];
            }
        }
    }

    /// Waits for the current tile.
    __device__ void arrive() {
        copies_.wait(stage_, parity_);
        if (ragged_) {
            Scope::sync();  // other lanes' plain loads
        }
        const entry& e = entries_[stage_];
        current_ = {ring_ + stage_ * stage_bytes + shift_of(e), e.first_row, e.rows, e.first_col, e.cols,
                    static_cast<std::uint32_t>(row_bytes_)};
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
        issue(stage_);
        next_stage();
        arrive();
    }

    using tile_order = std::conditional_t<claims, detail::claimed_tiles<Scheduler, stages>, detail::dealt_tiles<Scheduler>>;

    std::byte* ring_;
    entry* entries_;  ///< [stages]
    detail::tile_copies<Scope, Copies, Caching, stages> copies_;
    const std::byte* data_;
    std::uint64_t row_bytes_;
    std::uint32_t element_bytes_;
    std::uint32_t rows_;
    cut cut_;
    tile_order order_;
    std::uint32_t stage_ = 0;
    std::uint32_t parity_ = 0;
    bool ragged_;
    tile current_{};
};

namespace detail {

template <class... Ps>
struct make_tile_pipeline {
    PENSTOCK_CHECK_POLICIES("tile_pipeline", Ps...);
    static_assert(axis_count<axis::scope, Ps...> <= 1, "penstock: tile_pipeline takes one scope, two were given");
    static_assert(axis_count<axis::copies, Ps...> <= 1, "penstock: tile_pipeline takes one way of copying, two were given");
    static_assert(axis_count<axis::caching, Ps...> <= 1, "penstock: tile_pipeline takes one caching, two were given");
    static_assert(axis_count<axis::eviction, Ps...> == 0, "penstock: tile_pipeline keeps nothing, so it takes no eviction rule");

    using memory_kind = pick_policy<axis::memory, memory::device, Ps...>;
    using chunking_kind = pick_policy<axis::chunking, chunking::fixed<bytes{8 << 10}>, Ps...>;
    using prefetch_kind = pick_policy<axis::prefetch, prefetch::depth<2>, Ps...>;
    using scheduler_kind = pick_policy<axis::scheduling, scheduler::fifo, Ps...>;
    using scope_kind = pick_policy<axis::scope, scope::warp, Ps...>;
    using copies_kind = pick_policy<axis::copies, copies::bulk, Ps...>;
    using caching_kind = pick_policy<axis::caching, caching::normal, Ps...>;

    static_assert(memory_kind::device_accessible,
                  "penstock: tile_pipeline reads where the bytes lie; memory::pageable is not reachable from a kernel");
    static_assert(sized_chunking<chunking_kind>, "penstock: tile_pipeline needs a tile size known at compile time, as chunking::fixed has");
    static_assert(constant_depth<prefetch_kind>,
                  "penstock: tile_pipeline needs a depth known at compile time: prefetch::none, depth or budget");
    static_assert(device_scheduler<scheduler_kind> || claiming_scheduler<scheduler_kind>,
                  "penstock: tile_pipeline needs a scheduler with a device facet: scheduler::fifo, round_robin or first_come");

    using type = basic_tile_pipeline<memory_kind, chunking_kind, prefetch_kind, scheduler_kind, scope_kind, copies_kind, caching_kind>;
};

}  // namespace detail

/// A kernel's way through a matrix that lies in global memory of some kind, by policies in any order, each axis at most once:
///   memory      device (default), peer, pinned, ...: read in place, no staging
///   chunking    the most bytes of a tile (default chunking::fixed<8_KiB>)
///   prefetch    tiles of a scope in shared memory (default prefetch::depth<2>)
///   scheduler   which tile a scope takes next (default scheduler::fifo: a run of neighbours each)
///   scope       scope::warp (default) or scope::block: the threads that share a tile
///   copies      copies::bulk (default): the copy engine; copies::by_lane: 16 bytes a lane
///   caching     caching::normal (default), or caching::once: the bytes leave the L2 cache first
///
///     using pipe_t = tile_pipeline<memory::pinned, chunking::fixed<4_KiB>>;
///     pipe_t pipe{dynamic_shared(), matrix};
///     for (tile t : pipe) { ... t.row<float>(r)[c] ... }
template <class... Ps>
using tile_pipeline = typename detail::make_tile_pipeline<Ps...>::type;

}  // namespace penstock::inline v0_1

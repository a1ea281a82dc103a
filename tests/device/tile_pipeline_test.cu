#include <penstock/cuda/launch.cuh>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/tile_pipeline.cuh>

#include "device_memory.hpp"

#include <doctest/doctest.h>

#include <cuda_bf16.h>

#include <algorithm>
#include <concepts>

namespace ps = penstock;
using namespace ps::literals;
using namespace tests;

static_assert(std::same_as<ps::tile_pipeline<>, ps::tile_pipeline<ps::scope::warp, ps::prefetch::depth<2>, ps::memory::device>>);
static_assert(std::same_as<ps::tile_pipeline<ps::chunking::fixed<4_KiB>, ps::memory::pinned>,
                           ps::tile_pipeline<ps::memory::pinned, ps::chunking::fixed<4_KiB>>>);
static_assert(std::same_as<ps::tile_pipeline<ps::memory::peer>::memory, ps::memory::peer>);
static_assert(ps::tile_pipeline<ps::prefetch::none>::stages == 1);
static_assert(ps::tile_pipeline<ps::prefetch::budget<32_KiB>>::stages == 4);

static_assert(std::same_as<ps::tile_pipeline<ps::copies::bulk, ps::caching::normal>, ps::tile_pipeline<>>);
static_assert(ps::tile_pipeline<ps::scheduler::first_come<4>>::claims && !ps::tile_pipeline<>::claims);

namespace {

/// A pipeline of any scheduler over all of the block's shared memory.
template <class Pipe, class T>
__device__ Pipe pipe_over(ps::matrix_ref<const T> matrix, ps::tile_counter* counter) {
    if constexpr (Pipe::claims) {
        return Pipe{ps::dynamic_shared(), matrix, counter};
    } else {
        return Pipe{ps::dynamic_shared(), matrix};
    }
}

/// Copies the matrix tile by tile and counts how often each element came.
template <class Pipe, class T>
__global__ void copy_by_tiles(ps::matrix_ref<const T> matrix, T* out, unsigned* visits, ps::tile_counter* counter) {
    Pipe pipe = pipe_over<Pipe>(matrix, counter);
    for (const ps::tile t : pipe) {
        for (std::uint32_t r = 0; r < t.rows; ++r) {
            const T* row = t.row<T>(r);
            for (std::uint32_t c = Pipe::scope::lane(); c < t.cols; c += Pipe::scope::lanes()) {
                const std::uint64_t at = static_cast<std::uint64_t>(t.first_row + r) * matrix.cols + t.first_col + c;
                out[at] = row[c];
                atomicAdd(visits + at, 1u);
            }
        }
    }
}

/// Leaves the loop in the middle and starts a second pipeline in the same memory.
template <class Pipe>
__global__ void leave_early(ps::matrix_ref<const float> matrix, float* out) {
    for (int pass = 0; pass < 3; ++pass) {
        Pipe pipe{ps::dynamic_shared(), matrix};
        int seen = 0;
        for (const ps::tile t : pipe) {
            if (seen++ == pass) {
                if (Pipe::scope::lane() == 0) {
                    out[pass] = t.row<float>(0)[0];
                }
                break;
            }
        }
    }
}

/// Counts the visits of each row. With `Leave` the even scopes take one tile at most and leave.
template <class Pipe, bool Leave>
__global__ void count_rows(ps::matrix_ref<const float> matrix, unsigned* visits, ps::tile_counter* counter) {
    Pipe pipe = pipe_over<Pipe>(matrix, counter);
    const std::uint32_t scope = blockIdx.x * Pipe::scope::number_per_block() + Pipe::scope::number_in_block();
    for (const ps::tile t : pipe) {
        if (Pipe::scope::lane() == 0) {
            atomicAdd(visits + t.first_row, 1u);
        }
        if (Leave && scope % 2 == 0) {
            break;
        }
    }
}

template <class T>
std::vector<T> random_elements(std::size_t count, std::mt19937& random) {
    std::vector<T> values(count);
    for (T& v : values) {
        const std::uint64_t bits = (static_cast<std::uint64_t>(random()) << 32 | random()) & 0x3f3f3f3f3f3f3f3full;  // no NaN
        std::memcpy(static_cast<void*>(&v), &bits, sizeof v);
    }
    return values;
}

template <class Pipe, class T>
void check_copy(std::uint32_t rows, std::uint32_t cols, std::size_t shift, place_of_test where, unsigned blocks, std::mt19937& random) {
    CAPTURE(rows);
    CAPTURE(cols);
    CAPTURE(shift);
    CAPTURE(blocks);
    const std::vector<T> values = random_elements<T>(std::size_t{rows} * cols, random);
    std::vector<T> padded(shift);
    padded.insert(padded.end(), values.begin(), values.end());
    const guarded<T> matrix(padded, where);
    guarded<T> out(values.size());
    guarded<unsigned> visits(std::vector<unsigned>(values.size(), 0u));
    guarded<ps::tile_counter> counter(std::vector<ps::tile_counter>(1));
    ps::launch(copy_by_tiles<Pipe, T>, blocks, 128, Pipe::template shared_bytes<128>, nullptr,
               ps::matrix_ref<const T>{matrix.data() + shift, rows, cols}, out.data(), visits.data(), counter.data());
    const std::vector<T> got = out.get();
    CHECK(counter.get()[0].state == 0);
    CHECK(std::memcmp(static_cast<const void*>(got.data()), static_cast<const void*>(values.data()), values.size() * sizeof(T)) == 0);
    CHECK(visits.get() == std::vector<unsigned>(values.size(), 1u));
    CHECK(out.guards_hold());
}

template <class Pipe>
void check_shapes() {
    std::mt19937 random(1);
    const auto where = Pipe::memory::host_accessible ? place_of_test::pinned : place_of_test::device;
    for (const unsigned blocks : {1u, 3u, 200u}) {
        check_copy<Pipe, float>(64, 256, 0, where, blocks, random);  // whole rows
        check_copy<Pipe, float>(37, 41, 0, where, blocks, random);   // rows that 16 does not divide
        check_copy<Pipe, float>(37, 41, 3, where, blocks, random);   // from any address
        check_copy<Pipe, float>(3, 5000, 0, where, blocks, random);  // rows longer than a tile
        check_copy<Pipe, float>(5, 4999, 1, where, blocks, random);  // and ragged
        check_copy<Pipe, float>(1, 1, 2, where, blocks, random);     // less than 16 bytes
        check_copy<Pipe, unsigned char>(100, 7, 5, where, blocks, random);
        check_copy<Pipe, unsigned char>(3, 9001, 1, where, blocks, random);
        check_copy<Pipe, __nv_bfloat16>(333, 100, 0, where, blocks, random);
        check_copy<Pipe, double>(20, 512, 1, where, blocks, random);
        check_copy<Pipe, float>(1000, 64, 0, where, blocks, random);  // many laps of the ring
    }
}

}  // namespace

TEST_CASE("every element of every shape comes once: a ring a warp") {
    check_shapes<ps::tile_pipeline<ps::memory::device, ps::chunking::fixed<2_KiB>, ps::prefetch::depth<2>, ps::scope::warp>>();
    check_shapes<ps::tile_pipeline<ps::chunking::fixed<1_KiB>, ps::prefetch::depth<3>, ps::scheduler::round_robin>>();
    check_shapes<ps::tile_pipeline<ps::chunking::fixed<128_B>, ps::prefetch::none>>();
}

TEST_CASE("every element of every shape comes once: a ring a block") {
    check_shapes<ps::tile_pipeline<ps::chunking::fixed<8_KiB>, ps::prefetch::depth<4>, ps::scope::block>>();
    check_shapes<ps::tile_pipeline<ps::chunking::fixed<2_KiB>, ps::prefetch::none, ps::scope::block, ps::scheduler::round_robin>>();
}

TEST_CASE("the same from pinned host memory") {
    check_shapes<ps::tile_pipeline<ps::memory::pinned, ps::chunking::fixed<2_KiB>, ps::prefetch::depth<4>>>();
    check_shapes<ps::tile_pipeline<ps::memory::pinned, ps::chunking::fixed<4_KiB>, ps::scope::block>>();
}

TEST_CASE("every element of every shape comes once: tiles are claimed") {
    check_shapes<ps::tile_pipeline<ps::chunking::fixed<1_KiB>, ps::prefetch::depth<3>, ps::scheduler::first_come<>>>();
    check_shapes<ps::tile_pipeline<ps::chunking::fixed<256_B>, ps::prefetch::depth<3>, ps::scheduler::first_come<4>>>();
    check_shapes<ps::tile_pipeline<ps::chunking::fixed<2_KiB>, ps::prefetch::none, ps::scope::block, ps::scheduler::first_come<2>>>();
}

TEST_CASE("every element of every shape comes once: copies by lanes, and bytes that leave the cache first") {
    check_shapes<ps::tile_pipeline<ps::chunking::fixed<1_KiB>, ps::prefetch::depth<3>, ps::copies::by_lane>>();
    check_shapes<ps::tile_pipeline<ps::chunking::fixed<2_KiB>, ps::prefetch::depth<3>, ps::copies::by_lane, ps::scope::block,
                                   ps::scheduler::first_come<2>, ps::caching::once>>();
    check_shapes<ps::tile_pipeline<ps::chunking::fixed<1_KiB>, ps::prefetch::depth<4>, ps::caching::once>>();
}

TEST_CASE("a counter serves launch after launch, and the replays of a graph") {
    using pipe = ps::tile_pipeline<ps::chunking::fixed<256_B>, ps::prefetch::depth<3>, ps::scheduler::first_come<2>>;
    const std::uint32_t rows = 20000;
    const std::uint32_t cols = 64;  // 10000 claims
    std::mt19937 random(2);
    const std::vector<float> values = random_elements<float>(std::size_t{rows} * cols, random);
    const guarded<float> matrix(values);
    guarded<float> out(values.size());
    guarded<unsigned> visits(std::vector<unsigned>(values.size(), 0u));
    guarded<ps::tile_counter> counter(std::vector<ps::tile_counter>(1));
    ps::stream stream;
    const auto enqueue = [&](unsigned blocks) {
        ps::launch(copy_by_tiles<pipe, float>, blocks, 128, pipe::shared_bytes<128>, stream.get(),
                   ps::matrix_ref<const float>{matrix.data(), rows, cols}, out.data(), visits.data(), counter.data());
    };
    unsigned launches = 0;
    for (const unsigned blocks : {1u, 7u, 300u, 2000u, 20000u}) {  // in the last there is not a tile for each scope
        enqueue(blocks);
        ++launches;
    }
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    ps::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue(64);
    enqueue(528);
    ps::check(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
    ps::check(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
    for (int replay = 0; replay < 10; ++replay) {
        ps::check(cudaGraphLaunch(ready, stream.get()), "cudaGraphLaunch");
        launches += 2;
    }
    stream.synchronize();
    ps::check(cudaGraphExecDestroy(ready), "cudaGraphExecDestroy");
    ps::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    CHECK(visits.get() == std::vector<unsigned>(values.size(), launches));
    CHECK(out.get() == values);
    CHECK(counter.get()[0].state == 0);
}

TEST_CASE("scopes that leave early end the pass: no tile comes twice, and the counter is as before") {
    using by_warp = ps::tile_pipeline<ps::chunking::fixed<256_B>, ps::prefetch::depth<2>, ps::scheduler::first_come<3>>;
    using by_block = ps::tile_pipeline<ps::chunking::fixed<256_B>, ps::prefetch::depth<4>, ps::scheduler::first_come<1>, ps::scope::block>;
    const std::uint32_t rows = 5000;
    const std::vector<float> values(std::size_t{rows} * 64, 1.0f);  // a row a tile
    const guarded<float> matrix(values);
    guarded<unsigned> visits(rows);
    guarded<ps::tile_counter> counter(std::vector<ps::tile_counter>(1));
    for (const std::uint32_t of_rows : {rows, 1000u, 40u, 3u}) {
        const ps::matrix_ref<const float> some{matrix.data(), of_rows, 64};
        const auto check_visits = [&] {
            const std::vector<unsigned> got = visits.get();
            CHECK(std::all_of(got.begin(), got.begin() + of_rows, [](unsigned n) { return n <= 1; }));
            CHECK(std::all_of(got.begin() + of_rows, got.end(), [](unsigned n) { return n == 0; }));
            CHECK(got[0] == 1);  // the first of the first scope
            CHECK(counter.get()[0].state == 0);
            visits.set(std::vector<unsigned>(rows));
        };
        visits.set(std::vector<unsigned>(rows));
        for (int repeat = 0; repeat < 5; ++repeat) {
            ps::launch(count_rows<by_warp, true>, 24, 128, by_warp::shared_bytes<128>, nullptr, some, visits.data(), counter.data());
            check_visits();
            ps::launch(count_rows<by_block, true>, 50, 64, by_block::shared_bytes<64>, nullptr, some, visits.data(), counter.data());
            check_visits();
        }
        ps::launch(count_rows<by_block, true>, 1, 64, by_block::shared_bytes<64>, nullptr, some, visits.data(), counter.data());
        check_visits();  // all leave
        ps::launch(count_rows<by_warp, false>, 24, 128, by_warp::shared_bytes<128>, nullptr, some, visits.data(), counter.data());
        CHECK(visits.get() == [&] {  // and the next launch sees every tile
            std::vector<unsigned> all(rows);
            std::fill_n(all.begin(), of_rows, 1u);
            return all;
        }());
        CHECK(counter.get()[0].state == 0);
    }
}

TEST_CASE("an empty matrix has no tiles") {
    using pipe = ps::tile_pipeline<>;
    guarded<float> out(1);
    ps::launch(copy_by_tiles<pipe, float>, 2, 64, pipe::shared_bytes<64>, nullptr, ps::matrix_ref<const float>{}, out.data(), nullptr,
               nullptr);
    ps::launch(copy_by_tiles<pipe, float>, 2, 64, pipe::shared_bytes<64>, nullptr, ps::matrix_ref<const float>{nullptr, 5, 0}, out.data(),
               nullptr, nullptr);
    CHECK(is_poison(out.get()[0]));
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("a loop may be left early: the pipeline drains and its memory can be used again") {
    std::vector<float> values(64 * 256);
    for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(i);
    }
    const guarded<float> matrix(values);
    guarded<float> out(3);
    using by_warp = ps::tile_pipeline<ps::chunking::fixed<1_KiB>, ps::prefetch::depth<4>>;
    ps::launch(leave_early<by_warp>, 1, 32, by_warp::shared_bytes<32>, nullptr, ps::matrix_ref<const float>{matrix.data(), 64, 256},
               out.data());
    CHECK(out.get() == std::vector<float>{0, 256, 512});
    out.poison();
    using by_block = ps::tile_pipeline<ps::chunking::fixed<2_KiB>, ps::prefetch::depth<3>, ps::scope::block>;
    ps::launch(leave_early<by_block>, 1, 256, by_block::shared_bytes<256>, nullptr, ps::matrix_ref<const float>{matrix.data(), 64, 256},
               out.data());
    CHECK(out.get() == std::vector<float>{0, 512, 1024});
}

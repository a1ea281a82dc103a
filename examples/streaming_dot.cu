// A kernel of your own on a tile pipeline: y = W x for a matrix W that is larger than any shared memory, read where it lies. Device memory
// first, then pinned host memory: only the policies change. Each warp takes the tiles it has room for (no warp has work left when others
// have none), 4 KiB at a time with three more on the way, and keeps x in registers.

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/event.hpp>
#include <penstock/cuda/launch.cuh>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/tile_pipeline.cuh>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace ps = penstock;
using namespace ps::literals;

constexpr std::uint32_t rows = 65536;
constexpr std::uint32_t cols = 1024;  // a row is a tile
constexpr unsigned threads = 256;

template <class Memory>
using pipe_t = ps::tile_pipeline<Memory, ps::chunking::fixed<4_KiB>, ps::prefetch::depth<4>, ps::scheduler::first_come<4>>;

template <class Pipe>
__global__ void dot(ps::matrix_ref<const float> w, const float* x, float* y, ps::tile_counter* counter) {
    Pipe pipe{ps::dynamic_shared(), w, counter};  // the first tiles are on their way
    const unsigned lane = threadIdx.x % 32;
    float4 mine[cols / 128];
    for (unsigned i = 0; i < cols / 128; ++i) {
        mine[i] = reinterpret_cast<const float4*>(x)[i * 32 + lane];
    }
    for (const ps::tile tile : pipe) {
        const auto* row = reinterpret_cast<const float4*>(tile.row<float>(0));
        float sum = 0;
        for (unsigned i = 0; i < cols / 128; ++i) {
            const float4 v = row[i * 32 + lane];
            sum += v.x * mine[i].x + v.y * mine[i].y + v.z * mine[i].z + v.w * mine[i].w;
        }
        for (int distance = 16; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (lane == 0) {
            y[tile.first_row] = sum;
        }
    }
}

template <class Memory>
bool run(const char* name, const std::vector<float>& w, const std::vector<float>& x) {
    ps::stream stream;
    ps::buffer<float, Memory> matrix(w.size());
    ps::buffer<float, ps::memory::device> vector(cols), out(rows);
    ps::buffer<ps::tile_counter, ps::memory::device> counter(1);  // zero at first; kernels leave it so
    ps::check(cudaMemcpy(matrix.data(), w.data(), w.size() * sizeof(float), cudaMemcpyDefault), "copy of the matrix");
    ps::check(cudaMemcpy(vector.data(), x.data(), cols * sizeof(float), cudaMemcpyDefault), "copy of the vector");
    ps::check(cudaMemset(counter.data(), 0, sizeof(ps::tile_counter)), "zeros for the counter");
    int multiprocessors = 0;
    ps::check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
    ps::timed_event begin, end;
    float best = HUGE_VALF;
    for (int repeat = 0; repeat < 5; ++repeat) {
        begin.record(stream.get());
        ps::launch(dot<pipe_t<Memory>>, multiprocessors, threads, pipe_t<Memory>::template shared_bytes<threads>, stream.get(),
                   ps::matrix_ref<const float>{matrix.data(), rows, cols}, vector.data(), out.data(), counter.data());
        end.record(stream.get());
        stream.synchronize();
        best = std::fmin(best, end.milliseconds_since(begin));
    }
    std::vector<float> got(rows);
    ps::check(cudaMemcpy(got.data(), out.data(), rows * sizeof(float), cudaMemcpyDefault), "copy of the result");
    double error = 0, size = 0;  // of the result in double
    for (std::size_t r = 0; r < rows; ++r) {
        double sum = 0;
        for (std::size_t c = 0; c < cols; ++c) {
            sum += static_cast<double>(w[r * cols + c]) * x[c];
        }
        error += (got[r] - sum) * (got[r] - sum);
        size += sum * sum;
    }
    std::printf("%-7s %zu bytes in %.3f ms: %.1f GB/s, relative error %.1e\n", name, w.size() * sizeof(float), best,
                static_cast<double>(w.size() * sizeof(float)) / best / 1e6, std::sqrt(error / size));
    return std::sqrt(error / size) < 1e-6;
}

int main() {
    if (ps::device_count() == 0) {
        std::puts("streaming_dot: there is no GPU here to run a kernel on, so there is nothing to show");
        return 0;
    }
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float> w(std::size_t{rows} * cols), x(cols);
    std::generate(w.begin(), w.end(), [&] { return uniform(random); });
    std::generate(x.begin(), x.end(), [&] { return uniform(random); });
    return run<ps::memory::device>("device", w, x) && run<ps::memory::pinned>("pinned", w, x) ? 0 : 1;
}

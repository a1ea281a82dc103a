// A kernel of your own on a tile pipeline: the norm of each row of a matrix, read where it lies. Device memory first, then pinned host
// memory: only the policy changes. A warp takes tiles of whole rows while its next tiles are on the way.

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/launch.cuh>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/tile_pipeline.cuh>

#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

namespace ps = penstock;
using namespace ps::literals;

template <class Memory>
using pipe_t = ps::tile_pipeline<Memory, ps::chunking::fixed<4_KiB>, ps::prefetch::depth<4>, ps::scope::warp>;

template <class Pipe>
__global__ void norms(ps::matrix_ref<const float> matrix, float* out) {
    Pipe pipe{ps::dynamic_shared(), matrix};
    for (const ps::tile tile : pipe) {
        for (std::uint32_t r = 0; r < tile.rows; ++r) {
            const float* row = tile.row<float>(r);
            float sum = 0;
            for (std::uint32_t c = threadIdx.x % 32; c < tile.cols; c += 32) {
                sum += row[c] * row[c];
            }
            for (int distance = 16; distance > 0; distance /= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            }
            if (threadIdx.x % 32 == 0) {
                out[tile.first_row + r] = sqrtf(sum);
            }
        }
    }
}

template <class Memory>
bool run(const char* name, const std::vector<float>& values, std::uint32_t rows, std::uint32_t cols) {
    using pipe = pipe_t<Memory>;
    ps::stream stream;
    ps::buffer<float, Memory> matrix(values.size());
    ps::buffer<float, ps::memory::device> out(rows);
    std::vector<float> got(rows);
    ps::check(cudaMemcpy(matrix.data(), values.data(), values.size() * sizeof(float), cudaMemcpyDefault), "copy of the matrix");
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    ps::check(cudaEventCreate(&begin), "cudaEventCreate");
    ps::check(cudaEventCreate(&end), "cudaEventCreate");
    float best = HUGE_VALF;
    for (int repeat = 0; repeat < 5; ++repeat) {
        float milliseconds = 0;
        ps::check(cudaEventRecord(begin, stream.get()), "cudaEventRecord");
        ps::launch(norms<pipe>, 264, 128, pipe::template shared_bytes<128>, stream.get(),
                   ps::matrix_ref<const float>{matrix.data(), rows, cols}, out.data());
        ps::check(cudaEventRecord(end, stream.get()), "cudaEventRecord");
        stream.synchronize();
        ps::check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
        best = std::fmin(best, milliseconds);
    }
    ps::check(cudaEventDestroy(begin), "cudaEventDestroy");
    ps::check(cudaEventDestroy(end), "cudaEventDestroy");
    ps::check(cudaMemcpy(got.data(), out.data(), rows * sizeof(float), cudaMemcpyDefault), "copy of the norms");
    double worst = 0;
    for (std::size_t r = 0; r < rows; ++r) {
        double sum = 0;
        for (std::size_t c = 0; c < cols; ++c) {
            sum += static_cast<double>(values[r * cols + c]) * values[r * cols + c];
        }
        worst = std::fmax(worst, std::fabs(got[r] - std::sqrt(sum)) / std::sqrt(sum));
    }
    const double moved = static_cast<double>(values.size() * sizeof(float));
    std::printf("%-7s %.0f bytes in %.3f ms: %.1f GB/s, largest relative error %.1e\n", name, moved, best, moved / best / 1e6, worst);
    return worst < 1e-5;
}

int main() try {
    if (ps::device_count() == 0) {
        std::puts("own_kernel: there is no GPU here to run a kernel on, so there is nothing to show");
        return 0;
    }
    constexpr std::uint32_t rows = 65536;
    constexpr std::uint32_t cols = 1000;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> values(std::size_t{rows} * cols);
    for (float& v : values) {
        v = normal(random);
    }
    const bool device = run<ps::memory::device>("device", values, rows, cols);
    const bool pinned = run<ps::memory::pinned>("pinned", values, rows, cols);
    return device && pinned ? 0 : 1;
} catch (const std::exception& e) {
    std::fprintf(stderr, "own_kernel: %s\n", e.what());
    return 1;
}

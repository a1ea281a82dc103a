#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/launch.cuh>
#include <penstock/cuda/stream.hpp>
#include <penstock/model/tensor.hpp>

namespace {

__global__ void fill(penstock::matrix_ref<float> out) {
    const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < out.rows * out.cols) {
        out.data[i] = static_cast<float>(penstock::round_up(i, 4));
    }
}

}  // namespace

long standard_of_the_cu_file() { return __cplusplus; }

bool compute_on_the_gpu() {
    penstock::stream stream{0};
    penstock::buffer<float, penstock::memory::pinned> numbers{1000};
    penstock::launch(fill, 4, 256, 0, stream.get(), penstock::matrix_ref<float>{numbers.data(), 10, 100});
    stream.synchronize();
    return numbers.data()[997] == 1000.0f;
}

/// The kernels of moe_stream's own: plain reads for the ceilings, and the step between two layers.

#include "ceilings.hpp"

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/event.hpp>
#include <penstock/cuda/stream.hpp>

namespace {

namespace ps = penstock;

/// Reads `count` 16-byte words and writes only if they sum to what they never do.
__global__ void read_all(const uint4* words, std::size_t count, unsigned* sink) {
    unsigned sum = 0;
    const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
    std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        const uint4 a = words[i], b = words[i + stride], c = words[i + 2 * stride], d = words[i + 3 * stride];
        sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < count; i += stride) {
        sum += words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
    }
    if (sum == 0x12345678u) {
        *sink = sum;
    }
}

__global__ void residual_norm(float* h, const float* addend, float* x, std::uint32_t hidden) {
    __shared__ float sums[32];
    h += std::size_t{blockIdx.x} * hidden;
    x += std::size_t{blockIdx.x} * hidden;
    float squares = 0;
    for (std::uint32_t i = threadIdx.x; i < hidden; i += blockDim.x) {
        const float v = h[i] + (addend != nullptr ? addend[std::size_t{blockIdx.x} * hidden + i] : 0);
        h[i] = v;
        squares += v * v;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        squares += __shfl_xor_sync(~0u, squares, offset);
    }
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = squares;
    }
    __syncthreads();
    float total = 0;
    for (unsigned w = 0; w < blockDim.x / 32; ++w) {
        total += sums[w];
    }
    const float scale = rsqrtf(total / static_cast<float>(hidden) + 1e-6f);
    for (std::uint32_t i = threadIdx.x; i < hidden; i += blockDim.x) {
        x[i] = h[i] * scale;
    }
}

/// Best of seven, in GB/s of `bytes`, on the device's clock.
template <class F>
double best_rate(cudaStream_t stream, std::size_t bytes, F enqueue) {
    ps::timed_event start, stop;
    double best = 0;
    for (int i = 0; i < 7; ++i) {
        start.record(stream);
        enqueue();
        stop.record(stream);
        stop.synchronize();
        best = std::max(best, static_cast<double>(bytes) / stop.milliseconds_since(start) / 1e6);
    }
    return best;
}

}  // namespace

namespace example {

ceilings measure_device_ceilings(int device) {
    const ps::device_guard here(device);
    cudaDeviceProp properties{};
    ps::check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    constexpr std::size_t host_bytes = std::size_t{512} << 20;
    constexpr std::size_t device_bytes = std::size_t{2} << 30;
    ps::buffer<std::byte, ps::memory::pinned> host(host_bytes);
    ps::buffer<std::byte, ps::memory::device> there(device_bytes);
    ps::buffer<unsigned, ps::memory::device> sink(1);
    std::memset(host.data(), 0x5a, host_bytes);
    const ps::stream stream;
    ps::check(cudaMemsetAsync(there.data(), 0x5a, device_bytes, stream.get()), "cudaMemsetAsync");
    const auto read = [&](const std::byte* from, std::size_t bytes) {
        read_all<<<properties.multiProcessorCount * 8, 256, 0, stream.get()>>>(reinterpret_cast<const uint4*>(from), bytes / 16,
                                                                               sink.data());
        ps::check(cudaGetLastError(), "a ceiling's kernel");
    };
    ceilings c;
    c.link = best_rate(stream.get(), host_bytes, [&] {
        ps::check(cudaMemcpyAsync(there.data(), host.data(), host_bytes, cudaMemcpyHostToDevice, stream.get()), "cudaMemcpyAsync");
    });
    c.zero_copy = best_rate(stream.get(), host_bytes, [&] { read(host.data(), host_bytes); });
    c.read = best_rate(stream.get(), device_bytes, [&] { read(there.data(), device_bytes); });
    c.machine = properties.name;
    c.link_name = "H2D copy, pinned";
    c.read_name = "HBM read";
    return c;
}

void residual_norm_on_device(float* h, const float* addend, float* x, std::uint32_t tokens, std::uint32_t hidden, cudaStream_t stream) {
    if (tokens > 0) {
        residual_norm<<<tokens, 256, 0, stream>>>(h, addend, x, hidden);
        ps::check(cudaGetLastError(), "residual_norm");
    }
}

}  // namespace example

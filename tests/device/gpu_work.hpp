#pragma once

#include "../known_bytes.hpp"

#include <penstock/cuda/launch.cuh>
#include <penstock/error.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// Work that keeps a stream busy, and bytes of a device, for tests of copies.
namespace tests {

static __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

/// Blocks `stream` for about `milliseconds` (at 2 GHz).
inline void keep_busy(cudaStream_t stream, int milliseconds) {
    penstock::launch(spin, 1, 1, 0, stream, static_cast<long long>(milliseconds) * 2'000'000);
}

inline std::vector<std::byte> from_device(const std::byte* data, std::size_t size) {
    std::vector<std::byte> host(size);
    penstock::check(cudaMemcpy(host.data(), data, size, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
}

}  // namespace tests

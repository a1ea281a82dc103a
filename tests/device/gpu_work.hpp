#pragma once

#include <penstock/cuda/launch.cuh>
#include <penstock/error.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// Work that keeps a stream busy, and bytes by formula, for tests of copies.
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

inline std::byte pattern(std::uint64_t which, std::uint64_t offset) {
    std::uint64_t x = (which + 1) * 0x9e3779b97f4a7c15u + offset;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return static_cast<std::byte>(x >> 56);
}

inline void fill(std::span<std::byte> to, std::uint64_t which, std::uint64_t offset = 0) {
    for (std::size_t i = 0; i < to.size(); ++i) {
        to[i] = pattern(which, offset + i);
    }
}

inline std::vector<std::byte> from_device(const std::byte* data, std::size_t size) {
    std::vector<std::byte> host(size);
    penstock::check(cudaMemcpy(host.data(), data, size, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
}

inline bool holds(std::span<const std::byte> data, std::uint64_t which, std::uint64_t offset = 0) {
    for (std::size_t i = 0; i < data.size(); ++i) {
        if (data[i] != pattern(which, offset + i)) {
            return false;
        }
    }
    return true;
}

}  // namespace tests

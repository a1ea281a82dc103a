#pragma once

#include <penstock/config.hpp>

#include <cuda_runtime_api.h>

namespace penstock::inline v0_1 {

/// Where bytes go: host memory, or a GPU's memory in the order of one of its streams.
struct place {
    int device = -1;                ///< negative: host memory
    cudaStream_t stream = nullptr;  ///< copies to the device are enqueued here

    [[nodiscard]] constexpr bool on_host() const noexcept { return device < 0; }
};

[[nodiscard]] constexpr place on_host() noexcept { return {}; }
[[nodiscard]] constexpr place on_device(int device, cudaStream_t stream = nullptr) noexcept { return {device, stream}; }

}  // namespace penstock::inline v0_1

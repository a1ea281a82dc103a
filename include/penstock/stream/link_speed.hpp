#pragma once

#include <penstock/buffer/arena.hpp>
#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/device.hpp>
#include <penstock/cuda/event.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/units.hpp>

#include <cstdint>

namespace penstock::inline v0_1 {

/// What the link to a GPU carries, in GB/s (1e9 bytes): the best of `copies` copies of `size` bytes from pinned host memory near it, by the
/// device's clock. What loads are held against. Takes that much host and device memory while it runs, and synchronises.
/// @throws configuration_error for a device that is not there; out_of_memory; cuda_error
[[nodiscard]] inline double link_gb_per_s(int device, bytes size = {std::uint64_t{256} << 20}, int copies = 5) {
    require_device(device, "link_gb_per_s");
    const device_guard on(device);
    const arena from(size, {.device = device});
    buffer<std::byte, memory::device> to(size);
    const stream way(device);
    timed_event begin, end;
    double best = 0;
    for (int i = 0; i < copies; ++i) {
        begin.record(way.get());
        check(cudaMemcpyAsync(to.data(), from.data(), size, cudaMemcpyHostToDevice, way.get()), "cudaMemcpyAsync");
        end.record(way.get());
        end.synchronize();
        best = larger(best, static_cast<double>(size.count) / static_cast<double>(end.milliseconds_since(begin)) / 1e6);
    }
    return best;
}

}  // namespace penstock::inline v0_1

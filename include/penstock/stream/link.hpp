#pragma once

#include <penstock/cuda/event.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/stream/place.hpp>

#include <cstdint>

namespace penstock::inline v0_1::detail {

/// The way from host memory to a device: what a weight stream asks of CUDA. A test puts a slow one of its own in its place.
struct cuda_link {
    using guard = device_guard;  ///< makes a device current for the calling thread
    using marker = event;        ///< stands for a copy that may still run

    /// Enqueues a copy on the place's stream.
    static void copy(const place& where, std::byte* to, const std::byte* from, std::uint64_t size) {
        check(cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, where.stream), "cudaMemcpyAsync");
    }

    /// Returns when all that is enqueued on the place's stream is done.
    static void finish(const place& where) { check(cudaStreamSynchronize(where.stream), "cudaStreamSynchronize"); }
};

}  // namespace penstock::inline v0_1::detail

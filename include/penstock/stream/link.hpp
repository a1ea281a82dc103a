#pragma once

#include <penstock/cuda/event.hpp>
#include <penstock/stream/device_clock.hpp>
#include <penstock/stream/place.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace penstock::inline v0_1::detail {

/// Bytes that are copied as one.
struct copy_range {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::uint64_t bytes = 0;
};

/// The way from host memory to a device: what a weight stream asks of CUDA. A test puts a slow one of its own in its place.
struct cuda_link {
    using guard = device_guard;  ///< makes a device current for the calling thread
    using marker = event;        ///< stands for a copy that may still run

    /// For a timeline. @pre the place's device is current
    static std::unique_ptr<copy_clock> clock(const place& where) { return std::make_unique<device_clock>(where); }

    /// Enqueues a copy on the place's stream.
    static void copy(const place& where, std::byte* to, const std::byte* from, std::uint64_t size) {
        check(cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, where.stream), "cudaMemcpyAsync");
    }

    /// Enqueues several in one call, which saves most of what each costs by itself: of 8 MiB each, 2 % of the link. Small ones and others go
    /// apart, since a call that has both waits for its copies. Default streams take no such call.
    static void copy(const place& where, std::span<const copy_range> ranges) {
        const auto small = [](const copy_range& r) { return r.bytes < (std::uint64_t{256} << 10); };
        const bool one_by_one = where.stream == nullptr || where.stream == cudaStreamLegacy || where.stream == cudaStreamPerThread;
        for (const bool of_small : {true, false}) {
            std::vector<void*> to;
            std::vector<const void*> from;
            std::vector<std::size_t> sizes;
            for (const copy_range& r : ranges) {
                if (small(r) == of_small) {
                    to.push_back(r.to);
                    from.push_back(r.from);
                    sizes.push_back(r.bytes);
                }
            }
            if (one_by_one || sizes.size() == 1) {
                for (std::size_t i = 0; i < sizes.size(); ++i) {
                    check(cudaMemcpyAsync(to[i], from[i], sizes[i], cudaMemcpyHostToDevice, where.stream), "cudaMemcpyAsync");
                }
            } else if (!sizes.empty()) {
                cudaMemcpyAttributes how{};
                how.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
                std::size_t from_the_first = 0;
                check(cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), sizes.size(), &how, &from_the_first, 1, where.stream),
                      "cudaMemcpyBatchAsync");
            }
        }
    }

    /// Returns when all that is enqueued on the place's stream is done.
    static void finish(const place& where) { check(cudaStreamSynchronize(where.stream), "cudaStreamSynchronize"); }
};

}  // namespace penstock::inline v0_1::detail

#pragma once

#include <penstock/buffer/host_cores.hpp>
#include <penstock/stream/place.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

/// What the machine can do, measured in this very run: the figures that every other one is held against. GB = 1e9 bytes.
namespace example {

namespace ps = penstock;

struct ceilings {
    double link = 0;       ///< GB/s from the host tier to the compute tier: H2D copy of pinned memory, or memcpy on the host executor
    double zero_copy = 0;  ///< GB/s of a kernel that reads mapped host memory; 0 on the host executor
    double read = 0;       ///< GB/s of a plain read of the compute tier's memory: HBM, or host memory by all threads
    std::string machine;
    std::string link_name = "memcpy", read_name = "host memory read";
};

inline double seconds_of(const std::function<void()>& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Best of five, each thread on its own part of 256 MiB a thread that was filled before.
inline ceilings measure_host_ceilings() {
    const unsigned threads = ps::usable_cores();
    constexpr std::size_t part = std::size_t{256} << 20;
    std::vector<std::vector<std::uint64_t>> from(threads), to(threads);
    std::vector<std::uint64_t> sums(threads);
    const auto on_all = [&](const std::function<void(unsigned)>& f) {
        std::vector<std::jthread> team;
        for (unsigned t = 0; t < threads; ++t) {
            team.emplace_back([&, t] { f(t); });
        }
    };
    on_all([&](unsigned t) {
        from[t].assign(part / 8, t + 1);
        to[t].assign(part / 8, 0);
    });
    double copy = 1e9;
    double read = 1e9;
    for (int i = 0; i < 5; ++i) {
        copy = std::min(copy, seconds_of([&] { on_all([&](unsigned t) { std::memcpy(to[t].data(), from[t].data(), part); }); }));
        read = std::min(read, seconds_of([&] {
                            on_all([&](unsigned t) {
                                std::uint64_t sum[8] = {};
                                for (std::size_t w = 0; w < from[t].size(); w += 8) {
                                    for (std::size_t lane = 0; lane < 8; ++lane) {
                                        sum[lane] += from[t][w + lane];
                                    }
                                }
                                sums[t] = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
                            });
                        }));
    }
    const double bytes = static_cast<double>(part) * threads;
    const bool kept = std::ranges::any_of(sums, [](std::uint64_t s) { return s != 0; });  // the reads cannot be optimised away
    return {.link = bytes / copy / 1e9, .read = kept ? bytes / read / 1e9 : 0, .machine = std::to_string(threads) + " host threads"};
}

/// Best of seven, on the device's clock. Defined in device_side.cu.
ceilings measure_device_ceilings(int device);

inline ceilings measure_ceilings(ps::place at) {
#ifdef PENSTOCK_EXAMPLE_HAS_CUDA
    if (!at.on_host()) {
        return measure_device_ceilings(at.device);
    }
#endif
    static_cast<void>(at);
    return measure_host_ceilings();
}

/// h += addend (where there is one), x = h / rms(h): what stands between two MoE layers here, in place of attention. [tokens, hidden]
void residual_norm_on_device(float* h, const float* addend, float* x, std::uint32_t tokens, std::uint32_t hidden, cudaStream_t stream);

inline void residual_norm_on_host(float* h, const float* addend, float* x, std::uint32_t tokens, std::uint32_t hidden) {
    for (std::uint32_t t = 0; t < tokens; ++t, h += hidden, x += hidden) {
        double squares = 0;
        for (std::uint32_t i = 0; i < hidden; ++i) {
            h[i] += addend != nullptr ? addend[std::size_t{t} * hidden + i] : 0;
            squares += double{h[i]} * h[i];
        }
        const auto scale = static_cast<float>(1 / std::sqrt(squares / hidden + 1e-6));
        for (std::uint32_t i = 0; i < hidden; ++i) {
            x[i] = h[i] * scale;
        }
    }
}

}  // namespace example

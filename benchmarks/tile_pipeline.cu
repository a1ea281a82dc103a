// A dot product over weights that are read once, y = W x, through tile pipelines of many kinds, against the fastest plain read of as many
// bytes in the same run: 1 GiB and 350 MB in device memory, 256 MiB in pinned host memory. A row of W is 512 floats. Figures are medians over
// replays of CUDA graphs (with the median deviation from it) that go through disjoint matrices, so that no weights are found in the L2 cache; candidates and reads take turns.
// Every candidate's result is compared with one in double.
//
// Orders: "runs" are neighbours a scope (fifo), "cards" neighbours over the scopes (round_robin), "claimed<N>" N at a time by who has room
// (first_come); "8 grids" are eight times as many blocks as are resident, each with an eighth of the work. KiB/SM is the shared memory that
// the rings of a multiprocessor take, about the bytes in flight. Usage: benchmark_tile_pipeline [--json FILE]

#include "load/measure.hpp"
#include "replay.hpp"

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/launch.cuh>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/tile_pipeline.cuh>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ps = penstock;
using namespace ps::literals;

namespace {

constexpr std::uint32_t cols = 512;
constexpr std::uint64_t row_bytes = cols * sizeof(float);
constexpr unsigned most_threads = 384;

__global__ void fill(std::uint32_t* words, std::uint64_t count, std::uint64_t seed) {
    for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count; i += std::uint64_t{gridDim.x} * blockDim.x) {
        std::uint64_t n = (i + seed) * 0x9e3779b97f4a7c15ull;
        n = (n ^ n >> 30) * 0xbf58476d1ce4e5b9ull;
        n = (n ^ n >> 27) * 0x94d049bb133111ebull;
        words[i] = __float_as_uint(static_cast<float>(n >> 40) / 8388608.0f - 1.0f);
    }
}

/// A block a row, in double.
__global__ void exact_dot(const float* w, const float* x, double* y) {
    const float* row = w + blockIdx.x * std::uint64_t{cols};
    double sum = 0;
    for (std::uint32_t c = threadIdx.x; c < cols; c += 32) {
        sum += static_cast<double>(row[c]) * x[c];
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (threadIdx.x == 0) {
        y[blockIdx.x] = sum;
    }
}

// ---- plain reads

enum class spread {
    far,     ///< the loads of a thread that are in flight together lie a grid apart
    near,    ///< they lie a block apart, so that a block reads one piece at a time
    ranges,  ///< as near, and each block reads one contiguous range of all
};

template <int Loads, spread Spread>
__global__ void __launch_bounds__(256) plain_read(const uint4* from, std::uint64_t count, std::uint32_t* sink) {
    std::uint32_t sum = 0;
    const std::uint64_t blocks = gridDim.x;
    const std::uint64_t between = Spread == spread::far ? blocks * blockDim.x : blockDim.x;
    const std::uint64_t piece = Loads * std::uint64_t{blockDim.x};
    const std::uint64_t share = (count + blocks * piece - 1) / (blocks * piece) * piece;  // of a block
    const std::uint64_t step = Spread == spread::ranges ? piece : blocks * piece;
    const std::uint64_t from_here = blockIdx.x * (Spread == spread::far ? blockDim.x : Spread == spread::near ? piece : share);
    const std::uint64_t end = Spread == spread::ranges && from_here + share < count ? from_here + share : count;
    std::uint64_t at = from_here + threadIdx.x;
    for (; at < end; at += step) {
        uint4 v[Loads];
#pragma unroll
        for (int i = 0; i < Loads; ++i) {
            v[i] = at + i * between < end ? __ldcs(from + at + i * between) : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int i = 0; i < Loads; ++i) {
            sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
        }
    }
    if (sum == 0x9e3779b9u) {
        *sink = sum;
    }
}

// ---- the candidates

template <class Pipe>
__device__ Pipe pipe_over(ps::matrix_ref<const float> matrix, ps::tile_counter* counter) {
    if constexpr (Pipe::claims) {
        return Pipe{ps::dynamic_shared(), matrix, counter};
    } else {
        return Pipe{ps::dynamic_shared(), matrix};
    }
}

/// A warp takes whole rows: all of its own tile, or every n-th of a block of n warps.
template <class Pipe>
__global__ void __launch_bounds__(most_threads) dot(ps::matrix_ref<const float> w, const float4* x, float* y, ps::tile_counter* counter) {
    static_assert(Pipe::tile_bytes >= row_bytes);
    Pipe pipe = pipe_over<Pipe>(w, counter);
    const std::uint32_t lane = threadIdx.x % 32;
    float4 mine[cols / 128];
#pragma unroll
    for (std::uint32_t i = 0; i < cols / 128; ++i) {
        mine[i] = x[i * 32 + lane];
    }
    const std::uint32_t first = Pipe::scope::lane() / 32;
    const std::uint32_t step = Pipe::scope::lanes() / 32;
    for (const ps::tile tile : pipe) {
        for (std::uint32_t r = first; r < tile.rows; r += step) {
            const auto* row = reinterpret_cast<const float4*>(tile.row<float>(r));
            float sum = 0;
#pragma unroll
            for (std::uint32_t i = 0; i < cols / 128; ++i) {
                const float4 v = row[i * 32 + lane];
                sum += v.x * mine[i].x + v.y * mine[i].y + v.z * mine[i].z + v.w * mine[i].w;
            }
            for (int distance = 16; distance > 0; distance /= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            }
            if (lane == 0) {
                y[tile.first_row + r] = sum;
            }
        }
    }
}

struct problem {
    const float* matrix;  ///< the first of several, one after another
    std::uint32_t rows;
    std::uint32_t matrices;
    const float* x;
    float* y;
    ps::tile_counter* counter;
    std::uint32_t* sink;

    std::uint64_t bytes() const { return rows * row_bytes; }
    ps::matrix_ref<const float> number(std::uint32_t call) const {
        return {matrix + call % matrices * (bytes() / sizeof(float)), rows, cols};
    }
};

/// What is measured: enqueues the call with that number.
struct contender {
    std::map<std::string, std::string> traits;  ///< order, scope, tile, copies, caching, grid; a plain read has "read" alone
    std::function<void(std::uint32_t call, const problem&, cudaStream_t)> enqueue;
    bool plain = false;
    std::vector<double> us{};
    double error = 0;
    double median = 0;
    double deviation = 0;
};

template <class S>
struct name_of;
template <>
struct name_of<ps::scheduler::fifo> {
    static std::string text() { return "runs"; }
};
template <>
struct name_of<ps::scheduler::round_robin> {
    static std::string text() { return "cards"; }
};
template <std::uint32_t N>
struct name_of<ps::scheduler::first_come<N>> {
    static std::string text() { return "claimed<" + std::to_string(N) + ">"; }
};

int multiprocessors = 0;

/// A grid: threads a block, blocks a multiprocessor, and how many such grids, one after another, share the work.
struct grid {
    unsigned threads;
    unsigned blocks;
    unsigned times = 1;
};

template <class Pipe>
std::size_t shared_bytes_for(unsigned threads) {
    // Both are linear in the number of scopes.
    constexpr std::size_t one = Pipe::template shared_bytes<32>;
    return std::is_same_v<typename Pipe::scope, ps::scope::warp> ? one * (threads / 32) : one;
}

/// `blocks` in grids counts per multiprocessor, or, with `absolute`, in all.
template <class Pipe>
void add(std::vector<contender>& to, std::initializer_list<grid> grids, bool absolute = false) {
    ps::check(cudaFuncSetAttribute(dot<Pipe>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
              "cudaFuncSetAttribute");  // as many blocks as it has room for
    for (const grid g : grids) {
        const std::size_t shared = shared_bytes_for<Pipe>(g.threads);
        const unsigned residents = absolute ? 1 : g.blocks;
        if ((shared + 1024) * residents > (228u << 10)) {
            throw ps::configuration_error("a grid of the list does not fit the shared memory of a multiprocessor");
        }
        const unsigned blocks = (absolute ? g.blocks : g.blocks * static_cast<unsigned>(multiprocessors)) * g.times;
        contender c;
        c.traits = {{"order", name_of<typename Pipe::scheduler>::text() + (g.times > 1 ? ", " + std::to_string(g.times) + " grids" : "")},
                    {"scope", std::is_same_v<typename Pipe::scope, ps::scope::warp> ? "warp" : "block"},
                    {"tile", std::to_string(Pipe::tile_bytes >> 10) + " KiB x " + std::to_string(Pipe::stages)},
                    {"copies", std::is_same_v<typename Pipe::copies, ps::copies::bulk> ? "bulk" : "lanes"},
                    {"caching", std::is_same_v<typename Pipe::caching, ps::caching::once> ? "once" : "normal"},
                    {"grid", std::to_string(blocks) + " x " + std::to_string(g.threads)},
                    {"shared", std::to_string(shared * residents >> 10)}};
        c.enqueue = [=](std::uint32_t call, const problem& p, cudaStream_t stream) {
            ps::launch(dot<Pipe>, blocks, g.threads, shared, stream, p.number(call), reinterpret_cast<const float4*>(p.x), p.y, p.counter);
        };
        to.push_back(std::move(c));
    }
}

template <int Loads, spread Spread>
void add_reads(std::vector<contender>& to, std::initializer_list<unsigned> grids) {
    for (const unsigned blocks : grids) {
        contender c;
        c.plain = true;
        c.traits = {{"read", std::to_string(Loads) + " loads, " +
                                 (Spread == spread::far    ? "a grid apart"
                                  : Spread == spread::near ? "a block apart"
                                                           : "a range a block")},
                    {"grid", std::to_string(blocks) + " x 256"}};
        c.enqueue = [=](std::uint32_t call, const problem& p, cudaStream_t stream) {
            ps::launch(plain_read<Loads, Spread>, blocks, 256, 0, stream, reinterpret_cast<const uint4*>(p.number(call).data),
                       p.bytes() / 16, p.sink);
        };
        to.push_back(std::move(c));
    }
}

template <class... Ps>
using device_pipe = ps::tile_pipeline<ps::memory::device, Ps...>;
template <class... Ps>
using pinned_pipe = ps::tile_pipeline<ps::memory::pinned, Ps...>;

std::vector<contender> device_contenders() {
    using ps::chunking::fixed;
    using ps::copies::by_lane;
    using ps::prefetch::depth;
    using ps::scheduler::fifo, ps::scheduler::round_robin, ps::scheduler::first_come;
    using once = ps::caching::once;
    using block = ps::scope::block;
    std::vector<contender> all;
    const auto reads = {264u, 528u, 1056u, 2112u, 4224u};
    add_reads<4, spread::far>(all, reads);
    add_reads<8, spread::far>(all, reads);
    add_reads<16, spread::far>(all, {264u, 528u});
    add_reads<4, spread::near>(all, reads);
    add_reads<8, spread::near>(all, reads);
    add_reads<8, spread::ranges>(all, reads);
    // One ring, three orders: who decides when the kernel ends (a), and whether neighbours are read at the same time (c).
    add<device_pipe<fixed<4_KiB>, depth<4>, fifo>>(all, {{128, 2}, {256, 1}, {384, 1}, {128, 3}, {256, 1, 8}, {128, 3, 8}});
    add<device_pipe<fixed<4_KiB>, depth<4>, round_robin>>(all, {{128, 2}, {256, 1}, {384, 1}, {128, 3}, {256, 1, 8}, {128, 3, 8}});
    add<device_pipe<fixed<4_KiB>, depth<4>, first_come<1>>>(all, {{128, 2}, {256, 1}, {384, 1}, {128, 3}});
    add<device_pipe<fixed<4_KiB>, depth<4>, first_come<4>>>(all, {{128, 1}, {128, 2}, {256, 1}, {384, 1}, {128, 3}});
    // The cache hint (d) and copies by lanes (e), else as above.
    add<device_pipe<fixed<4_KiB>, depth<4>, first_come<4>, once>>(all, {{128, 2}, {256, 1}, {384, 1}, {128, 3}});
    add<device_pipe<fixed<4_KiB>, depth<4>, first_come<4>, by_lane>>(all, {{128, 2}, {256, 1}, {384, 1}, {128, 3}});
    add<device_pipe<fixed<4_KiB>, depth<4>, round_robin, by_lane>>(all, {{128, 2}, {256, 1}, {384, 1}, {128, 3}});
    // Other shapes of a warp's ring: what a tile costs (b).
    add<device_pipe<fixed<2_KiB>, depth<8>, first_come<8>>>(all, {{128, 2}, {256, 1}, {384, 1}, {128, 3}});
    add<device_pipe<fixed<4_KiB>, depth<2>, first_come<4>>>(all, {{256, 1}, {256, 2}, {256, 3}, {384, 2}});
    add<device_pipe<fixed<8_KiB>, depth<3>, first_come<2>>>(all, {{128, 1}, {128, 2}, {256, 1}});
    add<device_pipe<fixed<8_KiB>, depth<2>, first_come<1>>>(all, {{128, 2}, {128, 3}, {256, 1}, {384, 1}});
    // A ring a block.
    add<device_pipe<fixed<32_KiB>, depth<6>, fifo, block>>(all, {{128, 1}, {256, 1}, {384, 1}});
    add<device_pipe<fixed<32_KiB>, depth<6>, first_come<1>, block>>(all, {{128, 1}, {256, 1}, {384, 1}});
    add<device_pipe<fixed<16_KiB>, depth<4>, round_robin, block>>(all, {{128, 2}, {128, 3}, {256, 3}});
    add<device_pipe<fixed<16_KiB>, depth<4>, first_come<1>, block>>(all, {{128, 1}, {128, 2}, {128, 3}, {256, 3}});
    add<device_pipe<fixed<8_KiB>, depth<4>, first_come<2>, block>>(all, {{128, 2}, {128, 3}, {128, 6}});
    return all;
}

std::vector<contender> pinned_contenders() {
    using ps::chunking::fixed;
    using ps::prefetch::depth;
    using ps::scheduler::fifo, ps::scheduler::round_robin, ps::scheduler::first_come;
    std::vector<contender> all;
    const auto reads = {8u, 16u, 32u, 66u, 132u, 264u, 1056u};
    add_reads<4, spread::far>(all, reads);
    add_reads<8, spread::far>(all, reads);
    add_reads<8, spread::near>(all, reads);
    add_reads<8, spread::ranges>(all, {16u, 32u, 132u, 1056u});
    add<pinned_pipe<fixed<4_KiB>, depth<4>, round_robin>>(all, {{128, 8}, {128, 16}, {128, 32}, {128, 132}, {128, 264}}, true);
    add<pinned_pipe<fixed<4_KiB>, depth<4>, first_come<4>>>(all, {{128, 8}, {128, 16}, {128, 32}, {128, 132}, {128, 264}}, true);
    add<pinned_pipe<fixed<4_KiB>, depth<4>, round_robin, ps::copies::by_lane>>(all, {{128, 16}, {128, 32}, {128, 132}}, true);
    add<pinned_pipe<fixed<16_KiB>, depth<4>, round_robin, ps::scope::block>>(all, {{128, 8}, {128, 16}, {128, 32}, {128, 132}}, true);
    add<pinned_pipe<fixed<32_KiB>, depth<6>, fifo, ps::scope::block>>(all, {{128, 16}, {128, 132}}, true);
    return all;
}

/// Largest difference from the exact result over its root mean square; infinite where a result is missing.
double error_of(const std::vector<float>& got, const std::vector<double>& want) {
    double worst = 0, square = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
        const double difference = std::fabs(got[i] - want[i]);
        worst = difference <= worst ? worst : std::isnan(difference) ? HUGE_VAL : difference;
        square += want[i] * want[i];
    }
    return worst / std::sqrt(square / static_cast<double>(want.size()));
}

FILE* json = nullptr;
bool first_line = true;
bool all_right = true;

void measure(const char* name, std::vector<contender> all, problem p, std::uint32_t calls, int replays, double target) {
    ps::stream stream;
    ps::buffer<double, ps::memory::device> exact(p.rows);
    std::vector<double> want(p.rows);
    std::vector<float> got(p.rows);
    ps::launch(exact_dot, p.rows, 32, 0, stream.get(), p.matrix, p.x, exact.data());
    stream.synchronize();
    ps::check(cudaMemcpy(want.data(), exact.data(), p.rows * sizeof(double), cudaMemcpyDefault), "cudaMemcpy");
    const auto verify = [&](contender& c) {
        if (c.plain) {
            return;
        }
        ps::check(cudaMemset(p.y, 0xff, p.rows * sizeof(float)), "cudaMemset");
        c.enqueue(0, p, stream.get());
        stream.synchronize();
        ps::check(cudaMemcpy(got.data(), p.y, p.rows * sizeof(float), cudaMemcpyDefault), "cudaMemcpy");
        c.error = std::max(c.error, error_of(got, want));
        all_right = all_right && c.error < 1e-5;
    };
    std::vector<graph_of_calls> graphs;
    for (contender& c : all) {
        verify(c);
        graphs.emplace_back(stream.get(), calls, [&](std::uint32_t call) { c.enqueue(call, p, stream.get()); });
    }
    for (int i = -1; i < replays; ++i) {
        for (std::size_t c = 0; c < all.size(); ++c) {
            const double us = graphs[c].microseconds();
            if (i >= 0) {
                all[c].us.push_back(us);
            }
        }
    }
    std::for_each(all.begin(), all.end(), verify);  // the counter is as it was
    const contender* read = nullptr;
    const contender* best = nullptr;
    for (contender& c : all) {
        c.median = load_benchmark::median(c.us);
        c.deviation = load_benchmark::spread(c.us);
        const contender*& fastest = c.plain ? read : best;
        if (fastest == nullptr || c.median < fastest->median) {
            fastest = &c;
        }
    }
    const auto rate = [&](const contender& c) { return static_cast<double>(p.bytes()) / c.median / 1e3; };
    std::printf("\n%s: %llu bytes, %u matrices in turn, %d replays of %u calls\n", name, static_cast<unsigned long long>(p.bytes()),
                p.matrices, replays, calls);
    std::printf("%-21s %-6s %-12s %-6s %-7s %-12s %6s %10s %6s %8s %7s %8s\n", "order", "scope", "tile", "copies", "caching", "grid",
                "KiB/SM", "us", "+-", "GB/s", "ratio", "error");
    for (const contender& c : all) {
        const auto trait = [&](const char* t) { return c.traits.count(t) != 0 ? c.traits.at(t) : std::string(); };
        if (c.plain) {
            std::printf("%-57s %-12s %6s", ("plain read: " + trait("read")).c_str(), trait("grid").c_str(), "");
        } else {
            std::printf("%-21s %-6s %-12s %-6s %-7s %-12s %6s", trait("order").c_str(), trait("scope").c_str(), trait("tile").c_str(),
                        trait("copies").c_str(), trait("caching").c_str(), trait("grid").c_str(), trait("shared").c_str());
        }
        std::printf(" %10.2f %6.2f %8.1f %7.4f", c.median, c.deviation, rate(c), read->median / c.median);
        if (c.plain) {
            std::puts("");
        } else {
            std::printf(" %8.1e\n", c.error);
        }
        if (json != nullptr) {
            std::fprintf(json, "%s\n{\"case\": \"%s\", \"bytes\": %llu", first_line ? "" : ",", name,
                         static_cast<unsigned long long>(p.bytes()));
            for (const auto& [key, value] : c.traits) {
                std::fprintf(json, ", \"%s\": \"%s\"", key.c_str(), value.c_str());
            }
            std::fprintf(json, ", \"us\": %.3f, \"spread\": %.3f, \"gb_per_s\": %.1f, \"ratio\": %.4f, \"error\": %.3e}", c.median,
                         c.deviation, rate(c), read->median / c.median, c.error);
            first_line = false;
        }
    }
    for (const char* trait : {"order", "scope", "tile", "copies", "caching"}) {
        std::map<std::string, double> fastest;
        for (const contender& c : all) {
            if (!c.plain) {
                const auto at = fastest.try_emplace(c.traits.at(trait), c.median).first;
                at->second = std::min(at->second, c.median);
            }
        }
        std::printf("best by %-8s:", trait);
        for (const auto& [value, median] : fastest) {
            std::printf("  %s %.4f", value.c_str(), read->median / median);
        }
        std::puts("");
    }
    const double ratio = read->median / best->median;
    std::printf("%s: best %s, %s, %s, %s, %s, %s: %.1f GB/s of %.1f, %.4f, wanted %.2f: %s\n", name, best->traits.at("order").c_str(),
                best->traits.at("scope").c_str(), best->traits.at("tile").c_str(), best->traits.at("copies").c_str(),
                best->traits.at("caching").c_str(), best->traits.at("grid").c_str(), rate(*best), rate(*read), ratio, target,
                ratio >= target ? "reached" : "missed");
}

}  // namespace

int main(int argc, char** argv) try {
    if (ps::device_count() == 0) {
        std::puts("tile_pipeline: there is no GPU here to measure");
        return 0;
    }
    for (int i = 1; i + 1 < argc; ++i) {
        if (std::strcmp(argv[i], "--json") == 0) {
            json = std::fopen(argv[i + 1], "w");
            if (json == nullptr) {
                throw ps::io_error(std::string("cannot write ") + argv[i + 1]);
            }
            std::fputs("[", json);
        }
    }
    cudaDeviceProp device{};
    int driver = 0;
    ps::check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    ps::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    std::printf("%s, runtime %d, driver for %d\n", device.name, CUDART_VERSION, driver);
    multiprocessors = device.multiProcessorCount;

    constexpr std::uint64_t gib = 1ull << 30;
    constexpr std::uint32_t rows_of_350_mb = 350'000'000 / row_bytes;
    constexpr std::uint32_t rows_of_256_mib = (256u << 20) / row_bytes;
    ps::buffer<float, ps::memory::device> weights(2 * gib / sizeof(float)), x(cols), y(gib / row_bytes);
    ps::buffer<ps::tile_counter, ps::memory::device> counter(1);
    ps::buffer<std::uint32_t, ps::memory::device> sink(1);
    ps::check(cudaMemset(counter.data(), 0, sizeof(ps::tile_counter)), "cudaMemset");
    ps::launch(fill, 2112, 256, 0, nullptr, reinterpret_cast<std::uint32_t*>(weights.data()), weights.size(), std::uint64_t{1});
    ps::launch(fill, 1, 256, 0, nullptr, reinterpret_cast<std::uint32_t*>(x.data()), std::uint64_t{cols}, std::uint64_t{1} << 40);
    ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    problem p{weights.data(), gib / row_bytes, 2, x.data(), y.data(), counter.data(), sink.data()};
    measure("1 GiB of device memory", device_contenders(), p, 4, 15, 0.98);
    p.rows = rows_of_350_mb;
    p.matrices = 6;
    measure("350 MB of device memory", device_contenders(), p, 12, 15, 0.96);
    {
        ps::buffer<float, ps::memory::pinned> there(2 * std::size_t{rows_of_256_mib} * cols);
        ps::check(cudaMemcpy(there.data(), weights.data(), there.size() * sizeof(float), cudaMemcpyDefault), "cudaMemcpy");
        p.matrix = there.data();
        p.rows = rows_of_256_mib;
        p.matrices = 2;
        measure("256 MiB of pinned host memory", pinned_contenders(), p, 2, 9, 0.98);
    }
    std::puts(all_right ? "all results are right" : "SOME RESULTS ARE WRONG");
    if (json != nullptr) {
        std::fputs("\n]\n", json);
        std::fclose(json);
    }
    return all_right ? 0 : 1;
} catch (const std::exception& e) {
    std::fprintf(stderr, "tile_pipeline: %s\n", e.what());
    return 1;
}

// One token's experts, and eight tokens', in the shapes of three models: microseconds for gate, up, activation and down, against a plain
// read of the same bytes in the same run. Each number is the median over replays of a CUDA graph that goes through ten disjoint sets of
// experts, so that no set is found in the L2 cache.

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/cuda_experts.cuh>
#include <penstock/policy/memory.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

namespace ps = penstock;

namespace {

constexpr std::uint32_t sets = 10;
constexpr int replays = 30;

struct shape {
    const char* name;
    ps::weight_kind kind;
    std::uint32_t hidden, intermediate, experts;
    ps::activation act;
};

ps::expert_layout layout_of(const shape& s) {
    const std::uint64_t bits = s.kind == ps::weight_kind::bf16 ? 16 : s.kind == ps::weight_kind::fp8_block128 ? 8 : 4;
    ps::expert_layout l;
    l.kind = s.kind;
    l.act = s.act;
    l.limit = 7.0f;
    std::uint64_t used = 0;
    const auto place = [&](ps::matrix_layout& m, std::uint32_t rows, std::uint32_t cols) {
        m = {.offset = used, .rows = rows, .cols = cols, .row_stride = cols};
        used = ps::round_up(used + rows * std::uint64_t{cols} * bits / 8, 16);
    };
    const auto place_scales = [&](ps::matrix_layout& m) {
        m.scale_offset = used;
        m.scale_row_stride = static_cast<std::uint32_t>(ps::ceil_div(m.cols, bits == 8 ? 128 : 32));
        used = ps::round_up(used + (bits == 8 ? ps::ceil_div(m.rows, 128) * 4 : m.rows) * m.scale_row_stride, 16);
    };
    place(l.gate, s.intermediate, s.hidden);
    place(l.up, s.intermediate, s.hidden);
    place(l.down, s.hidden, s.intermediate);
    if (bits < 16) {
        place_scales(l.gate);
        place_scales(l.up);
        place_scales(l.down);
    }
    l.bytes = used;
    return l;
}

__device__ std::uint32_t mixed(std::uint64_t n) {
    n = (n ^ n >> 30) * 0xbf58476d1ce4e5b9ull;
    n = (n ^ n >> 27) * 0x94d049bb133111ebull;
    return static_cast<std::uint32_t>(n >> 32);
}

/// Random weights and scales of moderate size: every 16-bit word, byte or float is a finite number of its format.
__global__ void fill(std::byte* records, std::uint64_t stride, std::uint32_t count, ps::expert_layout l) {
    const std::uint64_t scales = l.kind == ps::weight_kind::bf16 ? l.bytes : l.gate.scale_offset;
    const std::uint64_t words = l.bytes / 4;
    for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < words * count;
         i += std::uint64_t{gridDim.x} * blockDim.x) {
        const std::uint64_t at = i % words * 4;
        std::uint32_t word = mixed(i);
        if (at < scales) {
            word = l.kind == ps::weight_kind::bf16           ? (word & 0x81ff81ffu) | 0x3c003c00u
                   : l.kind == ps::weight_kind::fp8_block128 ? word & 0xb7b7b7b7u
                                                             : word;
        } else if (l.kind == ps::weight_kind::fp8_block128) {
            word = __float_as_uint(0.01f + 0.01f * static_cast<float>(word & 0xff) / 256.0f);
        } else {
            word = (word & 0x03030303u) + 0x78787878u;  // 2^-7 to 2^-4
        }
        *reinterpret_cast<std::uint32_t*>(records + i / words * stride + at) = word;
    }
}

__global__ void fill_inputs(float* x, std::uint64_t count) {
    for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count; i += std::uint64_t{gridDim.x} * blockDim.x) {
        x[i] = static_cast<float>(mixed(i + (1ull << 40)) & 0xffff) / 32768.0f - 1.0f;
    }
}

/// The ceiling: eight 16-byte loads in flight a thread.
__global__ void read_all(const uint4* from, std::uint64_t count, std::uint32_t* sink) {
    std::uint32_t sum = 0;
    const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
    std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int u = 0; u < 8; ++u) {
            v[u] = __ldcs(from + i + u * stride);
        }
#pragma unroll
        for (int u = 0; u < 8; ++u) {
            sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
        }
    }
    for (; i < count; i += stride) {
        const uint4 v = __ldcs(from + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9e3779b9u) {
        *sink = sum;
    }
}

/// Median microseconds of a set, over replays of a graph of what `enqueue(set)` enqueues for each set.
template <class F>
double median_us(cudaStream_t stream, std::uint32_t count, F&& enqueue) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    ps::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (std::uint32_t set = 0; set < count; ++set) {
        enqueue(set);
    }
    ps::check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    ps::check(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    ps::check(cudaEventCreate(&begin), "cudaEventCreate");
    ps::check(cudaEventCreate(&end), "cudaEventCreate");
    std::vector<float> milliseconds;
    for (int i = 0; i < replays + 3; ++i) {
        float one = 0;
        ps::check(cudaEventRecord(begin, stream), "cudaEventRecord");
        ps::check(cudaGraphLaunch(ready, stream), "cudaGraphLaunch");
        ps::check(cudaEventRecord(end, stream), "cudaEventRecord");
        ps::check(cudaEventSynchronize(end), "cudaEventSynchronize");
        ps::check(cudaEventElapsedTime(&one, begin, end), "cudaEventElapsedTime");
        if (i >= 3) {
            milliseconds.push_back(one);
        }
    }
    ps::check(cudaEventDestroy(begin), "cudaEventDestroy");
    ps::check(cudaEventDestroy(end), "cudaEventDestroy");
    ps::check(cudaGraphExecDestroy(ready), "cudaGraphExecDestroy");
    ps::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    std::nth_element(milliseconds.begin(), milliseconds.begin() + replays / 2, milliseconds.end());
    return milliseconds[replays / 2] * 1000.0 / count;
}

template <class Memory>
void measure(const shape& s, const std::vector<std::uint32_t>& token_counts, std::uint32_t set_count, const char* where) {
    const ps::expert_layout layout = layout_of(s);
    const std::uint64_t stride = ps::round_up(layout.bytes, 256);
    const std::uint32_t most_tokens = *std::max_element(token_counts.begin(), token_counts.end());
    const std::uint32_t pairs = most_tokens * s.experts;
    ps::stream stream;
    const ps::buffer<std::byte, Memory> records(stride * s.experts * set_count);
    ps::buffer<float, ps::memory::device> x(std::size_t{most_tokens} * s.hidden);
    ps::buffer<float, ps::memory::device> activated(std::size_t{pairs} * s.intermediate);
    ps::buffer<float, ps::memory::device> partial(std::size_t{pairs} * s.hidden);
    ps::buffer<std::int32_t, ps::memory::device> rows(pairs);
    ps::buffer<std::uint32_t, ps::memory::device> sink(1);
    auto* bytes = const_cast<std::byte*>(records.data());
    ps::launch(fill, 1024, 256, 0, stream.get(), bytes, stride, s.experts * set_count, layout);
    ps::launch(fill_inputs, 64, 256, 0, stream.get(), x.data(), std::uint64_t{most_tokens} * s.hidden);
    stream.synchronize();

    const std::uint64_t set_bytes = layout.bytes * s.experts;
    double read_us = 1e30;
    for (const unsigned blocks : {264u, 528u, 1056u, 2112u, 4224u}) {
        read_us =
            std::min(read_us, median_us(stream.get(), set_count, [&](std::uint32_t set) {
                         ps::launch(read_all, blocks, 256, 0, stream.get(),
                                    reinterpret_cast<const uint4*>(bytes + stride * s.experts * set), stride * s.experts / 16, sink.data());
                     }));
    }
    const ps::executor::cuda<ps::format::bf16, ps::format::fp8_block128, ps::format::mxfp4> executor(stream.get());
    for (const std::uint32_t tokens : token_counts) {
        std::vector<std::int32_t> order;  // every token visits every expert of the set
        for (std::uint32_t e = 0; e < s.experts; ++e) {
            for (std::uint32_t t = 0; t < tokens; ++t) {
                order.push_back(static_cast<std::int32_t>(t * s.experts + e));
            }
        }
        ps::check(cudaMemcpy(rows.data(), order.data(), order.size() * sizeof(std::int32_t), cudaMemcpyDefault), "copy of the rows");
        const double us = median_us(stream.get(), set_count, [&](std::uint32_t set) {
            std::vector<ps::expert_work> works;
            for (std::uint32_t e = 0; e < s.experts; ++e) {
                works.push_back({e, bytes + stride * (s.experts * set + e), e * tokens, tokens});
            }
            executor.experts(layout, works, rows.data(), s.experts, x.data(), nullptr, activated.data(), partial.data());
        });
        std::vector<float> result(std::size_t{tokens} * s.experts * s.hidden);
        ps::check(cudaMemcpy(result.data(), partial.data(), result.size() * sizeof(float), cudaMemcpyDefault), "copy of the result");
        const bool sound = std::all_of(result.begin(), result.end(), [](float v) { return v == v && v - v == 0.0f; }) &&
                           std::any_of(result.begin(), result.end(), [](float v) { return v != 0.0f; });
        std::printf("%-12s %-7s %6u %13llu %10.1f %8.0f %10.1f %8.0f %6.2f%s\n", s.name, where, tokens,
                    static_cast<unsigned long long>(set_bytes), us, static_cast<double>(set_bytes) / us / 1e3, read_us,
                    static_cast<double>(set_bytes) / read_us / 1e3, read_us / us, sound ? "" : "  NOT FINITE");
    }
}

}  // namespace

int main() try {
    if (ps::device_count() == 0) {
        std::puts("expert_mlp: there is no GPU here to measure");
        return 0;
    }
    const shape qwen{"qwen3-30b", ps::weight_kind::bf16, 2048, 768, 8, ps::activation::swiglu};
    const shape deepseek{"deepseek-v3", ps::weight_kind::fp8_block128, 7168, 2048, 8, ps::activation::swiglu};
    const shape gpt_oss{"gpt-oss", ps::weight_kind::mxfp4, 2880, 2880, 4, ps::activation::gpt_oss};
    std::printf("%-12s %-7s %6s %13s %10s %8s %10s %8s %6s\n", "shape", "memory", "tokens", "bytes", "us", "GB/s", "read us", "GB/s",
                "ratio");
    for (const shape& s : {qwen, deepseek, gpt_oss}) {
        measure<ps::memory::device>(s, {1, 2, 4, 8}, sets, "device");
    }
    measure<ps::memory::pinned>(qwen, {1}, 2, "pinned");
    return 0;
} catch (const std::exception& e) {
    std::fprintf(stderr, "expert_mlp: %s\n", e.what());
    return 1;
}

// One layer's routed experts at decode sizes, from bf16 hidden states and expert ids to the bf16 output, in the shapes of real models:
// microseconds, against a plain read of as many bytes in the same run. Figures are medians over replays of CUDA graphs that go through
// different ids and weights, so that no weights are found in the L2 cache; candidate and read take turns. The first call of each shape is
// compared with the float32 kernels. Usage: benchmark_experts [--only name,...] [--json FILE]

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/cuda_experts.cuh>
#include <penstock/dispatch/expert_decode.cuh>
#include <penstock/policy/memory.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace ps = penstock;

namespace {

constexpr int replays = 15;

struct shape {
    const char* name;
    ps::weight_kind kind;
    std::uint32_t hidden, intermediate, experts, k;
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

__global__ void fill_inputs(std::uint16_t* x, std::uint64_t count) {
    for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count; i += std::uint64_t{gridDim.x} * blockDim.x) {
        x[i] = ps::encode_bf16(static_cast<float>(mixed(i + (1ull << 40)) & 0xffff) / 32768.0f - 1.0f);
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

/// What is captured once and replayed.
class replayed {
public:
    template <class F>
    replayed(cudaStream_t stream, std::uint32_t calls, F&& enqueue) : stream_(stream), calls_(calls) {
        cudaGraph_t graph = nullptr;
        ps::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        for (std::uint32_t call = 0; call < calls; ++call) {
            enqueue(call);
        }
        ps::check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
        ps::check(cudaGraphInstantiate(&ready_, graph, 0), "cudaGraphInstantiate");
        ps::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
        ps::check(cudaEventCreate(&begin_), "cudaEventCreate");
        ps::check(cudaEventCreate(&end_), "cudaEventCreate");
    }
    replayed(const replayed&) = delete;
    replayed& operator=(const replayed&) = delete;
    ~replayed() {
        cudaGraphExecDestroy(ready_);
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
    }

    /// Microseconds a call.
    float run() {
        float milliseconds = 0;
        ps::check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
        ps::check(cudaGraphLaunch(ready_, stream_), "cudaGraphLaunch");
        ps::check(cudaEventRecord(end_, stream_), "cudaEventRecord");
        ps::check(cudaEventSynchronize(end_), "cudaEventSynchronize");
        ps::check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
        return milliseconds * 1000 / static_cast<float>(calls_);
    }

private:
    cudaStream_t stream_;
    std::uint32_t calls_;
    cudaGraphExec_t ready_ = nullptr;
    cudaEvent_t begin_ = nullptr;
    cudaEvent_t end_ = nullptr;
};

struct median_and_spread {
    float median, spread;
};

median_and_spread of(std::vector<float> values) {
    std::sort(values.begin(), values.end());
    return {values[values.size() / 2], (values[values.size() * 9 / 10] - values[values.size() / 10]) / 2};
}

template <class T>
ps::buffer<T, ps::memory::device> to_device(const std::vector<T>& values) {
    ps::buffer<T, ps::memory::device> there(values.size());
    ps::check(cudaMemcpy(there.data(), values.data(), values.size() * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
    return there;
}

FILE* json = nullptr;
bool first_row = true;

template <class Format>
void measure(const shape& s, const std::vector<std::uint32_t>& token_counts, bool same_experts) {
    const ps::expert_layout layout = layout_of(s);
    const std::uint64_t stride = ps::round_up(layout.bytes, 256);
    const std::uint32_t most_tokens = *std::max_element(token_counts.begin(), token_counts.end());
    ps::stream stream;
    const ps::buffer<std::byte, ps::memory::device> records(stride * s.experts);
    auto* bytes = const_cast<std::byte*>(records.data());
    std::vector<const std::byte*> addresses(s.experts);
    for (std::uint32_t e = 0; e < s.experts; ++e) {
        addresses[e] = bytes + e * stride;
    }
    const auto table = to_device(addresses);
    ps::buffer<std::uint16_t, ps::memory::device> hidden(std::size_t{most_tokens} * s.hidden);
    ps::buffer<std::uint16_t, ps::memory::device> out(std::size_t{most_tokens} * s.hidden);
    ps::buffer<std::uint32_t, ps::memory::device> sink(1);
    ps::launch(fill, 2048, 256, 0, stream.get(), bytes, stride, s.experts, layout);
    ps::launch(fill_inputs, 64, 256, 0, stream.get(), hidden.data(), std::uint64_t{most_tokens} * s.hidden);
    stream.synchronize();
    std::mt19937 random(3);
    for (const std::uint32_t tokens : token_counts) {
        const ps::expert_decode<Format> decode(layout, s.experts, tokens, s.k);
        ps::buffer<std::byte, ps::memory::device> workspace(decode.workspace_bytes());
        ps::check(cudaMemset(workspace.data(), 0xff, workspace.size()), "cudaMemset");
        ps::check(cudaMemset(workspace.data(), 0, decode.counter_bytes()), "cudaMemset");
        const std::uint32_t pairs = tokens * s.k;
        // Calls visit other experts in turn: at T = 1 disjoint ones, over all of the layer.
        const std::uint32_t calls = std::max(3u, std::min(10u, s.experts / s.k));
        std::vector<std::int32_t> ids;
        std::uint64_t visited = 0;
        std::vector<std::int32_t> order(s.experts);
        std::iota(order.begin(), order.end(), 0);
        std::uint32_t next = 0;
        for (std::uint32_t call = 0; call < calls; ++call) {
            std::vector<bool> seen(s.experts);
            for (std::uint32_t t = 0; t < tokens; ++t) {
                if (!same_experts || t == 0) {
                    if (tokens == 1 || same_experts) {
                        next = next + s.k > s.experts ? 0 : next;
                    } else {
                        std::shuffle(order.begin(), order.end(), random);
                        next = 0;
                    }
                    next += s.k;
                }
                for (std::uint32_t j = 0; j < s.k; ++j) {
                    const std::int32_t e = order[next - s.k + j];
                    ids.push_back(e);
                    visited += seen[static_cast<std::size_t>(e)] ? 0 : 1;
                    seen[static_cast<std::size_t>(e)] = true;
                }
            }
        }
        const std::uint64_t read_bytes = visited * layout.bytes / calls;
        const auto device_ids = to_device(ids);
        std::vector<float> weights(ids.size());
        std::uniform_real_distribution<float> weight(0.05f, 0.25f);
        std::generate(weights.begin(), weights.end(), [&] { return weight(random); });
        const auto device_weights = to_device(weights);
        const auto step = [&](std::uint32_t call) {
            return ps::decode_step{.records = table.data(),
                                   .hidden = {hidden.data(), ps::dtype::bf16, tokens, s.hidden},
                                   .ids = device_ids.data() + std::size_t{call} * pairs,
                                   .weights = device_weights.data() + std::size_t{call} * pairs,
                                   .out = {out.data(), ps::dtype::bf16, tokens, s.hidden}};
        };

        // The float32 kernels on the same inputs.
        double error = 0;
        {
            const std::vector<std::int32_t> mine(ids.begin(), ids.begin() + pairs);
            std::vector<std::int32_t> rows(pairs);
            std::iota(rows.begin(), rows.end(), 0);
            std::stable_sort(rows.begin(), rows.end(), [&](std::int32_t a, std::int32_t b) { return mine[a] < mine[b]; });
            std::vector<ps::expert_work> works;
            for (std::uint32_t i = 0; i < pairs; ++i) {
                const std::int32_t e = mine[static_cast<std::size_t>(rows[i])];
                if (works.empty() || works.back().expert != static_cast<std::uint32_t>(e)) {
                    works.push_back({static_cast<std::uint32_t>(e), addresses[static_cast<std::size_t>(e)], i, 0});
                }
                ++works.back().count;
            }
            const auto device_rows = to_device(rows);
            ps::buffer<float, ps::memory::device> x(std::size_t{tokens} * s.hidden), want(std::size_t{tokens} * s.hidden);
            ps::buffer<float, ps::memory::device> activated(std::size_t{pairs} * s.intermediate), partial(std::size_t{pairs} * s.hidden);
            const ps::executor::cuda<Format> exact(stream.get());
            exact.widen({hidden.data(), ps::dtype::bf16, tokens, s.hidden}, x.data());
            exact.experts(layout, works, device_rows.data(), s.k, x.data(), nullptr, activated.data(), partial.data());
            exact.combine(partial.data(), device_ids.data(), device_weights.data(), s.k, nullptr,
                          {want.data(), ps::dtype::f32, tokens, s.hidden});
            ps::check(cudaMemset(out.data(), 0xff, out.size() * 2), "cudaMemset");
            for (int twice = 0; twice < 2; ++twice) {  // the counters are as before
                decode.enqueue(step(0), {workspace.data(), workspace.size()}, stream.get());
            }
            stream.synchronize();
            std::vector<float> expected(std::size_t{tokens} * s.hidden);
            std::vector<std::uint16_t> got(expected.size());
            ps::check(cudaMemcpy(expected.data(), want.data(), expected.size() * 4, cudaMemcpyDefault), "cudaMemcpy");
            ps::check(cudaMemcpy(got.data(), out.data(), got.size() * 2, cudaMemcpyDefault), "cudaMemcpy");
            double difference = 0, norm = 0;
            for (std::size_t i = 0; i < got.size(); ++i) {
                difference += std::pow(double{ps::decode_bf16(got[i])} - expected[i], 2);
                norm += std::pow(double{expected[i]}, 2);
            }
            error = std::sqrt(difference / norm);
        }

        replayed candidate(stream.get(), calls, [&](std::uint32_t call) {
            decode.enqueue(step(call), {workspace.data(), workspace.size()}, stream.get());
        });
        constexpr unsigned grids[] = {528, 1056, 2112, 4224, 8448};
        std::vector<std::unique_ptr<replayed>> reads;
        const std::uint64_t whole = stride * s.experts;
        for (const unsigned blocks : grids) {
            reads.push_back(std::make_unique<replayed>(stream.get(), calls, [&](std::uint32_t call) {
                const std::uint64_t room = whole > read_bytes ? whole - read_bytes : 0;
                const std::uint64_t from = calls > 1 ? room * call / (calls - 1) / 256 * 256 : 0;
                ps::launch(read_all, blocks, 256, 0, stream.get(), reinterpret_cast<const uint4*>(bytes + from), read_bytes / 16,
                           sink.data());
            }));
        }
        std::vector<float> ours;
        std::vector<std::vector<float>> theirs(reads.size());
        for (int i = 0; i < replays + 2; ++i) {
            const float us = candidate.run();
            for (std::size_t r = 0; r < reads.size(); ++r) {
                const float read_us = reads[r]->run();
                if (i >= 2) {
                    theirs[r].push_back(read_us);
                }
            }
            if (i >= 2) {
                ours.push_back(us);
            }
        }
        const median_and_spread us = of(ours);
        median_and_spread read{1e30f, 0};
        for (const std::vector<float>& r : theirs) {
            read = of(r).median < read.median ? of(r) : read;
        }
        const double gb = static_cast<double>(read_bytes) / 1e3;
        std::printf("%-12s %-8s %5u %7.1f %13llu %9.2f %6.2f %7.0f %9.2f %6.2f %7.0f %6.3f %9.1e %4u%s\n", s.name,
                    same_experts ? "same" : "uniform", tokens, static_cast<double>(visited) / calls,
                    static_cast<unsigned long long>(read_bytes), us.median, us.spread, gb / us.median, read.median, read.spread,
                    gb / read.median, us.median / read.median, error, decode.blocks(tokens), error < 1e-2 ? "" : "  WRONG");
        std::fflush(stdout);
        if (json != nullptr) {
            std::fprintf(json,
                         "%s\n  {\"shape\": \"%s\", \"routing\": \"%s\", \"tokens\": %u, \"bytes\": %llu, \"us\": %.3f, \"spread\": %.3f, "
                         "\"read_us\": %.3f, \"read_spread\": %.3f, \"over_read\": %.4f, \"error\": %.3e}",
                         first_row ? "" : ",", s.name, same_experts ? "same" : "uniform", tokens,
                         static_cast<unsigned long long>(read_bytes), us.median, us.spread, read.median, read.spread,
                         us.median / read.median, error);
            first_row = false;
        }
    }
}

}  // namespace

int main(int argc, char** argv) try {
    if (ps::device_count() == 0) {
        std::puts("experts: there is no GPU here to measure");
        return 0;
    }
    std::string only;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (std::strcmp(argv[i], "--only") == 0) {
            only = argv[i + 1];
        } else if (std::strcmp(argv[i], "--json") == 0) {
            json = std::fopen(argv[i + 1], "w");
            std::fputs("[", json);
        }
    }
    using ps::activation;
    using ps::weight_kind;
    std::vector<std::uint32_t> doubling{1, 2, 4, 8, 16, 32, 64, 128};
    if (only.find("few") != std::string::npos) {
        doubling = {1, 8, 32};
    }
    const auto wanted = [&](const char* name) { return only.empty() || only.find(name) != std::string::npos; };
    cudaDeviceProp device{};
    int driver = 0;
    ps::check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    ps::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    std::printf("%s, runtime %d, driver for %d\n", device.name, CUDART_VERSION, driver);
    std::printf("%-12s %-8s %5s %7s %13s %9s %6s %7s %9s %6s %7s %6s %9s blocks\n", "shape", "routing", "T", "experts", "bytes", "us", "+-",
                "GB/s", "read us", "+-", "GB/s", "ratio", "error");
    const shape deepseek{"deepseek-v3", weight_kind::fp8_block128, 7168, 2048, 256, 8, activation::swiglu};
    const shape qwen235{"qwen3-235b", weight_kind::bf16, 4096, 1536, 128, 8, activation::swiglu};
    const shape mixtral{"mixtral", weight_kind::bf16, 4096, 14336, 8, 2, activation::swiglu};
    const shape qwen30{"qwen3-30b", weight_kind::bf16, 2048, 768, 128, 8, activation::swiglu};
    for (const bool same : {false, true}) {
        if (wanted("deepseek")) {
            measure<ps::format::fp8_block128>(deepseek, same ? std::vector<std::uint32_t>{8, 16, 32, 64, 128} : doubling, same);
        }
        if (wanted("qwen3-235b")) {
            measure<ps::format::bf16>(qwen235, same ? std::vector<std::uint32_t>{8, 16, 32, 64, 128} : doubling, same);
        }
        if (wanted("mixtral") && !same) {
            measure<ps::format::bf16>(mixtral, doubling, same);
        }
        if (wanted("qwen3-30b") && !same) {
            measure<ps::format::bf16>(qwen30, doubling, same);
        }
    }
    if (json != nullptr) {
        std::fputs("\n]\n", json);
        std::fclose(json);
    }
    return 0;
} catch (const std::exception& e) {
    std::fprintf(stderr, "experts: %s\n", e.what());
    return 1;
}

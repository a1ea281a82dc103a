// One layer's routed experts at many tokens, from bf16 hidden states and sorted expert ids to the bf16 output: microseconds and TFLOP/s,
// against cuBLASLt's two dense products of as many operations in the same run, in the precision of the inputs. Where all tokens visit the
// same experts, also against a plain read of their weights. Figures are medians over replays of CUDA graphs that go through different ids
// and weights, so that no weights are found in the L2 cache; candidates take turns. The first call of each row is compared with the
// float32 kernels. Usage: benchmark_prefill [--only NAME,...] [--tokens NUMBER,...] [--json FILE]. Exit status 77 without a GPU, 1 where a
// result is wrong.

#include "expert_layer.cuh"
#include "load/measure.hpp"
#include "replay.hpp"

#include <penstock/dispatch/expert_prefill.cuh>

#include <cublasLt.h>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <string>

namespace ps = penstock;
using namespace layer_of_experts;

namespace {

constexpr int rounds = 9;

__global__ void fill_dense(std::uint32_t* words, std::uint64_t count, ps::weight_kind kind) {
    for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count; i += std::uint64_t{gridDim.x} * blockDim.x) {
        words[i] = moderate(kind, mixed(i + (1ull << 41)));
    }
}

void check_blas(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS) {
        throw ps::configuration_error(std::string("penstock: ") + what + " gave status " + std::to_string(static_cast<int>(status)));
    }
}

/// out[rows, outputs] = x[rows, inputs] * weights[outputs, inputs]^T by cuBLASLt, its fastest algorithm of those that it proposes.
class dense_product {
public:
    dense_product(bool fp8, std::uint64_t rows, std::uint64_t outputs, std::uint64_t inputs, cudaStream_t stream)
        : workspace_(64u << 20), x_(rows * inputs * (fp8 ? 1 : 2)), weights_(outputs * inputs * (fp8 ? 1 : 2)), out_(rows * outputs) {
        const ps::weight_kind kind = fp8 ? ps::weight_kind::fp8_block128 : ps::weight_kind::bf16;
        ps::launch(fill_dense, 1024, 256, 0, stream, reinterpret_cast<std::uint32_t*>(x_.data()), x_.size() / 4, kind);
        ps::launch(fill_dense, 1024, 256, 0, stream, reinterpret_cast<std::uint32_t*>(weights_.data()), weights_.size() / 4, kind);
        const cudaDataType type = fp8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
        check_blas(cublasLtCreate(&handle_), "cublasLtCreate");
        check_blas(cublasLtMatmulDescCreate(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
        const cublasOperation_t transposed = CUBLAS_OP_T;
        check_blas(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed), "TRANSA");
        if (fp8) {
            const std::int8_t fast = 1;
            check_blas(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast), "FAST_ACCUM");
        }
        check_blas(cublasLtMatrixLayoutCreate(&a_, type, inputs, outputs, static_cast<std::int64_t>(inputs)), "layout");
        check_blas(cublasLtMatrixLayoutCreate(&b_, type, inputs, rows, static_cast<std::int64_t>(inputs)), "layout");
        check_blas(cublasLtMatrixLayoutCreate(&d_, CUDA_R_16BF, outputs, rows, static_cast<std::int64_t>(outputs)), "layout");
        cublasLtMatmulPreference_t preference = nullptr;
        check_blas(cublasLtMatmulPreferenceCreate(&preference), "preference");
        const std::size_t room = workspace_.size();
        check_blas(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room),
                   "preference");
        cublasLtMatmulHeuristicResult_t found[8];
        int count = 0;
        check_blas(cublasLtMatmulAlgoGetHeuristic(handle_, product_, a_, b_, d_, d_, preference, 8, found, &count), "heuristic");
        check_blas(cublasLtMatmulPreferenceDestroy(preference), "preference");
        double best = 0;
        for (int i = 0; i < count; ++i) {
            const auto run = [&](std::uint32_t) { enqueue(found[i].algo, stream); };
            graph_of_calls graph(stream, 2, run);
            const double us = std::min(graph.microseconds(), graph.microseconds());
            if (i == 0 || us < best) {
                best = us;
                algorithm_ = found[i].algo;
            }
        }
        if (count == 0) {
            throw ps::configuration_error("penstock: cuBLASLt proposes no algorithm");
        }
    }

    dense_product(const dense_product&) = delete;
    dense_product& operator=(const dense_product&) = delete;

    ~dense_product() {
        static_cast<void>(cublasLtMatrixLayoutDestroy(a_));
        static_cast<void>(cublasLtMatrixLayoutDestroy(b_));
        static_cast<void>(cublasLtMatrixLayoutDestroy(d_));
        static_cast<void>(cublasLtMatmulDescDestroy(product_));
        static_cast<void>(cublasLtDestroy(handle_));
    }

    void enqueue(cudaStream_t stream) const { enqueue(algorithm_, stream); }

private:
    void enqueue(const cublasLtMatmulAlgo_t& algorithm, cudaStream_t stream) const {
        const float one = 1.0f, zero = 0.0f;
        check_blas(cublasLtMatmul(handle_, product_, &one, weights_.data(), a_, x_.data(), b_, &zero, out_.data(), d_, out_.data(), d_,
                                  &algorithm, workspace_.data(), workspace_.size(), stream),
                   "cublasLtMatmul");
    }

    mutable ps::buffer<std::byte, ps::memory::device> workspace_;
    ps::buffer<std::byte, ps::memory::device> x_, weights_;
    mutable ps::buffer<std::uint16_t, ps::memory::device> out_;
    cublasLtHandle_t handle_ = nullptr;
    cublasLtMatmulDesc_t product_ = nullptr;
    cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, d_ = nullptr;
    cublasLtMatmulAlgo_t algorithm_{};
};

struct layer_on_device {
    shape s;
    ps::expert_layout layout;
    std::uint64_t stride;
    ps::stream stream;
    ps::buffer<std::byte, ps::memory::device> records;
    std::vector<const std::byte*> addresses;
    ps::buffer<const std::byte*, ps::memory::device> table;

    explicit layer_on_device(const shape& of)
        : s(of),
          layout(layout_of(of)),
          stride(ps::round_up(layout.bytes, 256)),
          records(stride * of.experts),
          addresses(of.experts),
          table(of.experts) {
        for (std::uint32_t e = 0; e < s.experts; ++e) {
            addresses[e] = records.data() + e * stride;
        }
        ps::check(cudaMemcpy(table.data(), addresses.data(), addresses.size() * sizeof addresses[0], cudaMemcpyDefault), "cudaMemcpy");
        ps::launch(fill, 2048, 256, 0, stream.get(), records.data(), stride, s.experts, layout);
        stream.synchronize();
    }
};

/// @returns whether the output was right
template <class Format, class Precision>
bool measure(const layer_on_device& l, const char* precision, std::uint32_t tokens, bool same_experts, double wanted_us,
             nlohmann::json& table) {
    using load_benchmark::median, load_benchmark::spread;
    const shape& s = l.s;
    const cudaStream_t stream = l.stream.get();
    constexpr bool fp8 = std::is_same_v<Precision, ps::precision::a8>;
    ps::buffer<std::uint16_t, ps::memory::device> hidden(std::size_t{tokens} * s.hidden), out(std::size_t{tokens} * s.hidden);
    ps::launch(fill_inputs, 256, 256, 0, stream, hidden.data(), std::uint64_t{tokens} * s.hidden);
    const ps::expert_prefill<Format, Precision> experts(l.layout, s.experts, tokens, s.k);
    ps::buffer<std::byte, ps::memory::device> workspace(experts.workspace_bytes());
    ps::check(cudaMemset(workspace.data(), 0xff, workspace.size()), "cudaMemset");
    const std::uint32_t calls = same_experts ? std::min(10u, s.experts / s.k) : 3;
    std::mt19937 random(3);
    const routed_calls routed = route(s, calls, tokens, same_experts, random);
    const std::uint64_t read_bytes = routed.visited * l.layout.bytes / calls;
    const auto ids = to_device(routed.ids);
    std::vector<float> some_weights(routed.ids.size());
    std::uniform_real_distribution<float> weight(0.05f, 0.25f);
    std::generate(some_weights.begin(), some_weights.end(), [&] { return weight(random); });
    const auto weights = to_device(some_weights);
    // Sorted pairs, as the routing kernels give them.
    const std::uint32_t pairs = tokens * s.k;
    ps::buffer<std::int32_t, ps::memory::device> rows(std::size_t{calls} * pairs);
    ps::buffer<std::uint32_t, ps::memory::device> offsets(std::size_t{calls} * (s.experts + 1));
    ps::buffer<std::byte, ps::memory::device> scratch(ps::executor::cuda<>::permute_scratch_bytes(pairs, s.experts) + 256);
    const ps::executor::cuda<Format> executor(stream);
    for (std::uint32_t call = 0; call < calls; ++call) {
        executor.permute(ids.data() + std::size_t{call} * pairs, pairs, s.experts, rows.data() + std::size_t{call} * pairs,
                         offsets.data() + std::size_t{call} * (s.experts + 1), {scratch.data(), scratch.size()});
    }
    const auto step = [&](std::uint32_t call) {
        const std::size_t first = std::size_t{call} * pairs;
        return ps::expert_step{.records = l.table.data(),
                               .hidden = {hidden.data(), ps::dtype::bf16, tokens, s.hidden},
                               .ids = ids.data() + first,
                               .rows = rows.data() + first,
                               .offsets = offsets.data() + std::size_t{call} * (s.experts + 1),
                               .weights = weights.data() + first,
                               .out = {out.data(), ps::dtype::bf16, tokens, s.hidden}};
    };
    const auto enqueue = [&](std::uint32_t call) { experts.enqueue(step(call), {workspace.data(), workspace.size()}, stream); };

    const std::vector<float> want = exact_output<Format>(s, l.layout, step(0), routed.ids, l.addresses, stream);
    ps::check(cudaMemset(out.data(), 0xff, out.size() * 2), "cudaMemset");
    enqueue(0);
    l.stream.synchronize();
    std::vector<std::uint16_t> got(want.size());
    ps::check(cudaMemcpy(got.data(), out.data(), got.size() * 2, cudaMemcpyDefault), "cudaMemcpy");
    const double error = relative_error(got, want);
    const bool right = error < (fp8 ? 5e-2 : 1e-2);

    const dense_product gate_and_up(fp8, pairs, 2 * s.intermediate, s.hidden, stream), down(fp8, pairs, s.hidden, s.intermediate, stream);
    ps::buffer<std::uint32_t, ps::memory::device> sink(1);
    std::vector<graph_of_calls> graphs;
    graphs.emplace_back(stream, calls, enqueue);
    graphs.emplace_back(stream, 2, [&](std::uint32_t) {
        gate_and_up.enqueue(stream);
        down.enqueue(stream);
    });
    const std::uint64_t room = l.stride * s.experts - std::min(l.stride * s.experts, read_bytes);
    for (const unsigned blocks : {1056u, 4224u, 8448u}) {
        if (same_experts) {
            graphs.emplace_back(stream, calls, [&](std::uint32_t call) {
                const std::uint64_t from = room * call / (calls - 1) / 256 * 256;
                ps::launch(read_all, blocks, 256, 0, stream, reinterpret_cast<const uint4*>(l.records.data() + from), read_bytes / 16,
                           sink.data());
            });
        }
    }
    std::vector<std::vector<double>> times(graphs.size());
    for (int round = -1; round < rounds; ++round) {
        for (std::size_t i = 0; i < graphs.size(); ++i) {
            const double us = graphs[i].microseconds();
            if (round >= 0) {
                times[i].push_back(us);
            }
        }
    }
    const double us = median(times[0]);
    const double dense_us = median(times[1]);
    double read_us = 0;
    for (std::size_t i = 2; i < times.size(); ++i) {
        read_us = read_us == 0 ? median(times[i]) : std::min(read_us, median(times[i]));
    }
    const double operations = 6.0 * pairs * s.hidden * s.intermediate;
    std::vector<double> ratios;
    for (int i = 0; i < rounds; ++i) {
        ratios.push_back(times[1][static_cast<std::size_t>(i)] / times[0][static_cast<std::size_t>(i)]);
    }
    const char* routing = same_experts ? "same" : "uniform";
    std::printf("%-12s %-4s %-8s %5u %9.1f %6.1f %7.1f %9.1f %7.1f %6.3f %8.1f %6.3f %9.1e", s.name, precision, routing, tokens, us,
                spread(times[0]), operations / us / 1e6, dense_us, operations / dense_us / 1e6, dense_us / us, read_us,
                read_us > 0 ? us / read_us : 0, error);
    nlohmann::json row{{"shape", s.name},
                       {"precision", precision},
                       {"routing", routing},
                       {"tokens", tokens},
                       {"us", us},
                       {"spread", spread(times[0])},
                       {"tflops", operations / us / 1e6},
                       {"cublaslt_us", dense_us},
                       {"cublaslt_tflops", operations / dense_us / 1e6},
                       {"of_cublaslt", dense_us / us},
                       {"error", error}};
    if (read_us > 0) {
        row["read_us"] = read_us;
        row["over_read"] = us / read_us;
    }
    load_benchmark::requirement must;
    if (!same_experts && tokens == 4096) {
        must = {.what = "of cuBLASLt", .value = dense_us / us, .wanted = 0.6, .spread = spread(ratios)};
    } else if (wanted_us > 0) {
        must = {.what = "us", .value = us, .wanted = wanted_us, .spread = spread(times[0]), .at_most = true};
    } else if (same_experts && tokens == 32) {
        must = {.what = "over the read", .value = us / read_us, .wanted = 1.15, .spread = spread(times[0]) / read_us, .at_most = true};
    }
    if (!must.what.empty()) {
        std::printf("  %s %s %g: %s", must.what.c_str(), must.at_most ? "<=" : ">=", must.wanted, must.verdict().c_str());
        row[must.at_most ? "at_most" : "at_least"] = must.wanted;
        row["verdict"] = must.verdict();
    }
    std::printf("%s\n", right ? "" : "  WRONG");
    std::fflush(stdout);
    table.push_back(std::move(row));
    return right;
}

}  // namespace

int main(int argc, char** argv) try {
    std::string only, tokens_only, json;
    for (int i = 1; i < argc; i += 2) {
        const std::string option = argv[i];
        if (i + 1 == argc || (option != "--only" && option != "--tokens" && option != "--json")) {
            throw ps::configuration_error("benchmark_prefill takes --only NAME,..., --tokens NUMBER,... and --json FILE, not " + option);
        }
        (option == "--only" ? only : option == "--tokens" ? tokens_only : json) = argv[i + 1];
    }
    if (ps::device_count() == 0) {
        std::puts("SKIPPED: this benchmark needs a GPU");
        return 77;
    }
    using ps::activation;
    using ps::weight_kind;
    const shape deepseek{"deepseek-v3", weight_kind::fp8_block128, 7168, 2048, 256, 8, activation::swiglu};
    const shape qwen235{"qwen3-235b", weight_kind::bf16, 4096, 1536, 128, 8, activation::swiglu};
    const shape qwen30{"qwen3-30b", weight_kind::bf16, 2048, 768, 128, 8, activation::swiglu};
    const shape gpt_oss{"gpt-oss-120b", weight_kind::mxfp4, 2880, 2880, 128, 4, activation::gpt_oss};
    const auto listed = [](const std::string& list, const std::string& name) {
        return list.empty() || ("," + list + ",").find("," + name + ",") != std::string::npos;
    };
    const auto wanted = [&](const shape& s) { return listed(only, s.name); };
    cudaDeviceProp device{};
    int driver = 0;
    ps::check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    ps::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    std::printf("%s, runtime %d, driver for %d, cuBLASLt %zu\n%-12s %-4s %-8s %5s %9s %6s %7s %9s %7s %6s %8s %6s %9s\n", device.name,
                CUDART_VERSION, driver, cublasLtGetVersion(), "shape", "", "routing", "T", "us", "+-", "TFLOP/s", "dense us", "TFLOP/s",
                "ratio", "read us", "over", "error");
    nlohmann::json table = nlohmann::json::array();
    bool right = true;
    const ps::precision::a16 a16;
    const ps::precision::a8 a8;
    const auto run = [&]<class Format, class Precision>(Format, Precision, const layer_on_device& l, const char* precision, double at_128) {
        for (const std::uint32_t tokens : {16u, 32u, 64u, 128u}) {
            if (listed(tokens_only, std::to_string(tokens))) {
                right = measure<Format, Precision>(l, precision, tokens, true, tokens == 128 ? at_128 : 0, table) && right;
            }
        }
        for (const std::uint32_t tokens : {512u, 1024u, 2048u, 4096u, 8192u}) {
            if (listed(tokens_only, std::to_string(tokens))) {
                right = measure<Format, Precision>(l, precision, tokens, false, 0, table) && right;
            }
        }
    };
    for (const shape& s : {qwen235, qwen30}) {
        if (wanted(s)) {
            run(ps::format::bf16{}, a16, layer_on_device(s), "A16", 0);
        }
    }
    if (wanted(deepseek)) {
        const layer_on_device l(deepseek);
        run(ps::format::fp8_block128{}, a16, l, "A16", 190);
        run(ps::format::fp8_block128{}, a8, l, "A8", 140);
    }
    if (wanted(gpt_oss)) {
        run(ps::format::mxfp4{}, a16, layer_on_device(gpt_oss), "A16", 0);
    }
    if (!json.empty()) {
        std::ofstream(json) << nlohmann::json{{"gpu", device.name}, {"rounds", rounds}, {"rows", table}}.dump(2) << "\n";
    }
    return right ? 0 : 1;
} catch (const std::exception& e) {
    std::fprintf(stderr, "benchmark_prefill: %s\n", e.what());
    return 2;
}

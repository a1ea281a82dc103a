#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/combine.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/dispatch/routing.cuh>
#include <penstock/model/tensor.hpp>

/// What lies before and after the experts: hidden states to float32, the gate of a shared expert, the weighted sum.

namespace penstock::inline v0_1::detail {

inline constexpr std::uint32_t element_threads = 256;
/// A block of the elementwise kernels takes this many columns of one row.
inline constexpr std::uint32_t columns_per_block = 4 * element_threads;

template <class Format>
using float_element = typename decoder<Format>::element;

/// Nearest value of a plain float format.
template <class Format>
__device__ float_element<Format> encode(float value) {
    if constexpr (Format::kind == weight_kind::f32) {
        return __float_as_uint(value);
    } else if constexpr (Format::kind == weight_kind::bf16) {
        return encode_bf16(value);
    } else {
        return encode_f16(value);
    }
}

template <class Format>
__global__ __launch_bounds__(element_threads)
    __attribute__((visibility("hidden"))) void widen_rows(const void* hidden, std::uint64_t count, float* x) {
    const auto* from = static_cast<const float_element<Format>*>(hidden);
    const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * element_threads;
    for (std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * element_threads + threadIdx.x; i < count; i += stride) {
        x[i] = decoder<Format>::one(from[i]);
    }
}

/// A block scales one token's row. The dot product is added in a fixed order: a thread's columns, the lanes of a warp, the warps.
template <class Format>
__global__ __launch_bounds__(element_threads)
    __attribute__((visibility("hidden"))) void gate_shared(const void* weight, const float* x, std::uint32_t hidden, float* shared) {
    __shared__ float partial[element_threads / 32];
    const auto* w = static_cast<const float_element<Format>*>(weight);
    const std::uint64_t row = static_cast<std::uint64_t>(blockIdx.x) * hidden;
    float sum[1] = {0.0f};
    for (std::uint32_t c = threadIdx.x; c < hidden; c += element_threads) {
        sum[0] = ::fmaf(decoder<Format>::one(w[c]), x[row + c], sum[0]);
    }
    const float of_warp = warp_sums<1>(sum);
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = of_warp;
    }
    __syncthreads();
    float logit = 0.0f;
    for (std::uint32_t i = 0; i < element_threads / 32; ++i) {
        logit += partial[i];
    }
    const float gate = 1.0f / (1.0f + ::expf(-logit));
    for (std::uint32_t c = threadIdx.x; c < hidden; c += element_threads) {
        shared[row + c] *= gate;
    }
}

/// What combine reads and writes.
struct combine_arguments {
    const float* partial;
    const std::int32_t* ids;
    const float* weights;
    const float* shared;
    std::uint32_t k;
    std::uint32_t hidden;
    std::uint32_t blocks_per_row;
    std::uint32_t experts;  ///< ids from here on visit nobody, as negative ones
    void* out;
};

template <class Format>
__global__ __launch_bounds__(element_threads) __attribute__((visibility("hidden"))) void combine_rows(combine_arguments a) {
    wait_for_launch_before();
    let_next_launch_begin();
    const std::uint64_t token = blockIdx.x / a.blocks_per_row;
    const std::uint32_t begin = blockIdx.x % a.blocks_per_row * columns_per_block;
    const std::uint32_t end = smaller(begin + columns_per_block, a.hidden);
    constexpr int mine = columns_per_block / element_threads;
    float sum[mine] = {};
    for (std::uint32_t j = 0; j < a.k; ++j) {
        const std::uint64_t pair = token * a.k + j;
        if (static_cast<std::uint32_t>(a.ids[pair]) >= a.experts) {
            continue;
        }
        const float weight = a.weights != nullptr ? a.weights[pair] : 1.0f;
        const float* from = a.partial + pair * a.hidden;
#pragma unroll
        for (int i = 0; i < mine; ++i) {
            const std::uint32_t c = begin + i * element_threads + threadIdx.x;
            sum[i] = c < end ? ::fmaf(weight, from[c], sum[i]) : 0.0f;
        }
    }
    auto* out = static_cast<float_element<Format>*>(a.out);
#pragma unroll
    for (int i = 0; i < mine; ++i) {
        const std::uint32_t c = begin + i * element_threads + threadIdx.x;
        if (c < end) {
            const float extra = a.shared != nullptr ? a.shared[token * a.hidden + c] : 0.0f;
            out[token * a.hidden + c] = encode<Format>(sum[i] + extra);
        }
    }
}

struct widen_launcher {
    activations hidden;
    float* x;
    cudaStream_t stream;

    template <class Format>
    void operator()(Format) const {
        const std::uint64_t count = static_cast<std::uint64_t>(hidden.tokens) * hidden.hidden;
        const std::uint64_t blocks = smaller<std::uint64_t>(ceil_div(count, element_threads), 1u << 16);
        launch(widen_rows<Format>, dim3(static_cast<unsigned>(blocks)), dim3(element_threads), 0, stream, hidden.data, count, x);
    }
};

/// The body of executor::cuda::widen.
inline void run_widen(activations hidden, float* x, cudaStream_t stream) {
    visit_float("hidden states", hidden.type, widen_launcher{hidden, x, stream});
}

struct shared_gate_launcher {
    const void* weight;
    const float* x;
    std::uint32_t tokens;
    std::uint32_t hidden;
    float* shared;
    cudaStream_t stream;

    template <class Format>
    void operator()(Format) const {
        launch(gate_shared<Format>, dim3(tokens), dim3(element_threads), 0, stream, weight, x, hidden, shared);
    }
};

/// The body of executor::cuda::shared_gate.
inline void run_shared_gate(const void* weight, dtype type, const float* x, std::uint32_t tokens, std::uint32_t hidden, float* shared,
                            cudaStream_t stream) {
    visit_float("a shared expert's gate", type, shared_gate_launcher{weight, x, tokens, hidden, shared, stream});
}

struct combine_launcher {
    combine_arguments a;
    std::uint32_t tokens;
    cudaStream_t stream;

    template <class Format>
    void operator()(Format) const {
        const std::uint64_t blocks = static_cast<std::uint64_t>(tokens) * a.blocks_per_row;
        if (blocks > 0x7fffffffu) {
            throw configuration_error("penstock: combine of " + std::to_string(tokens) + " tokens needs more blocks than a launch has");
        }
        launch_early(combine_rows<Format>, dim3(static_cast<unsigned>(blocks)), dim3(element_threads), 0, stream, a);
    }
};

inline void load_combine() { load_kernels(combine_rows<format::f32>, combine_rows<format::bf16>, combine_rows<format::f16>); }

/// The body of executor::cuda::combine. @param experts ids from here on visit nobody
inline void run_combine(const float* partial, const std::int32_t* ids, const float* weights, std::uint32_t k, const float* shared,
                        activations_out out, cudaStream_t stream, std::uint32_t experts = 1u << 31) {
    const auto blocks_per_row = static_cast<std::uint32_t>(ceil_div(out.hidden, columns_per_block));
    visit_float("an output", out.type,
                combine_launcher{{partial, ids, weights, shared, k, out.hidden, blocks_per_row, experts, out.data}, out.tokens, stream});
}

}  // namespace penstock::inline v0_1::detail

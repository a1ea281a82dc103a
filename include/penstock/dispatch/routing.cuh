#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/routing.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/decode.cuh>
#include <penstock/dispatch/expert_work.hpp>
#include <penstock/dispatch/warp_routing.cuh>

#include <utility>

/// Logits and the choice of experts.

namespace penstock::inline v0_1 {

namespace detail {

inline constexpr std::uint32_t logit_warps = 4;
inline constexpr std::uint32_t logit_tokens = 4;  ///< a warp computes one expert's logit for this many tokens
inline constexpr std::uint32_t route_warps = 4;

template <int Q, class Format>
__device__ void copy_quad(const uint4& v, float (&w)[decoder<Format>::per_vector]) {
    float four[4];
    decoder<Format>::template quad<Q>(v, four);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        w[4 * Q + i] = four[i];
    }
}

template <class Format, int... Q>
__device__ void decode_vector(const uint4& v, float (&w)[decoder<Format>::per_vector], std::integer_sequence<int, Q...>) {
    (copy_quad<Q, Format>(v, w), ...);
}

/// A lane takes the columns of 16-byte vectors in turn, whether it can load them as vectors or not, so that alignment does not change bits.
template <class Format>
__global__ __launch_bounds__(logit_warps * 32)
    __attribute__((visibility("hidden"))) void router_logits(router_ref router, const float* x, std::uint32_t tokens, float* logits,
                                                             bool vectors) {
    constexpr std::uint32_t vector = decoder<Format>::per_vector;
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint64_t number = static_cast<std::uint64_t>(blockIdx.x) * logit_warps + threadIdx.x / 32;
    const auto e = static_cast<std::uint32_t>(number % router.experts);
    const std::uint64_t token0 = number / router.experts * logit_tokens;
    if (token0 >= tokens) {
        return;
    }
    const auto present = static_cast<std::uint32_t>(smaller<std::uint64_t>(logit_tokens, tokens - token0));
    const std::uint32_t hidden = router.hidden;
    const auto* row = reinterpret_cast<const typename decoder<Format>::element*>(router.weight) + static_cast<std::uint64_t>(e) * hidden;
    const float* input = x + token0 * hidden;
    float acc[logit_tokens] = {};
#pragma unroll 4
    for (std::uint32_t c = lane * vector; c < hidden; c += 32 * vector) {
        float w[vector];
        if (vectors) {
            decode_vector<Format>(load_weights(row + c), w, std::make_integer_sequence<int, vector / 4>{});
        } else {
#pragma unroll
            for (std::uint32_t i = 0; i < vector; ++i) {
                w[i] = c + i < hidden ? decoder<Format>::one(__ldg(row + c + i)) : 0.0f;
            }
        }
#pragma unroll
        for (std::uint32_t t = 0; t < logit_tokens; ++t) {
            if (t < present) {
                const float* at = input + static_cast<std::uint64_t>(t) * hidden + c;
                if (vectors) {
#pragma unroll
                    for (std::uint32_t i = 0; i < vector; i += 4) {
                        const float4 four = __ldg(reinterpret_cast<const float4*>(at + i));
                        acc[t] = ::fmaf(w[i], four.x, acc[t]);
                        acc[t] = ::fmaf(w[i + 1], four.y, acc[t]);
                        acc[t] = ::fmaf(w[i + 2], four.z, acc[t]);
                        acc[t] = ::fmaf(w[i + 3], four.w, acc[t]);
                    }
                } else {
#pragma unroll
                    for (std::uint32_t i = 0; i < vector; ++i) {
                        acc[t] = c + i < hidden ? ::fmaf(w[i], __ldg(at + i), acc[t]) : acc[t];
                    }
                }
            }
        }
    }
    const float sum = warp_sums<logit_tokens>(acc);
    const std::uint32_t t = lane / (32 / logit_tokens);
    if (lane % (32 / logit_tokens) == 0 && t < present) {
        const float bias = router.bias != nullptr ? load_element(router.bias, router.bias_type, e) : 0.0f;
        logits[(token0 + t) * router.experts + e] = sum + bias;
    }
}

/// What a warp gives a token: the choice of `router`, or, for a token past the live ones, nobody.
template <class Router>
__device__ lane_choice choose_or_nobody(const Router& router, const typename Router::token_logits& logits, bool is_live) {
    return is_live ? router.route(logits) : lane_choice{};
}

/// A warp routes one token. Dynamic shared memory: what the router of each warp needs.
template <int PerLane, std::uint32_t Warps>
__global__ __launch_bounds__(Warps * 32, 1)
    __attribute__((visibility("hidden"))) void route_tokens(const __grid_constant__ routing_rule rule, const float* correction_bias,
                                                            const float* logits, std::uint32_t tokens, const std::int32_t* live,
                                                            std::int32_t* ids, float* weights) {
    extern __shared__ float penstock_route_scratch[];
    using router_type = warp_router<PerLane>;
    const std::uint32_t warp = __shfl_sync(whole_warp, threadIdx.x / 32, 0);  // tells the compiler that a warp stays together
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t token = blockIdx.x * Warps + warp;
    if (token >= tokens) {
        return;
    }
    const router_type router(rule, correction_bias, penstock_route_scratch + warp * router_type::scratch_floats(rule.experts));
    const typename router_type::token_logits mine = router.load(logits + static_cast<std::uint64_t>(token) * rule.experts);
    const lane_choice choice = choose_or_nobody(router, mine, live == nullptr || static_cast<std::int64_t>(token) < *live);
    if (lane < rule.top_k) {
        const std::uint64_t pair = static_cast<std::uint64_t>(token) * rule.top_k + lane;
        ids[pair] = choice.id;
        weights[pair] = choice.weight;
    }
}

[[noreturn]] inline void refuse_type(const char* what, dtype type) {
    throw configuration_error("penstock: " + std::string(what) + " of type " + std::string(name(type)) + "; F32, BF16 and F16 are served");
}

/// Calls `f` with the format of plain floats of a type. @throws configuration_error
template <class F>
void visit_float(const char* what, dtype type, F&& f) {
    switch (type) {
        case dtype::f32: f(format::f32{}); return;
        case dtype::bf16: f(format::bf16{}); return;
        case dtype::f16: f(format::f16{}); return;
        default: refuse_type(what, type);
    }
}

struct logits_launcher {
    const router_ref& router;
    const float* x;
    std::uint32_t tokens;
    float* logits;
    cudaStream_t stream;

    template <class Format>
    void operator()(Format) const {
        const bool vectors = reinterpret_cast<std::uintptr_t>(router.weight) % 16 == 0 && reinterpret_cast<std::uintptr_t>(x) % 16 == 0 &&
                             router.hidden % decoder<Format>::per_vector == 0;
        const std::uint64_t warps = ceil_div(tokens, logit_tokens) * router.experts;
        const std::uint64_t blocks = ceil_div(warps, logit_warps);
        if (blocks > 0x7fffffffu) {
            throw configuration_error("penstock: logits of " + std::to_string(tokens) + " tokens and " + std::to_string(router.experts) +
                                      " experts need more blocks than a launch has");
        }
        launch(router_logits<Format>, dim3(static_cast<unsigned>(blocks)), dim3(logit_warps * 32), 0, stream, router, x, tokens, logits,
               vectors);
    }
};

/// The body of executor::cuda::logits.
inline void run_logits(const router_ref& router, const float* x, std::uint32_t tokens, float* logits, cudaStream_t stream) {
    if (tokens == 0 || router.experts == 0) {
        return;
    }
    if (router.bias != nullptr && router.bias_type != dtype::f32 && router.bias_type != dtype::bf16 && router.bias_type != dtype::f16) {
        refuse_type("a router bias", router.bias_type);
    }
    visit_float("a router weight", router.type, logits_launcher{router, x, tokens, logits, stream});
}

/// The body of executor::cuda::route.
inline void run_route(const routing_rule& rule, const router_ref& router, const float* logits, std::uint32_t tokens,
                      const std::int32_t* live, std::int32_t* ids, float* weights, cudaStream_t stream) {
    validate(rule);
    visit_registers(rule, [&]<int PerLane>(std::integral_constant<int, PerLane>) {
        launch(route_tokens<PerLane, route_warps>, dim3(static_cast<unsigned>(ceil_div(tokens, route_warps))), dim3(route_warps * 32),
               std::size_t{route_warps} * warp_router<PerLane>::scratch_floats(rule.experts) * sizeof(float), stream, rule,
               router.correction_bias, logits, tokens, live, ids, weights);
    });
}

}  // namespace detail
}  // namespace penstock::inline v0_1

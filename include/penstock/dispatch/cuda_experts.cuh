#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/cuda_experts.cuh holds kernels: compile this file with nvcc; .cpp files take cuda_experts.hpp"
#endif

#include <penstock/dispatch/combine.cuh>
#include <penstock/dispatch/cuda_experts.hpp>
#include <penstock/dispatch/expert_mlp.cuh>
#include <penstock/dispatch/permutation.cuh>
#include <penstock/dispatch/route_to_work.cuh>
#include <penstock/dispatch/routing.cuh>

/// The bodies of executor::cuda, and the macro that puts them in a program.

namespace penstock::inline v0_1::executor {

template <class... Formats>
void cuda<Formats...>::widen(activations hidden, float* x) const {
    detail::run_widen(hidden, x, stream_);
}

template <class... Formats>
void cuda<Formats...>::logits(const router_ref& router, const float* x, std::uint32_t tokens, float* logits) const {
    detail::run_logits(router, x, tokens, logits, stream_);
}

template <class... Formats>
void cuda<Formats...>::route(const routing_rule& rule, const router_ref& router, const float* logits, std::uint32_t tokens,
                             const std::int32_t* live, std::int32_t* ids, float* weights) const {
    detail::run_route(rule, router, logits, tokens, live, ids, weights, stream_);
}

template <class... Formats>
void cuda<Formats...>::permute(const std::int32_t* ids, std::uint32_t pairs, std::uint32_t experts, std::int32_t* rows,
                               std::uint32_t* offsets, std::span<std::byte> scratch) const {
    detail::run_permute(ids, pairs, experts, rows, offsets, scratch, permute_scratch_bytes(pairs, experts), stream_);
}

template <class... Formats>
void cuda<Formats...>::route_to_work(const routing_rule& rule, const router_ref& router, const float* logits, std::uint32_t tokens,
                                     const std::int32_t* live, std::int32_t* ids, float* weights, std::int32_t* rows,
                                     std::uint32_t* offsets, std::span<std::byte> scratch) const {
    detail::run_route_to_work(rule, router, logits, tokens, live, ids, weights, rows, offsets, scratch,
                              route_to_work_scratch_bytes(tokens, rule.top_k, rule.experts), stream_);
}

template <class... Formats>
void cuda<Formats...>::experts(const expert_layout& layout, std::span<const expert_work> works, const std::int32_t* rows, std::uint32_t k,
                               const float* x, const float* input_scale, float* activated, float* partial) const {
    if (!computes(layout.kind)) {
        throw configuration_error("penstock: this executor::cuda was not instantiated for experts of format " +
                                  std::string(name(layout.kind)));
    }
    const auto run = [&]<class Format>(Format) {
        detail::run_experts<Format>(layout, works, rows, k, x, input_scale, activated, partial, stream_);
    };
    if constexpr (sizeof...(Formats) == 0) {
        visit(layout.kind, run);
    } else {
        static_cast<void>(((Formats::kind == layout.kind && (run(Formats{}), true)) || ...));
    }
}

template <class... Formats>
void cuda<Formats...>::shared_gate(const void* weight, dtype type, const float* x, std::uint32_t tokens, std::uint32_t hidden,
                                   float* shared) const {
    detail::run_shared_gate(weight, type, x, tokens, hidden, shared, stream_);
}

template <class... Formats>
void cuda<Formats...>::combine(const float* partial, const std::int32_t* ids, const float* weights, std::uint32_t k, const float* shared,
                               activations_out out) const {
    detail::run_combine(partial, ids, weights, k, shared, out, stream_);
}

}  // namespace penstock::inline v0_1::executor

/// Puts executor::cuda for the named formats in this `.cu`, once a program: PENSTOCK_INSTANTIATE(bf16, fp8_block128) is what
/// executor::cuda<format::bf16, format::fp8_block128> needs, PENSTOCK_INSTANTIATE() what executor::cuda<> needs. At namespace scope.
#define PENSTOCK_INSTANTIATE(...)               \
    namespace penstock::inline v0_1::executor { \
    using namespace ::penstock::format;         \
    template class cuda<__VA_ARGS__>;           \
    }

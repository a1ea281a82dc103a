#pragma once

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/launch.cuh>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/cuda_experts.cuh>
#include <penstock/dispatch/expert_step.hpp>
#include <penstock/policy/memory.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

/// A layer of experts with random weights, calls that visit them, and what the float32 kernels make of a call.
namespace layer_of_experts {

namespace ps = penstock;

struct shape {
    const char* name;
    ps::weight_kind kind;
    std::uint32_t hidden, intermediate, experts, k;
    ps::activation act;
};

inline ps::expert_layout layout_of(const shape& s) {
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

__device__ inline std::uint32_t mixed(std::uint64_t n) {
    n = (n ^ n >> 30) * 0xbf58476d1ce4e5b9ull;
    n = (n ^ n >> 27) * 0x94d049bb133111ebull;
    return static_cast<std::uint32_t>(n >> 32);
}

/// Of moderate size: every 16-bit word, or byte, is a finite number of its format.
__device__ inline std::uint32_t moderate(ps::weight_kind kind, std::uint32_t word) {
    return kind == ps::weight_kind::bf16           ? (word & 0x81ff81ffu) | 0x3c003c00u
           : kind == ps::weight_kind::fp8_block128 ? word & 0xb7b7b7b7u
                                                   : word;
}

/// Random weights and scales.
static __global__ void fill(std::byte* records, std::uint64_t stride, std::uint32_t count, ps::expert_layout l) {
    const std::uint64_t scales = l.kind == ps::weight_kind::bf16 ? l.bytes : l.gate.scale_offset;
    const std::uint64_t words = l.bytes / 4;
    for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < words * count;
         i += std::uint64_t{gridDim.x} * blockDim.x) {
        const std::uint64_t at = i % words * 4;
        std::uint32_t word = mixed(i);
        if (at < scales) {
            word = moderate(l.kind, word);
        } else if (l.kind == ps::weight_kind::fp8_block128) {
            word = __float_as_uint(0.01f + 0.01f * static_cast<float>(word & 0xff) / 256.0f);
        } else {
            word = (word & 0x03030303u) + 0x78787878u;  // 2^-7 to 2^-4
        }
        *reinterpret_cast<std::uint32_t*>(records + i / words * stride + at) = word;
    }
}

/// Between -1 and 1.
static __global__ void fill_inputs(std::uint16_t* x, std::uint64_t count) {
    for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count; i += std::uint64_t{gridDim.x} * blockDim.x) {
        x[i] = ps::encode_bf16(static_cast<float>(mixed(i + (1ull << 40)) & 0xffff) / 32768.0f - 1.0f);
    }
}

/// The ceiling: eight 16-byte loads in flight a thread.
static __global__ void read_all(const uint4* from, std::uint64_t count, std::uint32_t* sink) {
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

template <class T>
ps::buffer<T, ps::memory::device> to_device(const std::vector<T>& values) {
    ps::buffer<T, ps::memory::device> there(values.size());
    ps::check(cudaMemcpy(there.data(), values.data(), values.size() * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
    return there;
}

/// Experts that calls visit, other ones in turn: where all tokens visit the same, disjoint ones over all of the layer.
struct routed_calls {
    std::vector<std::int32_t> ids;  ///< [calls, tokens, k]
    std::uint64_t visited = 0;      ///< distinct experts, over all calls
};

inline routed_calls route(const shape& s, std::uint32_t calls, std::uint32_t tokens, bool same_experts, std::mt19937& random) {
    routed_calls all;
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
                all.ids.push_back(e);
                all.visited += seen[static_cast<std::size_t>(e)] ? 0 : 1;
                seen[static_cast<std::size_t>(e)] = true;
            }
        }
    }
    return all;
}

/// What the float32 kernels make of the first call of `step`, whose ids are the first of `ids`.
template <class Format>
std::vector<float> exact_output(const shape& s, const ps::expert_layout& layout, const ps::expert_step& step,
                                const std::vector<std::int32_t>& ids, const std::vector<const std::byte*>& records, cudaStream_t stream) {
    const std::uint32_t tokens = step.hidden.tokens;
    const std::uint32_t pairs = tokens * s.k;
    std::vector<std::int32_t> rows(pairs);
    std::iota(rows.begin(), rows.end(), 0);
    std::stable_sort(rows.begin(), rows.end(),
                     [&](std::int32_t a, std::int32_t b) { return ids[static_cast<std::size_t>(a)] < ids[static_cast<std::size_t>(b)]; });
    std::vector<ps::expert_work> works;
    for (std::uint32_t i = 0; i < pairs; ++i) {
        const auto e = static_cast<std::uint32_t>(ids[static_cast<std::size_t>(rows[i])]);
        if (works.empty() || works.back().expert != e) {
            works.push_back({e, records[e], i, 0});
        }
        ++works.back().count;
    }
    const auto device_rows = to_device(rows);
    ps::buffer<float, ps::memory::device> x(std::size_t{tokens} * s.hidden), out(std::size_t{tokens} * s.hidden);
    ps::buffer<float, ps::memory::device> activated(std::size_t{pairs} * s.intermediate), partial(std::size_t{pairs} * s.hidden);
    const ps::executor::cuda<Format> exact(stream);
    exact.widen(step.hidden, x.data());
    exact.experts(layout, works, device_rows.data(), s.k, x.data(), nullptr, activated.data(), partial.data());
    exact.combine(partial.data(), step.ids, step.weights, s.k, nullptr, {out.data(), ps::dtype::f32, tokens, s.hidden});
    ps::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    std::vector<float> values(std::size_t{tokens} * s.hidden);
    ps::check(cudaMemcpy(values.data(), out.data(), values.size() * sizeof(float), cudaMemcpyDefault), "cudaMemcpy");
    return values;
}

inline double relative_error(const std::vector<std::uint16_t>& got, const std::vector<float>& want) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
        difference += std::pow(double{ps::decode_bf16(got[i])} - want[i], 2);
        norm += std::pow(double{want[i]}, 2);
    }
    return std::sqrt(difference / norm);
}

}  // namespace layer_of_experts

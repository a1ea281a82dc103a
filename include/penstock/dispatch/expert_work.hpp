#pragma once

#include <penstock/model/dtype.hpp>

#include <cstddef>
#include <cstdint>

/// What the executors share. A *pair* is p = token * k + j, the j-th choice of a token. `rows` lists pairs sorted by expert, ascending
/// within an expert; pairs whose id is negative are left out. Expert e owns rows[offsets[e]] to rows[offsets[e + 1]], end excluded.

namespace penstock::inline v0_1 {

/// rows[first, first + count) visit expert `expert`, whose record lies at `record`, in memory that the executor can read.
struct expert_work {
    std::uint32_t expert = 0;
    const std::byte* record = nullptr;
    std::uint32_t first = 0;
    std::uint32_t count = 0;
};

/// A router's tensors, in the executor's memory.
struct router_ref {
    const void* weight = nullptr;  ///< [experts, hidden] row-major
    dtype type = dtype::f32;       ///< f32, bf16 or f16
    std::uint32_t experts = 0;
    std::uint32_t hidden = 0;
    const void* bias = nullptr;  ///< [experts], added to the logits; may be absent
    dtype bias_type = dtype::f32;
    const float* correction_bias = nullptr;  ///< [experts], for the choice alone; may be absent
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/model/tensor.hpp>

#include <cstddef>
#include <cstdint>

namespace penstock::inline v0_1 {

/// What one call of a layer's experts computes. Pointers are in memory that the device reads, `out`'s in memory that it writes; hidden states
/// start at a multiple of 16 bytes.
struct expert_step {
    const std::byte* const* records = nullptr;  ///< [experts], each at a multiple of 16 bytes; of experts that no id names, unused
    activations hidden;                         ///< in the operand's type: f16 for experts in f16, else bf16
    const std::int32_t* ids = nullptr;          ///< [tokens, k]; outside [0, experts): no expert
    const std::int32_t* rows = nullptr;      ///< with `offsets`: the pairs sorted by expert, as executor::cuda::route_to_work and permute
    const std::uint32_t* offsets = nullptr;  ///< write them; where they are null, calls with many pairs sort the ids themselves
    const float* weights = nullptr;          ///< [tokens, k]; null: every weight is 1
    const float* input_scale = nullptr;      ///< [tokens, k], multiplies the input of the pair; may be null
    const float* shared = nullptr;           ///< [tokens, hidden], added; may be null
    activations_out out;                     ///< [tokens, hidden]
};

}  // namespace penstock::inline v0_1

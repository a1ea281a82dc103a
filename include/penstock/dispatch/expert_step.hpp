#pragma once

#include <penstock/error.hpp>
#include <penstock/model/record.hpp>
#include <penstock/model/tensor.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace penstock::inline v0_1 {

/// What one call of a layer's experts computes. Pointers are in memory that the device reads, `out`'s in memory that it writes; hidden states
/// and outputs start at multiples of 16 bytes.
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

namespace detail {

/// Why kernels on tensor cores do not serve a layout, if they do not: rows are contiguous, start at multiples of 16 bytes and hold whole
/// multiples of 16 bytes.
template <class Format>
[[nodiscard]] std::optional<std::string> layout_refusal(const expert_layout& layout) {
    if (layout.kind != Format::kind) {
        return "made for " + std::string(name(Format::kind)) + ", the experts are " + std::string(name(layout.kind));
    }
    if (layout.hidden() == 0 || layout.intermediate() == 0 || layout.up.rows != layout.gate.rows || layout.up.cols != layout.gate.cols ||
        layout.down.rows != layout.hidden() || layout.down.cols != layout.intermediate()) {
        return "the expert's matrices do not fit each other";
    }
    for (const matrix_layout* m : {&layout.gate, &layout.up, &layout.down}) {
        const auto whole = [](std::uint64_t elements) { return elements * Format::bits % 128 == 0; };
        if (m->col_stride != 1 || m->offset % 16 != 0 || !whole(m->row_stride) || !whole(m->cols)) {
            return "rows that are not contiguous, or no whole multiples of 16 bytes";
        }
        if (Format::kind == weight_kind::fp8_block128 && m->scale_offset % sizeof(float) != 0) {
            return "scales that start at no multiple of 4 bytes";
        }
    }
    return {};
}

/// Why a step does not fit what an object was made for, if it does not.
/// @param operand_type, hidden of its hidden states @param needed bytes of workspace
[[nodiscard]] inline std::optional<std::string> step_refusal(const expert_step& step, std::span<const std::byte> workspace,
                                                             dtype operand_type, std::uint32_t hidden, std::uint32_t max_tokens,
                                                             std::size_t needed) {
    const auto starts_at = [](const void* data, std::uintptr_t multiple) { return reinterpret_cast<std::uintptr_t>(data) % multiple == 0; };
    if (step.hidden.tokens > max_tokens) {
        return std::to_string(step.hidden.tokens) + " tokens, made for " + std::to_string(max_tokens);
    }
    if (step.hidden.type != operand_type || step.hidden.hidden != hidden || !starts_at(step.hidden.data, 16)) {
        return "hidden states have to be " + std::string(name(operand_type)) + ", " + std::to_string(hidden) +
               " a token, and start at a multiple of 16 bytes";
    }
    if (step.out.type != dtype::f32 && step.out.type != dtype::bf16 && step.out.type != dtype::f16) {
        return "an output of type " + std::string(name(step.out.type)) + "; f32, bf16 and f16 are served";
    }
    if (step.out.tokens != step.hidden.tokens || step.out.hidden != hidden || !starts_at(step.out.data, 16)) {
        return "the output is not as large as the hidden states, or starts at no multiple of 16 bytes";
    }
    if ((step.rows == nullptr) != (step.offsets == nullptr)) {
        return "rows and offsets of sorted pairs come together";
    }
    if (workspace.size() < needed || !starts_at(workspace.data(), 256)) {
        return "the workspace has " + std::to_string(workspace.size()) + " bytes, " + std::to_string(needed) +
               " are needed, at a multiple of 256";
    }
    return {};
}

}  // namespace detail
}  // namespace penstock::inline v0_1

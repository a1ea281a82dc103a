#pragma once

#include <penstock/model/moe_model.hpp>
#include <penstock/units.hpp>

#include <cstddef>
#include <span>

namespace penstock::inline v0_1 {

/// What one MoE layer call needs besides weights, carved from one span. The same code counts the bytes and places the arrays.
/// T tokens, k choices a token, H hidden, I intermediate, E experts.
struct layer_workspace {
    std::uint32_t tokens = 0;
    float* x = nullptr;                 ///< [T, H] hidden states
    float* logits = nullptr;            ///< [T, E]
    std::int32_t* ids = nullptr;        ///< [T, k]
    float* weights = nullptr;           ///< [T, k]
    std::int32_t* rows = nullptr;       ///< [T * k] pairs by expert
    std::uint32_t* offsets = nullptr;   ///< [E + 1]
    std::span<std::byte> scratch;       ///< of the permutation
    float* activated = nullptr;         ///< [T * k, I]
    float* partial = nullptr;           ///< [T * k, H]
    float* shared_activated = nullptr;  ///< [T, I of the shared expert]
    float* shared = nullptr;            ///< [T, H]

    template <class Executor>
    [[nodiscard]] static std::uint64_t bytes_needed(const moe_layer_model& layer, std::uint32_t tokens, std::uint32_t k) {
        layer_workspace counting;
        return counting.carve<Executor>(layer, tokens, k, nullptr);
    }

    /// @pre memory.size() >= bytes_needed(layer, tokens, k) and its start is 256-byte aligned.
    template <class Executor>
    void place(const moe_layer_model& layer, std::uint32_t tokens_of_call, std::uint32_t k, std::span<std::byte> memory) {
        carve<Executor>(layer, tokens_of_call, k, memory.data());
    }

private:
    template <class T>
    static void next(T*& array, std::uint64_t count, std::byte* base, std::uint64_t& used) {
        array = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
        used += round_up(count * sizeof(T), placement_alignment);
    }

    template <class Executor>
    std::uint64_t carve(const moe_layer_model& layer, std::uint32_t tokens_of_call, std::uint32_t k, std::byte* base) {
        const std::uint64_t t = tokens_of_call;
        std::uint64_t used = 0;
        tokens = tokens_of_call;
        next(x, t * layer.hidden, base, used);
        next(logits, t * layer.routing.experts, base, used);
        next(ids, t * k, base, used);
        next(weights, t * k, base, used);
        next(rows, t * k, base, used);
        next(offsets, layer.routing.experts + 1, base, used);
        const std::size_t scratch_bytes = Executor::permute_scratch_bytes(tokens_of_call * k, layer.routing.experts);
        std::byte* scratch_start = nullptr;
        next(scratch_start, scratch_bytes, base, used);
        scratch = {scratch_start, scratch_start == nullptr ? 0 : scratch_bytes};
        next(activated, t * k * layer.intermediate, base, used);
        next(partial, t * k * layer.hidden, base, used);
        if (layer.shared) {
            next(shared_activated, t * layer.shared->layout.intermediate(), base, used);
            next(shared, t * layer.hidden, base, used);
        }
        return used;
    }
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/dispatch/expert_work.hpp>
#include <penstock/error.hpp>
#include <penstock/model/record.hpp>
#include <penstock/model/routing_rule.hpp>
#include <penstock/model/tensor.hpp>
#include <penstock/units.hpp>

#include <cuda_runtime_api.h>

#include <span>

namespace penstock::inline v0_1 {

namespace detail {

/// Pairs that one block of the permutation sorts.
inline constexpr std::uint32_t pairs_per_block = 2048;

}  // namespace detail

namespace executor {

/// Computes MoE layers on a GPU, for experts stored in one of `Formats` (format::bf16, ...); an empty list means every format.
///
/// This header only declares: the bodies are in cuda_experts.cuh, and one `.cu` of the program instantiates them with
/// PENSTOCK_INSTANTIATE(bf16, fp8_block128), the formats in the same order as here. So `.cpp` files may use an executor.
///
/// Every member enqueues on the executor's stream and returns; none allocates, copies to the device or synchronises, so that all are
/// capturable. Pointers are in memory that the stream's device reads and writes (weights may lie in mapped host memory); the stream's
/// device must be current. Arrays of float are 4-byte aligned at least, 16-byte alignment is faster. Zero tokens, pairs or works launch
/// nothing, and their pointers may be null. Members throw cuda_error for a launch that the runtime refuses and configuration_error for
/// arguments that no kernel serves.
///
/// Same bits: what `experts` writes for a pair depends on the record's bytes, its layout, the pair's input row and scale alone.
template <class... Formats>
class cuda {
public:
    static constexpr bool on_device = true;

    explicit cuda(cudaStream_t stream) noexcept : stream_(stream) {}

    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

    /// Whether `experts` serves layouts of this kind.
    [[nodiscard]] static constexpr bool computes(weight_kind kind) noexcept {
        return sizeof...(Formats) == 0 ? kind != weight_kind::int4_group : ((Formats::kind == kind) || ... || false);
    }

    /// x [tokens, hidden] = hidden, in float32.
    void widen(activations hidden, float* x) const;

    /// logits [tokens, experts] = router weight . x (+ bias), accumulated in float32.
    void logits(const router_ref& router, const float* x, std::uint32_t tokens, float* logits) const;

    /// ids, weights [tokens, top_k] by `rule`. @param live device pointer to the number of tokens that count, or null for all: rows past it
    /// get id -1 and weight 0. @throws configuration_error for a rule that cannot be followed.
    void route(const routing_rule& rule, const router_ref& router, const float* logits, std::uint32_t tokens, const std::int32_t* live,
               std::int32_t* ids, float* weights) const;

    /// Bytes of device memory that `permute` needs for `scratch`.
    [[nodiscard]] static constexpr std::size_t permute_scratch_bytes(std::uint32_t pairs, std::uint32_t experts) noexcept {
        const std::uint64_t blocks = ceil_div(pairs, detail::pairs_per_block);
        return blocks <= 1 ? 0 : static_cast<std::size_t>(blocks * experts * sizeof(std::uint32_t));
    }

    /// rows [pairs]: the pairs sorted by expert, ascending within one; offsets [experts + 1]: where each expert's pairs begin. Ids outside
    /// [0, experts) are left out; rows past offsets[experts] are not written.
    void permute(const std::int32_t* ids, std::uint32_t pairs, std::uint32_t experts, std::int32_t* rows, std::uint32_t* offsets,
                 std::span<std::byte> scratch) const;

    /// Bytes of device memory that `route_to_work` needs for `scratch`; what they hold before and after does not matter.
    [[nodiscard]] static constexpr std::size_t route_to_work_scratch_bytes(std::uint32_t tokens, std::uint32_t top_k,
                                                                           std::uint32_t experts) noexcept {
        return permute_scratch_bytes(tokens * top_k, experts);
    }

    /// `route`, then `permute` of its ids to the rule's experts, with the same bits; one launch where `route_to_work_selector` finds that it
    /// pays: up to 256 tokens on architectures with clusters, 32 on others. No two launches share anything, so graphs may be replayed as
    /// they are. @throws configuration_error for a rule that cannot be followed or too little scratch
    void route_to_work(const routing_rule& rule, const router_ref& router, const float* logits, std::uint32_t tokens,
                       const std::int32_t* live, std::int32_t* ids, float* weights, std::int32_t* rows, std::uint32_t* offsets,
                       std::span<std::byte> scratch) const;

    /// For each pair p of each work, of token p / k: activated[p] = act(gate x, up x), partial[p] = down activated[p] + bias. Nothing is
    /// written for other pairs. @param input_scale [tokens * k], multiplies the pair's input; may be null.
    /// @pre records start at a multiple of 16. @throws configuration_error if the layout's kind is not among Formats.
    void experts(const expert_layout& layout, std::span<const expert_work> works, const std::int32_t* rows, std::uint32_t k, const float* x,
                 const float* input_scale, float* activated, float* partial) const;

    /// shared[t] *= sigmoid(weight . x[t]). @param weight [hidden] f32, bf16 or f16
    void shared_gate(const void* weight, dtype type, const float* x, std::uint32_t tokens, std::uint32_t hidden, float* shared) const;

    /// out[t] = sum over j, ascending, of weights[t, j] * partial[t * k + j], + shared[t]; pairs whose id is negative are skipped. Every row
    /// of `out` is written. @param weights null: every weight is 1. @param shared [tokens, hidden], or null
    void combine(const float* partial, const std::int32_t* ids, const float* weights, std::uint32_t k, const float* shared,
                 activations_out out) const;

private:
    cudaStream_t stream_;
};

}  // namespace executor
}  // namespace penstock::inline v0_1

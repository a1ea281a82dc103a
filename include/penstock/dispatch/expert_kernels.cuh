#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/expert_kernels.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/dispatch/expert_decode.cuh>
#include <penstock/dispatch/expert_prefill.cuh>
#include <penstock/dispatch/expert_selector.hpp>

namespace penstock::inline v0_1 {

/// The experts of a layer for any number of tokens: `expert_decode` or `expert_prefill`, as `Selector` says for each call. Where prefill does
/// not run (another device than sm_90, gate and up that do not lie alike), decode serves all calls.
///
/// Both take hidden states in the same type and the same step. Their bits are not the same: who needs those of a token not to depend on the
/// size of the batch uses one of the two.
/// @tparam Precision of prefill's inputs; decode's have 16 bits
template <class Format, class Precision = precision::a16, class Selector = expert_selector>
class expert_kernels {
public:
    static constexpr dtype operand_type = expert_decode<Format>::operand_type;  ///< of hidden states
    static_assert(operand_type == expert_prefill<Format, Precision>::operand_type);

    /// For calls of up to `max_tokens` tokens. @param blocks the most blocks that a launch may use; 0: as many as the current device holds.
    /// @throws configuration_error for a layout that expert_decode<Format>::refusal() names, cuda_error
    expert_kernels(const expert_layout& layout, std::uint32_t experts, std::uint32_t max_tokens, std::uint32_t k, std::uint32_t blocks = 0)
        : experts_(experts), k_(k), decode_(layout, experts, max_tokens, k, blocks) {
        using prefill = expert_prefill<Format, Precision>;
        if (Selector::many(max_tokens, k, experts) && prefill::runs_here() && !prefill::refusal(layout)) {
            prefill_.emplace(layout, experts, max_tokens, k, blocks);
        }
    }

    /// Bytes of device memory that calls need, at a multiple of 256. The owner zeroes the first counter_bytes() once, before the first call;
    /// each call leaves them zero.
    [[nodiscard]] std::size_t workspace_bytes() const noexcept {
        const std::size_t beside = prefill_ ? kept_bytes() + prefill_->workspace_bytes() : 0;
        return larger(decode_.workspace_bytes(), beside);
    }
    [[nodiscard]] std::size_t counter_bytes() const noexcept { return decode_.counter_bytes(); }

    /// Whether a call of so many tokens takes prefill's kernels.
    [[nodiscard]] bool many(std::uint32_t tokens) const noexcept { return prefill_.has_value() && Selector::many(tokens, k_, experts_); }

    /// Enqueues one step. Capturable; nothing waits. @throws configuration_error for what does not fit the constructor's arguments, cuda_error
    void enqueue(const expert_step& step, std::span<std::byte> workspace, cudaStream_t stream) const {
        if (!many(step.hidden.tokens)) {
            return decode_.enqueue(step, workspace, stream);
        }
        if (workspace.size() < kept_bytes()) {  // the rest is prefill's to see
            throw configuration_error("penstock: expert_kernels: the workspace has " + std::to_string(workspace.size()) + " bytes, " +
                                      std::to_string(workspace_bytes()) + " are needed");
        }
        prefill_->enqueue(step, workspace.subspan(kept_bytes()), stream);  // behind decode's counters
    }

private:
    [[nodiscard]] std::size_t kept_bytes() const noexcept { return round_up(decode_.counter_bytes(), 256); }

    std::uint32_t experts_;
    std::uint32_t k_;
    expert_decode<Format> decode_;
    std::optional<expert_prefill<Format, Precision>> prefill_;
};

}  // namespace penstock::inline v0_1

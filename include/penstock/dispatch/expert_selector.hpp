#pragma once

#include <cstdint>

namespace penstock::inline v0_1 {

/// Which kernels compute a call of a layer's experts: those for few tokens an expert, which read the weights at the speed of memory for up to
/// eight of them, or those for many, which multiply at the speed of the tensor cores. Stateless, like the tuning policies of CUB: a type of your
/// own with the same function takes its place in `expert_kernels`. It sees the sizes of the call alone, never where experts lie.
struct expert_selector {
    /// Tokens an expert, over all experts, from which on the many win. On an H200 with uniform routing (benchmark_experts, benchmark_prefill):
    /// at 4 a decode takes 1.06 of the read (Mixtral, T = 16), at 8 it takes 1.30 (Qwen3-235B, T = 128) where prefill takes 1.24 for four
    /// times the tokens.
    static constexpr std::uint32_t tokens_an_expert = 6;

    [[nodiscard]] static constexpr bool many(std::uint32_t tokens, std::uint32_t k, std::uint32_t experts) noexcept {
        return static_cast<std::uint64_t>(tokens) * k >= static_cast<std::uint64_t>(tokens_an_expert) * experts;
    }
};

}  // namespace penstock::inline v0_1

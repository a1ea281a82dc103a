#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/expert_decode.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/combine.cuh>
#include <penstock/dispatch/detail/decode_kernel.cuh>
#include <penstock/dispatch/expert_step.hpp>
#include <penstock/dispatch/permutation.cuh>

#include <array>
#include <optional>
#include <span>
#include <string>

namespace penstock::inline v0_1 {

/// The experts of a layer for few tokens each: out[t] = sum over j, ascending, of weights[t, j] * expert ids[t, j] of hidden[t], + shared[t].
///
/// One launch reads the weights, each once for up to eight tokens, from wherever `records` point: device, peer or mapped host memory. With
/// more than 32 pairs a launch before sorts them, unless they come sorted, and one after adds them up. Inputs, and what lies between the two
/// matrices, are in 16 bits (W.A16); products are added in float32, and so are the outputs of a token's experts. The bits of a pair's result
/// depend on the record, its layout and the pair's input alone.
///
/// An object serves the device that was current when it was made. After that nothing allocates, waits or copies to the device; calls are
/// capturable. A workspace serves calls of one object that follow each other on one stream: where another object has its counters, this one
/// may have results. Blocks wait for blocks that run already, never for such as have yet to start: neighbours on other streams delay a call,
/// and cannot stop it.
/// @tparam Format of the weights: format::bf16, f16, fp8_block128, or mxfp4 with scales up to 2^33
template <class Format>
class expert_decode {
    using fragment = detail::fragment<Format>;
    static constexpr bool two_planes = fragment::planes == 2;

public:
    static constexpr dtype operand_type = fragment::type;  ///< of hidden states

    /// For calls of up to `max_tokens` tokens. @param blocks the most blocks that a call may use; 0: as many as the current device holds.
    /// @throws configuration_error for a layout that serves() refuses, cuda_error
    expert_decode(const expert_layout& layout, std::uint32_t experts, std::uint32_t max_tokens, std::uint32_t k, std::uint32_t blocks = 0)
        : experts_(experts), max_tokens_(max_tokens), k_(k) {
        if (const auto why = refusal(layout)) {
            throw configuration_error("penstock: expert_decode: " + *why);
        }
        if (experts == 0 || (experts + 1) * sizeof(std::uint32_t) > detail::decode_ring<Format, 8>::bytes) {
            throw configuration_error("penstock: expert_decode of " + std::to_string(experts) + " experts");
        }
        if (k == 0 || static_cast<std::uint64_t>(max_tokens) * k > 1u << 30) {
            throw configuration_error("penstock: expert_decode of " + std::to_string(max_tokens) + " tokens and top-" + std::to_string(k));
        }
        arguments_.phase[0] = phase(layout.gate, layout.up, 8, 0);
        arguments_.phase[1] = phase(layout.down, layout.down, 16, 8);
        arguments_.rule = rule_of(layout);
        arguments_.experts = experts;
        arguments_.k = k;
        blocks_[0] = blocks_of(detail::decode_experts<Format, 1>, shared_bytes<1>(), blocks);
        blocks_[1] = blocks_of(detail::decode_experts<Format, 8>, shared_bytes<8>(), blocks);
        if constexpr (two_planes) {
            detail::load_kernels(detail::scale_hidden<scale_warps>);
        }
        detail::load_permute();
        detail::load_combine();
    }

    /// Why a layout is not served, if it is not: rows are contiguous, start at multiples of 16 bytes and hold whole multiples of 16 bytes.
    [[nodiscard]] static std::optional<std::string> refusal(const expert_layout& layout) { return detail::layout_refusal<Format>(layout); }

    /// Bytes of device memory that calls need, at a multiple of 256. The owner zeroes the first counter_bytes() once, before the first call;
    /// each call leaves them zero.
    [[nodiscard]] std::size_t workspace_bytes() const noexcept { return places().bytes; }
    [[nodiscard]] std::size_t counter_bytes() const noexcept { return places().activated; }

    /// Blocks that a call of so many tokens launches.
    [[nodiscard]] std::uint32_t blocks(std::uint32_t tokens) const noexcept { return blocks_[tokens == 1 ? 0 : 1]; }

    /// Enqueues one step. @throws configuration_error for what does not fit the constructor's arguments, cuda_error
    void enqueue(const expert_step& step, std::span<std::byte> workspace, cudaStream_t stream) const {
        const std::uint32_t tokens = step.hidden.tokens;
        if (tokens == 0) {
            return;
        }
        if (const auto why =
                detail::step_refusal(step, workspace, operand_type, arguments_.phase[0].cols, max_tokens_, workspace_bytes())) {
            throw configuration_error("penstock: expert_decode: " + *why);
        }
        const workspace_places at = places();
        detail::decode_arguments a = arguments_;
        a.records = step.records;
        a.pairs = tokens * k_;
        a.hidden = step.hidden.data;
        a.ids = step.ids;
        a.input_scale = step.input_scale;
        a.weights = step.weights;
        a.shared = step.shared;
        a.activated = workspace.data() + at.activated;
        a.partial = reinterpret_cast<float*>(workspace.data() + at.partial);
        a.counters = reinterpret_cast<std::uint32_t*>(workspace.data());
        a.most_groups = most_groups();
        a.out = step.out.data;
        a.out_type = step.out.type;
        a.combines = a.pairs <= detail::decode_pairs_without_sorting;
        a.rows_in_shared = a.combines || rows_in_shared();
        if (!a.combines) {
            a.rows = step.rows;
            a.offsets = step.offsets;
            if (step.rows == nullptr) {
                auto* rows = reinterpret_cast<std::int32_t*>(workspace.data() + at.rows);
                auto* offsets = reinterpret_cast<std::uint32_t*>(workspace.data() + at.offsets);
                detail::run_permute(step.ids, a.pairs, experts_, rows, offsets, {workspace.data() + at.scratch, at.scratch_bytes},
                                    at.scratch_bytes, stream);
                a.rows = rows;
                a.offsets = offsets;
            }
        }
        if constexpr (two_planes) {
            for (std::size_t i = 0; i < 2; ++i) {
                a.scaled[i] = {workspace.data() + at.planes[i], reinterpret_cast<float*>(workspace.data() + at.scales[i]),
                               i == 0 && tokens == 1 ? copies : 1, i == 0 ? tokens : a.pairs};
            }
            const std::uint64_t blocks = ceil_div(tokens * ceil_div(arguments_.phase[0].cols, 128), scale_warps);
            detail::launch_early(detail::scale_hidden<scale_warps>, dim3(static_cast<unsigned>(blocks), a.scaled[0].copies),
                                 dim3(scale_warps * 32), 0, stream, static_cast<const std::uint16_t*>(step.hidden.data), tokens,
                                 arguments_.phase[0].cols, a.scaled[0]);
        }
        if (tokens == 1) {
            detail::launch_early(detail::decode_experts<Format, 1>, dim3(blocks_[0]), dim3(detail::decode_threads), shared_bytes<1>(),
                                 stream, a);
        } else {
            detail::launch_early(detail::decode_experts<Format, 8>, dim3(blocks_[1]), dim3(detail::decode_threads), shared_bytes<8>(),
                                 stream, a);
        }
        if (!a.combines) {
            detail::run_combine(a.partial, step.ids, step.weights, k_, step.shared, step.out, stream, experts_);
        }
    }

private:
    /// Whether sorted pairs find room in shared memory beside the works of all experts; else they are read where they lie.
    [[nodiscard]] bool rows_in_shared() const noexcept {
        const std::uint64_t pairs = static_cast<std::uint64_t>(max_tokens_) * k_;
        return pairs <= 1024 && smaller<std::uint64_t>(pairs, experts_) * sizeof(detail::decode_work) <= 9 << 10;
    }

    static constexpr std::uint32_t scale_warps = 4;  ///< of a block of scale_hidden
    static constexpr std::uint32_t copies = 16;      ///< of one token's scaled hidden states, which all blocks read at once

    struct workspace_places {
        std::size_t activated, partial, rows, offsets, scratch, scratch_bytes, bytes;
        std::array<std::size_t, 2> planes, scales;
    };

    /// Pairs visit at most so many groups of tokens that a stage holds.
    [[nodiscard]] std::uint32_t most_groups() const noexcept { return max_tokens_ * k_; }

    [[nodiscard]] workspace_places places() const noexcept {
        workspace_places at{};
        const std::uint64_t pairs = static_cast<std::uint64_t>(max_tokens_) * k_;
        const std::uint64_t hidden = arguments_.phase[1].half[0].rows;
        std::size_t used = 0;
        const auto place = [&](std::uint64_t bytes) {
            const std::size_t here = used;
            used += round_up(bytes, 256);
            return here;
        };
        const std::uint64_t tiles = arguments_.phase[0].items * (detail::decode_warps / arguments_.phase[0].split);
        place((2 + most_groups() + ceil_div(hidden, 16) + (two_planes ? most_groups() * ceil_div(tiles, 16) : 0)) * sizeof(std::uint32_t));
        at.activated = place(pairs * arguments_.phase[1].cols * 2);
        at.partial = place(pairs * hidden * sizeof(float));
        at.rows = place(pairs * sizeof(std::int32_t));
        at.offsets = place((static_cast<std::uint64_t>(experts_) + 1) * sizeof(std::uint32_t));
        at.scratch_bytes = executor::cuda<>::permute_scratch_bytes(static_cast<std::uint32_t>(pairs), experts_);
        at.scratch = place(at.scratch_bytes);
        if constexpr (two_planes) {
            for (std::size_t i = 0; i < 2; ++i) {
                const std::uint64_t scaled_rows = i == 0 ? larger(max_tokens_, copies) : pairs;
                at.planes[i] = place(scaled_rows * 2 * arguments_.phase[i].cols);
                at.scales[i] = place(scaled_rows * ceil_div(arguments_.phase[i].cols, 128) * sizeof(float));
            }
        }
        at.bytes = used;
        return at;
    }

    template <std::uint32_t Tokens>
    [[nodiscard]] std::size_t shared_bytes() const noexcept {
        using ring = detail::decode_ring<Format, Tokens>;
        constexpr std::uint64_t few = detail::decode_pairs_without_sorting;
        const std::uint64_t pairs = static_cast<std::uint64_t>(Tokens == 1 ? 1 : max_tokens_) * k_;
        return ring::bytes + ring::sums_bytes + smaller<std::uint64_t>(pairs, experts_) * sizeof(detail::decode_work) +
               (rows_in_shared() ? pairs : smaller<std::uint64_t>(pairs, few)) * sizeof(std::int32_t) +
               smaller<std::uint64_t>(pairs, few) * 2 * sizeof(float);
    }

    static detail::decode_phase phase(const matrix_layout& upper, const matrix_layout& lower, std::uint32_t step, std::uint32_t shift) {
        detail::decode_phase p{};
        p.half[0] = upper;
        p.half[1] = lower;
        p.step = step;
        p.shift = shift;
        p.cols = upper.cols;
        p.row_bytes = static_cast<std::uint32_t>(static_cast<std::uint64_t>(upper.cols) * Format::bits / 8);
        p.stages = static_cast<std::uint32_t>(ceil_div(p.row_bytes, detail::decode_row_bytes));
        p.split = p.stages >= 16 ? 8 : p.stages >= 12 ? 4 : p.stages >= 4 ? 2 : 1;
        p.items = static_cast<std::uint32_t>(ceil_div(ceil_div(upper.rows, step), detail::decode_warps / p.split));
        return p;
    }

    /// Blocks that the current device holds, at most `limit`. Loads the kernel.
    static std::uint32_t blocks_of(void (*kernel)(detail::decode_arguments), std::size_t bytes, std::uint32_t limit) {
        int on_each = 0;
        detail::allow_shared_bytes(reinterpret_cast<const void*>(kernel), bytes);
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_each, kernel, static_cast<int>(detail::decode_threads), bytes),
              "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
        const auto most = static_cast<std::uint32_t>(on_each * detail::multiprocessors());
        return limit > 0 ? smaller(limit, most) : most;
    }

    detail::decode_arguments arguments_{};
    std::uint32_t experts_;
    std::uint32_t max_tokens_;
    std::uint32_t k_;
    std::array<std::uint32_t, 2> blocks_{};
};

}  // namespace penstock::inline v0_1

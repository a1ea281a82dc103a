#pragma once

#ifndef __CUDACC__
#error "penstock/dispatch/expert_prefill.cuh holds kernels: compile this file with nvcc"
#endif

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/detail/prefill_kernel.cuh>
#include <penstock/dispatch/expert_step.hpp>
#include <penstock/dispatch/permutation.cuh>

#include <array>
#include <optional>
#include <span>
#include <string>

namespace penstock::inline v0_1 {

/// The experts of a layer for many tokens each: out[t] = sum over j, ascending, of weights[t, j] * expert ids[t, j] of hidden[t], +
/// shared[t].
///
/// Tensor cores at full width (wgmma), so for sm_90a alone: the weights of 128 rows by up to 320 pairs of an expert at once. Four launches,
/// five for fp8 weights, and those that sort pairs that do not come sorted. How many pairs visit an expert is known to the device alone:
/// nothing waits for the host. Products are added in float32; inputs, what lies between the two matrices and an expert's output are in 16
/// bits, or with precision::a8 the first two in E4M3. With 16-bit inputs, fp8 weights are widened to f16 and mxfp4 to bf16, with their
/// scale, in registers. The bits of a pair's result depend on the record, its layout and the pair's input alone.
///
/// An object serves the device that was current when it was made. After that nothing allocates, waits or copies to the device; calls are
/// capturable. A workspace serves calls that follow each other on one stream. No block waits for another: neighbours on other streams
/// delay a call, and cannot stop it.
/// @tparam Format of the weights: format::bf16, f16, fp8_block128 or mxfp4
/// @tparam Precision of the inputs: precision::a16, or with fp8_block128 precision::a8
template <class Format, class Precision = precision::a16>
class expert_prefill {
    using operand = detail::prefill_operand<Format, Precision>;

    /// Pairs that are multiplied together: as many as leave four stages of shared memory and registers for their sums.
    static constexpr std::uint32_t most_columns = operand::widened ? 144 : operand::scaled ? 160 : 320;
    static constexpr std::uint32_t few_columns = 64;

public:
    static constexpr dtype operand_type = operand::type;  ///< of hidden states

    /// For calls of up to `max_tokens` tokens. @param blocks the most blocks that the products of a call may use; 0: as many as the current
    /// device holds. @throws configuration_error for a layout that refusal() names and for another device than sm_90, cuda_error
    expert_prefill(const expert_layout& layout, std::uint32_t experts, std::uint32_t max_tokens, std::uint32_t k, std::uint32_t blocks = 0)
        : experts_(experts), max_tokens_(max_tokens), k_(k), rule_(rule_of(layout)) {
        if (const auto why = refusal(layout)) {
            throw configuration_error("penstock: expert_prefill: " + *why);
        }
        if (experts == 0 || k == 0 || static_cast<std::uint64_t>(max_tokens) * k > 1u << 30) {
            throw configuration_error("penstock: expert_prefill of " + std::to_string(max_tokens) + " tokens, top-" + std::to_string(k) +
                                      " of " + std::to_string(experts) + " experts");
        }
        if (!runs_here()) {
            throw configuration_error("penstock: expert_prefill needs a device of compute capability 9.0, and code for sm_90a");
        }
        up_first_ = layout.up.offset < layout.gate.offset;
        half_ = up_first_ ? std::array{layout.up, layout.gate} : std::array{layout.gate, layout.up};
        down_ = layout.down;
        steps_ = {static_cast<std::uint32_t>(ceil_div(layout.hidden(), operand::depth)),
                  static_cast<std::uint32_t>(ceil_div(layout.intermediate(), operand::depth))};
        form_ = {detail::map_of(half_[0], &half_[1], Format::bits, operand::row_bytes, detail::prefill_rows / 16),
                 detail::map_of(down_, nullptr, Format::bits, operand::row_bytes, detail::prefill_rows / 8)};
        const auto most = static_cast<std::uint32_t>(detail::multiprocessors());
        blocks_ = blocks > 0 ? smaller(blocks, most) : most;
        load<most_columns>();
        load<few_columns>();
        detail::load_kernels(detail::prefill_begin<operand, true>, detail::prefill_begin<operand, false>,
                             detail::prefill_combine<dtype::f32>, detail::prefill_combine<dtype::bf16>,
                             detail::prefill_combine<dtype::f16>);
        detail::load_permute();
    }

    /// Whether the current device runs these kernels, and they were compiled for it: for sm_90a, not sm_90. @throws cuda_error
    [[nodiscard]] static bool runs_here() {
        int device = 0, major = 0;
        check(cudaGetDevice(&device), "cudaGetDevice");
        check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
        cudaFuncAttributes about{};
        check(cudaFuncGetAttributes(&about, reinterpret_cast<const void*>(detail::prefill_product<operand, true, few_columns>)),
              "cudaFuncGetAttributes");
        return major == 9 && about.sharedSizeBytes > 0;  // compiled for anything else the kernel is empty, without its barriers
    }

    /// Why a layout is not served, if it is not: rows are contiguous, start at multiples of 16 bytes and hold whole multiples of 16 bytes.
    [[nodiscard]] static std::optional<std::string> refusal(const expert_layout& layout) {
        if (auto why = detail::layout_refusal<Format>(layout)) {
            return why;
        }
        if (layout.up.row_stride != layout.gate.row_stride || layout.up.offset == layout.gate.offset) {
            return "gate and up that do not lie alike";
        }
        return {};
    }

    /// Bytes of device memory that calls need, at a multiple of 256. What they hold before a call does not matter.
    [[nodiscard]] std::size_t workspace_bytes() const noexcept { return places().bytes; }

    /// Enqueues one step. @throws configuration_error for what does not fit the constructor's arguments, cuda_error
    void enqueue(const expert_step& step, std::span<std::byte> workspace, cudaStream_t stream) const {
        const std::uint32_t tokens = step.hidden.tokens;
        if (tokens == 0) {
            return;
        }
        if (const auto why = detail::step_refusal(step, workspace, operand_type, down_.rows, max_tokens_, workspace_bytes())) {
            throw configuration_error("penstock: expert_prefill: " + *why);
        }
        const workspace_places at = places();
        const std::uint32_t pairs = tokens * k_;
        const auto place = [&]<class T>(T*& pointer, std::size_t offset) { pointer = reinterpret_cast<T*>(workspace.data() + offset); };
        const std::int32_t* rows = step.rows;
        const std::uint32_t* offsets = step.offsets;
        if (rows == nullptr) {
            std::int32_t* sorted = nullptr;
            std::uint32_t* begins = nullptr;
            place(sorted, at.rows);
            place(begins, at.offsets);
            detail::run_permute(step.ids, pairs, experts_, sorted, begins, {workspace.data() + at.scratch, at.scratch_bytes},
                                at.scratch_bytes, stream);
            rows = sorted;
            offsets = begins;
        }
        const bool few = tokens <= few_columns;

        detail::prefill_begin_arguments begin{};
        begin.records = step.records;
        begin.hidden = step.hidden.data;
        begin.rows = rows;
        begin.offsets = offsets;
        begin.input_scale = step.input_scale;
        begin.k = k_;
        begin.cols = half_[0].cols;
        begin.pitch = half_[0].cols;
        begin.steps = steps_[0];
        begin.experts = experts_;
        begin.most_columns = few ? few_columns : most_columns;
        begin.form[0] = form_[0];
        begin.form[1] = form_[1];
        begin.first_byte[0] = half_[0].offset;
        begin.first_byte[1] = down_.offset;
        place(begin.tiles, at.tiles);
        place(begin.tile_count, at.tile_count);
        place(begin.maps[0], at.maps);
        begin.maps[1] = begin.maps[0] + experts_;
        begin.to.rows = input_rows();
        place(begin.to.atoms, at.inputs[0]);
        place(begin.to.scales, at.scales[0]);
        detail::launch_early(detail::prefill_begin<operand, true>, begin_blocks(pairs, 0), dim3(detail::begin_threads), 0, stream, begin);

        detail::prefill_arguments product{};
        product.records = step.records;
        product.tiles = begin.tiles;
        product.tile_count = begin.tile_count;
        product.maps = begin.maps[0];
        product.in = begin.to;
        product.half[0] = half_[0];
        product.half[1] = half_[1];
        product.rule = rule_;
        product.up_first = up_first_;
        product.row_tiles = static_cast<std::uint32_t>(ceil_div(steps_[1] * operand::depth, 64));
        product.steps = steps_[0];
        product.padded_rows = steps_[1] * operand::depth;
        product.activated.rows = input_rows();
        place(product.activated.atoms, at.inputs[1]);
        place(product.activated.scales, at.scales[1]);
        place(product.rows_out, at.partial);
        product.pitch = down_.cols;
        product.pairs = rows;
        launch_product<false>(few, product, stream);

        if constexpr (operand::scaled || operand::by_row) {
            begin.hidden = product.rows_out;
            begin.rows = nullptr;
            begin.input_scale = nullptr;
            begin.cols = down_.cols;
            begin.pitch = down_.cols;
            begin.steps = steps_[1];
            begin.to = product.activated;
            detail::launch_early(detail::prefill_begin<operand, false>, begin_blocks(pairs, 1), dim3(detail::begin_threads), 0, stream,
                                 begin);
        }

        product.maps = begin.maps[1];
        product.in = product.activated;
        product.half[0] = down_;
        product.half[1] = down_;
        product.row_tiles = static_cast<std::uint32_t>(ceil_div(down_.rows, detail::prefill_rows));
        product.steps = steps_[1];
        product.pitch = down_.rows;
        launch_product<true>(few, product, stream);

        const std::uint64_t vectors = static_cast<std::uint64_t>(tokens) * (down_.rows / 8);
        const detail::prefill_combine_arguments sum{product.rows_out, step.ids, step.weights, step.shared,  k_,
                                                    down_.rows,       experts_, vectors,      step.out.data};
        const auto kernel = step.out.type == dtype::f32    ? detail::prefill_combine<dtype::f32>
                            : step.out.type == dtype::bf16 ? detail::prefill_combine<dtype::bf16>
                                                           : detail::prefill_combine<dtype::f16>;
        detail::launch_early(kernel, dim3(static_cast<unsigned>(ceil_div(vectors, detail::begin_threads))), dim3(detail::begin_threads), 0,
                             stream, sum);
    }

private:
    struct workspace_places {
        std::size_t tiles, tile_count, maps, rows, offsets, scratch, scratch_bytes, partial, bytes;
        std::array<std::size_t, 2> inputs, scales;
    };

    /// Rows of inputs: groups of eight, and a tile's columns from the last group on.
    [[nodiscard]] std::uint64_t input_rows() const noexcept {
        return round_up(static_cast<std::uint64_t>(max_tokens_) * k_, 8) + most_columns;
    }

    [[nodiscard]] workspace_places places() const noexcept {
        workspace_places at{};
        const std::uint64_t pairs = static_cast<std::uint64_t>(max_tokens_) * k_;
        std::size_t used = 0;
        const auto place = [&](std::uint64_t bytes) {
            const std::size_t here = used;
            used += round_up(bytes, 256);
            return here;
        };
        // Each expert with pairs has one tile, and one more for each whole tile's worth of them and of the seven rows before.
        at.tiles = place((2 * smaller<std::uint64_t>(pairs, experts_) + pairs / few_columns) * sizeof(detail::prefill_tile));
        at.tile_count = place(sizeof(std::uint32_t));
        at.maps = place(2 * static_cast<std::uint64_t>(experts_) * sizeof(CUtensorMap));
        at.rows = place(pairs * sizeof(std::int32_t));
        at.offsets = place((static_cast<std::uint64_t>(experts_) + 1) * sizeof(std::uint32_t));
        at.scratch_bytes = executor::cuda<>::permute_scratch_bytes(static_cast<std::uint32_t>(pairs), experts_);
        at.scratch = place(at.scratch_bytes);
        for (std::size_t i = 0; i < 2; ++i) {
            at.inputs[i] = place(input_rows() * steps_[i] * operand::atoms * 128);
            at.scales[i] = place(operand::scaled   ? input_rows() * steps_[i] * sizeof(float)
                                 : operand::by_row ? input_rows() * sizeof(float)
                                                   : 0);
        }
        // Activated rows in bf16 are there before the experts' outputs.
        at.partial = place(larger(pairs * down_.rows, operand::scaled || operand::by_row ? pairs * down_.cols : 0) * 2);
        at.bytes = used;
        return at;
    }

    [[nodiscard]] dim3 begin_blocks(std::uint32_t pairs, std::size_t matrix) const {
        const std::uint64_t warps = static_cast<std::uint64_t>(pairs) * ceil_div(steps_[matrix] * (operand::depth / operand::unit), 32);
        const std::uint64_t most = 8 * static_cast<std::uint64_t>(detail::multiprocessors());
        return dim3(static_cast<unsigned>(smaller(ceil_div(warps, detail::begin_threads / 32), most)));
    }

    template <bool Down>
    void launch_product(bool few, const detail::prefill_arguments& a, cudaStream_t stream) const {
        const auto launch = [&]<std::uint32_t Most>() {
            detail::launch_early(detail::prefill_product<operand, Down, Most>, dim3(blocks_), dim3(detail::prefill_threads),
                                 detail::prefill_ring<operand, Most>::bytes, stream, a);
        };
        if (few) {
            launch.template operator()<few_columns>();
        } else {
            launch.template operator()<most_columns>();
        }
    }

    template <std::uint32_t Most>
    static void load() {
        constexpr std::size_t bytes = detail::prefill_ring<operand, Most>::bytes;
        detail::allow_shared_bytes(reinterpret_cast<const void*>(detail::prefill_product<operand, false, Most>), bytes);
        detail::allow_shared_bytes(reinterpret_cast<const void*>(detail::prefill_product<operand, true, Most>), bytes);
    }

    std::uint32_t experts_;
    std::uint32_t max_tokens_;
    std::uint32_t k_;
    activation_rule rule_;
    bool up_first_ = false;
    std::array<matrix_layout, 2> half_;  ///< gate and up in the order of their bytes
    matrix_layout down_;
    std::array<std::uint32_t, 2> steps_{};
    std::array<CUtensorMap, 2> form_{};
    std::uint32_t blocks_ = 0;
};

}  // namespace penstock::inline v0_1

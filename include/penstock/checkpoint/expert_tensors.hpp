#pragma once

#include <penstock/checkpoint/family_table.hpp>
#include <penstock/checkpoint/sharded.hpp>
#include <penstock/model/moe_model.hpp>

#include <array>

/// From an expert's tensors to its record: which byte ranges go where, and how a weight is found among them.

namespace penstock::inline v0_1::detail {

/// One expert's layout, or a layer's where experts are stacked, with the byte ranges of its record.
struct described_expert {
    expert_layout layout;
    expert_parts parts;
    std::vector<const tensor_info*> tensors;  ///< in the order of `parts`
};

[[nodiscard]] inline std::string kind_text(const tensor_info& t) {
    return "tensor " + in_quotes(t.name) + " is " + std::string(name(t.type)) + " " + shape_text(t.shape);
}

/// Finds the tensors of one MoE block and lays out its experts' records. Its errors name the checkpoint and the tensor.
class expert_reader {
public:
    using next_part = std::uint64_t (*)(std::uint64_t);  ///< a layout's `next`

    expert_reader(const checkpoint& weights, const families::row& row, next_part next) : weights_(weights), row_(row), next_(next) {}

    [[noreturn]] void fail(const std::string& problem) const { throw configuration_error(weights_.path().string() + ": " + problem); }

    [[nodiscard]] const tensor_info* find(const std::string& tensor) const { return weights_.find(tensor); }

    [[nodiscard]] const tensor_info& need(const std::string& tensor) const {
        const tensor_info* found = find(tensor);
        if (found == nullptr) {
            fail("tensor " + in_quotes(tensor) + " is missing");
        }
        return *found;
    }

    void need_shape(const tensor_info& t, std::initializer_list<std::uint64_t> wanted) const {
        if (!std::equal(t.shape.begin(), t.shape.end(), wanted.begin(), wanted.end())) {
            fail(kind_text(t) + ", " + shape_text(std::vector<std::uint64_t>(wanted)) + " is wanted");
        }
    }

    /// An expert whose three matrices are tensors of their own: `prefix`gate_proj.weight and so on, with scales and biases.
    [[nodiscard]] described_expert separate(const std::string& prefix, std::uint32_t hidden) const {
        const std::array<std::string_view, 3> names{row_.names.gate, row_.names.up, row_.names.down};
        std::array<const tensor_info*, 3> weight{};
        bool packed = false;
        for (std::size_t m = 0; m < 3; ++m) {
            const std::string base = prefix + std::string(names[m]);
            weight[m] = find(base + ".weight");
            if (weight[m] == nullptr) {
                weight[m] = find(base + ".weight_packed");
                packed = weight[m] != nullptr;
            }
            if (weight[m] == nullptr) {
                fail("neither " + in_quotes(base + ".weight") + " nor " + in_quotes(base + ".weight_packed") + " is there");
            }
            if (weight[m]->type != weight[0]->type) {
                fail(kind_text(*weight[m]) + ", but " + kind_text(*weight[0]) + ": the matrices of an expert must be of one type");
            }
            if (weight[m]->shape.size() != 2) {
                fail(kind_text(*weight[m]) + ", a matrix is wanted");
            }
        }
        record made(*this, weight_kind_of(*weight[0], packed));
        const std::uint64_t intermediate = weight[0]->shape[0];
        const std::array<std::array<std::uint64_t, 2>, 3> shape{{{intermediate, hidden}, {intermediate, hidden}, {hidden, intermediate}}};
        std::array<matrix_layout*, 3> matrix{&made.result.layout.gate, &made.result.layout.up, &made.result.layout.down};
        for (std::size_t m = 0; m < 3; ++m) {
            const auto [rows, cols] = shape[m];
            const std::uint64_t stored = packed ? ceil_div(cols, 8) : cols;
            need_shape(*weight[m], {rows, stored});
            *matrix[m] = {.offset = made.add(*weight[m], weight[m]->bytes / larger<std::uint64_t>(rows, 1)),
                          .rows = narrow(rows),
                          .cols = narrow(cols),
                          .row_stride = packed ? stored * 8 : cols};
        }
        for (std::size_t m = 0; m < 3; ++m) {
            const std::string base = prefix + std::string(names[m]);
            if (made.result.layout.kind == weight_kind::fp8_block128) {
                const tensor_info& scale = fp8_scale(base + ".weight_scale_inv", *weight[m]);
                matrix[m]->scale_row_stride = narrow(ceil_div(shape[m][1], 128));
                need_shape(scale, {ceil_div(shape[m][0], 128), matrix[m]->scale_row_stride});
                matrix[m]->scale_offset = made.add(scale, 0);
            } else if (packed) {
                const tensor_info& scale = need(base + ".weight_scale");
                if (scale.shape.size() != 2 || scale.shape[0] != shape[m][0] || scale.shape[1] == 0) {
                    fail(kind_text(scale) + ", [" + std::to_string(shape[m][0]) + ", groups] is wanted");
                }
                matrix[m]->scale_row_stride = narrow(scale.shape[1]);
                matrix[m]->scale_offset = made.add(scale, 0);
            }
        }
        for (std::size_t m = 0; m < 3; ++m) {
            if (const tensor_info* bias = find(prefix + std::string(names[m]) + ".bias")) {
                need_shape(*bias, {shape[m][0]});
                set_bias(*matrix[m], made.add(*bias, 0), 1, *bias);
            }
        }
        return made.finish();
    }

    /// True where the block stacks all its experts in one tensor a projection.
    [[nodiscard]] bool is_stacked(const std::string& block) const {
        return find(block + ".experts.gate_up_proj") || find(block + ".experts.gate_up_proj_blocks") || find(block + ".mlp1_weight.blocks");
    }

    /// All experts of a block that stacks them: the layout with the parts of expert 0; expert e's parts lie e slices further.
    [[nodiscard]] described_expert stacked(const std::string& block, std::uint32_t experts, std::uint32_t hidden) const {
        const bool first_published = find(block + ".mlp1_weight.blocks") != nullptr;
        const std::string gate_up = first_published ? block + ".mlp1_" : block + ".experts.gate_up_proj";
        const std::string down = first_published ? block + ".mlp2_" : block + ".experts.down_proj";
        const std::string blocks = first_published ? "weight.blocks" : "_blocks", scales = first_published ? "weight.scales" : "_scales";
        const bool mxfp4 = find(gate_up + blocks) != nullptr;
        const tensor_info& w1 = need(gate_up + (mxfp4 ? blocks : ""));
        const tensor_info& w2 = need(down + (mxfp4 ? blocks : ""));
        if (w1.type != w2.type) {
            fail(kind_text(w2) + ", but " + kind_text(w1) + ": the matrices of an expert must be of one type");
        }
        record made(*this, mxfp4 ? weight_kind::mxfp4 : weight_kind_of(w1, false), experts);
        const bool alternating = row_.stacked == families::stacking::alternating;
        const bool inputs_first = !mxfp4 && row_.stacked != families::stacking::outputs_first;
        if (w1.shape.size() != (mxfp4 ? 4u : 3u) || w1.shape[inputs_first ? 2 : 1] % 2 != 0) {
            fail(kind_text(w1) + ", " + (inputs_first ? "[experts, hidden, 2 * intermediate]" : "[experts, 2 * intermediate, hidden]") +
                 (mxfp4 ? " in blocks of 32" : "") + " is wanted");
        }
        const std::uint64_t both = w1.shape[inputs_first ? 2 : 1], intermediate = both / 2;
        expert_layout& layout = made.result.layout;
        if (mxfp4) {
            if (w1.type != dtype::u8 || hidden % 32 != 0 || intermediate % 32 != 0) {
                fail(kind_text(w1) + ", U8 with rows of whole blocks of 32 weights is wanted");
            }
            need_shape(w1, {experts, both, hidden / 32, 16});
            need_shape(w2, {experts, hidden, intermediate / 32, 16});
        } else if (inputs_first) {
            need_shape(w1, {experts, hidden, both});
            need_shape(w2, {experts, intermediate, hidden});
        } else {
            need_shape(w1, {experts, both, hidden});
            need_shape(w2, {experts, hidden, intermediate});
        }
        const std::uint64_t element_bits = mxfp4 ? 4 : bits(w1.type);
        const std::uint64_t stored_row = inputs_first ? both : hidden;
        const std::uint64_t up_at =
            inputs_first ? (alternating ? 1 : intermediate) : (alternating ? 1 : intermediate) * hidden;  // elements
        const std::uint64_t step = alternating ? 2 : 1;
        layout.gate = {.offset = made.add(w1, stored_row * element_bits / 8),
                       .rows = narrow(intermediate),
                       .cols = hidden,
                       .row_stride = inputs_first ? step : step * hidden,
                       .col_stride = inputs_first ? both : 1};
        layout.up = layout.gate;
        layout.up.offset += up_at * element_bits / 8;
        layout.down = {.offset = made.add(w2, (inputs_first ? hidden : intermediate) * element_bits / 8),
                       .rows = hidden,
                       .cols = narrow(intermediate),
                       .row_stride = inputs_first ? 1 : intermediate,
                       .col_stride = inputs_first ? hidden : 1ull};
        if (mxfp4 || layout.kind == weight_kind::fp8_block128) {
            const std::uint64_t block_cols = mxfp4 ? 32 : 128, block_rows = mxfp4 ? 1 : 128;
            if (inputs_first) {
                fail(kind_text(w1) + ": block scales of stacked experts are read with outputs first only");
            }
            const tensor_info& s1 = mxfp4 ? need(gate_up + scales) : fp8_scale(gate_up + "_scale_inv", w1);
            const tensor_info& s2 = mxfp4 ? need(down + scales) : fp8_scale(down + "_scale_inv", w2);
            if (mxfp4 && (bits(s1.type) != 8 || bits(s2.type) != 8)) {
                fail(kind_text(bits(s1.type) != 8 ? s1 : s2) + ", one byte a scale is wanted");
            }
            need_shape(s1, {experts, ceil_div(both, block_rows), ceil_div(hidden, block_cols)});
            need_shape(s2, {experts, ceil_div(hidden, block_rows), ceil_div(intermediate, block_cols)});
            layout.gate.scale_offset = layout.up.scale_offset = made.add(s1, 0);
            layout.down.scale_offset = made.add(s2, 0);
            layout.gate.scale_row_stride = layout.up.scale_row_stride = narrow(ceil_div(hidden, block_cols));
            layout.down.scale_row_stride = narrow(ceil_div(intermediate, block_cols));
            layout.gate.scale_row_step = layout.up.scale_row_step = narrow(step);
            layout.up.scale_row0 = alternating ? 1 : narrow(intermediate);
        }
        const std::string bias_ending = first_published ? "bias" : "_bias";
        if (const tensor_info* bias = find(gate_up + bias_ending)) {
            need_shape(*bias, {experts, both});
            const std::uint64_t at = made.add(*bias, 0);
            set_bias(layout.gate, at, narrow(step), *bias);
            set_bias(layout.up, at + (alternating ? 1 : intermediate) * bits(bias->type) / 8, narrow(step), *bias);
        }
        if (const tensor_info* bias = find(down + bias_ending)) {
            need_shape(*bias, {experts, hidden});
            set_bias(layout.down, made.add(*bias, 0), 1, *bias);
        }
        return made.finish();
    }

    /// Parts of expert `e` where `first` describes expert 0 of a stack.
    [[nodiscard]] static expert_parts slice(const described_expert& first, std::uint32_t e) {
        expert_parts parts = first.parts;
        for (record_part& part : parts) {
            part.offset += e * part.bytes;
        }
        return parts;
    }

    [[nodiscard]] std::uint32_t narrow(std::uint64_t extent) const {
        if (extent == 0 || extent > 0x7fffffff) {
            fail("a dimension of " + std::to_string(extent) + " in an expert");
        }
        return static_cast<std::uint32_t>(extent);
    }

private:
    /// A record that grows part by part.
    struct record {
        record(const expert_reader& owner, weight_kind kind, std::uint32_t stack = 1) : owner_(owner), stack_(stack) {
            result.layout.kind = kind;
            result.layout.act = owner.row_.act;
        }

        /// Appends a tensor, or the first of the slices of a stacked one. @return where it begins in the record
        std::uint64_t add(const tensor_info& t, std::uint64_t row_bytes) {
            const std::uint64_t at = owner_.next_(end_), bytes = t.bytes / stack_;
            result.parts.push_back({.file = t.file, .offset = t.offset, .bytes = bytes, .record_offset = at, .row_bytes = row_bytes});
            result.tensors.push_back(&t);
            end_ = at + bytes;
            return at;
        }

        described_expert finish() {
            result.layout.bytes = owner_.next_(end_);
            return std::move(result);
        }

        described_expert result;

    private:
        const expert_reader& owner_;
        std::uint64_t end_ = 0;
        std::uint32_t stack_;
    };

    [[nodiscard]] weight_kind weight_kind_of(const tensor_info& t, bool packed) const {
        switch (t.type) {
            case dtype::f32: return weight_kind::f32;
            case dtype::bf16: return weight_kind::bf16;
            case dtype::f16: return weight_kind::f16;
            case dtype::f8_e4m3: return weight_kind::fp8_block128;
            case dtype::i32:
                if (packed) {
                    return weight_kind::int4_group;
                }
                [[fallthrough]];
            default: break;
        }
        fail(kind_text(t) + ": expert weights are read as F32, BF16, F16, F8_E4M3 with block scales, mxfp4 blocks or packed int4");
    }

    [[nodiscard]] const tensor_info& fp8_scale(const std::string& tensor, const tensor_info& weight) const {
        const tensor_info* scale = find(tensor);
        if (scale == nullptr) {
            fail(kind_text(weight) + ", but its block scales " + in_quotes(tensor) +
                 " are missing (scales a tensor or a row are not read)");
        }
        if (scale->type != dtype::f32) {
            fail(kind_text(*scale) + ", F32 is wanted for block scales");
        }
        return *scale;
    }

    void set_bias(matrix_layout& matrix, std::uint64_t at, std::uint32_t stride, const tensor_info& bias) const {
        if (bias.type != dtype::bf16 && bias.type != dtype::f16 && bias.type != dtype::f32) {
            fail(kind_text(bias) + ", BF16, F16 or F32 is wanted");
        }
        matrix.bias_offset = at;
        matrix.bias_stride = stride;
        matrix.bias_type = bias.type;
    }

    const checkpoint& weights_;
    const families::row& row_;
    next_part next_;
};

}  // namespace penstock::inline v0_1::detail

#pragma once

#include <penstock/error.hpp>
#include <penstock/model/moe_model.hpp>
#include <penstock/model/tensor_slice.hpp>

#include <cstdint>
#include <string>
#include <vector>

/// A tensor-parallel slice of an expert: rows of gate and up, and the matching columns of down, as a record of its own.

namespace penstock::inline v0_1 {

/// Bytes of a whole record that a slice's record takes, and where they go in it.
struct record_range {
    std::uint64_t from = 0;
    std::uint64_t bytes = 0;
    std::uint64_t to = 0;
    std::uint64_t row_bytes = 0;  ///< as transfer::row_bytes
};

/// How every expert of a layer is cut for one GPU.
struct record_slice {
    expert_layout layout;  ///< of the slice's record

    /// fp8: column c of the slice's down matrix has scale column (c + this) / 128. Not 0 where the cut falls inside a block; the layout, and so
    /// the kernels, know columns that begin with a block only, so such a slice is for engines that add this themselves.
    std::uint32_t down_scale_column = 0;
    std::vector<record_range> ranges;  ///< in the order of the slice's record
};

namespace detail {

/// Grows a slice's record piece by piece.
class record_cutter {
public:
    record_cutter(const expert_layout& whole, index_range range, bool with_down_bias)
        : whole_(whole), first_(range.first), count_(range.count), alternating_(alternates(whole)), with_down_bias_(with_down_bias) {
        made_.layout = whole;
        made_.layout.gate.rows = made_.layout.up.rows = made_.layout.down.cols = static_cast<std::uint32_t>(count_);
        if (count_ == 0) {
            made_.layout.bytes = 0;
            made_.layout.gate.bias_stride = made_.layout.up.bias_stride = made_.layout.down.bias_stride = 0;
            return;
        }
        cut_weights();
        if (whole.kind == weight_kind::fp8_block128 || whole.kind == weight_kind::mxfp4) {
            cut_scales();
        }
        cut_biases();
        made_.layout.bytes = layout::expert_major::next(end_);
    }

    [[nodiscard]] record_slice take_result() { return std::move(made_); }

private:
    /// Gate and up share rows: row 2 r of the tensor is gate's, row 2 r + 1 up's.
    static bool alternates(const expert_layout& l) noexcept {
        return l.gate.row_stride == (l.gate.col_stride == 1 ? std::uint64_t{2} * l.gate.cols : 2);
    }

    std::uint64_t weight_bytes(std::uint64_t elements) const noexcept {
        const std::uint64_t width = whole_.kind == weight_kind::f32            ? 32
                                    : whole_.kind == weight_kind::fp8_block128 ? 8
                                    : whole_.kind == weight_kind::mxfp4        ? 4
                                                                               : 16;
        return elements * width / 8;
    }

    /// Appends `runs` runs of `run` bytes, `stride` apart in the whole record, as one piece. @return where it begins
    std::uint64_t take(std::uint64_t from, std::uint64_t runs, std::uint64_t stride, std::uint64_t run, std::uint64_t row_bytes) {
        const std::uint64_t at = layout::expert_major::next(end_);
        if (runs > 1 && run == stride) {
            run *= runs;
            runs = 1;
        }
        for (std::uint64_t i = 0; i < runs; ++i) {
            made_.ranges.push_back({from + i * stride, run, at + i * run, row_bytes});
        }
        end_ = at + runs * run;
        return at;
    }

    void cut_weights() {
        const std::uint64_t step = alternating_ ? 2 : 1;
        const auto rows = [&](const matrix_layout& m, matrix_layout& cut) {
            if (m.col_stride == 1) {
                cut.offset =
                    take(m.offset + weight_bytes(step * first_ * m.cols), 1, 0, weight_bytes(step * count_ * m.cols), weight_bytes(m.cols));
            } else {
                cut.offset = take(m.offset + weight_bytes(step * first_), m.cols, weight_bytes(m.col_stride), weight_bytes(step * count_),
                                  weight_bytes(step * count_));
                cut.col_stride = step * count_;
            }
        };
        rows(whole_.gate, made_.layout.gate);
        if (alternating_) {
            made_.layout.up.offset = made_.layout.gate.offset + (whole_.up.offset - whole_.gate.offset);
            made_.layout.up.col_stride = made_.layout.gate.col_stride;
        } else {
            rows(whole_.up, made_.layout.up);
        }
        const matrix_layout& m = whole_.down;
        matrix_layout& cut = made_.layout.down;
        if (m.col_stride == 1) {
            cut.offset =
                take(m.offset + weight_bytes(first_), m.rows, weight_bytes(m.row_stride), weight_bytes(count_), weight_bytes(count_));
            cut.row_stride = count_;
        } else {
            cut.offset =
                take(m.offset + weight_bytes(first_ * m.col_stride), 1, 0, weight_bytes(count_ * m.col_stride), weight_bytes(m.col_stride));
        }
    }

    void cut_scales() {
        const bool fp8 = whole_.kind == weight_kind::fp8_block128;
        const std::uint64_t block_rows = fp8 ? 128 : 1, block_cols = fp8 ? 128 : 32, width = fp8 ? 4 : 1;
        /// Scale rows that rows [first, first + count) of `a` touch, and of `b`, which shares the tensor.
        const auto rows = [&](const matrix_layout& a, const matrix_layout& b) {
            const std::uint64_t lo = (first_ * a.scale_row_step + smaller(a.scale_row0, b.scale_row0)) / block_rows;
            const std::uint64_t hi = ((first_ + count_ - 1) * a.scale_row_step + larger(a.scale_row0, b.scale_row0)) / block_rows;
            return index_range{lo, hi - lo + 1};
        };
        const auto place = [&](const matrix_layout& m, matrix_layout& cut, index_range touched, std::uint64_t at) {
            cut.scale_offset = at;
            cut.scale_row0 = static_cast<std::uint32_t>(first_ * m.scale_row_step + m.scale_row0 - touched.first * block_rows);
        };
        const auto bring = [&](const matrix_layout& m, index_range touched) {
            const std::uint64_t row = m.scale_row_stride * width;
            return take(m.scale_offset + touched.first * row, 1, 0, touched.count * row, 0);
        };
        const matrix_layout &gate = whole_.gate, &up = whole_.up, &down = whole_.down;
        const index_range of_gate = rows(gate, alternating_ ? up : gate), of_up = alternating_ ? of_gate : rows(up, up);
        const std::uint64_t at = bring(gate, of_gate);
        place(gate, made_.layout.gate, of_gate, at);
        place(up, made_.layout.up, of_up, alternating_ ? at : bring(up, of_up));
        const std::uint64_t lo = first_ / block_cols, columns = ceil_div(first_ + count_, block_cols) - lo;
        const std::uint64_t down_rows = ((down.rows - 1) * std::uint64_t{down.scale_row_step} + down.scale_row0) / block_rows + 1;
        made_.layout.down.scale_offset = take(down.scale_offset + lo * width, down_rows, down.scale_row_stride * width, columns * width, 0);
        made_.layout.down.scale_row_stride = static_cast<std::uint32_t>(columns);
        made_.down_scale_column = static_cast<std::uint32_t>(first_ % block_cols);
    }

    void cut_biases() {
        const auto width = [](const matrix_layout& m) { return std::uint64_t{bits(m.bias_type)} / 8; };
        const auto rows = [&](const matrix_layout& m, std::uint64_t step) {
            return take(m.bias_offset + step * first_ * width(m), 1, 0, step * count_ * width(m), 0);
        };
        expert_layout& cut = made_.layout;
        if (alternating_ && whole_.gate.bias_stride == 2 && whole_.up.bias_stride == 2) {
            cut.gate.bias_offset = rows(whole_.gate, 2);
            cut.up.bias_offset = cut.gate.bias_offset + (whole_.up.bias_offset - whole_.gate.bias_offset);
        } else {
            if (whole_.gate.bias_stride > 0) {
                cut.gate.bias_offset = rows(whole_.gate, 1);
            }
            if (whole_.up.bias_stride > 0) {
                cut.up.bias_offset = rows(whole_.up, 1);
            }
        }
        if (whole_.down.bias_stride > 0 && with_down_bias_) {
            cut.down.bias_offset = take(whole_.down.bias_offset, 1, 0, whole_.down.rows * width(whole_.down), 0);
        } else {
            cut.down.bias_stride = 0;
        }
    }

    const expert_layout& whole_;
    std::uint64_t first_, count_;
    bool alternating_, with_down_bias_;
    std::uint64_t end_ = 0;
    record_slice made_;
};

}  // namespace detail

/// Cuts the records of a layer to the part `intermediate` of their intermediate dimension. Sums of the slices' outputs over all GPUs are the
/// expert's output; so that down's bias counts once, one GPU has it: `with_down_bias`. Gate and up that alternate in one tensor stay so.
/// @throws configuration_error for a range that is not there, mxfp4 cut inside a run of 32 weights that share a scale, int4 (whose scales'
/// type a layout does not tell)
[[nodiscard]] inline record_slice slice_record(const expert_layout& whole, index_range intermediate, bool with_down_bias) {
    const auto refuse = [&](const std::string& problem) {
        throw configuration_error("penstock: " + std::to_string(intermediate.count) + " of " + std::to_string(whole.intermediate()) +
                                  " intermediate values from " + std::to_string(intermediate.first) + " on, weights " + name(whole.kind) +
                                  ": " + problem);
    };
    if (intermediate.first > whole.intermediate() || intermediate.count > whole.intermediate() - intermediate.first) {
        refuse("they are not there");
    }
    if (whole.kind == weight_kind::int4_group) {
        refuse("experts of this format are not sliced");
    }
    if (whole.kind == weight_kind::mxfp4 &&
        (intermediate.first % 32 != 0 || (intermediate.end() % 32 != 0 && intermediate.end() != whole.intermediate()))) {
        refuse("a cut inside 32 weights that share a scale");
    }
    return detail::record_cutter(whole, intermediate, with_down_bias).take_result();
}

/// The parts of one expert's slice: its whole record's parts cut by a slice of its layer.
/// @throws configuration_error for a range that no part holds: parts that are not those of the layout
[[nodiscard]] inline expert_parts slice_parts(const expert_parts& whole, const record_slice& cut) {
    expert_parts parts;
    parts.reserve(cut.ranges.size());
    std::size_t p = 0;
    const auto holds = [](const record_part& part, const record_range& r) {
        return part.record_offset <= r.from && r.from + r.bytes <= part.record_offset + part.bytes;
    };
    for (const record_range& r : cut.ranges) {
        for (std::size_t tried = 0; !whole.empty() && tried < whole.size() && !holds(whole[p], r); ++tried) {
            p = (p + 1) % whole.size();
        }
        if (whole.empty() || !holds(whole[p], r)) {
            throw configuration_error("penstock: bytes " + std::to_string(r.from) + " to " + std::to_string(r.from + r.bytes) +
                                      " of a record lie in none of its " + std::to_string(whole.size()) + " parts");
        }
        parts.push_back({whole[p].file, whole[p].offset + (r.from - whole[p].record_offset), r.bytes, r.to, r.row_bytes});
    }
    return parts;
}

}  // namespace penstock::inline v0_1

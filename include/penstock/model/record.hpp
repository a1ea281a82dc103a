#pragma once

#include <penstock/model/dtype.hpp>
#include <penstock/model/weight_format.hpp>
#include <penstock/units.hpp>

#include <vector>

/// An expert's bytes as one contiguous record, and how to find a weight in it.

namespace penstock::inline v0_1 {

/// One matrix inside a record. Weight (r, c) is element r * row_stride + c * col_stride counted from byte `offset`; one of the strides
/// of a dense matrix is 1, save in gpt-oss stored as bf16, [hidden, 2 * intermediate] with gate and up alternating: row_stride is 2 there. Packed formats (mxfp4, int4) have col_stride 1 and strides counted in elements, as if unpacked.
struct matrix_layout {
    std::uint64_t offset = 0;
    std::uint32_t rows = 0;  ///< outputs
    std::uint32_t cols = 0;  ///< inputs
    std::uint64_t row_stride = 0;
    std::uint64_t col_stride = 1;

    /// fp8_block128: float scale of (r, c) is number ((r * scale_row_step + scale_row0) / 128) * scale_row_stride + c / 128 from byte
    /// `scale_offset`. mxfp4: E8M0 byte of (r, c) is number (r * scale_row_step + scale_row0) * scale_row_stride + c / 32.
    /// (row0, step: gate and up may share one tensor, concatenated or interleaved.)
    std::uint64_t scale_offset = 0;
    std::uint32_t scale_row0 = 0;
    std::uint32_t scale_row_step = 1;
    std::uint32_t scale_row_stride = 0;

    /// Bias of row r is bf16, f16 or f32 element r * bias_stride from byte `bias_offset`; absent where bias_stride is 0.
    std::uint64_t bias_offset = 0;
    std::uint32_t bias_stride = 0;
    dtype bias_type = dtype::bf16;
};

/// What lies between the two matrices of an expert.
enum class activation : std::uint8_t {
    swiglu,          ///< silu(gate) * up
    swiglu_clamped,  ///< the same with gate clamped from above and up on both sides by `limit`
    gpt_oss          ///< g = min(gate, limit), u = clamp(up, +-limit): g * sigmoid(alpha * g) * (u + 1)
};

/// The layout of every expert of a layer: what `expert_mlp` needs besides a pointer to the record.
struct expert_layout {
    weight_kind kind = weight_kind::bf16;
    std::uint64_t bytes = 0;  ///< size of a record
    matrix_layout gate, up;   ///< intermediate x hidden
    matrix_layout down;       ///< hidden x intermediate
    activation act = activation::swiglu;
    float alpha = 1.702f;
    float limit = 0.0f;

    [[nodiscard]] std::uint32_t hidden() const noexcept { return gate.cols; }
    [[nodiscard]] std::uint32_t intermediate() const noexcept { return gate.rows; }
};

/// One byte range of a file and where it goes in the record.
struct record_part {
    std::uint32_t file = 0;
    std::uint64_t offset = 0;  ///< from the start of the file
    std::uint64_t bytes = 0;
    std::uint64_t record_offset = 0;
    std::uint64_t row_bytes = 0;  ///< of the matrix; 0 for scales and biases
};

using expert_parts = std::vector<record_part>;

/// A record layout places parts one after another: `next(offset)` is where a part may start that cannot start before `offset`.
namespace layout {

/// gate, up, down, then scales and biases, each part on a multiple of 16 bytes, as bulk copies and 16-byte loads want it.
struct expert_major {
    static constexpr std::uint64_t next(std::uint64_t offset) noexcept { return round_up(offset, 16); }
};

}  // namespace layout
}  // namespace penstock::inline v0_1

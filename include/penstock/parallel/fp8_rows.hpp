#pragma once

#include <penstock/dispatch/decode.hpp>
#include <penstock/units.hpp>

#include <cstdint>

/// Rows of E4M3 with one float for 128 elements, which multiplies: how activations cross in half the bytes of bf16.

namespace penstock::inline v0_1 {

inline constexpr std::uint32_t fp8_row_block = 128;
inline constexpr float largest_e4m3 = 448.0f;

/// Quantises one row of f32, bf16 or f16 elements. A block's scale puts its largest finite element at 448; a block of zeros has scale 1.
/// Infinities and NaN become NaN, and do not touch their neighbours.
/// @param out [hidden] @param scales [ceil(hidden / 128)]
PENSTOCK_HD inline void quantise_row(const void* row, dtype type, std::uint32_t hidden, std::uint8_t* out, float* scales) noexcept {
    for (std::uint32_t first = 0; first < hidden; first += fp8_row_block) {
        const std::uint32_t end = smaller(hidden, first + fp8_row_block);
        float most = 0.0f;
        for (std::uint32_t i = first; i < end; ++i) {
            const float x = load_element(row, type, i);
            const float size = x < 0.0f ? -x : x;
            most = size <= 3.402823466e38f && size > most ? size : most;
        }
        // A scale below the smallest normal number would lose bits, or be 0.
        const float scale = most > 0.0f ? larger(most / largest_e4m3, 1.17549435e-38f) : 1.0f;
        for (std::uint32_t i = first; i < end; ++i) {
            const float x = load_element(row, type, i);
            out[i] = x - x == 0.0f ? encode_e4m3(x / scale) : std::uint8_t{0x7f};
        }
        scales[first / fp8_row_block] = scale;
    }
}

/// Element `i` of a quantised row.
PENSTOCK_HD inline float dequantised(const std::uint8_t* row, const float* scales, std::uint32_t i) noexcept {
    return decode_e4m3(row[i]) * scales[i / fp8_row_block];
}

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/model/dtype.hpp>
#include <penstock/model/record.hpp>

#include <cuda/std/bit>

#include <cstddef>
#include <cstdint>
#include <cstring>

/// Bits to floats and back, one element at a time, for host and device: what every vectorised decoder has to agree with.
/// Loads are by memcpy, since a record may put a tensor at any byte.

namespace penstock::inline v0_1 {

PENSTOCK_HD inline float decode_bf16(std::uint16_t bits) noexcept {
    return cuda::std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

PENSTOCK_HD inline float decode_f16(std::uint16_t bits) noexcept {
    const std::uint32_t sign = (bits & 0x8000u) << 16;
    const std::uint32_t magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) {  // infinity, NaN
        return cuda::std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    }
    // Exponent and mantissa moved into place, then the bias corrected by a multiplication, which is exact for subnormals too.
    const float value = cuda::std::bit_cast<float>(magnitude << 13) * cuda::std::bit_cast<float>(0x77800000u);  // 2^112
    return cuda::std::bit_cast<float>(sign | cuda::std::bit_cast<std::uint32_t>(value));
}

/// OCP E4M3 without infinities: 0x7f and 0xff are NaN, the largest is 448.
PENSTOCK_HD inline float decode_e4m3(std::uint8_t bits) noexcept {
    const std::uint32_t sign = (bits & 0x80u) << 24;
    const std::uint32_t magnitude = bits & 0x7fu;
    if (magnitude == 0x7fu) {
        return cuda::std::bit_cast<float>(sign | 0x7fc00000u);
    }
    const float value = cuda::std::bit_cast<float>(magnitude << 20) * cuda::std::bit_cast<float>(0x7b800000u);  // 2^120
    return cuda::std::bit_cast<float>(sign | cuda::std::bit_cast<std::uint32_t>(value));
}

/// E2M1: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign.
PENSTOCK_HD inline float decode_e2m1(std::uint32_t nibble) noexcept {
    const std::uint32_t sign = (nibble & 8u) << 28;
    const std::uint32_t exponent = nibble >> 1 & 3u;
    const std::uint32_t mantissa = nibble & 1u;
    const std::uint32_t magnitude = exponent != 0 ? (exponent + 126u) << 23 | mantissa << 22 : mantissa * 0x3f000000u;
    return cuda::std::bit_cast<float>(sign | magnitude);
}

/// E8M0: 2^(byte - 127); 0 is 2^-127, subnormal in float32; 255 is NaN.
PENSTOCK_HD inline float decode_e8m0(std::uint8_t byte) noexcept {
    const std::uint32_t bits = byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : static_cast<std::uint32_t>(byte) << 23;
    return cuda::std::bit_cast<float>(bits);
}

/// Nearest bf16, ties to even; NaN stays NaN.
PENSTOCK_HD inline std::uint16_t encode_bf16(float value) noexcept {
    const auto bits = cuda::std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
    }
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/// Nearest f16, ties to even; beyond 65520 infinity, NaN stays NaN.
PENSTOCK_HD inline std::uint16_t encode_f16(float value) noexcept {
    const auto bits = cuda::std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return static_cast<std::uint16_t>(sign | 0x7e00u);
    }
    if (magnitude >= 0x477ff000u) {
        return static_cast<std::uint16_t>(sign | 0x7c00u);
    }
    if (magnitude < 0x38800000u) {  // subnormal: the addition of 0.5 rounds at 2^-24, the place of f16's last bit
        const float rounded = cuda::std::bit_cast<float>(magnitude) + 0.5f;
        return static_cast<std::uint16_t>(sign | (cuda::std::bit_cast<std::uint32_t>(rounded) - 0x3f000000u));
    }
    const std::uint32_t odd = magnitude >> 13 & 1u;
    return static_cast<std::uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + odd) >> 13);
}

/// Nearest E4M3, ties to even; beyond 448 it is 448, NaN stays NaN.
PENSTOCK_HD inline std::uint8_t encode_e4m3(float value) noexcept {
    const auto bits = cuda::std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 24 & 0x80u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return static_cast<std::uint8_t>(sign | 0x7fu);
    }
    if (magnitude >= 0x43e00000u) {
        return static_cast<std::uint8_t>(sign | 0x7eu);
    }
    if (magnitude < 0x3c800000u) {  // subnormal: the addition of 2^14 rounds at 2^-9, the place of E4M3's last bit
        const float rounded = cuda::std::bit_cast<float>(magnitude) + 16384.0f;
        return static_cast<std::uint8_t>(sign | (cuda::std::bit_cast<std::uint32_t>(rounded) - 0x46800000u));
    }
    const std::uint32_t odd = magnitude >> 20 & 1u;
    return static_cast<std::uint8_t>(sign | (magnitude - 0x3c000000u + 0x7ffffu + odd) >> 20);
}

namespace detail {

template <class T>
PENSTOCK_HD T load_unaligned(const void* from, std::uint64_t index) noexcept {
    T value;
    std::memcpy(&value, static_cast<const unsigned char*>(from) + index * sizeof(T), sizeof(T));
    return value;
}

}  // namespace detail

/// Element `index` of an array of f32, bf16 or f16 elements, at any alignment. @pre `type` is one of the three.
PENSTOCK_HD inline float load_element(const void* from, dtype type, std::uint64_t index) noexcept {
    switch (type) {
        case dtype::bf16: return decode_bf16(detail::load_unaligned<std::uint16_t>(from, index));
        case dtype::f16: return decode_f16(detail::load_unaligned<std::uint16_t>(from, index));
        default: return detail::load_unaligned<float>(from, index);
    }
}

/// Writes element `index` of an array of f32, bf16 or f16 elements, rounded to nearest. @pre `type` is one of the three.
PENSTOCK_HD inline void store_element(void* to, dtype type, std::uint64_t index, float value) noexcept {
    auto* bytes = static_cast<unsigned char*>(to);
    if (type == dtype::f32) {
        std::memcpy(bytes + index * 4, &value, 4);
        return;
    }
    const std::uint16_t bits = type == dtype::bf16 ? encode_bf16(value) : encode_f16(value);
    std::memcpy(bytes + index * 2, &bits, 2);
}

/// Bias of output row `r`, 0 where the matrix has none.
PENSTOCK_HD inline float bias_at(const matrix_layout& matrix, const std::byte* record, std::uint32_t r) noexcept {
    if (matrix.bias_stride == 0) {
        return 0.0f;
    }
    return load_element(record + matrix.bias_offset, matrix.bias_type, static_cast<std::uint64_t>(r) * matrix.bias_stride);
}

/// Scale of weight (r, c): 1 for formats without scales.
PENSTOCK_HD inline float scale_at(weight_kind kind, const matrix_layout& matrix, const std::byte* record, std::uint32_t r,
                                  std::uint32_t c) noexcept {
    const std::uint64_t row = static_cast<std::uint64_t>(r) * matrix.scale_row_step + matrix.scale_row0;
    if (kind == weight_kind::fp8_block128) {
        return detail::load_unaligned<float>(record + matrix.scale_offset, row / 128 * matrix.scale_row_stride + c / 128);
    }
    if (kind == weight_kind::mxfp4) {
        return decode_e8m0(detail::load_unaligned<std::uint8_t>(record + matrix.scale_offset, row * matrix.scale_row_stride + c / 32));
    }
    return 1.0f;
}

/// Weight (r, c) of a matrix in a record, by the definition of `matrix_layout`. Slow: for odd strides, tails and tests.
/// @pre `kind` is one of the formats that `visit` serves.
PENSTOCK_HD inline float weight_at(weight_kind kind, const matrix_layout& matrix, const std::byte* record, std::uint32_t r,
                                   std::uint32_t c) noexcept {
    const std::uint64_t index = r * matrix.row_stride + c * matrix.col_stride;
    const std::byte* data = record + matrix.offset;
    switch (kind) {
        case weight_kind::f32: return load_element(data, dtype::f32, index);
        case weight_kind::bf16: return load_element(data, dtype::bf16, index);
        case weight_kind::f16: return load_element(data, dtype::f16, index);
        case weight_kind::fp8_block128:
            return decode_e4m3(detail::load_unaligned<std::uint8_t>(data, index)) * scale_at(kind, matrix, record, r, c);
        default: break;
    }
    const auto byte = detail::load_unaligned<std::uint8_t>(data, index / 2);
    return decode_e2m1(index % 2 == 0 ? byte & 15u : byte >> 4) * scale_at(kind, matrix, record, r, c);
}

}  // namespace penstock::inline v0_1

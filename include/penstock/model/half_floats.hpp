#pragma once

#include <penstock/error.hpp>
#include <penstock/model/dtype.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

/// Scalar conversions between float and the float types of checkpoints, on the host, exact where the target can hold the value.

namespace penstock::inline v0_1 {

[[nodiscard]] constexpr float from_bf16(std::uint16_t bits) noexcept { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

/// Round to nearest even; NaN stays NaN.
[[nodiscard]] constexpr std::uint16_t to_bf16(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
    }
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[nodiscard]] constexpr float from_f16(std::uint16_t bits) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fu;
    const std::uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0) {
        const float subnormal = static_cast<float>(fraction) * 0x1p-24f;
        return sign != 0 ? -subnormal : subnormal;
    }
    const std::uint32_t wide = exponent == 31 ? 0xffu : exponent + 112;
    return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

/// Round to nearest even; beyond the largest finite value infinity.
[[nodiscard]] constexpr std::uint16_t to_f16(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return static_cast<std::uint16_t>(sign | 0x7e00u);
    }
    if (magnitude >= 0x477ff000u) {
        return static_cast<std::uint16_t>(sign | 0x7c00u);
    }
    if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded fraction in the low bits
        const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
        return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
    }
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

/// Element `index` of an array of f32, bf16 or f16 that need not be aligned. @throws configuration_error for another type.
[[nodiscard]] inline float load_float(const void* array, dtype type, std::size_t index) {
    const auto* bytes = static_cast<const std::byte*>(array);
    if (type == dtype::f32) {
        float value;
        std::memcpy(&value, bytes + index * 4, 4);
        return value;
    }
    std::uint16_t half;
    std::memcpy(&half, bytes + index * 2, 2);
    switch (type) {
        case dtype::bf16: return from_bf16(half);
        case dtype::f16: return from_f16(half);
        default: throw configuration_error("penstock: " + std::string(name(type)) + " where F32, BF16 or F16 is wanted");
    }
}

/// Stores `value` as element `index`, rounded to nearest even. @throws configuration_error for a type that is not f32, bf16 or f16.
inline void store_float(void* array, dtype type, std::size_t index, float value) {
    auto* bytes = static_cast<std::byte*>(array);
    if (type == dtype::f32) {
        std::memcpy(bytes + index * 4, &value, 4);
        return;
    }
    std::uint16_t half;
    switch (type) {
        case dtype::bf16: half = to_bf16(value); break;
        case dtype::f16: half = to_f16(value); break;
        default: throw configuration_error("penstock: " + std::string(name(type)) + " where F32, BF16 or F16 is wanted");
    }
    std::memcpy(bytes + index * 2, &half, 2);
}

}  // namespace penstock::inline v0_1

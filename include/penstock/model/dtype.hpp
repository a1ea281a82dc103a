#pragma once

#include <penstock/config.hpp>

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace penstock::inline v0_1 {

/// Element types of checkpoint tensors, with the spelling of safetensors.
enum class dtype : std::uint8_t {
    boolean,
    f4,
    f6_e2m3,
    f6_e3m2,
    u8,
    i8,
    f8_e5m2,
    f8_e4m3,
    f8_e8m0,
    f8_e4m3fnuz,
    f8_e5m2fnuz,
    i16,
    u16,
    f16,
    bf16,
    i32,
    u32,
    f32,
    c64,
    f64,
    i64,
    u64
};

namespace detail {

struct dtype_row {
    std::string_view name;
    std::uint32_t bits;
};

inline constexpr std::array<dtype_row, 22> dtype_table{
    {{"BOOL", 8},    {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6}, {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8},
     {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16}, {"F16", 16}, {"BF16", 16},   {"I32", 32},
     {"U32", 32},    {"F32", 32},        {"C64", 64},        {"F64", 64},    {"I64", 64}, {"U64", 64}}};

}  // namespace detail

[[nodiscard]] constexpr std::string_view name(dtype type) noexcept { return detail::dtype_table[static_cast<std::size_t>(type)].name; }

/// Bits of one element; F4 and F6 elements do not fill bytes.
[[nodiscard]] constexpr std::uint32_t bits(dtype type) noexcept { return detail::dtype_table[static_cast<std::size_t>(type)].bits; }

[[nodiscard]] constexpr std::optional<dtype> parse_dtype(std::string_view text) noexcept {
    for (std::size_t i = 0; i < detail::dtype_table.size(); ++i) {
        if (detail::dtype_table[i].name == text) {
            return static_cast<dtype>(i);
        }
    }
    return std::nullopt;
}

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/config.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace penstock::inline v0_1 {

/// A number of bytes. Structural, so that a policy can carry one: `chunking::fixed<4_MiB>`.
struct bytes {
    std::uint64_t count = 0;

    PENSTOCK_HD constexpr operator std::uint64_t() const noexcept { return count; }
};

namespace literals {

constexpr bytes operator""_B(unsigned long long n) noexcept { return {n}; }
constexpr bytes operator""_KiB(unsigned long long n) noexcept { return {n << 10}; }
constexpr bytes operator""_MiB(unsigned long long n) noexcept { return {n << 20}; }
constexpr bytes operator""_GiB(unsigned long long n) noexcept { return {n << 30}; }

/// A count, not a size: 1_Mi elements.
constexpr std::size_t operator""_Ki(unsigned long long n) noexcept { return n << 10; }
constexpr std::size_t operator""_Mi(unsigned long long n) noexcept { return n << 20; }

}  // namespace literals

/// Smallest multiple of `step` that is not below `n`. @pre step > 0, n + step - 1 does not wrap.
PENSTOCK_HD constexpr std::uint64_t round_up(std::uint64_t n, std::uint64_t step) noexcept { return (n + step - 1) / step * step; }

/// Largest multiple of `step` that is not above `n`. @pre step > 0.
PENSTOCK_HD constexpr std::uint64_t round_down(std::uint64_t n, std::uint64_t step) noexcept { return n / step * step; }

/// n / d, rounded up. @pre d > 0.
PENSTOCK_HD constexpr std::uint64_t ceil_div(std::uint64_t n, std::uint64_t d) noexcept { return (n + d - 1) / d; }

template <class T>
PENSTOCK_HD constexpr T smaller(T a, T b) noexcept {
    return b < a ? b : a;
}

template <class T>
PENSTOCK_HD constexpr T larger(T a, T b) noexcept {
    return a < b ? b : a;
}

/// Every tensor and record that the library places starts at a multiple of this, as CUDA's own allocations do.
inline constexpr std::uint64_t placement_alignment = 256;

/// "12.2 MiB", "768 B": for messages and tables.
inline std::string to_string(bytes size) {
    constexpr const char* unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int u = 0;
    double value = static_cast<double>(size.count);
    for (; value >= 1024 && u < 4; ++u) {
        value /= 1024;
    }
    char text[32];
    std::snprintf(text, sizeof text, u == 0 ? "%.0f %s" : "%.1f %s", value, unit[u]);
    return text;
}

}  // namespace penstock::inline v0_1

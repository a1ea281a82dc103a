#pragma once

#include <penstock/config.hpp>
#include <penstock/error.hpp>

#include <cstdint>
#include <string>
#include <utility>

/// How an expert's weights are stored. Each format is a type, so that kernels are generated for it.

namespace penstock::inline v0_1 {

enum class weight_kind : std::uint8_t { f32, bf16, f16, fp8_block128, mxfp4, int4_group };

[[nodiscard]] constexpr const char* name(weight_kind kind) noexcept {
    constexpr const char* text[] = {"f32", "bf16", "f16", "fp8_block128", "mxfp4", "int4_group"};
    return text[static_cast<int>(kind)];
}

namespace format {

/// 32-bit IEEE floats.
struct f32 {
    static constexpr weight_kind kind = weight_kind::f32;
    static constexpr std::uint32_t bits = 32;
};

struct bf16 {
    static constexpr weight_kind kind = weight_kind::bf16;
    static constexpr std::uint32_t bits = 16;
};

struct f16 {
    static constexpr weight_kind kind = weight_kind::f16;
    static constexpr std::uint32_t bits = 16;
};

/// E4M3 with one float for a block of 128 x 128 weights, which multiplies (DeepSeek-V3, `weight_scale_inv`).
struct fp8_block128 {
    static constexpr weight_kind kind = weight_kind::fp8_block128;
    static constexpr std::uint32_t bits = 8;
};

/// OCP MXFP4: two E2M1 a byte, low nibble first; one E8M0 byte for 32 values along the input dimension (gpt-oss).
struct mxfp4 {
    static constexpr weight_kind kind = weight_kind::mxfp4;
    static constexpr std::uint32_t bits = 4;
};

}  // namespace format

/// Calls `f` with the format type of a kind known at run time. @throws configuration_error for a kind without kernels.
template <class F>
decltype(auto) visit(weight_kind kind, F&& f) {
    switch (kind) {
        case weight_kind::f32: return std::forward<F>(f)(format::f32{});
        case weight_kind::bf16: return std::forward<F>(f)(format::bf16{});
        case weight_kind::f16: return std::forward<F>(f)(format::f16{});
        case weight_kind::fp8_block128: return std::forward<F>(f)(format::fp8_block128{});
        case weight_kind::mxfp4: return std::forward<F>(f)(format::mxfp4{});
        case weight_kind::int4_group: break;
    }
    throw configuration_error(std::string("penstock: weights of format ") + name(kind) +
                              " can be loaded, but no kernel computes with them");
}

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/error.hpp>
#include <penstock/model/dtype.hpp>
#include <penstock/model/routing_rule.hpp>
#include <penstock/model/tensor.hpp>
#include <penstock/parallel/fp8_rows.hpp>
#include <penstock/units.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

/// What crosses between ranks, and what the owner of experts gets to see of it.

namespace penstock::inline v0_1 {

/// One rank's tokens and the experts they were routed to, in the transport's memory.
struct routed_tokens {
    activations hidden;                  ///< [tokens, hidden]
    const std::int32_t* ids = nullptr;   ///< [tokens, top_k] global ids; negative: no expert
    const float* weights = nullptr;      ///< [tokens, top_k]; null: every weight is 1
    const std::int32_t* live = nullptr;  ///< number of tokens that count; null: all
};

/// The tokens that came to one rank, from all ranks, in the transport's memory: by ascending source rank, then in the order of the source.
/// In the vocabulary of the executors: pair p = row * top_k + j, its expert is a local id.
struct expert_rows {
    const void* hidden = nullptr;   ///< [rows, width]
    dtype type = dtype::bf16;       ///< f32, bf16, f16, or f8_e4m3 with scales
    const float* scales = nullptr;  ///< [rows, ceil(width / 128)] for f8_e4m3, else null
    std::uint32_t rows = 0;
    std::uint32_t width = 0;  ///< hidden size
    std::uint32_t top_k = 0;
    std::uint32_t experts = 0;               ///< that this rank holds
    const std::int32_t* ids = nullptr;       ///< [rows, top_k] local ids; -1: not here
    const float* weights = nullptr;          ///< [rows, top_k]
    const std::int32_t* pairs = nullptr;     ///< sorted by expert, ascending within one
    const std::uint32_t* offsets = nullptr;  ///< [experts + 1] into `pairs`
    std::span<const std::uint32_t> from;     ///< [ranks + 1], in host memory: rows [from[s], from[s + 1]) came from rank s
};

/// The form of rows as they cross.
struct row_format {
    std::uint32_t hidden = 0;
    std::uint32_t top_k = 0;
    dtype type = dtype::bf16;  ///< of the rows that go out: f32, bf16, f16 or f8_e4m3
    dtype sums = dtype::bf16;  ///< of the rows that come back: f32, bf16 or f16

    [[nodiscard]] constexpr std::uint64_t row_bytes() const noexcept { return std::uint64_t{hidden} * bits(type) / 8; }
    [[nodiscard]] constexpr std::uint64_t sum_bytes() const noexcept { return std::uint64_t{hidden} * bits(sums) / 8; }
    [[nodiscard]] constexpr std::uint32_t scales() const noexcept {
        return type == dtype::f8_e4m3 ? static_cast<std::uint32_t>(ceil_div(hidden, fp8_row_block)) : 0;
    }

    /// All that goes out for one row: elements, scales, ids and weights.
    [[nodiscard]] constexpr std::uint64_t dispatch_bytes() const noexcept {
        return row_bytes() + scales() * sizeof(float) + top_k * (sizeof(std::int32_t) + sizeof(float));
    }

    /// @throws configuration_error for a type or size that is not served
    void validate() const {
        const auto refuse = [](const std::string& why) { throw configuration_error("penstock: expert parallelism: " + why); };
        const auto wide = [](dtype t) { return t == dtype::f32 || t == dtype::bf16 || t == dtype::f16; };
        if (!wide(sums) || !(type == sums || type == dtype::f8_e4m3)) {
            refuse("rows of " + std::string(name(type)) + " out and " + std::string(name(sums)) +
                   " back; both are F32, BF16 or F16, and those that go out may be F8_E4M3 instead");
        }
        if (hidden == 0 || row_bytes() % 16 != 0) {
            refuse("a hidden size of " + std::to_string(hidden) + " makes rows of " + std::to_string(row_bytes()) + " bytes in " +
                   std::string(name(type)) + "; multiples of 16 bytes are served");
        }
        if (top_k == 0 || top_k > max_top_k) {
            refuse("top-" + std::to_string(top_k) + "; 1 to " + std::to_string(max_top_k) + " are served");
        }
    }
};

/// Arrays of rows that are to be sent or were received, in the transport's memory.
struct row_arrays {
    std::byte* hidden = nullptr;  ///< [rows, row_bytes]
    float* scales = nullptr;      ///< [rows, scales]
    std::int32_t* ids = nullptr;  ///< [rows, top_k]
    float* weights = nullptr;     ///< [rows, top_k]
};

}  // namespace penstock::inline v0_1

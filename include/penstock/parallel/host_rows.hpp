#pragma once

#include <penstock/dispatch/decode.hpp>
#include <penstock/dispatch/permutation.hpp>
#include <penstock/parallel/dispatch_plan.hpp>
#include <penstock/parallel/rows.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace penstock::inline v0_1 {

/// Gathers, groups and sums rows in host memory. The `row_steps` of a transport whose blocks lie elsewhere has the same members; there, what
/// they write is ready in the order of the transport.
class host_rows {
public:
    /// The ids of the tokens that count, where the host can read them, until the next call. @return [live tokens * top_k]
    [[nodiscard]] std::span<const std::int32_t> ids_on_host(const routed_tokens& tokens, std::uint32_t top_k) const {
        const std::uint32_t all = tokens.hidden.tokens;
        const std::uint32_t live = tokens.live == nullptr ? all : smaller(all, static_cast<std::uint32_t>(larger(*tokens.live, 0)));
        return {tokens.ids, std::size_t{live} * top_k};
    }

    /// Gathers the plan's rows, in the type in which they cross.
    void pack(const dispatch_plan& plan, const routed_tokens& tokens, const row_format& format, const row_arrays& out) const {
        const std::uint64_t row_bytes = format.row_bytes();
        const std::uint64_t source_bytes = std::uint64_t{format.hidden} * bits(tokens.hidden.type) / 8;
        const std::uint32_t k = format.top_k;
        for (std::uint32_t r = 0; r < plan.rows(); ++r) {
            const std::uint32_t t = plan.token_of()[r];
            const std::byte* source = static_cast<const std::byte*>(tokens.hidden.data) + t * source_bytes;
            if (format.type == dtype::f8_e4m3) {
                quantise_row(source, tokens.hidden.type, format.hidden, reinterpret_cast<std::uint8_t*>(out.hidden + r * row_bytes),
                             out.scales + std::uint64_t{r} * format.scales());
            } else {
                std::memcpy(out.hidden + r * row_bytes, source, row_bytes);
            }
            for (std::uint32_t j = 0; j < k; ++j) {
                const std::int32_t id = plan.local_ids()[std::size_t{r} * k + j];
                out.ids[std::size_t{r} * k + j] = id;
                out.weights[std::size_t{r} * k + j] = id < 0                      ? 0.0f
                                                      : tokens.weights == nullptr ? 1.0f
                                                                                  : tokens.weights[std::size_t{t} * k + j];
            }
        }
    }

    /// Sorts the pairs of received rows by local expert. @param pairs [rows * top_k] @param offsets [experts + 1]
    /// @throws configuration_error for an id that this rank lacks: the ranks do not follow the same placement
    void group(const std::int32_t* ids, std::uint32_t rows, std::uint32_t top_k, std::uint32_t experts, std::int32_t* pairs,
               std::uint32_t* offsets) const {
        permute_by_expert({ids, std::size_t{rows} * top_k}, experts, pairs, offsets);
    }

    /// out[t] = the sum of the rows that came back for token t, by ascending rank, + shared[t], in float32 and rounded once. Rows of `out`
    /// past the tokens of the plan become 0.
    /// @param sums [plan.rows(), hidden], in format.sums
    /// @param shared [tokens, hidden], or null
    void add_up(const dispatch_plan& plan, const row_format& format, const std::byte* sums, const float* shared, activations_out out) {
        total_.resize(format.hidden);
        for (std::uint32_t t = 0; t < out.tokens; ++t) {
            std::fill(total_.begin(), total_.end(), 0.0f);
            if (t < plan.tokens()) {
                for (const std::uint32_t r : plan.rows_of(t)) {
                    const std::byte* row = sums + r * format.sum_bytes();
                    for (std::uint32_t i = 0; i < format.hidden; ++i) {
                        total_[i] += load_element(row, format.sums, i);
                    }
                }
                for (std::uint32_t i = 0; shared != nullptr && i < format.hidden; ++i) {
                    total_[i] += shared[std::uint64_t{t} * format.hidden + i];
                }
            }
            for (std::uint32_t i = 0; i < format.hidden; ++i) {
                store_element(out.data, out.type, std::uint64_t{t} * out.hidden + i, total_[i]);
            }
        }
    }

private:
    std::vector<float> total_;
};

/// x [rows, width] = the received rows in float32; host memory.
inline void widen(const expert_rows& rows, float* x) noexcept {
    for (std::uint32_t r = 0; r < rows.rows; ++r) {
        for (std::uint32_t i = 0; i < rows.width; ++i) {
            const std::uint64_t at = std::uint64_t{r} * rows.width + i;
            x[at] = rows.type == dtype::f8_e4m3 ? dequantised(static_cast<const std::uint8_t*>(rows.hidden) + std::uint64_t{r} * rows.width,
                                                              rows.scales + r * ceil_div(rows.width, fp8_row_block), i)
                                                : load_element(rows.hidden, rows.type, at);
        }
    }
}

/// What the owner sends back, on the host: sums[r] = sum over the choices j of row r that are here, ascending, of weight * partial, in
/// float32 and rounded once.
/// @param partial [rows * top_k, width]: the output of the expert of each pair, read for pairs with an expert here
inline void weigh(const expert_rows& rows, const float* partial, activations_out sums) {
    std::vector<float> total(rows.width);
    for (std::uint32_t r = 0; r < rows.rows; ++r) {
        std::fill(total.begin(), total.end(), 0.0f);
        for (std::uint64_t p = std::uint64_t{r} * rows.top_k; p < (r + std::uint64_t{1}) * rows.top_k; ++p) {
            for (std::uint32_t i = 0; rows.ids[p] >= 0 && i < rows.width; ++i) {
                total[i] += rows.weights[p] * partial[p * rows.width + i];
            }
        }
        for (std::uint32_t i = 0; i < rows.width; ++i) {
            store_element(sums.data, sums.type, std::uint64_t{r} * rows.width + i, total[i]);
        }
    }
}

}  // namespace penstock::inline v0_1

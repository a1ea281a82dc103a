#pragma once

#include <penstock/error.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace penstock::inline v0_1 {

/// Attention of one token over keys and values that come in windows, in float32 on the host: what a kernel has to do when the context does
/// not fit, and what it is held against. The softmax runs along: of the windows so far it keeps, for each query head, the largest score m,
/// the sum of exp(score - m), and the values weighted by exp(score - m); a larger score scales both sums down (Milakov and Gimelshein,
/// "Online normalizer calculation for softmax", 2018). So windows of any size, in any order, give the same result up to rounding.
class running_attention {
public:
    /// Query head q reads KV head q / (query_heads / heads). Scores are query . key / sqrt(head_size).
    /// @throws configuration_error for sizes of zero, and query heads that the KV heads do not divide
    running_attention(std::uint32_t query_heads, std::uint32_t heads, std::uint32_t head_size)
        : query_heads_(query_heads), heads_(heads), head_size_(head_size) {
        if (query_heads == 0 || heads == 0 || head_size == 0 || query_heads % heads != 0) {
            throw configuration_error("penstock: " + std::to_string(query_heads) + " query heads cannot share " + std::to_string(heads) +
                                      " KV heads of " + std::to_string(head_size) + " elements");
        }
        reset();
    }

    /// Forgets all windows.
    void reset() {
        largest_.assign(query_heads_, -std::numeric_limits<float>::infinity());
        sum_.assign(query_heads_, 0);
        weighted_.assign(std::size_t{query_heads_} * head_size_, 0);
    }

    /// One more window. @param queries [query_heads, head_size] @param keys, values [tokens, heads, head_size], as in a block
    void add(const float* queries, const float* keys, const float* values, std::uint32_t tokens) {
        const std::size_t row = std::size_t{heads_} * head_size_;
        const float scale = 1 / std::sqrt(static_cast<float>(head_size_));
        scores_.resize(tokens);
        for (std::uint32_t q = 0; q < query_heads_ && tokens > 0; ++q) {
            const std::size_t head = std::size_t{q / (query_heads_ / heads_)} * head_size_;
            const float* query = queries + std::size_t{q} * head_size_;
            for (std::uint32_t t = 0; t < tokens; ++t) {
                const float* key = keys + t * row + head;
                float dot = 0;
                for (std::uint32_t d = 0; d < head_size_; ++d) {
                    dot += query[d] * key[d];
                }
                scores_[t] = dot * scale;
            }
            const float largest = std::max(largest_[q], *std::max_element(scores_.begin(), scores_.end()));
            float* weighted = weighted_.data() + std::size_t{q} * head_size_;
            const float shrink = std::exp(largest_[q] - largest);  // of the first window, exp(-inf) of nothing
            sum_[q] *= shrink;
            for (std::uint32_t d = 0; d < head_size_; ++d) {
                weighted[d] *= shrink;
            }
            for (std::uint32_t t = 0; t < tokens; ++t) {
                const float weight = std::exp(scores_[t] - largest);
                const float* value = values + t * row + head;
                sum_[q] += weight;
                for (std::uint32_t d = 0; d < head_size_; ++d) {
                    weighted[d] += weight * value[d];
                }
            }
            largest_[q] = largest;
        }
    }

    /// The result of the windows so far, [query_heads, head_size]; zeros of none. @pre output has that size
    void result(std::span<float> output) const {
        for (std::size_t i = 0; i < weighted_.size(); ++i) {
            const float sum = sum_[i / head_size_];
            output[i] = sum > 0 ? weighted_[i] / sum : 0;
        }
    }

private:
    std::uint32_t query_heads_;
    std::uint32_t heads_;
    std::uint32_t head_size_;
    std::vector<float> largest_;   ///< by query head
    std::vector<float> sum_;       ///< by query head
    std::vector<float> weighted_;  ///< [query_heads, head_size]
    std::vector<float> scores_;    ///< of one query head and window
};

}  // namespace penstock::inline v0_1

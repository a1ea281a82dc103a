#pragma once

#include <penstock/buffer/buffer.hpp>
#include <penstock/parallel/rows.hpp>
#include <penstock/parallel/transport.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace penstock::inline v0_1 {

/// The buffers of `expert_parallel`, and which parts of them go to and come from which rank.
template <allocating_memory Memory>
class row_exchange {
public:
    /// Room for `sent` outgoing and `received` incoming rows. Grows by half at least, so that a slowly growing batch does not take memory in
    /// every call; what it held is lost.
    void reserve(const row_format& f, std::uint64_t sent, std::uint64_t received) {
        // The sums come back where the rows went out.
        grow(out_hidden_, sent * larger(f.row_bytes(), f.sum_bytes()));
        grow(out_scales_, sent * f.scales());
        grow(out_ids_, sent * f.top_k);
        grow(out_weights_, sent * f.top_k);
        grow(in_hidden_, received * f.row_bytes());
        grow(in_scales_, received * f.scales());
        grow(in_ids_, received * f.top_k);
        grow(in_weights_, received * f.top_k);
        grow(pairs_, received * f.top_k);
        grow(sums_, received * f.sum_bytes());
    }

    void reserve_experts(std::uint32_t experts) { grow(offsets_, experts + std::uint64_t{1}); }

    [[nodiscard]] std::uint64_t bytes() const noexcept {
        return out_hidden_.size_bytes() + out_scales_.size_bytes() + out_ids_.size_bytes() + out_weights_.size_bytes() +
               in_hidden_.size_bytes() + in_scales_.size_bytes() + in_ids_.size_bytes() + in_weights_.size_bytes() + pairs_.size_bytes() +
               offsets_.size_bytes() + sums_.size_bytes();
    }

    [[nodiscard]] row_arrays outgoing() noexcept { return {out_hidden_.data(), out_scales_.data(), out_ids_.data(), out_weights_.data()}; }
    [[nodiscard]] row_arrays incoming() noexcept { return {in_hidden_.data(), in_scales_.data(), in_ids_.data(), in_weights_.data()}; }
    [[nodiscard]] std::int32_t* pairs() noexcept { return pairs_.data(); }
    [[nodiscard]] std::uint32_t* offsets() noexcept { return offsets_.data(); }
    [[nodiscard]] std::byte* sums() noexcept { return sums_.data(); }
    [[nodiscard]] const std::byte* returned() const noexcept { return out_hidden_.data(); }

    /// @param to, from [ranks + 1]: rows before those for, or of, each rank
    void list_dispatch(const row_format& f, std::span<const std::uint32_t> to, std::span<const std::uint32_t> from) {
        sends_.clear();
        receives_.clear();
        const row_arrays out = outgoing(), in = incoming();
        for (std::uint32_t r = 0; r + 1 < to.size(); ++r) {
            list(sends_, r, f, out, to[r], to[r + std::size_t{1}] - to[r]);
            list(receives_, r, f, in, from[r], from[r + std::size_t{1}] - from[r]);
        }
    }

    /// The way back: a sum for each received row goes to its source.
    void list_combine(const row_format& f, std::span<const std::uint32_t> from, std::span<const std::uint32_t> to) {
        sends_.clear();
        receives_.clear();
        for (std::uint32_t r = 0; r + 1 < to.size(); ++r) {
            add(sends_, r, sums_.data(), from[r], from[r + std::size_t{1}] - from[r], f.sum_bytes());
            add(receives_, r, out_hidden_.data(), to[r], to[r + std::size_t{1}] - to[r], f.sum_bytes());
        }
    }

    [[nodiscard]] std::span<const send_block> sends() const noexcept { return sends_; }
    [[nodiscard]] std::span<const receive_block> receives() const noexcept { return receives_; }

private:
    template <class T>
    static void grow(buffer<T, Memory>& b, std::uint64_t count) {
        if (count > b.size()) {
            const std::uint64_t size = b.empty() ? count : larger(count, b.size() + b.size() / 2);
            b = {};  // given back first: both at once might not fit
            b = buffer<T, Memory>(size);
        }
    }

    template <class Block>
    static void add(std::vector<Block>& blocks, std::uint32_t rank, auto* array, std::uint64_t first, std::uint64_t rows,
                    std::uint64_t row_bytes) {
        if (rows * row_bytes > 0) {
            blocks.push_back({rank, reinterpret_cast<std::byte*>(array) + first * row_bytes, rows * row_bytes});
        }
    }

    template <class Block>
    static void list(std::vector<Block>& blocks, std::uint32_t rank, const row_format& f, const row_arrays& arrays, std::uint64_t first,
                     std::uint64_t rows) {
        add(blocks, rank, arrays.hidden, first, rows, f.row_bytes());
        add(blocks, rank, arrays.scales, first, rows, f.scales() * sizeof(float));
        add(blocks, rank, arrays.ids, first, rows, f.top_k * sizeof(std::int32_t));
        add(blocks, rank, arrays.weights, first, rows, f.top_k * sizeof(float));
    }

    buffer<std::byte, Memory> out_hidden_, in_hidden_, sums_;
    buffer<float, Memory> out_scales_, out_weights_, in_scales_, in_weights_;
    buffer<std::int32_t, Memory> out_ids_, in_ids_, pairs_;
    buffer<std::uint32_t, Memory> offsets_;
    std::vector<send_block> sends_;
    std::vector<receive_block> receives_;
};

}  // namespace penstock::inline v0_1

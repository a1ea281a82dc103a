#pragma once

#include <penstock/error.hpp>
#include <penstock/model/dtype.hpp>
#include <penstock/units.hpp>

#include <cstdint>
#include <string>

/// Where the keys and values of a paged KV cache lie.

namespace penstock::inline v0_1 {

/// What one block of a KV cache holds: keys and values of `tokens` tokens, in every layer and KV head. Within a layer of a block the keys of
/// all tokens come first, [tokens, heads, head_size], then their values, in the same order.
struct block_geometry {
    std::uint32_t tokens = 16;
    std::uint32_t layers = 0;
    std::uint32_t heads = 0;      ///< that have keys and values of their own
    std::uint32_t head_size = 0;  ///< elements of a key, and of a value
    dtype type = dtype::bf16;

    friend bool operator==(const block_geometry&, const block_geometry&) = default;
};

/// "16 tokens x 80 layers x 8 heads x 128 BF16": for messages.
[[nodiscard]] inline std::string to_string(const block_geometry& g) {
    return std::to_string(g.tokens) + " tokens x " + std::to_string(g.layers) + " layers x " + std::to_string(g.heads) + " heads x " +
           std::to_string(g.head_size) + " " + std::string(name(g.type));
}

/// What lies together in a pool of blocks. In both, the keys and the values of one layer of one block are neighbours.
enum class block_order : std::uint8_t {
    block_first,  ///< [blocks, layers, 2, ...]: all of a block is one run of bytes, which suits moving whole blocks
    layer_first   ///< [layers, blocks, 2, ...]: all of a layer is one run of bytes, as engines keep one cache a layer
};

enum class kv_part : std::uint8_t { keys, values };

/// A pool of equal blocks: its sizes, and where each part is. Trivially copyable, for kernels too. No padding anywhere.
class block_layout {
public:
    /// @throws configuration_error for a size of zero, a key that does not fill whole bytes, or more bytes than 64 bits count
    block_layout(const block_geometry& geometry, std::uint32_t blocks, block_order order = block_order::block_first)
        : geometry_(geometry), blocks_(blocks), order_(order) {
        need(geometry.tokens, "tokens a block");
        need(geometry.layers, "layers");
        need(geometry.heads, "heads");
        need(geometry.head_size, "elements a head");
        need(blocks, "blocks");
        const std::uint64_t key_bits = std::uint64_t{geometry.head_size} * bits(geometry.type);
        if (key_bits % 8 != 0) {
            throw configuration_error("penstock: a key of " + std::to_string(geometry.head_size) + " elements of " +
                                      std::string(name(geometry.type)) + " does not fill whole bytes");
        }
        part_bytes_ = times(times(key_bits / 8, geometry.heads), geometry.tokens);
        layer_bytes_ = times(part_bytes_, 2);
        bytes_ = times(times(layer_bytes_, geometry.layers), blocks);
    }

    [[nodiscard]] PENSTOCK_HD constexpr const block_geometry& geometry() const noexcept { return geometry_; }
    [[nodiscard]] PENSTOCK_HD constexpr std::uint32_t blocks() const noexcept { return blocks_; }
    [[nodiscard]] PENSTOCK_HD constexpr block_order order() const noexcept { return order_; }

    /// Of the keys of one layer of a block; its values take as many.
    [[nodiscard]] PENSTOCK_HD constexpr std::uint64_t part_bytes() const noexcept { return part_bytes_; }
    /// Of keys and values of one layer of a block, which lie together.
    [[nodiscard]] PENSTOCK_HD constexpr std::uint64_t layer_bytes() const noexcept { return layer_bytes_; }
    [[nodiscard]] PENSTOCK_HD constexpr std::uint64_t block_bytes() const noexcept { return layer_bytes_ * geometry_.layers; }
    /// Of the whole pool.
    [[nodiscard]] PENSTOCK_HD constexpr std::uint64_t bytes() const noexcept { return bytes_; }

    /// From the start of the pool. @pre block < blocks(), layer < geometry().layers
    [[nodiscard]] PENSTOCK_HD constexpr std::uint64_t offset(std::uint32_t block, std::uint32_t layer,
                                                             kv_part part = kv_part::keys) const noexcept {
        const std::uint64_t number =
            order_ == block_order::block_first ? std::uint64_t{block} * geometry_.layers + layer : std::uint64_t{layer} * blocks_ + block;
        return number * layer_bytes_ + (part == kv_part::values ? part_bytes_ : 0);
    }

private:
    static void need(std::uint32_t n, const char* what) {
        if (n == 0) {
            throw configuration_error(std::string("penstock: a KV cache of zero ") + what + " holds nothing");
        }
    }

    [[nodiscard]] std::uint64_t times(std::uint64_t a, std::uint64_t b) const {
        if (a > ~std::uint64_t{0} / b) {
            throw configuration_error("penstock: " + std::to_string(blocks_) + " KV blocks of " + to_string(geometry_) +
                                      " take more bytes than 64 bits count");
        }
        return a * b;
    }

    block_geometry geometry_;
    std::uint32_t blocks_;
    block_order order_;
    std::uint64_t part_bytes_ = 0;
    std::uint64_t layer_bytes_ = 0;
    std::uint64_t bytes_ = 0;
};

/// A pool of blocks in memory that someone else owns.
struct block_memory {
    std::byte* data = nullptr;  ///< layout.bytes() of them
    block_layout layout;
    int device = -1;      ///< whose memory it is; negative: the host's
    bool pinned = false;  ///< host memory that is page-locked: copies to and from a device go without staging

    [[nodiscard]] constexpr bool on_host() const noexcept { return device < 0; }
    [[nodiscard]] std::byte* at(std::uint32_t block, std::uint32_t layer, kv_part part = kv_part::keys) const noexcept {
        return data + layout.offset(block, layer, part);
    }
};

}  // namespace penstock::inline v0_1

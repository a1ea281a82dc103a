#pragma once

#include <penstock/kv/block_layout.hpp>
#include <penstock/stream/weight_stream.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// KV blocks between pools, as transfers of a weight stream.

namespace penstock::inline v0_1 {

inline constexpr std::uint32_t all_layers = ~std::uint32_t{0};

/// Blocks that go from one pool to another, whole or some layers of them: from_blocks[i] to to_blocks[i]. To a device it is a fetch, from
/// one to the host an offload; between two pools of the host, or of devices, a copy. The pools are of one geometry, save that where single
/// layers go, they need not have equally many; their orders may differ. The memory of two pools overlaps not at all, or is the same pool.
struct block_copy {
    block_memory from;
    std::span<const std::uint32_t> from_blocks;
    block_memory to;
    std::span<const std::uint32_t> to_blocks;
    std::uint32_t from_layer = 0;       ///< the first that is taken
    std::uint32_t to_layer = 0;         ///< where that goes
    std::uint32_t layers = all_layers;  ///< how many; all_layers: whole blocks
    bool layer_by_layer = false;  ///< each layer is a request of its own, the first `request`, the next `request + 1`, due a tick later
    std::uint64_t request = 0;    ///< by which the scheduler and the ticket know it
    urgency level = urgency::on_demand;
    std::uint64_t deadline = no_deadline;  ///< see transfer
    std::uint32_t weight = 1;              ///< see transfer
};

namespace detail {

/// @throws configuration_error for no blocks, for one that the pool does not have, for one that is named twice
inline void check_blocks(std::span<const std::uint32_t> list, std::uint32_t blocks, const char* side) {
    if (list.empty()) {
        throw configuration_error(std::string("penstock: a copy of KV blocks names no blocks to copy ") + side);
    }
    std::vector<std::uint32_t> sorted(list.begin(), list.end());
    std::sort(sorted.begin(), sorted.end());
    if (sorted.back() >= blocks) {
        throw configuration_error("penstock: KV block " + std::to_string(sorted.back()) + " to copy " + side + " is beyond the last of " +
                                  std::to_string(blocks));
    }
    if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end()) {
        throw configuration_error("penstock: KV block " + std::to_string(*twice) + " to copy " + side + " is named twice");
    }
}

inline void check_layers(std::uint32_t first, std::uint32_t count, std::uint32_t layers, const char* side) {
    if (count == 0 || first >= layers || count > layers - first) {
        throw configuration_error("penstock: " + std::to_string(count) + " layers from layer " + std::to_string(first) + " on, to copy " +
                                  side + ", are not among the " + std::to_string(layers) + " of the KV blocks");
    }
}

}  // namespace detail

/// How many layers a copy moves. @throws configuration_error for what cannot be copied: see block_copy
inline std::uint32_t checked_layers(const block_copy& c) {
    const block_geometry& from = c.from.layout.geometry();
    const block_geometry& to = c.to.layout.geometry();
    block_geometry same_but_for_layers = from;
    same_but_for_layers.layers = to.layers;
    if (same_but_for_layers != to || (c.layers == all_layers && from != to)) {
        throw configuration_error("penstock: KV blocks of " + to_string(from) + " do not fit into blocks of " + to_string(to));
    }
    if (c.from.data == nullptr || c.to.data == nullptr) {
        throw configuration_error("penstock: a pool of KV blocks has no memory");
    }
    detail::check_blocks(c.from_blocks, c.from.layout.blocks(), "from");
    detail::check_blocks(c.to_blocks, c.to.layout.blocks(), "to");
    if (c.from_blocks.size() != c.to_blocks.size()) {
        throw configuration_error("penstock: " + std::to_string(c.from_blocks.size()) + " KV blocks do not fit into the places of " +
                                  std::to_string(c.to_blocks.size()));
    }
    if (c.from.data == c.to.data) {
        const auto both = std::find_first_of(c.from_blocks.begin(), c.from_blocks.end(), c.to_blocks.begin(), c.to_blocks.end());
        if (both != c.from_blocks.end()) {
            throw configuration_error("penstock: KV block " + std::to_string(*both) + " is to be copied from and to in one copy");
        }
    }
    const std::uint32_t layers = c.layers == all_layers ? from.layers : c.layers;
    detail::check_layers(c.from_layer, layers, from.layers, "from");
    detail::check_layers(c.to_layer, layers, to.layers, "to");
    return layers;
}

/// A copy as transfers, to be started by itself or beside others of the same place: weights, for one.
/// @throws configuration_error for what cannot be copied: see block_copy
[[nodiscard]] inline std::vector<transfer> transfers_of(const block_copy& c) {
    const std::uint32_t layers = checked_layers(c);
    const std::uint64_t layer_bytes = c.from.layout.layer_bytes();
    const bool in_one_run =
        !c.layer_by_layer && c.from.layout.order() == block_order::block_first && c.to.layout.order() == block_order::block_first;
    const std::uint32_t together = in_one_run ? layers : 1;
    std::vector<transfer> list;
    list.reserve(c.from_blocks.size() * (layers / together));
    for (std::uint32_t l = 0; l < layers; l += together) {
        for (std::size_t i = 0; i < c.from_blocks.size(); ++i) {
            transfer t;
            t.request = c.request + (c.layer_by_layer ? l : 0);
            t.memory = c.from.at(c.from_blocks[i], c.from_layer + l);
            t.memory_is_pinned = c.from.pinned || !c.from.on_host();  // a device's own memory passes through no staging either
            t.bytes = together * layer_bytes;
            t.destination = c.to.at(c.to_blocks[i], c.to_layer + l);
            t.level = c.level;
            t.deadline = c.layer_by_layer && c.deadline < no_deadline - l ? c.deadline + l : c.deadline;
            t.weight = c.weight;
            list.push_back(t);
        }
    }
    return list;
}

/// The place of a copy's transfers: the host if both pools are there, else the GPU at whose end of the link the copy is enqueued.
[[nodiscard]] inline place place_of(const block_copy& c, cudaStream_t copies = nullptr) noexcept {
    return c.from.on_host() && c.to.on_host() ? on_host() : on_device(c.to.on_host() ? c.from.device : c.to.device, copies);
}

/// Brings KV blocks by a weight stream of the caller's, so that one scheduler has weights and blocks, of all classes and both directions, in
/// one queue, and one issue window a GPU before the link. Stream, pools and block_stream outlive the tickets. Several threads may use it.
///
/// Blocks that are whole chunks, or many small ones, share chunks within a request; so a list of blocks is best one request. An offload that
/// nobody waits for belongs to urgency::background. Into pageable host memory a copy from a device holds up the thread that enqueues it.
template <class Stream>
class block_stream {
public:
    explicit block_stream(Stream& stream) noexcept : stream_(&stream) {}

    /// Starts a copy. Of tickets of the host the bytes are there after wait(); of a device's, the copies are enqueued on `copies` then.
    /// @throws configuration_error for what cannot be copied (see block_copy), before anything is moved; what Stream::start() throws
    [[nodiscard]] ticket start(const block_copy& c, cudaStream_t copies = nullptr, progress_callback callback = {},
                               std::stop_token stop = {}) {
        const std::vector<transfer> list = transfers_of(c);
        return stream_->start(list, no_files_, place_of(c, copies), std::move(callback), std::move(stop));
    }

    /// The same; returns when every byte is at its place. @throws as start(), and what a ticket throws
    stream_report run(const block_copy& c, cudaStream_t copies = nullptr, progress_callback callback = {}, std::stop_token stop = {}) {
        const std::vector<transfer> list = transfers_of(c);
        return stream_->run(list, no_files_, place_of(c, copies), std::move(callback), std::move(stop));
    }

    [[nodiscard]] Stream& stream() const noexcept { return *stream_; }

private:
    /// Pools are memory: nothing is read.
    struct no_files final : byte_source {
        void read(std::uint32_t, std::uint64_t, std::span<std::byte>) override { throw io_error("penstock: KV blocks are in no file"); }
        [[nodiscard]] std::string name(std::uint32_t) const override { return "memory"; }
    };

    Stream* stream_;
    no_files no_files_;
};

}  // namespace penstock::inline v0_1

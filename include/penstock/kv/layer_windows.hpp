#pragma once

#include <penstock/cuda/event.hpp>
#include <penstock/kv/block_stream.hpp>

#include <chrono>
#include <numeric>
#include <optional>
#include <utility>

namespace penstock::inline v0_1 {

/// Blocks of a context, of one layer, that lie in the room now.
struct layer_window {
    std::uint32_t layer = 0;
    std::uint32_t first = 0;   ///< its first block in the context's list
    std::uint32_t blocks = 0;  ///< how many
    std::uint32_t at = 0;      ///< block first + i lies in block at + i of the room
    bool last = false;         ///< of its layer
};

/// Layer-wise streaming of a context whose KV blocks are elsewhere: its blocks of layer 0, of layer 1, ... come through a room that is much
/// smaller, each layer in as many windows as the room makes needful, one window ahead of whoever computes. A window that is computed on is
/// never overwritten: the room has two halves, which take turns.
///
/// The fetch ahead is a prefetch for the scheduler; what the consumer has to wait for becomes on demand. For a device, next() may be called
/// when the work on the window before is enqueued: events order copies and consumer. The block_stream, both pools and
/// the CUDA streams outlive it, and copies that are enqueued when it dies still write to the room: in the order of `copies`, behind what the
/// consumer's stream had to do when they were enqueued. One thread at a time.
template <class Stream>
class layer_windows {
public:
    /// Starts to bring the first window. @param blocks of the context, in its order @param room a pool of blocks of one layer, for 2 at least
    /// @param copies where copies to or from a device are enqueued @param consumer where the work on windows is enqueued, for a device
    /// @throws configuration_error for a room that holds no two blocks, more than one layer or another geometry, and what
    /// block_stream::start() refuses
    layer_windows(block_stream<Stream>& stream, const block_memory& from, std::span<const std::uint32_t> blocks, const block_memory& room,
                  cudaStream_t copies = nullptr, cudaStream_t consumer = nullptr)
        : stream_(&stream),
          from_(from),
          blocks_(blocks.begin(), blocks.end()),
          room_(room),
          copies_(copies),
          consumer_(consumer),
          half_(std::min<std::uint32_t>(room.layout.blocks() / 2, static_cast<std::uint32_t>(blocks.size()))),
          places_(room.layout.blocks()) {
        detail::check_blocks(blocks_, from.layout.blocks(), "from");
        if (room.layout.geometry().layers != 1) {
            throw configuration_error("penstock: windows of one layer pass through blocks of one layer, not of " +
                                      std::to_string(room.layout.geometry().layers));
        }
        if (half_ == 0) {
            throw configuration_error("penstock: a pool of " + std::to_string(room.layout.blocks()) +
                                      " KV blocks is too small for windows of a layer: one that comes and one that is computed on need 2");
        }
        std::iota(places_.begin(), places_.end(), 0);
        if (!place_of(copy_of(0)).on_host()) {
            computed_.record(consumer_);  // what is enqueued there may still read the room
            computed_.make_wait(copies_);
        }
        load_ = start(0);
    }

    layer_windows(const layer_windows&) = delete;
    layer_windows& operator=(const layer_windows&) = delete;

    /// Windows that a layer takes.
    [[nodiscard]] std::uint32_t windows_a_layer() const noexcept { return static_cast<std::uint32_t>(ceil_div(blocks_.size(), half_)); }
    /// Windows of all layers.
    [[nodiscard]] std::uint64_t windows() const noexcept { return std::uint64_t{windows_a_layer()} * from_.layout.geometry().layers; }

    /// The next window; nothing after the last. The one before is given up: its half is filled with what comes after this one. For the host
    /// the bytes are there; for a device they are for what is enqueued on the consumer's stream from now on.
    /// @throws what a ticket throws, and what block_stream::start() throws; the call may be repeated
    [[nodiscard]] std::optional<layer_window> next() {
        if (given_ == windows()) {
            return std::nullopt;
        }
        const bool on_device = !place_of(copy_of(given_)).on_host();
        const auto asked = std::chrono::steady_clock::now();
        if (!load_.done()) {
            load_.promote(0);
        }
        load_.wait();
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - asked).count();
        (given_ == 0 ? first_wait_ : waited_) += seconds;
        if (on_device) {
            if (given_ > 0) {
                computed_.record(consumer_);
            }
            arrived_.record(copies_);
            arrived_.make_wait(consumer_);
            computed_.make_wait(copies_);  // before the half of the window before is filled again
        }
        if (given_ + 1 < windows()) {
            load_ = start(given_ + 1);
        }
        return window(given_++);
    }

    /// Whether next() would not wait.
    [[nodiscard]] bool arrived() const { return load_.done(); }

    /// Seconds that next() waited for the first window, which nothing can hide, and for all others.
    [[nodiscard]] double first_wait() const noexcept { return first_wait_; }
    [[nodiscard]] double waited() const noexcept { return waited_; }

private:
    [[nodiscard]] layer_window window(std::uint64_t n) const noexcept {
        const std::uint32_t in_layer = static_cast<std::uint32_t>(n % windows_a_layer());
        layer_window w;
        w.layer = static_cast<std::uint32_t>(n / windows_a_layer());
        w.first = in_layer * half_;
        w.blocks = smaller(half_, static_cast<std::uint32_t>(blocks_.size()) - w.first);
        w.at = n % 2 == 0 ? 0 : half_;
        w.last = in_layer + 1 == windows_a_layer();
        return w;
    }

    [[nodiscard]] block_copy copy_of(std::uint64_t n) const noexcept {
        const layer_window w = window(n);
        block_copy c{from_, std::span(blocks_).subspan(w.first, w.blocks), room_, std::span(places_).subspan(w.at, w.blocks)};
        c.from_layer = w.layer;
        c.layers = 1;
        c.level = n == 0 ? urgency::on_demand : urgency::prefetch;
        return c;
    }

    [[nodiscard]] ticket start(std::uint64_t n) { return stream_->start(copy_of(n), copies_); }

    block_stream<Stream>* stream_;
    block_memory from_;
    std::vector<std::uint32_t> blocks_;
    block_memory room_;
    cudaStream_t copies_;
    cudaStream_t consumer_;
    std::uint32_t half_;                 ///< blocks of a window
    std::vector<std::uint32_t> places_;  ///< in the room: 0, 1, 2, ...
    std::uint64_t given_ = 0;            ///< windows that next() has given
    double first_wait_ = 0;
    double waited_ = 0;
    event arrived_;   ///< copies of the window that is given
    event computed_;  ///< the consumer's work on the one before
    ticket load_;     ///< the next window to be given; goes first
};

}  // namespace penstock::inline v0_1

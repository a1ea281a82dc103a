#pragma once

#include <penstock/policy/axis.hpp>

#include <concepts>
#include <cstdint>
#include <deque>
#include <optional>

/// The scheduling axis. Host facet: `queue`, which decides at every chunk boundary whose next chunk goes on the link.
/// Device facet: `order`, which hands the tiles of a kernel to its scopes. A policy may have one facet or both.

namespace penstock::inline v0_1 {

/// Why bytes are wanted; lower is more urgent.
enum class urgency : std::uint8_t { on_demand, prefetch, background };

/// One thing to bring (an expert, a tensor), already cut into chunks.
struct request {
    std::uint64_t id = 0;
    std::uint32_t chunks = 0;
    urgency level = urgency::on_demand;
};

/// Chunk `index` of the request `request`.
struct chunk {
    std::uint64_t request = 0;
    std::uint32_t index = 0;

    friend bool operator==(const chunk&, const chunk&) = default;
};

/// `queue`: push(request), next() -> the chunk to move now, or nothing when no request is left. Not thread-safe: its owner locks.
template <class S>
concept host_scheduler = policy_for<S, axis::scheduling> && std::default_initializable<typename S::queue> &&
    requires(typename S::queue q, request r) {
    q.push(r);
    { q.next() } -> std::same_as<std::optional<chunk>>;
};

/// `order`: tile(i, scope, scopes, tiles) -> the i-th tile of that scope, or `tiles` when it has no more.
template <class S>
concept device_scheduler = policy_for<S, axis::scheduling> && requires(std::uint32_t n) {
    { S::order::tile(n, n, n, n) } -> std::same_as<std::uint32_t>;
};

template <class S>
concept scheduling_policy = host_scheduler<S> || device_scheduler<S>;

namespace scheduler {

/// Requests one after another, in the order in which they came. Kernels: each scope takes a contiguous run of tiles.
struct fifo {
    using policy_axis = axis::scheduling;

    class queue {
    public:
        void push(request r) {
            if (r.chunks > 0) {
                waiting_.push_back(r);
            }
        }

        std::optional<chunk> next() {
            if (waiting_.empty()) {
                return std::nullopt;
            }
            const request& r = waiting_.front();
            chunk c{r.id, done_++};
            if (done_ == r.chunks) {
                waiting_.pop_front();
                done_ = 0;
            }
            return c;
        }

    private:
        std::deque<request> waiting_;
        std::uint32_t done_ = 0;
    };

    struct order {
        PENSTOCK_HD static constexpr std::uint32_t tile(std::uint32_t i, std::uint32_t scope, std::uint32_t scopes,
                                                        std::uint32_t tiles) noexcept {
            const std::uint32_t share = (tiles + scopes - 1) / scopes;
            const std::uint32_t t = scope * share + i;
            return i < share && t < tiles ? t : tiles;
        }
    };
};

/// One chunk of each request in turn. Kernels: tiles are dealt to the scopes like cards.
struct round_robin {
    using policy_axis = axis::scheduling;

    class queue {
    public:
        void push(request r) {
            if (r.chunks > 0) {
                turn_.push_back({r, 0});
            }
        }

        std::optional<chunk> next() {
            if (turn_.empty()) {
                return std::nullopt;
            }
            progress p = turn_.front();
            turn_.pop_front();
            chunk c{p.what.id, p.done++};
            if (p.done < p.what.chunks) {
                turn_.push_back(p);
            }
            return c;
        }

    private:
        struct progress {
            request what;
            std::uint32_t done;
        };
        std::deque<progress> turn_;
    };

    struct order {
        PENSTOCK_HD static constexpr std::uint32_t tile(std::uint32_t i, std::uint32_t scope, std::uint32_t scopes,
                                                        std::uint32_t tiles) noexcept {
            const std::uint64_t t = static_cast<std::uint64_t>(i) * scopes + scope;
            return t < tiles ? static_cast<std::uint32_t>(t) : tiles;
        }
    };
};

/// The most urgent level that has a chunk goes first; within a level first come, first served. An urgency beyond the last level
/// counts as the last.
template <std::uint32_t Levels = 3>
struct priority {
    static_assert(Levels > 0, "penstock: scheduler::priority needs at least one level");
    using policy_axis = axis::scheduling;

    class queue {
    public:
        void push(request r) { level_[smaller_level(r.level)].push(r); }

        std::optional<chunk> next() {
            for (fifo::queue& q : level_) {
                if (std::optional<chunk> c = q.next()) {
                    return c;
                }
            }
            return std::nullopt;
        }

    private:
        static constexpr std::uint32_t smaller_level(urgency u) noexcept {
            const auto n = static_cast<std::uint32_t>(u);
            return n < Levels ? n : Levels - 1;
        }

        fifo::queue level_[Levels];
    };
};

}  // namespace scheduler
}  // namespace penstock::inline v0_1

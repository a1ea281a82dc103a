#pragma once

#include <penstock/policy/axis.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <compare>
#include <concepts>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>

/// The scheduling axis. Host facet: `queue`, which decides at every chunk boundary whose next chunk goes on the link.
/// Device facet: `order`, which deals the tiles of a kernel to its scopes, or `tiles_per_claim`, by which they claim them. A policy may have
/// one facet or both.

namespace penstock::inline v0_1 {

/// Why bytes are wanted; lower is more urgent.
enum class urgency : std::uint8_t { on_demand, prefetch, background };

/// Comes after every deadline.
inline constexpr std::uint64_t no_deadline = ~std::uint64_t{0};

/// One thing to bring (an expert, a tensor), already cut into chunks.
struct request {
    std::uint64_t id = 0;
    std::uint32_t chunks = 0;
    urgency level = urgency::on_demand;
    std::uint64_t deadline = no_deadline;  ///< in ticks of any clock that all requests of a queue share; the smaller is due sooner
    std::uint32_t weight = 1;              ///< tokens that wait for it; 0 counts as 1
    std::uint64_t chunk_bytes = 1;         ///< of a chunk, on average; 0 counts as 1
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

/// Optional member `change`: change(request) -> whether that request waits. All that wait with its id get what it says (raised, lowered, due
/// sooner, more or fewer chunks); chunks that were given out stay given out. A queue without it is told of a promoted request by push().
template <class Queue>
concept changeable_queue = requires(Queue q, request r) {
    { q.change(r) } -> std::same_as<bool>;
};

/// Optional member `cancel`: cancel(id) -> whether such a request waited. No further chunk of it is given out. The chunks that a queue
/// without it names of a cancelled request are passed over.
template <class Queue>
concept cancellable_queue = requires(Queue q, std::uint64_t id) {
    { q.cancel(id) } -> std::same_as<bool>;
};

/// What decides between two chunks that both stand before the link, the smaller first; of equal ones the first to come there.
struct precedence {
    std::uint32_t level = 0;
    std::uint64_t deadline = 0;

    friend auto operator<=>(const precedence&, const precedence&) = default;
};

/// Optional static member `precedence_of`: precedence_of(request) of a scheduler that names what is on demand before all else. Chunks that have
/// left its queue and wait before the link keep to it, and staging slots are kept for what is on demand. Without it they go as they came.
template <class S>
concept ranked_scheduler = host_scheduler<S> && requires(request r) {
    { S::precedence_of(r) } -> std::same_as<precedence>;
};

/// `order`: tile(i, scope, scopes, tiles) -> the i-th tile of that scope, or `tiles` when it has no more.
template <class S>
concept device_scheduler = policy_for<S, axis::scheduling> && requires(std::uint32_t n) {
    { S::order::tile(n, n, n, n) } -> std::same_as<std::uint32_t>;
};

/// `tiles_per_claim`, a constant, at least 1: scopes claim runs of so many neighbouring tiles from a `tile_counter` as they come to need them.
template <class S>
concept claiming_scheduler = policy_for<S, axis::scheduling> && requires {
    typename std::integral_constant<std::uint32_t, S::tiles_per_claim>;
};

template <class S>
concept scheduling_policy = host_scheduler<S> || device_scheduler<S> || claiming_scheduler<S>;

/// What the scopes of a kernel claim tiles from, in global memory. Zero before its first use; every kernel that used it leaves it zero, so
/// that kernels of one stream, and replays of a graph, may share one. Kernels that run at the same time may not.
struct tile_counter {
    std::uint32_t state = 0;
};

namespace detail {

/// A request in a queue.
template <class Rank>
struct waiting_request {
    request what;
    std::uint32_t done = 0;  ///< chunks given out
    std::uint64_t turn = 0;  ///< decides between equal ranks, and is no other's
    double start = 0;        ///< of its next chunk, in the virtual time of weighted_fair
    std::tuple<std::uint32_t, Rank, std::uint64_t> key{};

    [[nodiscard]] std::uint32_t left() const noexcept { return what.chunks - done; }
};

/// First come, first served, without levels: what the rules of the queues below have in common.
struct plain_rule {
    using rank = std::uint8_t;

    static std::uint32_t level(const request&) noexcept { return 0; }
    /// A request comes to its level.
    template <class Rank>
    void arrive(waiting_request<Rank>& r) noexcept {
        r.turn = turns++;
    }
    static std::uint8_t rank_of(const waiting_request<std::uint8_t>&) noexcept { return 0; }
    /// Its next chunk is given out.
    template <class Rank>
    void serve(waiting_request<Rank>&) noexcept {}
    void rest() noexcept {}  ///< nothing waits

    std::uint64_t turns = 0;
};

/// An urgency beyond the last level counts as the last.
template <std::uint32_t Levels>
constexpr std::uint32_t level_of(urgency u) noexcept {
    const auto n = static_cast<std::uint32_t>(u);
    return n < Levels ? n : Levels - 1;
}

/// The request with the smallest (level, rank, turn) goes next. Of n requests: push, next, change and cancel take O(log n) steps.
template <class Rule>
class request_queue {
public:
    request_queue() = default;
    request_queue(request_queue&&) = default;  // a copy would order the entries of another queue
    request_queue& operator=(request_queue&&) = default;

    void push(request r) {
        if (r.chunks == 0) {
            return;
        }
        const auto at = waiting_.emplace(r.id, entry{r});
        rule_.arrive(at->second);
        at->second.key = key_of(at->second);
        try {
            order_.emplace(at->second.key, &at->second);
        } catch (...) {
            waiting_.erase(at);
            throw;
        }
    }

    std::optional<chunk> next() {
        if (order_.empty()) {
            return std::nullopt;
        }
        entry& e = *order_.begin()->second;
        const chunk c{e.what.id, e.done};
        rule_.serve(e);
        ++e.done;
        if (e.left() > 0) {
            place(e);
        } else {
            const auto [first, last] = waiting_.equal_range(c.request);
            erase(std::find_if(first, last, [&](const auto& w) { return &w.second == &e; }));
        }
        return c;
    }

    bool change(request r) {
        const auto [first, last] = waiting_.equal_range(r.id);
        const bool waits = first != last;
        for (auto at = first; at != last;) {
            entry& e = at->second;
            if (r.chunks <= e.done) {
                at = erase(at);
                continue;
            }
            const bool elsewhere = rule_.level(r) != rule_.level(e.what);
            e.what = r;
            if (elsewhere) {
                rule_.arrive(e);
            }
            place(e);
            ++at;
        }
        return waits;
    }

    bool cancel(std::uint64_t id) {
        const auto [first, last] = waiting_.equal_range(id);
        const bool waited = first != last;
        for (auto at = first; at != last;) {
            at = erase(at);
        }
        return waited;
    }

private:
    using entry = waiting_request<typename Rule::rank>;
    using entries = std::unordered_multimap<std::uint64_t, entry>;  // by id; a rehash moves no entry

    auto key_of(const entry& e) const noexcept { return decltype(e.key){rule_.level(e.what), rule_.rank_of(e), e.turn}; }

    void place(entry& e) {
        if (const auto key = key_of(e); key != e.key) {
            auto node = order_.extract(e.key);
            node.key() = e.key = key;
            order_.insert(std::move(node));
        }
    }

    typename entries::iterator erase(typename entries::iterator at) {
        order_.erase(at->second.key);
        const auto next = waiting_.erase(at);
        if (order_.empty()) {
            rule_.rest();
        }
        return next;
    }

    Rule rule_;
    entries waiting_;
    std::map<decltype(entry::key), entry*> order_;
};

}  // namespace detail

namespace scheduler {

/// Requests one after another, in the order in which they came. Kernels: each scope takes a contiguous run of tiles.
struct fifo {
    using policy_axis = axis::scheduling;
    using queue = detail::request_queue<detail::plain_rule>;

    struct order {
        PENSTOCK_HD static constexpr std::uint32_t tile(std::uint32_t i, std::uint32_t scope, std::uint32_t scopes,
                                                        std::uint32_t tiles) noexcept {
            const std::uint32_t share = (tiles + scopes - 1) / scopes;
            const std::uint32_t t = scope * share + i;
            return i < share && t < tiles ? t : tiles;
        }
    };
};

/// One chunk of each request in turn, so that of two that wait neither gets more than one chunk ahead. Kernels: tiles are dealt to the scopes
/// like cards.
struct round_robin {
    using policy_axis = axis::scheduling;

    struct rule : detail::plain_rule {
        void serve(detail::waiting_request<rank>& r) noexcept { r.turn = turns++; }
    };
    using queue = detail::request_queue<rule>;

    struct order {
        PENSTOCK_HD static constexpr std::uint32_t tile(std::uint32_t i, std::uint32_t scope, std::uint32_t scopes,
                                                        std::uint32_t tiles) noexcept {
            const std::uint64_t t = static_cast<std::uint64_t>(i) * scopes + scope;
            return t < tiles ? static_cast<std::uint32_t>(t) : tiles;
        }
    };
};

/// Kernels alone: a scope that has room takes the next tiles of the matrix, `Tiles` neighbours at a time, so that no scope has work left
/// when others have none. A scope that leaves its loop early ends it for all: tiles that nobody has claimed by then are not handed out. A claim is an access to one word of global memory, which serves about one a nanosecond; so small tiles want a
/// larger number.
template <std::uint32_t Tiles = 1>
struct first_come {
    static_assert(Tiles > 0, "penstock: scheduler::first_come needs at least one tile a claim");
    using policy_axis = axis::scheduling;
    static constexpr std::uint32_t tiles_per_claim = Tiles;
};

/// The most urgent level that has a chunk goes first; within a level the request that is due first, and of equal ones the first to come to
/// the level. An urgency beyond the last level counts as the last.
template <std::uint32_t Levels = 3>
struct priority {
    static_assert(Levels > 0, "penstock: scheduler::priority needs at least one level");
    using policy_axis = axis::scheduling;

    static precedence precedence_of(const request& r) noexcept { return {detail::level_of<Levels>(r.level), r.deadline}; }

    struct rule : detail::plain_rule {
        using rank = std::uint64_t;

        static std::uint32_t level(const request& r) noexcept { return detail::level_of<Levels>(r.level); }
        static std::uint64_t rank_of(const detail::waiting_request<rank>& r) noexcept { return r.what.deadline; }
    };
    using queue = detail::request_queue<rule>;
};

/// The most urgent level that has a chunk goes first; within a level the link is shared: a request's share of the bytes is in proportion to
///
///     (tokens waiting for it) / (its bytes left)
///
/// so that of two equal experts the one with thrice the tokens gets thrice the bytes, and one that is nearly whole is soon whole, before
/// which it serves nobody. The rule is self-clocked fair queueing (Golestani, INFOCOM 1994), with a weight for each chunk: a chunk costs
///
///     bytes of the chunk * bytes left, with the chunk / tokens
///
/// and is due at the virtual time at which the one before it was due (for the first: the level's virtual time) plus its cost; the chunk that
/// is due first goes, and moves the level's virtual time to when it was due. While two requests of a level wait, what their chunks have
/// cost since then differs by no more than the dearest of one and the dearest of the other: one chunk each. A chunk costs more than
/// nothing, so that the virtual time reaches every chunk that waits, however many others come to its level; those that are much smaller, or
/// have many more tokens, may delay it long.
struct weighted_fair {
    using policy_axis = axis::scheduling;

    static precedence precedence_of(const request& r) noexcept { return {detail::level_of<3>(r.level), 0}; }

    /// What the next chunk of a request of which `left` chunks, at least one, are left costs, in bytes * bytes / tokens.
    static double cost(const request& r, std::uint32_t left) noexcept {
        const auto bytes = static_cast<double>(std::max<std::uint64_t>(r.chunk_bytes, 1));
        return bytes * (bytes * left) / std::max<std::uint32_t>(r.weight, 1);
    }

    class rule : public detail::plain_rule {
    public:
        using rank = double;

        static std::uint32_t level(const request& r) noexcept { return detail::level_of<levels>(r.level); }
        void arrive(detail::waiting_request<rank>& r) noexcept {
            plain_rule::arrive(r);
            r.start = now_[level(r.what)];
        }
        /// After now, though the cost may be lost in rounding, or the request have become cheaper while it waited.
        double rank_of(const detail::waiting_request<rank>& r) const noexcept {
            constexpr double end = std::numeric_limits<double>::infinity();
            return std::max(r.start + cost(r.what, r.left()), std::nextafter(now_[level(r.what)], end));
        }
        void serve(detail::waiting_request<rank>& r) noexcept { r.start = now_[level(r.what)] = std::get<1>(r.key); }
        void rest() noexcept { now_ = {}; }  // small numbers are the more exact

    private:
        static constexpr std::uint32_t levels = 3;
        std::array<double, levels> now_{};  ///< virtual time of each level
    };
    using queue = detail::request_queue<rule>;
};

}  // namespace scheduler
}  // namespace penstock::inline v0_1

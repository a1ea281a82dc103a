#pragma once

#include <penstock/buffer/arena.hpp>
#include <penstock/kv/block_index.hpp>
#include <penstock/kv/block_layout.hpp>

#include <algorithm>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace penstock::inline v0_1 {

/// Counters of a pool since it was made.
struct block_pool_report {
    std::uint32_t stored = 0;  ///< blocks now
    std::uint32_t free = 0;    ///< blocks now; the rest is being filled
    std::uint64_t found = 0;   ///< blocks that find() and insert() were asked for and that were stored
    std::uint64_t missed = 0;  ///< those that were not
    std::uint64_t evicted = 0;
};

namespace detail {

/// What a pool shares with its pins and reservations.
struct block_pool_state {
    explicit block_pool_state(std::uint32_t blocks) : index(blocks) {}

    std::mutex mutex;
    block_index index;
    std::uint64_t step = 0;  ///< counts find(), insert() and publications
    block_pool_report counters;
};

}  // namespace detail

/// Stored blocks that stay where they are as long as this lives: block i of the pinned prefix is number blocks()[i] of the pool. Move-only.
/// It may be used and destroyed by any thread, one at a time, and may outlive the pool (whose memory it does not keep).
class pinned_blocks {
public:
    pinned_blocks() = default;
    pinned_blocks(std::shared_ptr<detail::block_pool_state> pool, std::vector<std::uint32_t> blocks) noexcept
        : pool_(std::move(pool)), blocks_(std::move(blocks)) {}

    pinned_blocks(pinned_blocks&& other) noexcept : pool_(std::move(other.pool_)), blocks_(std::exchange(other.blocks_, {})) {}
    pinned_blocks& operator=(pinned_blocks&& other) noexcept {
        pinned_blocks taken(std::move(other));
        std::swap(pool_, taken.pool_);
        std::swap(blocks_, taken.blocks_);
        return *this;
    }
    ~pinned_blocks() {
        if (pool_ != nullptr) {
            const std::lock_guard lock(pool_->mutex);
            pool_->index.unpin(blocks_);
        }
    }

    [[nodiscard]] std::span<const std::uint32_t> blocks() const noexcept { return blocks_; }
    [[nodiscard]] std::size_t size() const noexcept { return blocks_.size(); }
    [[nodiscard]] bool empty() const noexcept { return blocks_.empty(); }

private:
    template <eviction_policy>
    friend class block_reservation;

    /// These and more blocks that are pinned, to be unpinned at one time, as no block may be pinned when one before it is not. Under the lock.
    [[nodiscard]] pinned_blocks joined_by(const std::vector<std::uint32_t>& more) {
        std::vector<std::uint32_t> all;
        all.reserve(blocks_.size() + more.size());
        all = blocks_;
        all.insert(all.end(), more.begin(), more.end());
        blocks_.clear();
        return pinned_blocks(pool_, std::move(all));
    }

    std::shared_ptr<detail::block_pool_state> pool_;
    std::vector<std::uint32_t> blocks_;
};

/// Blocks of a pool that the holder fills, and that nobody finds before publish(). Its destructor gives back what was not published. What
/// comes before them is pinned as long as it lives. Move-only; by one thread at a time.
template <eviction_policy Eviction>
class block_reservation {
public:
    block_reservation() = default;
    block_reservation(std::shared_ptr<detail::block_pool_state> pool, pinned_blocks before, std::vector<std::uint32_t> blocks) noexcept
        : pool_(std::move(pool)), before_(std::move(before)), blocks_(std::move(blocks)) {}

    block_reservation(block_reservation&& other) noexcept
        : pool_(std::move(other.pool_)), before_(std::move(other.before_)), blocks_(std::exchange(other.blocks_, {})) {}
    block_reservation& operator=(block_reservation&& other) noexcept {
        block_reservation taken(std::move(other));
        std::swap(pool_, taken.pool_);
        std::swap(before_, taken.before_);
        std::swap(blocks_, taken.blocks_);
        return *this;
    }
    ~block_reservation() {
        if (pool_ != nullptr) {
            const std::lock_guard lock(pool_->mutex);
            for (auto b = blocks_.rbegin(); b != blocks_.rend(); ++b) {
                pool_->index.abandon(*b);
            }
        }
    }

    /// The first block of the chain that is to be filled: as many were stored.
    [[nodiscard]] std::size_t first() const noexcept { return before_.size(); }
    /// Block first() + i of the chain is number blocks()[i] of the pool. Empty: nothing is to be filled.
    [[nodiscard]] std::span<const std::uint32_t> blocks() const noexcept { return blocks_; }
    [[nodiscard]] bool empty() const noexcept { return blocks_.empty(); }

    /// The bytes of all are there: from now on they are found. @return what find() would give: these blocks and those before them, pinned
    pinned_blocks publish() {
        if (pool_ == nullptr) {
            return {};
        }
        const std::lock_guard lock(pool_->mutex);
        pinned_blocks all = before_.joined_by(blocks_);
        ++pool_->step;
        for (const std::uint32_t b : blocks_) {
            pool_->index.template publish<Eviction>(b, pool_->step);
        }
        blocks_.clear();
        return all;
    }

private:
    std::shared_ptr<detail::block_pool_state> pool_;
    pinned_blocks before_;
    std::vector<std::uint32_t> blocks_;
};

/// KV blocks in host memory, found by the caller's chain of hashes. As many blocks as the layout says, and never more: the budget is hard,
/// and what takes part in it is the layout's bytes (pool() adds some 100 bytes a block of its own). A prefix is stored without gaps: what
/// leaves first is, of the last blocks of contexts that nobody has pinned, the one with the lowest Eviction::score; a step is a call of
/// find(), insert() or publish().
///
/// All members may be called by several threads at once. The bytes of a block belong to who has it reserved, and to readers who have it
/// pinned; the pool itself never touches them. Destination or source of a block_stream: memory().
/// @tparam Eviction a rule of the expert store; what it refuses newcomers is not asked for here: an engine that calls insert() means it
template <eviction_policy Eviction = eviction::lru>
class block_pool {
public:
    using eviction = Eviction;
    using reservation = block_reservation<Eviction>;

    /// Over memory of the caller's, which outlives the pool and whoever has blocks of it pinned. @param pinned page-locked
    /// @throws configuration_error if it is smaller than the layout
    block_pool(const block_layout& layout, std::span<std::byte> memory, bool pinned = false)
        : memory_{memory.data(), layout, -1, pinned}, state_(std::make_shared<detail::block_pool_state>(layout.blocks())) {
        if (memory.size() < layout.bytes()) {
            throw configuration_error("penstock: a pool of " + std::to_string(layout.blocks()) + " KV blocks of " +
                                      to_string(layout.geometry()) + " takes " + std::to_string(layout.bytes()) + " bytes, " +
                                      std::to_string(memory.size()) + " were given");
        }
    }

    /// In an arena. @throws out_of_memory
    block_pool(const block_layout& layout, arena& from) : block_pool(layout, from.take(layout.bytes()), from.pinned()) {}

    block_pool(const block_pool&) = delete;
    block_pool& operator=(const block_pool&) = delete;

    [[nodiscard]] const block_layout& layout() const noexcept { return memory_.layout; }
    [[nodiscard]] const block_memory& memory() const noexcept { return memory_; }

    /// The longest prefix of the chain that is stored, pinned: blocks 0 to n - 1. Empty where not even the first is.
    /// @throws configuration_error for keys that are stored in another order
    [[nodiscard]] pinned_blocks find(std::span<const block_key> chain) {
        const std::lock_guard lock(state_->mutex);
        pinned_blocks found = pinned_prefix(chain);
        state_->counters.found += found.size();
        state_->counters.missed += chain.size() - found.size();
        return found;
    }

    /// Blocks for what of the chain is not stored, to be filled and published; others leave for them where none is free. A block that
    /// somebody else is filling is not given out twice: the reservation ends before it.
    /// @throws out_of_memory when more blocks are pinned or being filled than the budget leaves: nothing has left then
    /// @throws configuration_error for an empty chain, a key that it has twice, keys that are stored in another order
    [[nodiscard]] reservation insert(std::span<const block_key> chain) {
        if (chain.empty()) {
            throw configuration_error("penstock: a chain of zero KV blocks was to be inserted");
        }
        std::unordered_set<block_key, detail::hash_of_key> seen;
        for (const block_key& key : chain) {
            if (!seen.insert(key).second) {
                throw configuration_error("penstock: KV block " + to_string(key) + " is twice in one chain");
            }
        }
        pinned_blocks before;  // dies after the lock is gone, should something be thrown
        const std::lock_guard lock(state_->mutex);
        before = pinned_prefix(chain);
        std::size_t end = before.size();
        for (; end < chain.size(); ++end) {
            if (const std::uint32_t b = state_->index.find(chain[end]); b != detail::block_index::none) {
                if (state_->index.is_stored(b)) {
                    state_->index.refuse(b);  // what is stored has all before it stored
                }
                break;
            }
        }
        state_->counters.found += before.size();
        state_->counters.missed += chain.size() - before.size();
        const std::size_t first = before.size();
        const std::uint32_t last = before.empty() ? detail::block_index::none : before.blocks().back();
        std::vector<std::uint32_t> blocks =
            reserved(chain.subspan(first, end - first),
                     [&](std::size_t i, std::span<const std::uint32_t> got) { return i == 0 ? last : got[i - 1]; });
        return reservation(state_, std::move(before), std::move(blocks));
    }

    [[nodiscard]] block_pool_report report() const {
        const std::lock_guard lock(state_->mutex);
        block_pool_report r = state_->counters;
        r.stored = state_->index.stored();
        r.free = state_->index.free_blocks();
        return r;
    }

    /// A block of a snapshot: its key, and the entry of what comes before it, which stands earlier; `none` for a first one.
    struct stored_block {
        block_key key;
        std::uint32_t before = detail::block_index::none;
    };
    /// All stored blocks, pinned, each behind what comes before it: entry i is block blocks.blocks()[i].
    struct snapshot {
        std::vector<stored_block> entries;
        pinned_blocks blocks;
    };
    [[nodiscard]] snapshot everything() {
        constexpr std::uint32_t none = detail::block_index::none;
        const std::lock_guard lock(state_->mutex);
        const detail::block_index& index = state_->index;
        std::vector<std::uint32_t> order, entry_of(index.blocks(), none), path;
        snapshot all;
        for (std::uint32_t b = 0; b < index.blocks(); ++b) {
            for (std::uint32_t p = b; p != none && index.is_stored(p) && entry_of[p] == none; p = index.parent(p)) {
                path.push_back(p);
            }
            for (; !path.empty(); path.pop_back()) {
                const std::uint32_t p = path.back(), before = index.parent(p);
                entry_of[p] = static_cast<std::uint32_t>(order.size());
                all.entries.push_back({index.key(p), before == none ? none : entry_of[before]});
                order.push_back(p);
            }
        }
        state_->index.pin(order);
        all.blocks = pinned_blocks(state_, std::move(order));
        return all;
    }

    /// Blocks for those of a snapshot that are neither stored nor being filled here, in free blocks alone, so that nothing leaves for them.
    struct addition {
        std::vector<std::uint32_t> entries;  ///< entry entries[i] of the snapshot is to be filled into reserved.blocks()[i]
        reservation reserved;
    };
    /// @throws out_of_memory when fewer blocks are free; configuration_error for keys that are stored in another order
    /// @pre each entry stands behind what comes before it, and no key is there twice
    [[nodiscard]] addition add(std::span<const stored_block> entries) {
        constexpr std::uint32_t none = detail::block_index::none, left_out = none - 1;
        addition result;
        pinned_blocks pinned;  // dies after the lock is gone, should something be thrown
        const std::lock_guard lock(state_->mutex);
        detail::block_index& index = state_->index;
        std::vector<std::uint32_t> there, block_of(entries.size(), left_out);  // of an entry; none: to be reserved
        std::vector<block_key> keys;
        for (std::uint32_t i = 0; i < entries.size(); ++i) {
            const std::uint32_t before = entries[i].before == none ? none : block_of[entries[i].before];
            const std::uint32_t b = index.find(entries[i].key);
            if (b == none && before != left_out) {
                block_of[i] = none;
                keys.push_back(entries[i].key);
                result.entries.push_back(i);
            } else if (b != none && index.is_stored(b)) {
                index.check_parent(b, before);
                block_of[i] = b;
                there.push_back(b);
            }
        }
        if (keys.size() > index.free_blocks()) {
            throw out_of_memory("penstock: " + std::to_string(keys.size()) + " KV blocks were to be restored, " +
                                std::to_string(index.free_blocks()) + " are free");
        }
        index.pin(there);
        pinned = pinned_blocks(state_, std::move(there));
        std::vector<std::uint32_t> blocks = reserved(keys, [&](std::size_t i, std::span<const std::uint32_t> got) {
            if (i > 0) {
                block_of[result.entries[i - 1]] = got[i - 1];
            }
            const std::uint32_t before = entries[result.entries[i]].before;
            return before == none ? none : block_of[before];
        });
        result.reserved = reservation(state_, std::move(pinned), std::move(blocks));
        return result;
    }

private:
    block_pool(const block_layout& layout, lease own, bool pinned) : block_pool(layout, own.bytes(), pinned) { own_ = std::move(own); }

    /// Under the lock.
    [[nodiscard]] pinned_blocks pinned_prefix(std::span<const block_key> chain) {
        std::vector<std::uint32_t> blocks = state_->index.prefix(chain);
        ++state_->step;
        for (const std::uint32_t b : blocks) {
            state_->index.template use<Eviction>(b, state_->step);
        }
        state_->index.pin(blocks);
        return pinned_blocks(state_, std::move(blocks));
    }

    /// Under the lock: a block for each key, or nothing at all. @param parent of key i, when those before it have theirs
    template <class Parent>
    [[nodiscard]] std::vector<std::uint32_t> reserved(std::span<const block_key> keys, Parent&& parent) {
        detail::block_index& index = state_->index;
        const std::uint32_t free = index.free_blocks(), may_leave = index.unpinned();
        if (keys.size() > std::size_t{free} + may_leave) {
            throw out_of_memory("penstock: " + std::to_string(keys.size()) + " KV blocks were to be stored in a pool of " +
                                std::to_string(index.blocks()) + ": " + std::to_string(free) + " are free, and " +
                                std::to_string(may_leave) + " are stored that nobody has pinned");
        }
        std::vector<std::uint32_t> got;
        got.reserve(keys.size());
        if (const auto wanted = static_cast<std::uint32_t>(keys.size()); wanted > free) {
            index.template evict<Eviction>(wanted - free, state_->step);
            state_->counters.evicted += wanted - free;
        }
        try {
            for (std::size_t i = 0; i < keys.size(); ++i) {
                got.push_back(index.reserve(keys[i], parent(i, got)));
            }
        } catch (...) {
            for (; !got.empty(); got.pop_back()) {
                index.abandon(got.back());
            }
            throw;
        }
        return got;
    }

    lease own_;
    block_memory memory_;
    std::shared_ptr<detail::block_pool_state> state_;
};

}  // namespace penstock::inline v0_1

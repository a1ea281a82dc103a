#pragma once

#include <penstock/error.hpp>
#include <penstock/policy/eviction.hpp>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <queue>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace penstock::inline v0_1 {

/// The caller's name of a block in a context: a hash of its tokens and of all before them, so that equal keys mean equal prefixes. 128 bits,
/// since two contexts of one key would share a block unseen.
struct block_key {
    std::uint64_t low = 0;
    std::uint64_t high = 0;

    friend bool operator==(const block_key&, const block_key&) = default;
};

/// Hexadecimal: for messages.
[[nodiscard]] inline std::string to_string(const block_key& key) {
    char text[40];
    std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(key.high), static_cast<unsigned long long>(key.low));
    return text;
}

namespace detail {

struct hash_of_key {
    std::size_t operator()(const block_key& key) const noexcept { return key.low ^ (key.high * 0x9e3779b97f4a7c15u); }
};

/// Which block of a pool holds which key. Stored blocks are trees: each knows the one that comes before it in its context, and stays while
/// one that comes behind it does, since without it that could never be found. So what leaves first is always the end of a context. Blocks
/// are free, filling (they have a key, are pinned, and are not found), or stored. Pins count. Not thread-safe: its owner locks.
class block_index {
public:
    static constexpr std::uint32_t none = ~std::uint32_t{0};

    explicit block_index(std::uint32_t blocks) : entries_(blocks) {
        for (std::uint32_t b = blocks; b > 0; --b) {
            free_.push_back(b - 1);
        }
        block_of_.reserve(blocks);
    }

    [[nodiscard]] std::uint32_t blocks() const noexcept { return static_cast<std::uint32_t>(entries_.size()); }
    [[nodiscard]] std::uint32_t stored() const noexcept { return stored_; }
    [[nodiscard]] std::uint32_t free_blocks() const noexcept { return static_cast<std::uint32_t>(free_.size()); }
    /// Stored blocks that nobody has pinned. What comes before a pinned block is pinned too, so that all of these can leave, ends first.
    [[nodiscard]] std::uint32_t unpinned() const noexcept { return unpinned_; }

    /// The block of a key, be it filling; `none` without one.
    [[nodiscard]] std::uint32_t find(const block_key& key) const {
        const auto at = block_of_.find(key);
        return at == block_of_.end() ? none : at->second;
    }
    [[nodiscard]] bool is_stored(std::uint32_t block) const noexcept { return entries_[block].now == state::stored; }
    [[nodiscard]] const block_key& key(std::uint32_t block) const noexcept { return entries_[block].key; }
    /// The block before it in its context; `none` for a first one.
    [[nodiscard]] std::uint32_t parent(std::uint32_t block) const noexcept { return entries_[block].parent; }

    /// The blocks of the longest prefix that is stored. @throws configuration_error for a block that is stored behind another key
    [[nodiscard]] std::vector<std::uint32_t> prefix(std::span<const block_key> chain) const {
        std::vector<std::uint32_t> blocks;
        for (const block_key& key : chain) {
            const std::uint32_t b = find(key);
            if (b == none || !is_stored(b)) {
                break;
            }
            check_parent(b, blocks.empty() ? none : blocks.back());
            blocks.push_back(b);
        }
        return blocks;
    }

    void check_parent(std::uint32_t block, std::uint32_t parent) const {
        if (entries_[block].parent != parent) {
            refuse(block);
        }
    }

    /// @throws configuration_error for a block whose key comes behind other keys than it was stored behind
    [[noreturn]] void refuse(std::uint32_t block) const {
        throw configuration_error("penstock: KV block " + to_string(entries_[block].key) +
                                  " is stored behind another block than this chain of keys has before it");
    }

    void pin(std::span<const std::uint32_t> blocks) noexcept {
        for (const std::uint32_t b : blocks) {
            unpinned_ -= entries_[b].pins++ == 0 ? 1 : 0;
        }
    }
    void unpin(std::span<const std::uint32_t> blocks) noexcept {
        for (const std::uint32_t b : blocks) {
            unpinned_ += --entries_[b].pins == 0 ? 1 : 0;
        }
    }

    /// A block is used in `step`.
    template <eviction_policy Eviction>
    void use(std::uint32_t block, std::uint64_t step) noexcept {
        note_use<Eviction>(entries_[block].what, step);
    }

    /// Frees `wanted` stored blocks at least, or as many as are unpinned, by ascending score, ties to the lower number.
    template <eviction_policy Eviction>
    void evict(std::uint32_t wanted, std::uint64_t step) {
        using candidate = std::pair<double, std::uint32_t>;
        std::vector<candidate> ends;
        const auto may_leave = [&](std::uint32_t b) { return is_stored(b) && entries_[b].pins == 0 && entries_[b].children == 0; };
        const auto scored = [&](std::uint32_t b) { return candidate(static_cast<double>(Eviction::score(entries_[b].what, step)), b); };
        for (std::uint32_t b = 0; b < blocks(); ++b) {
            if (may_leave(b)) {
                ends.push_back(scored(b));
            }
        }
        std::priority_queue queue(std::greater<>{}, std::move(ends));
        for (; wanted > 0 && !queue.empty(); --wanted) {
            const std::uint32_t b = queue.top().second;
            queue.pop();
            const std::uint32_t before = entries_[b].parent;
            --stored_;
            --unpinned_;
            forget(b);
            if (before != none && may_leave(before)) {
                queue.push(scored(before));
            }
        }
    }

    /// A free block becomes `key`'s, filling and pinned. @pre one is free, the key has none, `parent` is pinned or `none`
    [[nodiscard]] std::uint32_t reserve(const block_key& key, std::uint32_t parent) {
        const std::uint32_t b = free_.back();
        block_of_.emplace(key, b);
        free_.pop_back();
        entries_[b] = {key, parent, 0, 1, state::filling, {}};
        if (parent != none) {
            ++entries_[parent].children;
        }
        return b;
    }

    /// A filling block is stored, and stays pinned. @pre the one before it is stored
    template <eviction_policy Eviction>
    void publish(std::uint32_t block, std::uint64_t step) noexcept {
        entries_[block].now = state::stored;
        entries_[block].what.filled = step;
        note_use<Eviction>(entries_[block].what, step);
        ++stored_;
    }

    /// A filling block is free again. @pre none comes behind it
    void abandon(std::uint32_t block) noexcept { forget(block); }

private:
    enum class state : std::uint8_t { free, filling, stored };

    struct entry {
        block_key key;
        std::uint32_t parent = none;
        std::uint32_t children = 0;
        std::uint32_t pins = 0;
        state now = state::free;
        residency_entry what;
    };

    void forget(std::uint32_t block) noexcept {
        entry& e = entries_[block];
        if (e.parent != none) {
            --entries_[e.parent].children;
        }
        block_of_.erase(e.key);
        e = {};
        free_.push_back(block);  // has had room for all since the beginning
    }

    std::vector<entry> entries_;
    std::vector<std::uint32_t> free_;
    std::unordered_map<block_key, std::uint32_t, hash_of_key> block_of_;
    std::uint32_t stored_ = 0;
    std::uint32_t unpinned_ = 0;
};

}  // namespace detail
}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/units.hpp>

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

namespace penstock::inline v0_1 {

/// Which byte ranges of a region are free: first fit, neighbours joined when they come back. Holds no memory and does not lock.
class free_list {
public:
    explicit free_list(std::uint64_t size) : free_(size) {
        if (size > 0) {
            ranges_.emplace(0, size);
        }
    }

    /// Offset of `size` free bytes at a multiple of `alignment`, the lowest there is; nothing where no range is long enough.
    /// @pre size > 0, alignment > 0
    [[nodiscard]] std::optional<std::uint64_t> take(std::uint64_t size, std::uint64_t alignment) {
        for (auto range = ranges_.begin(); range != ranges_.end(); ++range) {
            const auto [begin, length] = *range;
            const std::uint64_t at = round_up(begin, alignment);
            if (at - begin > length || length - (at - begin) < size) {
                continue;
            }
            const std::uint64_t after = begin + length - (at + size);
            if (after > 0) {
                ranges_.emplace(at + size, after);
            }
            if (at > begin) {
                range->second = at - begin;
            } else {
                ranges_.erase(range);
            }
            free_ -= size;
            return at;
        }
        return std::nullopt;
    }

    /// Takes back what `take` gave.
    void give_back(std::uint64_t at, std::uint64_t size) {
        auto range = ranges_.emplace(at, size).first;
        free_ += size;
        if (const auto after = std::next(range); after != ranges_.end() && at + size == after->first) {
            range->second += after->second;
            ranges_.erase(after);
        }
        if (range != ranges_.begin()) {
            if (const auto before = std::prev(range); before->first + before->second == at) {
                before->second += range->second;
                ranges_.erase(range);
            }
        }
    }

    [[nodiscard]] std::uint64_t free_bytes() const noexcept { return free_; }

    /// Length of the longest free range.
    [[nodiscard]] std::uint64_t longest() const noexcept {
        std::uint64_t most = 0;
        for (const auto& range : ranges_) {
            most = larger(most, range.second);
        }
        return most;
    }

private:
    std::map<std::uint64_t, std::uint64_t> ranges_;  // offset -> length; never adjacent
    std::uint64_t free_ = 0;
};

}  // namespace penstock::inline v0_1

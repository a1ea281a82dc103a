#pragma once

#include <penstock/units.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace penstock::inline v0_1::detail {

/// How many direct reads a disk is given at a time. Some are the faster the more they have to do, others lose when requests come out of
/// order: so four are tried first, then twice as many as long as that brings a tenth more, and the best number is kept. Every now and then
/// it is tried again with more and with fewer, since others use the disk, too. Fewer than four have to be a tenth faster: rates differ by
/// that much from one look to the next, and two reads leave most disks something to gain.
class read_depth {
public:
    using clock = std::chrono::steady_clock;

    static constexpr std::uint64_t window_bytes = std::uint64_t{48} << 20;  ///< after which the rate at a depth is known
    static constexpr int windows_until_another_look = 40;
    static constexpr double worth_it = 1.1;

    /// Reads at a time, at present.
    [[nodiscard]] std::uint32_t limit() const noexcept { return std::uint32_t{1} << level_; }

    /// Counts bytes that have come by `now`. @param wanted whether as many reads were under way as the limit allows: else the rate says
    /// nothing about the disk
    void count(std::uint64_t bytes, bool wanted, clock::time_point now) {
        if (!wanted || done_ == 0) {
            done_ = 0;
            begin_ = now;
        }
        unwanted_ = wanted ? 0 : unwanted_ + bytes;
        if (level_ > best_ && unwanted_ >= window_bytes) {  // there are not as many readers
            rates_.resize(larger<std::size_t>(rates_.size(), level_ + 1), 0);
            level_ = best_;
            return;
        }
        done_ += bytes;
        if (done_ < window_bytes + bytes || now <= begin_) {
            return;
        }
        const double rate = static_cast<double>(done_ - bytes) / std::chrono::duration<double>(now - begin_).count();
        done_ = 0;
        rates_.resize(larger<std::size_t>(rates_.size(), level_ + 1), 0);
        rates_[level_] = rate;
        choose();
    }

private:
    void choose() {
        if (level_ > best_ && rates_[level_] > worth_it * rates_[best_]) {
            best_ = level_++;  // and on
        } else if (level_ < best_ && rates_[level_] * (level_ >= first ? worth_it : 1 / worth_it) > rates_[best_]) {
            best_ = level_;  // as good with less
        } else if (level_ != best_) {
            level_ = best_;
        } else if (rates_.size() == best_ + 1) {
            ++level_;  // nothing is known of more
        } else if (++settled_ == windows_until_another_look) {
            settled_ = 0;
            fewer_next_ = !fewer_next_;
            fewer_next_&& level_ > least ? --level_ : ++level_;
        }
        level_ = smaller(level_, most);
    }

    static constexpr std::uint32_t least = 1;  // two reads: with one, the disk waits for the reader
    static constexpr std::uint32_t first = 2;
    static constexpr std::uint32_t most = 10;

    std::uint32_t level_ = first;
    std::uint32_t best_ = first;
    std::vector<double> rates_;  ///< the last seen at each level, bytes/s
    int settled_ = 0;            ///< windows at the best level since another one was looked at
    bool fewer_next_ = false;
    std::uint64_t done_ = 0;
    std::uint64_t unwanted_ = 0;  ///< bytes that came while fewer reads were under way than the limit allows
    clock::time_point begin_{};
};

/// A read_depth that watches the reads of several threads.
class read_meter {
public:
    /// Calls `read()`, which brings `bytes`.
    template <class Read>
    void watch(std::uint64_t bytes, Read&& read) {
        {
            const std::lock_guard lock(mutex_);
            ++under_way_;
        }
        struct over {
            read_meter& meter;
            std::uint64_t bytes;
            ~over() { meter.end(bytes); }
        } const then{*this, bytes};
        read();
    }

    [[nodiscard]] std::uint32_t limit() const noexcept { return limit_.load(std::memory_order_relaxed); }

private:
    void end(std::uint64_t bytes) noexcept {
        const std::lock_guard lock(mutex_);
        try {
            depth_.count(bytes, under_way_ >= depth_.limit(), read_depth::clock::now());
        } catch (...) {  // no memory to remember a rate in: the depth stays
        }
        limit_ = depth_.limit();
        --under_way_;
    }

    std::mutex mutex_;
    read_depth depth_;
    std::uint32_t under_way_ = 0;
    std::atomic<std::uint32_t> limit_{read_depth().limit()};
};

}  // namespace penstock::inline v0_1::detail

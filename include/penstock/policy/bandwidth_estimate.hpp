#pragma once

#include <penstock/config.hpp>
#include <penstock/units.hpp>

#include <chrono>
#include <cmath>
#include <cstdint>

namespace penstock::inline v0_1 {

/// What a link, or a disk, carries: a moving average of bytes per second over samples. The first sample that says something is the first
/// estimate; one without bytes, or that took no time (a clock that stood still or went back), says nothing.
class bandwidth_estimate {
public:
    /// @param newest weight of a sample beside all before it, in (0, 1]
    explicit constexpr bandwidth_estimate(double newest = 0.25) noexcept : newest_(newest) {}

    constexpr void add(std::uint64_t bytes, std::chrono::nanoseconds took) noexcept {
        if (bytes == 0 || took.count() <= 0) {
            return;
        }
        const double rate = static_cast<double>(bytes) * 1e9 / static_cast<double>(took.count());
        rate_ = rate_ > 0 ? rate_ + newest_ * (rate - rate_) : rate;
    }

    /// 0 until it is known.
    [[nodiscard]] constexpr double bytes_per_second() const noexcept { return rate_; }

    /// Chunks that arrive within `time`, held to [least, most]; `least` while nothing is known.
    [[nodiscard]] constexpr std::uint32_t chunks_within(std::chrono::nanoseconds time, std::uint64_t chunk_bytes, std::uint32_t least,
                                                        std::uint32_t most) const noexcept {
        const double chunks = rate_ * static_cast<double>(time.count()) / 1e9 / static_cast<double>(larger<std::uint64_t>(chunk_bytes, 1));
        return chunks >= most ? larger(most, least) : chunks > least ? static_cast<std::uint32_t>(chunks) : least;
    }

private:
    double newest_;
    double rate_ = 0;
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/policy/bandwidth_estimate.hpp>
#include <penstock/policy/scheduling.hpp>
#include <penstock/units.hpp>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <utility>

/// Governors: how much of the link what is not on demand may take beside what is. They decide by the times that they are given and by nothing
/// else, so that a test can give them a clock of its own.

namespace penstock::inline v0_1 {

/// What can be seen on the way to a device.
struct link_sight {
    std::uint64_t on_demand = 0;       ///< loads on demand that have copies on the link, or wait before it
    std::uint64_t missing = 0;         ///< bytes that running kernels still miss and read from host memory themselves
    std::uint64_t device_to_host = 0;  ///< bytes that are on their way from the device
};

/// `look(now, sight)` tells it what is seen; `may_go(now)` is the time from which on the next chunk that is not on demand may go, `now` or
/// before it for at once; `went(now, bytes)` that one goes; `arrived(now, bytes, took, alone)` how long one was on the engine, and whether it
/// found the engine idle. Times of one clock, which does not go back.
template <class G>
concept link_governor = std::default_initializable<G> && requires(G g, std::chrono::nanoseconds t, link_sight s, std::uint64_t n) {
    g.look(t, s);
    { g.may_go(t) } -> std::same_as<std::chrono::nanoseconds>;
    g.went(t, n);
    g.arrived(t, n, t, true);
};

namespace governor {

using std::chrono::nanoseconds;

/// Lets everything go.
struct none {
    void look(nanoseconds, const link_sight&) noexcept {}
    [[nodiscard]] nanoseconds may_go(nanoseconds now) const noexcept { return now; }
    void went(nanoseconds, std::uint64_t) noexcept {}
    void arrived(nanoseconds, std::uint64_t, nanoseconds, bool) noexcept {}
};

/// At most `PerSecond` bytes a second over any time, save for the one chunk that is on its way.
template <bytes PerSecond>
class cap {
    static_assert(PerSecond.count > 0, "penstock: governor::cap needs at least one byte a second");

public:
    void look(nanoseconds, const link_sight&) noexcept {}
    [[nodiscard]] nanoseconds may_go(nanoseconds) const noexcept { return next_; }
    void went(nanoseconds now, std::uint64_t size) noexcept {
        const double takes = std::ceil(static_cast<double>(size) * 1e9 / static_cast<double>(PerSecond.count));
        next_ = std::max(next_, now) + nanoseconds(static_cast<std::int64_t>(takes));
    }
    void arrived(nanoseconds, std::uint64_t, nanoseconds, bool) noexcept {}

private:
    nanoseconds next_ = nanoseconds::min();
};

/// Gives way while it sees that somebody needs the link, and comes back. `pace` is the part of the link that others leave:
///
///     while a load on demand or a kernel's miss is on the link   floor
///     within `calm` after the last of them                       floor, so that the gaps between misses of one kernel are not filled
///     after that                                                 a quarter, doubled every `step`, up to what the next two lines allow
///     while bytes come from the device                           at most 3/4: both ways at once cost each of them a fifth (H200)
///     while copies achieve less than `free_share` of the best    at most 2 x share - 1: somebody unseen takes the rest, half of it if it could
///
/// At a pace p a chunk of n bytes goes n / (p x the best rate seen) after the one before it. What is seen is what others do, and does not
/// depend on the pace, so the pace settles where they do; it falls at once and rises slowly.
class adaptive {
public:
    static constexpr double floor = 1.0 / 64;  ///< of the link, whatever is seen: nothing starves
    static constexpr double free_share = 0.85;
    static constexpr nanoseconds calm = std::chrono::microseconds(10);
    static constexpr nanoseconds step = std::chrono::microseconds(50);

    void look(nanoseconds now, const link_sight& s) noexcept {
        if (s.on_demand > 0 || s.missing > 0) {
            pressed_ = now;
            was_pressed_ = true;
        }
        from_device_ = s.device_to_host > 0;
    }

    /// In [floor, 1].
    [[nodiscard]] double pace(nanoseconds now) const noexcept {
        double p = 1;
        if (was_pressed_) {
            const nanoseconds rest = now - pressed_ - calm;
            p = rest < nanoseconds(0) ? floor : smaller(1.0, 0.25 * std::exp2(static_cast<double>(std::min(rest, 8 * step) / step)));
        }
        if (from_device_) {
            p = smaller(p, 0.75);
        }
        if (const double s = share(); s < free_share) {
            p = smaller(p, 2 * s - 1);
        }
        return larger(p, floor);
    }

    [[nodiscard]] nanoseconds may_go(nanoseconds now) const noexcept {
        const double p = pace(now);
        if (p == 1 || last_bytes_ == 0) {
            return now;
        }
        return last_ + nanoseconds(static_cast<std::int64_t>(static_cast<double>(last_bytes_) * 1e9 / (p * best())));
    }

    void went(nanoseconds now, std::uint64_t size) noexcept {
        last_ = now;
        last_bytes_ = size;
        most_bytes_ = larger(most_bytes_, size);
    }

    /// Copies beside what is seen say nothing about what is not; nor do small ones, for which the way to the engine counts. Several make a sample,
    /// since the end of one may be seen late, and that of the next is then too soon.
    void arrived(nanoseconds now, std::uint64_t size, nanoseconds took, bool alone) noexcept {
        if (size < most_bytes_ / 4 * 3 || from_device_ || (was_pressed_ && pressed_ >= now - took)) {
            sample_bytes_ = 0;
            sample_took_ = nanoseconds(0);
            return;
        }
        sample_bytes_ += size;
        sample_took_ += alone ? took - start : took;
        if (sample_took_ >= sample) {
            achieved_.add(std::exchange(sample_bytes_, 0), std::exchange(sample_took_, nanoseconds(0)));
            best_ = larger(best_, achieved_.bytes_per_second());
        }
    }

    /// What copies achieve, as a part of the best that they did; 1 while nothing is known.
    [[nodiscard]] double share() const noexcept { return best_ > 0 ? achieved_.bytes_per_second() / best_ : 1; }

private:
    static constexpr nanoseconds sample = std::chrono::milliseconds(1);
    static constexpr nanoseconds start = std::chrono::microseconds(10);  ///< from the call to the first byte, on an idle engine
    static constexpr double slowest = 10e9;                              ///< bytes a second, until something is known: PCIe 3

    [[nodiscard]] double best() const noexcept { return best_ > 0 ? best_ : slowest; }

    bandwidth_estimate achieved_;
    double best_ = 0;
    std::uint64_t sample_bytes_ = 0;
    nanoseconds sample_took_{0};
    bool was_pressed_ = false;
    bool from_device_ = false;
    nanoseconds pressed_{0};
    nanoseconds last_{0};
    std::uint64_t last_bytes_ = 0;
    std::uint64_t most_bytes_ = 0;
};

}  // namespace governor

/// `Scheduler`, with what is not on demand held to what `Governor` lets go. It is asked where a chunk would go on the link, after the queue: so
/// reading ahead goes on, and what is on demand passes what is held, also with a scheduler that has no levels. For weight streams and stores.
template <class Scheduler, class Governor>
struct throttled : Scheduler {
    static_assert(host_scheduler<Scheduler>, "penstock: throttled takes a scheduler with a host queue");
    static_assert(link_governor<Governor>, "penstock: throttled takes a governor with look, may_go, went and arrived");
    using governor = Governor;
};

namespace detail {

template <class Scheduler>
struct governor_of {
    using type = governor::none;
};
template <class Scheduler>
    requires requires { typename Scheduler::governor; }
struct governor_of<Scheduler> {
    using type = typename Scheduler::governor;
};

}  // namespace detail
}  // namespace penstock::inline v0_1

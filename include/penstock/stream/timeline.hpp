#pragma once

#include <penstock/policy/scheduling.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <ostream>
#include <tuple>
#include <utility>
#include <vector>

namespace penstock::inline v0_1 {

/// When a copy ran, by the device's clock.
class copy_clock {
public:
    using time = std::chrono::nanoseconds;

    virtual ~copy_clock() = default;
    virtual void begin() = 0;  ///< enqueued before the copy
    virtual void end() = 0;    ///< and behind it
    /// Both, in the time of std::chrono::steady_clock. Waits for the copy.
    [[nodiscard]] virtual std::pair<time, time> times() = 0;
};

/// What became of a chunk. Times since the epoch of std::chrono::steady_clock.
struct timeline_entry {
    using time = std::chrono::nanoseconds;

    std::uint64_t request = 0;
    urgency level = urgency::on_demand;  ///< when it moved
    std::uint32_t chunk = 0;             ///< among those of its request
    std::uint64_t bytes = 0;
    int device = -1;  ///< negative: to host memory
    time asked{0};    ///< its load was started
    time chosen{0};   ///< its turn came
    time start{0};    ///< on a device's link, or of reading, where it goes to host memory
    time end{0};

    [[nodiscard]] time waited() const noexcept { return start - asked; }
};

/// Keeps what weight streams did, chunk by chunk, where it is asked to: stream_options::kept_in. Without one nothing is measured. It outlives
/// the streams. While it is kept, a copy is one chunk, in two timed events, which costs the link some microseconds a chunk.
class timeline {
public:
    /// Any thread. `clock`, where there is one, knows start and end.
    void note(timeline_entry e, std::unique_ptr<copy_clock> clock = nullptr) {
        const std::lock_guard lock(mutex_);
        entries_.push_back({e, std::move(clock)});
    }

    /// In the order in which the chunks were enqueued, or arrived in host memory. Waits for copies that still run.
    [[nodiscard]] std::vector<timeline_entry> entries() {
        const std::lock_guard lock(mutex_);
        std::vector<timeline_entry> all;
        all.reserve(entries_.size());
        for (kept& k : entries_) {
            if (k.clock != nullptr) {
                std::tie(k.what.start, k.what.end) = k.clock->times();
                k.clock.reset();
            }
            all.push_back(k.what);
        }
        return all;
    }

    void clear() {
        const std::lock_guard lock(mutex_);
        entries_.clear();
    }

    /// As JSON that Perfetto (ui.perfetto.dev) and chrome://tracing show: a track for each device's link and one for host memory, and above
    /// them how long each chunk waited, from the start of its load to its own.
    void write(std::ostream& out) {
        constexpr const char* names[] = {"on demand", "prefetch", "background"};
        const std::vector<timeline_entry> all = entries();
        const auto us = [&](timeline_entry::time t) { return static_cast<double>((t - origin_).count()) / 1000; };
        const auto precision = out.precision(3);
        const auto flags = out.setf(std::ios::fixed, std::ios::floatfield);
        out << R"({"displayTimeUnit":"ms","traceEvents":[)"
            << R"({"ph":"M","pid":1,"name":"process_name","args":{"name":"penstock"}})";
        std::vector<int> devices;
        for (const timeline_entry& e : all) {
            if (std::find(devices.begin(), devices.end(), e.device) == devices.end()) {
                devices.push_back(e.device);
                out << ",\n"
                    << R"({"ph":"M","pid":1,"tid":)" << e.device + 1 << R"(,"name":"thread_name","args":{"name":")";
                e.device < 0 ? out << "to host memory" : out << "link to GPU " << e.device;
                out << R"("}})";
            }
        }
        for (std::size_t i = 0; i < all.size(); ++i) {
            const timeline_entry& e = all[i];
            const char* level = names[std::min<std::size_t>(static_cast<std::size_t>(e.level), 2)];
            const auto event = [&](const char* phase, timeline_entry::time at) -> std::ostream& {
                return out << ",\n"
                           << R"({"ph":")" << phase << R"(","pid":1,"tid":)" << e.device + 1 << R"(,"name":"request )" << e.request
                           << ", chunk " << e.chunk << R"(","ts":)" << us(at);
            };
            event("b", e.asked) << R"(,"cat":"waits","id":)" << i << "}";
            event("e", e.start) << R"(,"cat":"waits","id":)" << i << "}";
            event("X", e.start) << R"(,"dur":)" << us(e.end) - us(e.start) << R"(,"cat":")" << level << R"(","args":{"request":)"
                                << e.request << R"(,"class":")" << level << R"(","chunk":)" << e.chunk << R"(,"bytes":)" << e.bytes
                                << R"(,"waited_us":)" << us(e.start) - us(e.asked) << R"(,"chosen_us_before":)"
                                << us(e.start) - us(e.chosen) << "}}";
        }
        out << "]}\n";
        out.precision(precision);
        out.flags(flags);
    }

private:
    struct kept {
        timeline_entry what;
        std::unique_ptr<copy_clock> clock;
    };

    const timeline_entry::time origin_ = std::chrono::steady_clock::now().time_since_epoch();
    std::mutex mutex_;
    std::vector<kept> entries_;
};

}  // namespace penstock::inline v0_1

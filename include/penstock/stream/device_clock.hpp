#pragma once

#include <penstock/cuda/event.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/stream/place.hpp>
#include <penstock/stream/timeline.hpp>

namespace penstock::inline v0_1::detail {

/// A copy_clock of two timed events. The device's clock and the host's are brought together when the first of a thread's clocks for a device is
/// made, to within some microseconds.
class device_clock final : public copy_clock {
public:
    /// @pre the place's device is current @throws cuda_error
    explicit device_clock(const place& where) : stream_(where.stream), origin_(origin_of(where.device)) {}

    void begin() override { begin_.record(stream_); }
    void end() override { end_.record(stream_); }

    [[nodiscard]] std::pair<time, time> times() override {
        end_.synchronize();
        const auto at = [&](const timed_event& e) {
            return origin_->host + time(static_cast<std::int64_t>(static_cast<double>(e.milliseconds_since(origin_->device)) * 1e6));
        };
        return {at(begin_), at(end_)};
    }

private:
    struct origin {
        timed_event device;
        time host{0};
    };

    /// The two clocks at one moment, on a stream that nothing else is on.
    static std::shared_ptr<const origin> origin_of(int device) {
        thread_local int of = -1;
        thread_local std::weak_ptr<const origin> last;  // dies with the clocks that use it, before the driver does
        std::shared_ptr<const origin> known = of == device ? last.lock() : nullptr;
        if (known == nullptr) {
            const stream idle(device);
            auto fresh = std::make_shared<origin>();
            fresh->device.record(idle.get());
            fresh->device.synchronize();
            fresh->host = std::chrono::steady_clock::now().time_since_epoch();
            last = known = fresh;
            of = device;
        }
        return known;
    }

    cudaStream_t stream_;
    std::shared_ptr<const origin> origin_;
    timed_event begin_, end_;
};

}  // namespace penstock::inline v0_1::detail

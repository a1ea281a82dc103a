#pragma once

#include <penstock/cuda/device.hpp>

#include <cstdint>
#include <utility>

namespace penstock::inline v0_1 {

/// How a host thread waits for an event: `spin` answers soonest, `sleep` leaves the core to others.
enum class waiting : std::uint8_t { spin, sleep };

/// An owned CUDA event without timing. The handle is made by the first `record`, on the device of the stream, so that an event that
/// is never used needs no GPU. An event that was never recorded is ready.
class event {
public:
    explicit event(waiting how = waiting::spin) noexcept : how_(how) {}

    event(event&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)), device_(other.device_), how_(other.how_) {}
    event& operator=(event&& other) noexcept {
        if (this != &other) {
            destroy();
            handle_ = std::exchange(other.handle_, nullptr);
            device_ = other.device_;
            how_ = other.how_;
        }
        return *this;
    }
    ~event() { destroy(); }

    /// The event now stands for the work enqueued on `stream` so far. Asynchronous. @throws cuda_error
    void record(cudaStream_t stream) {
        int device = 0;
        check(cudaStreamGetDevice(stream, &device), "cudaStreamGetDevice");
        const device_guard on(device);
        if (handle_ == nullptr || device != device_) {
            destroy();
            check(cudaEventCreateWithFlags(
                      &handle_, how_ == waiting::sleep ? cudaEventDisableTiming | cudaEventBlockingSync : cudaEventDisableTiming),
                  "cudaEventCreateWithFlags");
            device_ = device;
        }
        check(cudaEventRecord(handle_, stream), "cudaEventRecord");
    }

    /// Returns when the recorded work is done. @throws cuda_error
    void synchronize() const {
        if (handle_ != nullptr) {
            check(cudaEventSynchronize(handle_), "cudaEventSynchronize");
        }
    }

    /// For destructors: as synchronize(), but an error ends the wait and is not reported.
    void synchronize_quietly() const noexcept {
        if (handle_ != nullptr && detail::cuda_usable() && cudaEventSynchronize(handle_) != cudaSuccess && detail::cuda_usable()) {
            static_cast<void>(cudaGetLastError());
        }
    }

    /// Whether the recorded work is done. @throws cuda_error
    [[nodiscard]] bool ready() const {
        if (handle_ == nullptr) {
            return true;
        }
        const cudaError_t code = cudaEventQuery(handle_);
        if (code == cudaErrorNotReady) {
            static_cast<void>(cudaGetLastError());
            return false;
        }
        check(code, "cudaEventQuery");
        return true;
    }

    /// Whether the recorded work runs no more: done, or ended by an error, which other calls report.
    [[nodiscard]] bool over() const noexcept {
        if (handle_ == nullptr) {
            return true;
        }
        const cudaError_t code = cudaEventQuery(handle_);
        if (code != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
        }
        return code != cudaErrorNotReady;
    }

    /// Work enqueued on `stream` from now on waits for the recorded work. Asynchronous. @throws cuda_error
    void make_wait(cudaStream_t stream) const {
        if (handle_ != nullptr) {
            check(cudaStreamWaitEvent(stream, handle_, 0), "cudaStreamWaitEvent");
        }
    }

private:
    void destroy() noexcept {
        if (handle_ != nullptr && detail::cuda_usable() && cudaEventDestroy(handle_) != cudaSuccess && detail::cuda_usable()) {
            static_cast<void>(cudaGetLastError());
        }
        handle_ = nullptr;
    }

    cudaEvent_t handle_ = nullptr;
    int device_ = -1;
    waiting how_;
};

/// An owned event that keeps the time, for measuring on the device's clock.
class timed_event {
public:
    /// On the current device. @throws cuda_error
    timed_event() { check(cudaEventCreate(&handle_), "cudaEventCreate"); }

    timed_event(timed_event&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    timed_event& operator=(timed_event&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~timed_event() {
        if (handle_ != nullptr && detail::cuda_usable() && cudaEventDestroy(handle_) != cudaSuccess && detail::cuda_usable()) {
            static_cast<void>(cudaGetLastError());
        }
    }

    void record(cudaStream_t stream) { check(cudaEventRecord(handle_, stream), "cudaEventRecord"); }
    void synchronize() const { check(cudaEventSynchronize(handle_), "cudaEventSynchronize"); }

    /// Milliseconds of device time from `start` to this event. @pre both were recorded on this device and are done
    [[nodiscard]] float milliseconds_since(const timed_event& start) const {
        float milliseconds = 0;
        check(cudaEventElapsedTime(&milliseconds, start.handle_, handle_), "cudaEventElapsedTime");
        return milliseconds;
    }

private:
    cudaEvent_t handle_ = nullptr;
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/cuda/device.hpp>

#include <utility>

namespace penstock::inline v0_1 {

/// An owned CUDA stream that does not synchronise with the legacy default stream. Move-only. Work enqueued on it goes on when it is
/// destroyed, as the runtime has it.
class stream {
public:
    /// On the current device. @throws cuda_error
    stream() : stream(-1) {}

    /// On `device`; a negative one means the current device. @throws cuda_error
    explicit stream(int device) {
        const device_guard on(device);
        check(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    }

    stream(stream&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    stream& operator=(stream&& other) noexcept {
        if (this != &other) {
            destroy();
            handle_ = std::exchange(other.handle_, nullptr);
        }
        return *this;
    }
    ~stream() { destroy(); }

    [[nodiscard]] cudaStream_t get() const noexcept { return handle_; }

    /// Returns when all work enqueued so far is done. @throws cuda_error with the error of that work, if any
    void synchronize() const { check(cudaStreamSynchronize(handle_), "cudaStreamSynchronize"); }

private:
    void destroy() noexcept {
        if (handle_ != nullptr && detail::cuda_usable() && cudaStreamDestroy(handle_) != cudaSuccess && detail::cuda_usable()) {
            static_cast<void>(cudaGetLastError());
        }
        handle_ = nullptr;
    }

    cudaStream_t handle_ = nullptr;
};

/// Whether work enqueued on `stream` is being captured into a graph instead of run. @throws cuda_error
[[nodiscard]] inline bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/error.hpp>

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

/// Memory for tests of kernels: poisoned, with a guard band on both sides that must stay as it is.
namespace tests {

namespace ps = penstock;

enum class place_of_test { device, pinned };

/// An array of T that kernels write or read. All bytes are 0xff at first: NaN for every float type.
template <class T>
class guarded {
public:
    static constexpr std::size_t guard = 1024;  // bytes; keeps the 256-byte alignment of the allocation

    explicit guarded(std::size_t count, place_of_test where = place_of_test::device) : count_(count), where_(where) {
        if (where == place_of_test::device) {
            ps::check(cudaMalloc(reinterpret_cast<void**>(&base_), bytes()), "cudaMalloc");
            ps::check(cudaMemset(base_, 0xff, bytes()), "cudaMemset");
        } else {
            ps::check(cudaHostAlloc(reinterpret_cast<void**>(&base_), bytes(), cudaHostAllocPortable | cudaHostAllocMapped),
                      "cudaHostAlloc");
            std::memset(base_, 0xff, bytes());
        }
        ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }

    explicit guarded(const std::vector<T>& values, place_of_test where = place_of_test::device) : guarded(values.size(), where) {
        set(values);
    }

    guarded(const guarded&) = delete;
    guarded& operator=(const guarded&) = delete;

    ~guarded() {
        if (where_ == place_of_test::device) {
            static_cast<void>(cudaFree(base_));
        } else {
            static_cast<void>(cudaFreeHost(base_));
        }
    }

    T* data() { return reinterpret_cast<T*>(base_ + guard); }
    const T* data() const { return reinterpret_cast<const T*>(base_ + guard); }
    std::size_t size() const { return count_; }

    void set(const std::vector<T>& values) {
        ps::check(cudaMemcpy(data(), values.data(), values.size() * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
    }

    void poison() { ps::check(cudaMemset(base_, 0xff, bytes()), "cudaMemset"); }

    /// Waits for the device.
    std::vector<T> get() const {
        ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        std::vector<T> values(count_);
        ps::check(cudaMemcpy(values.data(), data(), count_ * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
        return values;
    }

    /// Whether nothing was written before the first or after the last element.
    bool guards_hold() const {
        ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        std::vector<unsigned char> all(bytes());
        ps::check(cudaMemcpy(all.data(), base_, bytes(), cudaMemcpyDefault), "cudaMemcpy");
        for (std::size_t i = 0; i < guard; ++i) {
            if (all[i] != 0xff || all[guard + count_ * sizeof(T) + i] != 0xff) {
                return false;
            }
        }
        return true;
    }

private:
    std::size_t bytes() const { return count_ * sizeof(T) + 2 * guard; }

    std::size_t count_;
    place_of_test where_;
    std::byte* base_ = nullptr;
};

inline bool is_poison(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits == 0xffffffffu;
}

inline bool same_bits(const float* a, const float* b, std::size_t count) { return std::memcmp(a, b, count * sizeof(float)) == 0; }

inline std::vector<float> random_floats(std::size_t count, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& v : values) {
        v = normal(random);
    }
    return values;
}

/// ||a - b|| / ||b|| over `count` values; infinite where either holds a NaN.
inline double relative_error(const float* a, const double* b, std::size_t count) {
    double difference = 0;
    double size = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const double d = a[i] - b[i];
        difference += d * d;
        size += b[i] * b[i];
    }
    if (!(difference >= 0)) {
        return HUGE_VAL;
    }
    return size > 0 ? std::sqrt(difference / size) : std::sqrt(difference);
}

}  // namespace tests

#pragma once

#include <penstock/error.hpp>

#include <cctype>
#include <fstream>
#include <string>

namespace penstock::inline v0_1 {

/// GPUs that this process can use; 0 without a driver or a GPU. Leaves no error behind.
[[nodiscard]] inline int device_count() noexcept {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        return 0;
    }
    return count;
}

/// @throws configuration_error unless `device` is a GPU of this process; `what` begins the sentence ("weight_stream").
inline void require_device(int device, const char* what) {
    const int count = device_count();
    if (count == 0) {
        throw configuration_error(std::string("penstock: ") + what + ": device " + std::to_string(device) +
                                  " was asked for, but there is no CUDA device");
    }
    if (device < 0 || device >= count) {
        throw configuration_error(std::string("penstock: ") + what + ": device " + std::to_string(device) +
                                  " was asked for, but there are " + std::to_string(count) + " (0 to " + std::to_string(count - 1) + ")");
    }
}

/// Makes `device` current and restores the caller's device in its destructor. A negative device leaves the current one.
/// @throws cuda_error if the device cannot be made current; the caller's device is then unchanged.
class device_guard {
public:
    explicit device_guard(int device) {
        if (device < 0) {
            return;
        }
        int current = -1;
        check(cudaGetDevice(&current), "cudaGetDevice");
        if (current != device) {
            check(cudaSetDevice(device), "cudaSetDevice");
            before_ = current;
        }
    }

    device_guard(const device_guard&) = delete;
    device_guard& operator=(const device_guard&) = delete;

    ~device_guard() {
        if (before_ >= 0 && cudaSetDevice(before_) != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
        }
    }

private:
    int before_ = -1;
};

/// The NUMA node next to which `device` sits, from its PCI entry in sysfs; -1 where that is not known.
[[nodiscard]] inline int numa_node(int device) noexcept {
    try {
        char id[32] = {};
        if (device < 0 || cudaDeviceGetPCIBusId(id, sizeof id, device) != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
            return -1;
        }
        std::string path = "/sys/bus/pci/devices/";
        for (const char* c = id; *c != '\0'; ++c) {
            path += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
        }
        int node = -1;
        std::ifstream file(path + "/numa_node");
        return file >> node ? node : -1;
    } catch (...) {
        return -1;
    }
}

namespace detail {

/// For destructors: false once the context is lost or the runtime unloads at exit, when CUDA is to be left alone.
[[nodiscard]] inline bool cuda_usable() noexcept {
    const cudaError_t code = cudaPeekAtLastError();
    return !loses_device(code) && code != cudaErrorCudartUnloading;
}

/// For destructors: as device_guard, without exceptions.
class quiet_device_guard {
public:
    explicit quiet_device_guard(int device) noexcept {
        int current = -1;
        if (device >= 0 && cudaGetDevice(&current) == cudaSuccess && current != device && cudaSetDevice(device) == cudaSuccess) {
            before_ = current;
        }
    }

    quiet_device_guard(const quiet_device_guard&) = delete;
    quiet_device_guard& operator=(const quiet_device_guard&) = delete;

    ~quiet_device_guard() {
        if (before_ >= 0) {
            static_cast<void>(cudaSetDevice(before_));
        }
        if (cuda_usable()) {
            static_cast<void>(cudaGetLastError());
        }
    }

private:
    int before_ = -1;
};

}  // namespace detail
}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/config.hpp>

#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

namespace penstock::inline v0_1 {

namespace detail {

/// The number in a one-line file of the kernel, or nothing where there is no such file or no limit ("max").
inline bool read_number(const char* path, std::uint64_t& value) {
    std::ifstream file(path);
    return static_cast<bool>(file >> value);
}

}  // namespace detail

/// Bytes of host memory that this process can still take without swapping: MemAvailable, or less where a container's limit
/// (cgroup v2 or v1) leaves less.
inline std::uint64_t available_host_memory() {
    std::uint64_t available = std::numeric_limits<std::uint64_t>::max();
    std::ifstream meminfo("/proc/meminfo");
    for (std::string key, unit; meminfo >> key;) {
        std::uint64_t kib = 0;
        if (key == "MemAvailable:" && meminfo >> kib) {
            available = kib * 1024;
            break;
        }
        std::getline(meminfo, unit);
    }
    constexpr const char* limits[][2] = {
        {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"},
    };
    for (const auto& [limit_file, usage_file] : limits) {
        std::uint64_t limit = 0;
        std::uint64_t usage = 0;
        if (detail::read_number(limit_file, limit) && detail::read_number(usage_file, usage)) {
            const std::uint64_t left = limit > usage ? limit - usage : 0;
            available = left < available ? left : available;
        }
    }
    return available;
}

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/buffer/cgroup.hpp>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace penstock::inline v0_1 {

namespace detail {

/// Bytes in the entry `key` of a list such as memory.stat; 0 where it has none.
inline std::uint64_t read_entry(const std::filesystem::path& path, const std::string& key) {
    std::ifstream file(path);
    std::uint64_t value = 0;
    for (std::string name; file >> name >> value;) {
        if (name == key) {
            return value;
        }
    }
    return 0;
}

/// Bytes that the cgroups of a process still grant it; the largest number where none sets a limit. The page cache that a cgroup would give
/// back first counts as free: files that were read once fill any container, and are no reason to plan for less.
inline std::uint64_t memory_left_in_cgroups(const cgroup_view& view) {
    struct version {
        const char* controller;
        const char* limits[2];
        const char* usage;
        const char* reclaimable;  ///< of this cgroup and all below it, as the usage is
    };
    constexpr version versions[] = {
        {"", {"memory.max", "memory.high"}, "memory.current", "inactive_file"},
        {"memory", {"memory.limit_in_bytes", nullptr}, "memory.usage_in_bytes", "total_inactive_file"},
    };
    std::uint64_t left = std::numeric_limits<std::uint64_t>::max();
    for (const version& v : versions) {
        for (const std::filesystem::path& level : cgroup_levels(view, v.controller)) {
            std::uint64_t usage = 0;
            if (!read_number(level / v.usage, usage)) {
                continue;
            }
            for (const char* name : v.limits) {
                std::uint64_t limit = 0;
                if (name != nullptr && read_number(level / name, limit)) {
                    const std::uint64_t held = usage - std::min(usage, read_entry(level / "memory.stat", v.reclaimable));
                    left = std::min(left, limit - std::min(limit, held));
                }
            }
        }
    }
    return left;
}

}  // namespace detail

/// Bytes of host memory that this process can still take without swapping: MemAvailable, or less where a container's limit (cgroup v2 or
/// v1, its own or one above it) leaves less.
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
    return std::min(available, detail::memory_left_in_cgroups(detail::cgroup_view::of_this_process()));
}

}  // namespace penstock::inline v0_1

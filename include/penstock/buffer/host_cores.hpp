#pragma once

#include <penstock/buffer/cgroup.hpp>
#include <penstock/cuda/device.hpp>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include <sched.h>

/// The cores that the machine, and a container, give to this process.

namespace penstock::inline v0_1 {

namespace detail {

inline constexpr std::size_t most_cpus = std::size_t{1} << 20;  ///< beyond any machine: where a search or a list is given up
inline constexpr std::size_t bits_a_word = std::numeric_limits<unsigned long>::digits;

/// The CPUs in a mask that `get(bytes, words)` fills as sched_getaffinity does, ascending; empty where it fails. The kernel refuses a mask
/// that is shorter than its own, which has more than the 1024 CPUs of a cpu_set_t on some machines.
template <class Get>
[[nodiscard]] std::vector<int> cpus_of_mask(Get get) {
    for (std::size_t bits = 1024; bits <= most_cpus; bits *= 2) {
        std::vector<unsigned long> words(bits / bits_a_word);
        if (get(words.size() * sizeof(unsigned long), words.data()) == 0) {
            std::vector<int> cpus;
            for (std::size_t i = 0; i < words.size(); ++i) {
                for (unsigned long left = words[i]; left != 0; left &= left - 1) {
                    cpus.push_back(static_cast<int>(i * bits_a_word) + std::countr_zero(left));
                }
            }
            return cpus;
        }
        if (errno != EINVAL) {
            break;
        }
    }
    return {};
}

/// The CPUs on which the calling thread may run, ascending; empty where the system does not say.
[[nodiscard]] inline std::vector<int> cpus_of_thread() {
    return cpus_of_mask(
        [](std::size_t bytes, unsigned long* words) { return ::sched_getaffinity(0, bytes, reinterpret_cast<cpu_set_t*>(words)); });
}

/// Cores' worth of time that the cgroups of a process grant it, rounded up; the largest number where none sets a limit.
[[nodiscard]] inline std::uint64_t cores_of_cgroups(const cgroup_view& view) {
    std::uint64_t cores = std::numeric_limits<std::uint64_t>::max();
    const auto limit = [&cores](std::int64_t quota, std::int64_t period) {
        if (quota > 0 && period > 0) {  // version 1 says -1 where there is no limit
            cores = std::min(cores, static_cast<std::uint64_t>((quota - 1) / period + 1));
        }
    };
    std::int64_t quota = 0;
    std::int64_t period = 0;
    for (const std::filesystem::path& level : cgroup_levels(view, "")) {
        std::ifstream file(level / "cpu.max");
        if (file >> quota >> period) {
            limit(quota, period);
        }
    }
    for (const std::filesystem::path& level : cgroup_levels(view, "cpu")) {
        if (read_number(level / "cpu.cfs_quota_us", quota) && read_number(level / "cpu.cfs_period_us", period)) {
            limit(quota, period);
        }
    }
    return cores;
}

/// `cpus` of them, or as many as the cgroups grant where that is less; at least 1.
[[nodiscard]] inline unsigned cores_within(std::size_t cpus, const cgroup_view& view) {
    return static_cast<unsigned>(std::min<std::uint64_t>(cores_of_cgroups(view), std::max<std::size_t>(cpus, 1)));
}

/// The numbers in a list such as "0-3,8,10-11", in its order; empty where it is not such a list.
[[nodiscard]] inline std::vector<int> parse_cpu_list(std::string_view text) {
    std::vector<int> cpus;
    const char* at = text.data();
    const char* const end = at + text.find_last_not_of(" \n") + 1;  // npos + 1 is 0
    while (at != end) {
        int first = 0;
        auto [next, error] = std::from_chars(at, end, first);
        int last = first;
        if (error == std::errc() && next != end && *next == '-') {
            const auto range_end = std::from_chars(next + 1, end, last);
            next = range_end.ptr;
            error = range_end.ec;
        }
        const bool more = next != end && *next == ',' && next + 1 != end;
        if (error != std::errc() || first < 0 || last < first || last >= static_cast<int>(most_cpus) || (next != end && !more)) {
            return {};
        }
        for (int cpu = first; cpu <= last; ++cpu) {
            cpus.push_back(cpu);
        }
        at = more ? next + 1 : next;
    }
    return cpus;
}

/// The folder in which the system describes its NUMA nodes.
inline constexpr const char* numa_nodes = "/sys/devices/system/node";

[[nodiscard]] inline std::vector<int> read_cpus_of_node(int node, const std::filesystem::path& nodes) {
    if (node < 0) {
        return {};
    }
    std::ifstream file(nodes / ("node" + std::to_string(node)) / "cpulist");
    return parse_cpu_list(std::string(std::istreambuf_iterator<char>(file), {}));
}

/// Takes from the calling thread the CPUs that are not among `cpus`, unless fewer than `least` would be left or none would go.
/// @return whether the thread has fewer CPUs than before
inline bool keep_thread_on(std::vector<int> cpus, std::size_t least) {
    const std::vector<int> before = cpus_of_thread();
    std::ranges::sort(cpus);
    std::vector<int> kept;
    std::ranges::set_intersection(before, cpus, std::back_inserter(kept));
    if (kept.size() < std::max<std::size_t>(least, 1) || kept.size() == before.size()) {
        return false;
    }
    std::vector<unsigned long> words(std::max(static_cast<std::size_t>(kept.back()) / bits_a_word + 1, 1024 / bits_a_word));
    for (const int cpu : kept) {
        words[static_cast<std::size_t>(cpu) / bits_a_word] |= 1ul << static_cast<std::size_t>(cpu) % bits_a_word;
    }
    return ::sched_setaffinity(0, words.size() * sizeof(unsigned long), reinterpret_cast<const cpu_set_t*>(words.data())) == 0;
}

inline bool keep_thread_in(int node, std::size_t least, const std::filesystem::path& nodes) {
    return keep_thread_on(read_cpus_of_node(node, nodes), least);
}

}  // namespace detail

/// Cores that threads of this process can use at once: the CPUs in the calling thread's affinity mask, which threads that it starts
/// inherit, or less where a container's CPU quota (cgroup v2 or v1, its own or one above it) is less. A part of a core counts as one; at
/// least 1. Ask before a thread is kept near a device, not in it.
[[nodiscard]] inline unsigned usable_cores() noexcept {
    try {
        const std::size_t cpus = detail::cpus_of_thread().size();
        return detail::cores_within(cpus > 0 ? cpus : std::thread::hardware_concurrency(), detail::cgroup_view::of_this_process());
    } catch (...) {  // no memory for a few lines of text: one thread will do
        return 1;
    }
}

/// The CPUs of a NUMA node; empty where there is no such node, or it has memory alone.
[[nodiscard]] inline std::vector<int> cpus_of_node(int node) { return detail::read_cpus_of_node(node, detail::numa_nodes); }

/// Keeps the calling thread on those of its CPUs that are in the NUMA node of `device`; threads that it starts later inherit that. Never
/// gives it a CPU that it did not have. Does nothing where the node is not known, fewer than `least` of the thread's CPUs are in it (a
/// container may own almost none of them, and a crowd there is slower than the way to the other node), or all are.
/// @param least how many CPUs the threads of one task need together
/// @return whether the thread has fewer CPUs than before
inline bool keep_thread_near(int device, std::size_t least = 1) noexcept {
    try {
        return detail::keep_thread_in(numa_node(device), least, detail::numa_nodes);
    } catch (...) {  // no more than a wish
        return false;
    }
}

}  // namespace penstock::inline v0_1

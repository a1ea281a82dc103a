#pragma once

#include <penstock/config.hpp>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

/// Where a container writes what it grants to this process.

namespace penstock::inline v0_1::detail {

/// Where the system mounts the cgroups, and which of them this process is in; a test puts its own in their place.
struct cgroup_view {
    std::filesystem::path root = "/sys/fs/cgroup";
    std::string membership;  ///< the text of /proc/self/cgroup: lines of "hierarchy:controllers:path"

    [[nodiscard]] static cgroup_view of_this_process() {
        cgroup_view view;
        std::ifstream file("/proc/self/cgroup");
        view.membership.assign(std::istreambuf_iterator<char>(file), {});
        return view;
    }
};

/// Whether `name` is in a list such as "cpu,cpuacct". The list of version 2 is empty, as its name here.
[[nodiscard]] inline bool lists_controller(std::string_view list, std::string_view name) {
    if (list.empty() || name.empty()) {
        return list == name;
    }
    for (;;) {
        const std::size_t comma = list.find(',');
        if (list.substr(0, comma) == name) {
            return true;
        }
        if (comma == std::string_view::npos) {
            return false;
        }
        list.remove_prefix(comma + 1);
    }
}

/// The folders of this process's cgroup and of all above it, whose limits hold for it too, from the root down. `controller` is one of
/// version 1, or empty for version 2. Not all of them need be there: a container may see its own cgroup as the root, under the path that it
/// has outside.
[[nodiscard]] inline std::vector<std::filesystem::path> cgroup_levels(const cgroup_view& view, std::string_view controller) {
    std::vector<std::filesystem::path> mounts;
    if (controller.empty()) {
        mounts = {view.root, view.root / "unified"};  // beside version 1, version 2 has a folder of its own
    } else {
        mounts = {view.root / controller};
    }
    std::filesystem::path own;
    for (std::string_view rest = view.membership; !rest.empty();) {
        const std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(line.size() < rest.size() ? line.size() + 1 : rest.size());
        const std::size_t first = line.find(':');
        const std::size_t second = first == std::string_view::npos ? first : line.find(':', first + 1);
        if (second == std::string_view::npos) {
            continue;
        }
        const std::string_view controllers = line.substr(first + 1, second - first - 1);
        if (lists_controller(controllers, controller)) {
            own = std::filesystem::path(line.substr(second + 1)).relative_path();
            if (controllers != controller) {  // mounted together, and the short name is a link that may be missing
                mounts.push_back(view.root / controllers);
            }
        }
    }
    std::vector<std::filesystem::path> levels;
    for (std::filesystem::path level : mounts) {
        levels.push_back(level);
        for (const std::filesystem::path& name : own) {
            if (name == "..") {  // outside of what this process is shown
                break;
            }
            level /= name;
            levels.push_back(level);
        }
    }
    return levels;
}

/// The number at the start of a kernel's file; false where there is no such file or no limit ("max").
template <class Number>
[[nodiscard]] bool read_number(const std::filesystem::path& path, Number& value) {
    std::ifstream file(path);
    return static_cast<bool>(file >> value);
}

}  // namespace penstock::inline v0_1::detail

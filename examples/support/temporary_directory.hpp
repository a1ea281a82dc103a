#pragma once

#include <filesystem>
#include <string>

#include <unistd.h>

namespace example {

/// A directory of its own below the system's temporary one, removed at the end.
struct temporary_directory {
    explicit temporary_directory(const std::string& name)
        : path(std::filesystem::temp_directory_path() / (name + "-" + std::to_string(getpid()))) {
        std::filesystem::create_directories(path);
    }
    temporary_directory(const temporary_directory&) = delete;
    ~temporary_directory() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }

    std::filesystem::path path;
};

}  // namespace example

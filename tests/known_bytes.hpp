#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

/// Files of bytes by formula, in a directory of the test's own.
namespace tests {

/// A directory that is removed with everything in it when the test ends.
class temporary_directory {
public:
    explicit temporary_directory(const std::filesystem::path& where = std::filesystem::temp_directory_path()) {
        std::string name = (where / "penstock-XXXXXX").string();
        REQUIRE(::mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    temporary_directory(const temporary_directory&) = delete;
    temporary_directory& operator=(const temporary_directory&) = delete;
    ~temporary_directory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }

    std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
    const std::filesystem::path& path() const { return path_; }

    /// Writes a file and gives its path.
    std::filesystem::path write(const std::string& name, const std::string& content) const {
        std::filesystem::create_directories((path_ / name).parent_path());
        std::ofstream(path_ / name, std::ios::binary) << content;
        return path_ / name;
    }

private:
    std::filesystem::path path_;
};

/// The byte at `offset` of file (or memory, or whatever is told apart by it) number `which`.
inline std::byte pattern(std::uint64_t which, std::uint64_t offset) {
    std::uint64_t x = (which + 1) * 0x9e3779b97f4a7c15u + offset;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return static_cast<std::byte>(x >> 56);
}

inline void fill(std::span<std::byte> to, std::uint64_t which, std::uint64_t offset = 0) {
    for (std::size_t i = 0; i < to.size(); ++i) {
        to[i] = pattern(which, offset + i);
    }
}

inline bool holds(std::span<const std::byte> data, std::uint64_t which, std::uint64_t offset = 0) {
    for (std::size_t i = 0; i < data.size(); ++i) {
        if (data[i] != pattern(which, offset + i)) {
            return false;
        }
    }
    return true;
}

/// A file of the first `size` bytes of number `which`.
inline std::filesystem::path write_pattern(const std::filesystem::path& path, std::uint64_t which, std::size_t size) {
    std::vector<std::byte> data(size);
    fill(data, which);
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(size));
    return path;
}

}  // namespace tests

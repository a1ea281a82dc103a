#pragma once

#include "../known_bytes.hpp"

#include <penstock/checkpoint/checkpoint.hpp>

#include <doctest/doctest.h>

#include <cstring>
#include <fstream>

/// Builders of small checkpoint files for the tests.

namespace files {

using tests::temporary_directory;

/// A safetensors file: length, header, data.
inline std::string st(const std::string& header, const std::string& data = "", std::optional<std::uint64_t> length = std::nullopt) {
    const std::uint64_t n = length.value_or(header.size());
    std::string out(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) {
        out[i] = static_cast<char>(n >> (8 * i) & 0xff);
    }
    return out + header + data;
}

/// One entry of a header.
inline std::string entry(const std::string& name, const std::string& type, const std::string& shape, std::uint64_t begin,
                         std::uint64_t end) {
    return "\"" + name + R"(":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":[)" + std::to_string(begin) + "," +
           std::to_string(end) + "]}";
}

inline std::string header(std::initializer_list<std::string> entries) {
    std::string out;
    for (const std::string& e : entries) {
        out += (out.empty() ? "{" : ",") + e;
    }
    return (out.empty() ? "{" : out) + "}";
}

/// The bytes of floats.
inline std::string floats(std::initializer_list<float> values) {
    std::string out(values.size() * sizeof(float), '\0');
    std::memcpy(out.data(), values.begin(), out.size());
    return out;
}

/// Zero bytes.
inline std::string zeros(std::size_t n) { return std::string(n, '\0'); }

/// The whole of a file.
inline std::string content(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
}

/// The bytes of a tensor, from its place in the file.
inline std::string bytes_of(const std::filesystem::path& path, const penstock::tensor_info& t) {
    std::ifstream file(path, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(t.offset));
    std::string out(t.bytes, '\0');
    file.read(out.data(), static_cast<std::streamsize>(t.bytes));
    return out;
}

inline float float_of(const std::string& bytes) {
    float value = 0;
    REQUIRE(bytes.size() == sizeof value);
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
}

/// What an `Error` says that `action` throws; the test fails if it throws none.
template <class Error, class Action>
std::string refusal(Action&& action) {
    try {
        static_cast<void>(action());
    } catch (const Error& problem) {
        return problem.what();
    }
    FAIL("nothing was thrown");
    return {};
}

/// Every word is in the text.
inline bool says(const std::string& text, std::initializer_list<const char*> words) {
    for (const char* word : words) {
        if (text.find(word) == std::string::npos) {
            MESSAGE("\"", text, "\" lacks \"", std::string(word), "\"");
            return false;
        }
    }
    return true;
}

/// A safetensors file of the tensors' true size whose data takes no room on the disk.
inline void write_sparse(const std::filesystem::path& path, std::span<const penstock::tensor_to_write> tensors) {
    const std::string head = penstock::detail::safetensors_header(tensors, {});
    std::uint64_t size = head.size();
    for (const penstock::tensor_to_write& t : tensors) {
        size += t.bytes();
    }
    std::ofstream(path, std::ios::binary) << head;
    std::filesystem::resize_file(path, size);
}

/// A tensor without data.
inline penstock::tensor_to_write shaped(const std::string& name, penstock::dtype type, std::vector<std::uint64_t> shape) {
    return {.name = name, .type = type, .shape = std::move(shape), .data = {}, .generate = {}};
}

}  // namespace files

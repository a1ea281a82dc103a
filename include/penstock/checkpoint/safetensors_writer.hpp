#pragma once

#include <penstock/checkpoint/text.hpp>
#include <penstock/model/tensor.hpp>
#include <penstock/units.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <unordered_set>
#include <vector>

/// Writing safetensors files, tensor by tensor, without holding a tensor in memory.

namespace penstock::inline v0_1 {

/// Fills `window` with the tensor's bytes from byte `offset` on. Called in order, each window once.
using tensor_generator = std::function<void(std::span<std::byte> window, std::uint64_t offset)>;

/// A tensor to be written: either its bytes or a function that makes them, window by window.
struct tensor_to_write {
    std::string name;
    dtype type = dtype::f32;
    std::vector<std::uint64_t> shape;
    std::span<const std::byte> data;
    tensor_generator generate;

    /// @pre The size fits 64 bits.
    [[nodiscard]] std::uint64_t bytes() const noexcept {
        std::uint64_t n = bits(type);
        for (const std::uint64_t extent : shape) {
            n *= extent;
        }
        return ceil_div(n, 8);
    }
};

namespace detail {

/// A new file under a temporary name, which gets its own name in `commit`; without it nothing is left behind.
class output_file {
public:
    explicit output_file(const std::filesystem::path& path) : path_(path.string()), partial_(path_ + ".partial") {
        descriptor_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        if (descriptor_ < 0) {
            throw io_error(partial_ + ": cannot be created: " + system_text(errno));
        }
    }
    output_file(output_file&&) = delete;

    ~output_file() {
        if (descriptor_ >= 0) {
            ::close(descriptor_);
            ::unlink(partial_.c_str());
        }
    }

    void write(std::span<const std::byte> data) {
        while (!data.empty()) {
            const ssize_t done = ::write(descriptor_, data.data(), data.size());
            if (done < 0 && errno == EINTR) {
                continue;
            }
            if (done < 0) {
                throw io_error(partial_ + ": cannot be written: " + system_text(errno));
            }
            data = data.subspan(static_cast<std::size_t>(done));
        }
    }

    void commit() {
        const bool closed = ::close(std::exchange(descriptor_, -1)) == 0;
        if (!closed || ::rename(partial_.c_str(), path_.c_str()) != 0) {
            const int problem = errno;
            ::unlink(partial_.c_str());
            throw io_error(path_ + ": cannot be written: " + system_text(problem));
        }
    }

private:
    std::string path_, partial_;
    int descriptor_ = -1;
};

inline void check_writable(const std::string& path, std::span<const tensor_to_write> tensors) {
    std::unordered_set<std::string_view> names;
    for (const tensor_to_write& t : tensors) {
        if (t.name == "__metadata__" || !names.insert(t.name).second) {
            throw configuration_error(path + ": the tensor name " + in_quotes(t.name) + " is reserved or given twice");
        }
        if (!t.generate && t.data.size() != t.bytes()) {
            throw configuration_error(path + ": tensor " + in_quotes(t.name) + " takes " + std::to_string(t.bytes()) + " bytes, " +
                                      std::to_string(t.data.size()) + " are given");
        }
    }
}

/// The header with its length in front, padded with spaces so that the data begins at a multiple of 8.
inline std::string safetensors_header(std::span<const tensor_to_write> tensors, const std::map<std::string, std::string>& metadata) {
    std::string text = "{";
    if (!metadata.empty()) {
        text += "\"__metadata__\":" + nlohmann::json(metadata).dump();
    }
    std::uint64_t offset = 0;
    for (const tensor_to_write& t : tensors) {
        text += text.size() > 1 ? "," : "";
        text += nlohmann::json(t.name).dump() + ":{\"dtype\":\"" + std::string(name(t.type)) +
                "\",\"shape\":" + nlohmann::json(t.shape).dump() + ",\"data_offsets\":[" + std::to_string(offset) + "," +
                std::to_string(offset + t.bytes()) + "]}";
        offset += t.bytes();
    }
    text += '}';
    text.resize(round_up(text.size(), 8), ' ');
    std::string length(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) {
        length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
    }
    return length + text;
}

}  // namespace detail

/// Writes `tensors` to `path`, their data in the order given. The file gets its name when it is whole; 8 MiB are held at most.
/// @return size of the file. @throws configuration_error for duplicate names or sizes that do not fit; io_error.
inline std::uint64_t write_safetensors(const std::filesystem::path& path, std::span<const tensor_to_write> tensors,
                                       const std::map<std::string, std::string>& metadata = {}) {
    detail::check_writable(path.string(), tensors);
    detail::output_file file(path);
    const std::string header = detail::safetensors_header(tensors, metadata);
    file.write(std::as_bytes(std::span(header)));
    std::uint64_t size = header.size();
    std::vector<std::byte> window;
    for (const tensor_to_write& t : tensors) {
        const std::uint64_t bytes = t.bytes();
        size += bytes;
        if (!t.generate) {
            file.write(t.data);
            continue;
        }
        for (std::uint64_t offset = 0; offset < bytes; offset += window.size()) {
            window.resize(std::min<std::uint64_t>(bytes - offset, 8u << 20));
            t.generate(window, offset);
            file.write(window);
        }
    }
    file.commit();
    return size;
}

/// Writes `tensors` as a model directory: shards of at most `shard_bytes` of data each (a larger tensor gets one of its own), named
/// model-00001-of-0000N.safetensors, with their index; one shard is model.safetensors and needs no index. @throws as write_safetensors.
inline void write_sharded(const std::filesystem::path& directory, std::span<const tensor_to_write> tensors, std::uint64_t shard_bytes) {
    detail::check_writable(directory.string(), tensors);
    std::vector<std::size_t> ends;
    std::uint64_t filled = 0, total = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const std::uint64_t bytes = tensors[i].bytes();
        if (filled != 0 && filled + bytes > shard_bytes) {
            ends.push_back(i);
            filled = 0;
        }
        filled += bytes;
        total += bytes;
    }
    ends.push_back(tensors.size());
    std::error_code ignored;  // what matters is whether the files can be created, and that says why
    std::filesystem::create_directories(directory, ignored);
    nlohmann::json weight_map = nlohmann::json::object();
    for (std::size_t shard = 0, first = 0; shard < ends.size(); first = ends[shard++]) {
        char file[64] = "model.safetensors";
        if (ends.size() > 1) {
            std::snprintf(file, sizeof file, "model-%05zu-of-%05zu.safetensors", shard + 1, ends.size());
        }
        const std::span<const tensor_to_write> part = tensors.subspan(first, ends[shard] - first);
        write_safetensors(directory / file, part, {{"format", "pt"}});
        for (const tensor_to_write& t : part) {
            weight_map[t.name] = file;
        }
    }
    if (ends.size() > 1) {
        const nlohmann::json index{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}};
        detail::output_file file(directory / "model.safetensors.index.json");
        const std::string text = index.dump(2);
        file.write(std::as_bytes(std::span(text)));
        file.commit();
    }
}

}  // namespace penstock::inline v0_1

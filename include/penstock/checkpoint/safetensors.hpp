#pragma once

#include <penstock/buffer/host_cores.hpp>
#include <penstock/checkpoint/safetensors_writer.hpp>
#include <penstock/checkpoint/text.hpp>
#include <penstock/checkpoint/work_in_order.hpp>
#include <penstock/model/tensor.hpp>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <vector>

/// The header of a safetensors file, read strictly: every byte of the data belongs to exactly one tensor, or the file is refused.

namespace penstock::inline v0_1 {

/// The header of one file. No tensor data is in memory.
struct safetensors_file {
    std::filesystem::path path;
    std::vector<tensor_info> tensors;  ///< in the order of their data; `file` is 0, `offset` counts from the start of the file
    std::map<std::string, std::string> metadata;
    std::uint64_t bytes = 0;  ///< size of the file
};

/// Longest header that the format allows, in bytes (decimal on purpose).
inline constexpr std::uint64_t max_safetensors_header = 100'000'000;

/// Bytes of `shape` elements of `type`. The product is formed from left to right and checked, so a huge prefix is refused even before a 0.
/// Nothing where it does not fit 64 bits or does not end on a byte border.
[[nodiscard]] constexpr std::optional<std::uint64_t> tensor_bytes(dtype type, std::span<const std::uint64_t> shape) noexcept {
    std::uint64_t product = 1;
    const auto times = [&product](std::uint64_t factor) {
        if (factor != 0 && product > std::numeric_limits<std::uint64_t>::max() / factor) {
            return false;
        }
        product *= factor;
        return true;
    };
    for (const std::uint64_t extent : shape) {
        if (!times(extent)) {
            return std::nullopt;
        }
    }
    if (!times(bits(type)) || product % 8 != 0) {
        return std::nullopt;
    }
    return product / 8;
}

namespace detail {

[[nodiscard]] inline std::string shape_text(std::span<const std::uint64_t> shape) {
    std::string text = "[";
    for (std::size_t i = 0; i < shape.size(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    }
    return text += ']';
}

/// Events of a header's JSON. While it runs a tensor's `offset` and `bytes` hold BEGIN and END of data_offsets.
class safetensors_events final : public strict_events {
public:
    safetensors_events(const std::string& path, safetensors_file& file) : strict_events(path, "its header "), file_(file) {}

    bool start_object(std::size_t) override {
        switch (place_) {
            case place::start: place_ = place::header; return true;
            case place::header:
                if (key_ == "__metadata__") {
                    if (std::exchange(metadata_seen_, true)) {
                        fail("__metadata__ occurs twice in the header");
                    }
                    place_ = place::metadata;
                } else {
                    file_.tensors.push_back({.name = key_, .type = dtype::u8, .shape = {}, .file = 0, .offset = 0, .bytes = 0});
                    has_dtype_ = has_shape_ = has_offsets_ = false;
                    place_ = place::tensor;
                }
                return true;
            default: return nested("an object");
        }
    }

    bool start_array(std::size_t) override {
        if (place_ == place::tensor && key_ == "shape") {
            once(has_shape_);
            extents_.clear();
            place_ = place::shape;
            return true;
        }
        if (place_ == place::tensor && key_ == "data_offsets") {
            once(has_offsets_);
            offsets_ = 0;
            place_ = place::offsets;
            return true;
        }
        return nested("an array");
    }

    bool key(string_t& name) override {
        if (place_ != place::skipped) {
            key_ = name;  // a copy: the parser goes on with the memory of `name`, and would have to get some anew each time
        }
        return true;
    }

    bool string(string_t& text) override {
        if (place_ == place::metadata) {
            if (!file_.metadata.emplace(key_, std::move(text)).second) {
                fail("__metadata__ has the key " + in_quotes(key_) + " twice");
            }
            return true;
        }
        if (place_ == place::tensor && key_ == "dtype") {
            once(has_dtype_);
            const std::optional<dtype> type = parse_dtype(text);
            if (!type) {
                fail("tensor " + in_quotes(tensor().name) + " is of the unknown dtype " + in_quotes(std::string_view(text).substr(0, 40)));
            }
            tensor().type = *type;
            return true;
        }
        return strict_events::string(text);
    }

    bool number_unsigned(number_unsigned_t value) override {
        if (place_ == place::shape) {
            extents_.push_back(value);
            return true;
        }
        if (place_ == place::offsets && offsets_ < 2) {
            (offsets_++ == 0 ? tensor().offset : tensor().bytes) = value;
            return true;
        }
        return strict_events::number_unsigned(value);
    }

    bool end_object() override {
        switch (place_) {
            case place::skipped: leave(); break;
            case place::tensor:
                if (!has_dtype_ || !has_shape_ || !has_offsets_) {
                    fail("tensor " + in_quotes(tensor().name) + " has no " +
                         (!has_dtype_   ? "dtype"
                          : !has_shape_ ? "shape"
                                        : "data_offsets"));
                }
                place_ = place::header;
                break;
            default: place_ = place::header; break;
        }
        return true;
    }

    bool end_array() override {
        if (place_ == place::skipped) {
            leave();
            return true;
        }
        if (place_ == place::offsets && offsets_ != 2) {
            fail("tensor " + in_quotes(tensor().name) + " has " + std::to_string(offsets_) + " data_offsets, 2 are wanted");
        }
        if (place_ == place::shape) {
            tensor().shape = extents_;  // as much memory as it takes
        }
        place_ = place::tensor;
        return true;
    }

private:
    enum class place : std::uint8_t { start, header, metadata, tensor, shape, offsets, skipped };

    tensor_info& tensor() { return file_.tensors.back(); }

    void once(bool& seen) {
        if (std::exchange(seen, true)) {
            fail("tensor " + in_quotes(tensor().name) + " has " + key_ + " twice");
        }
    }

    [[nodiscard]] bool in_unknown_field() const {
        return place_ == place::tensor && key_ != "dtype" && key_ != "shape" && key_ != "data_offsets";
    }

    /// Other fields of a tensor are legal and mean nothing, whatever they hold.
    bool nested(const char* what) {
        if (place_ == place::skipped || in_unknown_field()) {
            ++depth_;
            place_ = place::skipped;
            return true;
        }
        return unexpected(what);
    }

    void leave() {
        if (--depth_ == 0) {
            place_ = place::tensor;
        }
    }

    bool unexpected(const std::string& found) override {
        switch (place_) {
            case place::skipped: return true;
            case place::start: fail("the header is " + found + ", an object is wanted");
            case place::header:
                fail((key_ == "__metadata__" ? key_ : "tensor " + in_quotes(key_)) + " is " + found +
                     " in the header, an object is wanted");
            case place::metadata: fail("__metadata__ holds " + found + " under " + in_quotes(key_) + ", only strings are allowed");
            case place::shape:
                fail("tensor " + in_quotes(tensor().name) + " has " + found + " in its shape, whole numbers from 0 are wanted");
            case place::offsets:
                fail("tensor " + in_quotes(tensor().name) + " has " + found + " in its data_offsets, two whole numbers from 0 are wanted");
            case place::tensor:
                if (in_unknown_field()) {
                    return true;
                }
                fail("tensor " + in_quotes(tensor().name) + " has " + found + " as its " + key_ + ", " +
                     (key_ == "dtype" ? "a string is wanted" : "an array is wanted"));
        }
        return false;
    }

    safetensors_file& file_;
    place place_ = place::start;
    std::string key_;
    std::vector<std::uint64_t> extents_;
    std::size_t depth_ = 0;
    int offsets_ = 0;
    bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false, metadata_seen_ = false;
};

/// What a file that is no safetensors file looks like, or nothing.
[[nodiscard]] inline std::string other_kind(std::string_view first) {
    constexpr std::pair<std::string_view, const char*> known[] = {
        {"version https://git-lfs", "a git-lfs pointer: the weights themselves were not fetched (git lfs pull)"},
        {"<", "an HTML or XML page: the download answered with a web page"},
        {"PK\x03\x04", "a zip archive, as PyTorch's .bin, .pt and .ckpt files are"},
        {"\x80\x02", "a Python pickle, as older PyTorch files are"},
        {"GGUF", "a GGUF file"},
        {"{", "plain JSON text"},
        {"\x1f\x8b", "a gzip archive"},
    };
    for (const auto& [start, what] : known) {
        if (first.starts_with(start)) {
            return std::string("; it looks like ") + what;
        }
    }
    return {};
}

/// Reads the length and the header's text. Nothing is allocated before the length has been checked against limit and file.
[[nodiscard]] inline std::string safetensors_header_text(const std::string& path, const input_file& file) {
    const std::uint64_t size = file.size();
    char first[64] = {};
    file.read(0, std::span<char>(first, std::min<std::uint64_t>(size, sizeof first)));
    const auto refuse = [&](const std::string& problem) -> void {
        throw format_error(path + ": does not look like safetensors: " + problem +
                           other_kind(std::string_view(first, std::min<std::uint64_t>(size, sizeof first))));
    };
    if (size < 8) {
        refuse("the file holds " + std::to_string(size) + " bytes, the length of the header alone takes 8");
    }
    std::uint64_t length = 0;
    for (int i = 7; i >= 0; --i) {
        length = length << 8 | static_cast<unsigned char>(first[i]);
    }
    if (length > max_safetensors_header) {
        refuse("its first 8 bytes announce a header of " + std::to_string(length) + " bytes, " + std::to_string(max_safetensors_header) +
               " is the limit");
    }
    if (length > size - 8) {
        refuse("its first 8 bytes announce a header of " + std::to_string(length) + " bytes, but " + std::to_string(size - 8) +
               " bytes follow (" + std::to_string(length - (size - 8)) + " missing: an interrupted download?)");
    }
    if (length == 0) {
        refuse("its header is empty");
    }
    std::string text(length, '\0');
    file.read(8, text);
    if (text[0] != '{') {
        refuse("its header begins with " + in_quotes(std::string_view(text).substr(0, 1)) + ", and must begin with \"{\"");
    }
    // The parser takes a NUL for the end of the text, so what follows one would never be looked at.
    if (const std::size_t nul = text.find('\0'); nul != std::string::npos) {
        throw format_error(path + ": byte " + std::to_string(nul) + " of the header is NUL; a header may be padded with spaces only");
    }
    return text;
}

/// Checks sizes, order, holes and overlaps; turns BEGIN and END into offset from the start of the file and bytes.
inline void place_tensors(safetensors_file& file, std::uint64_t data_start) {
    const std::string path = file.path.string();
    const std::uint64_t data = file.bytes - data_start;
    std::vector<tensor_info>& tensors = file.tensors;
    std::vector<std::string_view> names;
    names.reserve(tensors.size());
    for (const tensor_info& t : tensors) {
        names.push_back(t.name);
    }
    std::sort(names.begin(), names.end());
    if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end()) {
        throw format_error(path + ": tensor " + in_quotes(*twice) + " occurs twice in the header");
    }
    const auto in_order = [](const tensor_info& a, const tensor_info& b) {
        return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes;
    };
    if (!std::is_sorted(tensors.begin(), tensors.end(), in_order)) {  // most are
        std::stable_sort(tensors.begin(), tensors.end(), in_order);
    }
    std::uint64_t reached = 0;
    const tensor_info* before = nullptr;
    for (tensor_info& t : tensors) {
        const std::uint64_t begin = t.offset, end = t.bytes;
        const auto refuse = [&](const std::string& problem) -> void {
            throw format_error(path + ": tensor " + in_quotes(t.name) + " " + problem);
        };
        if (end < begin) {
            refuse("ends at byte " + std::to_string(end) + " of the data, before it begins at " + std::to_string(begin));
        }
        const std::optional<std::uint64_t> wanted = tensor_bytes(t.type, t.shape);
        const auto kind = [&t] { return std::string(name(t.type)) + " " + shape_text(t.shape); };
        if (!wanted) {
            refuse("is " + kind() + ": its size does not fit 64 bits or does not end on a byte border");
        }
        if (*wanted != end - begin) {
            refuse("is " + kind() + ", which takes " + std::to_string(*wanted) + " bytes, but its data_offsets give it " +
                   std::to_string(end - begin));
        }
        if (begin != reached) {
            refuse("begins at byte " + std::to_string(begin) + " of the data, " +
                   (before == nullptr ? "where the first tensor must begin at 0"
                                      : (begin < reached ? "inside tensor " : "after a hole that follows tensor ") +
                                            in_quotes(before->name) + ", which ends at " + std::to_string(reached)));
        }
        if (end > data) {
            refuse("ends at byte " + std::to_string(end) + " of the data, but the file holds " + std::to_string(data) + " (" +
                   std::to_string(end - data) + " missing: an interrupted download?)");
        }
        reached = end;
        before = &t;
        t.offset = data_start + begin;
        t.bytes = end - begin;
    }
    if (reached != data) {
        throw format_error(path + ": its tensors end at byte " + std::to_string(reached) + " of the data, but the file holds " +
                           std::to_string(data) + " (" + std::to_string(data - reached) + " bytes belong to no tensor)");
    }
}

}  // namespace detail

/// Reads and checks the header of a safetensors file; of the data only its length is looked at.
/// @throws io_error where the file cannot be read; format_error where it does not follow the format, naming file and tensor.
/// A header must begin with "{" (blank space before it is refused) and may end in blank space. Duplicate names are refused.
[[nodiscard]] inline safetensors_file read_safetensors_header(const std::filesystem::path& path) {
    const detail::input_file input(path);
    const std::string text = detail::safetensors_header_text(path.string(), input);
    safetensors_file file{.path = path, .tensors = {}, .metadata = {}, .bytes = input.size()};
    detail::safetensors_events events(path.string(), file);
    nlohmann::json::sax_parse(text, &events);
    detail::place_tensors(file, 8 + text.size());
    return file;
}

/// The headers of several files, in the order of `paths`, as `read_safetensors_header` reads them: by as many threads as there are cores for,
/// 16 at most, that end before this returns; a few files are read by the calling thread alone.
/// @throws as read_safetensors_header: the exception of the first file, in the order of `paths`, that has a fault.
[[nodiscard]] inline std::vector<safetensors_file> read_safetensors_headers(std::span<const std::filesystem::path> paths) {
    const std::size_t most = std::min<std::size_t>(paths.size() / 2, 16);  // one header is soon read: a thread takes two at least
    std::vector<safetensors_file> files(paths.size());
    detail::work_in_order(paths.size(), most > 1 ? std::min<std::size_t>(most, usable_cores()) : 1,
                          [&](std::size_t i) { files[i] = read_safetensors_header(paths[i]); });
    return files;
}

/// Bytes [offset, offset + bytes) of the file of a tensor.
struct byte_range {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
};

/// Where rows [first, first + count) of the outermost dimension lie.
/// @throws configuration_error for a scalar, rows out of range, or rows of F4 or F6 elements that do not begin and end on byte borders.
[[nodiscard]] inline byte_range rows_of(const tensor_info& t, std::uint64_t first, std::uint64_t count) {
    const std::string rows =
        "rows " + std::to_string(first) + " to " + std::to_string(first + count) + " of tensor " + detail::in_quotes(t.name);
    if (t.shape.empty() || first > t.shape[0] || count > t.shape[0] - first) {
        throw configuration_error(rows + ", which is " + detail::shape_text(t.shape));
    }
    std::uint64_t row_bits = bits(t.type);
    for (std::size_t i = 1; i < t.shape.size(); ++i) {
        row_bits *= t.shape[i];
    }
    if (first * row_bits % 8 != 0 || count * row_bits % 8 != 0) {
        throw configuration_error(rows + " do not lie on byte borders: a row is " + std::to_string(row_bits) + " bits of " +
                                  std::string(name(t.type)));
    }
    return {t.offset + first * row_bits / 8, count * row_bits / 8};
}

}  // namespace penstock::inline v0_1

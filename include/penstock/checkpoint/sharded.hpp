#pragma once

#include <penstock/checkpoint/safetensors.hpp>

#include <optional>
#include <unordered_map>

/// A checkpoint: one safetensors file, or the shards that an index names. Only headers are read.

namespace penstock::inline v0_1 {

/// What to do with tensors that a shard holds and the index does not list.
enum class unlisted : std::uint8_t {
    leave_out,  ///< the index is the authority; `checkpoint::unlisted_tensors` names them
    include     ///< they count as if listed
};

namespace detail {

/// Events of model.safetensors.index.json. Only weight_map matters: total_size and the rest are informational and often wrong.
class index_events final : public strict_events {
public:
    struct entry {
        std::string tensor, file;
    };

    explicit index_events(const std::string& path) : strict_events(path) {}

    std::vector<entry> entries;
    bool has_map = false;

    bool start_object(std::size_t) override {
        switch (place_) {
            case place::start: place_ = place::top; return true;
            case place::top:
                if (key_ == "weight_map") {
                    if (std::exchange(has_map, true)) {
                        fail("weight_map occurs twice");
                    }
                    place_ = place::map;
                    return true;
                }
                [[fallthrough]];
            case place::skipped:
                ++depth_;
                place_ = place::skipped;
                return true;
            case place::map: break;
        }
        return unexpected("an object");
    }

    bool start_array(std::size_t) override {
        if (place_ == place::skipped || (place_ == place::top && key_ != "weight_map")) {
            ++depth_;
            place_ = place::skipped;
            return true;
        }
        return unexpected("an array");
    }

    bool key(string_t& name) override {
        if (place_ != place::skipped) {
            key_ = std::move(name);
        }
        return true;
    }

    bool string(string_t& text) override {
        if (place_ == place::map) {
            entries.push_back({key_, std::move(text)});
            return true;
        }
        return strict_events::string(text);
    }

    bool end_object() override { return leave(); }
    bool end_array() override { return leave(); }

private:
    enum class place : std::uint8_t { start, top, map, skipped };

    bool leave() {
        if (place_ == place::map || (place_ == place::skipped && --depth_ == 0)) {
            place_ = place::top;
        }
        return true;
    }

    bool unexpected(const std::string& found) override {
        if (place_ == place::start) {
            fail("is " + found + ", an object with a weight_map is wanted");
        }
        if (place_ == place::map) {
            fail("weight_map gives " + found + " for tensor " + in_quotes(key_) + ", the name of a shard is wanted");
        }
        if (place_ == place::top && key_ == "weight_map") {
            fail("weight_map is " + found + ", an object of tensor names and shards is wanted");
        }
        return true;
    }

    place place_ = place::start;
    std::string key_;
    std::size_t depth_ = 0;
};

/// M of a name like "model-00001-of-0000M.safetensors", else 0.
[[nodiscard]] inline std::uint64_t shard_count(std::string_view file) {
    constexpr std::string_view ending = ".safetensors", of = "-of-", digits = "0123456789";
    if (!file.ends_with(ending)) {
        return 0;
    }
    file.remove_suffix(ending.size());
    const std::size_t at = file.rfind(of);
    if (at == std::string_view::npos || at == 0 || digits.find(file[at - 1]) == std::string_view::npos) {
        return 0;
    }
    const std::string_view count = file.substr(at + of.size());
    if (count.empty() || count.size() > 9 || count.find_first_not_of(digits) != std::string_view::npos) {
        return 0;
    }
    return std::stoull(std::string(count));
}

/// Names of the regular files (or links to some) of a directory, sorted. @throws io_error
[[nodiscard]] inline std::vector<std::string> files_in(const std::filesystem::path& directory) {
    std::vector<std::string> names;
    std::error_code problem;
    for (std::filesystem::directory_iterator it(directory, problem), end; !problem && it != end; it.increment(problem)) {
        std::error_code dangling;
        if (!it->is_directory(dangling)) {
            names.push_back(it->path().filename().string());
        }
    }
    if (problem) {
        throw io_error(directory.string() + ": cannot be listed: " + problem.message());
    }
    std::sort(names.begin(), names.end());
    return names;
}

struct text_hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
};

}  // namespace detail

/// The tensors of a checkpoint and where their bytes lie. A value: it holds no open file.
class checkpoint {
public:
    /// Opens a .safetensors file, an index (*.safetensors.index.json), or a directory. In a directory the index decides which files are
    /// read, model.safetensors.index.json before another; without one, model.safetensors or the only .safetensors file.
    /// @throws io_error for missing or unreadable files, listing every missing shard; format_error where a file does not follow its format or
    /// index and shards disagree; configuration_error for a directory from which the files cannot be told.
    [[nodiscard]] static checkpoint open(const std::filesystem::path& path, unlisted rest = unlisted::leave_out) {
        std::error_code problem;
        const std::filesystem::file_status status = std::filesystem::status(path, problem);
        if (!std::filesystem::exists(status)) {
            throw io_error(path.string() + ": cannot be opened: " + (problem ? problem.message() : detail::system_text(ENOENT)));
        }
        if (std::filesystem::is_directory(status)) {
            return open_directory(path, rest);
        }
        if (path.string().ends_with(".index.json")) {
            return open_index(path, rest);
        }
        return open_files({path});
    }

    /// Opens files that together are one checkpoint without an index; their order does not matter.
    /// @throws as `open`; format_error naming tensor and both files where two files hold the same name.
    [[nodiscard]] static checkpoint open_files(const std::vector<std::filesystem::path>& files) {
        checkpoint result;
        result.root_ = files.size() == 1 ? files[0] : files.empty() ? std::filesystem::path() : files[0].parent_path();
        for (const std::filesystem::path& file : files) {
            result.add(read_safetensors_header(file));
        }
        return result;
    }

    /// Every tensor with its place: files in the order of their names, in each file the order of the data.
    [[nodiscard]] const tensor_list& all() const noexcept { return list_; }

    /// The tensor of that name, or nullptr. Constant time.
    [[nodiscard]] const tensor_info* find(std::string_view name) const {
        const auto it = by_name_.find(name);
        return it == by_name_.end() ? nullptr : &list_.tensors[it->second];
    }

    /// config.json of the directory, or nothing where there is none or single files were opened. Read and parsed on each call.
    /// @throws io_error, format_error naming the file.
    [[nodiscard]] std::optional<nlohmann::json> config() const {
        std::error_code ignored;
        if (directory_.empty() || !std::filesystem::exists(directory_ / "config.json", ignored)) {
            return std::nullopt;
        }
        const std::filesystem::path path = directory_ / "config.json";
        try {
            std::optional<nlohmann::json> parsed(nlohmann::json::parse(detail::read_text(path)));
            if (!parsed->is_object()) {
                throw format_error(path.string() + ": is " + parsed->type_name() + ", an object is wanted");
            }
            return parsed;
        } catch (const nlohmann::json::exception& problem) {
            throw format_error(path.string() + ": is not valid JSON: " + detail::parse_text(problem));
        }
    }

    /// What was opened, for messages.
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return root_; }

    /// Tensors in the headers of the shards that the index does not list.
    [[nodiscard]] const std::vector<std::string>& unlisted_tensors() const noexcept { return unlisted_; }

    /// Numbered shards (…-00002-of-00003.safetensors) that lie in the directory and that the index leaves out.
    [[nodiscard]] std::vector<std::filesystem::path> unreferenced_files() const {
        std::vector<std::filesystem::path> result;
        if (directory_.empty()) {
            return result;
        }
        for (const std::string& name : detail::files_in(directory_)) {
            const std::filesystem::path file = directory_ / name;
            if (detail::shard_count(name) != 0 && std::find(list_.files.begin(), list_.files.end(), file) == list_.files.end()) {
                result.push_back(file);
            }
        }
        return result;
    }

private:
    checkpoint() = default;

    static checkpoint open_directory(const std::filesystem::path& directory, unlisted rest) {
        std::vector<std::string> indexes, files;
        for (const std::string& name : detail::files_in(directory)) {
            if (name.ends_with(".safetensors.index.json")) {
                indexes.push_back(name);
            } else if (name.ends_with(".safetensors")) {
                files.push_back(name);
            }
        }
        if (const std::string& index = preferred(indexes, "model.safetensors.index.json"); !index.empty()) {
            checkpoint result = open_index(directory / index, rest);
            result.root_ = directory;
            return result;
        }
        const std::string& file = indexes.empty() ? preferred(files, "model.safetensors") : std::string();
        if (file.empty() || detail::shard_count(file) > 1) {
            throw configuration_error(
                directory.string() + ": cannot tell which files make up the model: " + std::to_string(indexes.size()) +
                " *.safetensors.index.json and " + std::to_string(files.size()) +
                " .safetensors files; wanted is model.safetensors.index.json, one other index, model.safetensors, or one "
                ".safetensors file that is not part of a set");
        }
        checkpoint result = open_files({directory / file});
        result.root_ = result.directory_ = directory;
        return result;
    }

    /// The usual name if it is there, else the only name, else nothing.
    static std::string preferred(const std::vector<std::string>& names, const char* usual) {
        if (std::find(names.begin(), names.end(), usual) != names.end()) {
            return usual;
        }
        return names.size() == 1 ? names[0] : std::string();
    }

    static checkpoint open_index(const std::filesystem::path& index, unlisted rest) {
        const std::string where = index.string();
        detail::index_events events(where);
        nlohmann::json::sax_parse(detail::read_text(index), &events);
        if (events.entries.empty()) {
            throw format_error(where + (events.has_map ? ": its weight_map is empty" : ": has no weight_map"));
        }
        checkpoint result;
        result.root_ = index;
        result.directory_ = index.parent_path();
        std::map<std::string, std::uint32_t> shards;
        for (const auto& [tensor, file] : events.entries) {
            check_shard_name(where, tensor, file);
            shards.emplace(file, 0);
        }
        std::string missing;
        for (const auto& [file, number] : shards) {
            std::error_code problem;
            if (!std::filesystem::exists(result.directory_ / file, problem)) {
                missing += (missing.empty() ? "" : ", ") + file;
            }
        }
        if (!missing.empty()) {
            throw io_error(where + ": names shards that are not there: " + missing);
        }
        for (auto& [file, number] : shards) {
            number = static_cast<std::uint32_t>(result.list_.files.size());
            result.add(read_safetensors_header(result.directory_ / file));
        }
        result.keep_listed(where, events.entries, shards, rest);
        return result;
    }

    /// A shard lies in the directory of its index: its name is a file name and nothing else. (A link may point elsewhere: caches do that.)
    static void check_shard_name(const std::string& where, const std::string& tensor, const std::string& file) {
        if (file.empty() || file == "." || file == ".." || file.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
            throw format_error(where + ": weight_map names the shard " + detail::in_quotes(file) + " for tensor " +
                               detail::in_quotes(tensor) + ", a file name without a path is wanted");
        }
    }

    /// Appends the tensors of one more file.
    void add(safetensors_file file) {
        const auto number = static_cast<std::uint32_t>(list_.files.size());
        list_.files.push_back(std::move(file.path));
        for (tensor_info& t : file.tensors) {
            const auto [it, fresh] = by_name_.emplace(t.name, list_.tensors.size());
            if (!fresh) {
                throw format_error("tensor " + detail::in_quotes(t.name) + " is in two files: " +
                                   list_.files[list_.tensors[it->second].file].string() + " and " + list_.files.back().string());
            }
            t.file = number;
            list_.tensors.push_back(std::move(t));
        }
    }

    /// Checks the index against the headers, then leaves out what it does not list.
    void keep_listed(const std::string& where, const std::vector<detail::index_events::entry>& entries,
                     const std::map<std::string, std::uint32_t>& shards, unlisted rest) {
        std::vector<bool> listed(list_.tensors.size(), false);
        for (const auto& [tensor, file] : entries) {
            const auto it = by_name_.find(tensor);
            if (it == by_name_.end() || list_.tensors[it->second].file != shards.at(file)) {
                throw format_error(
                    where + ": maps tensor " + detail::in_quotes(tensor) + " to " + file + ", whose header does not hold it" +
                    (it == by_name_.end() ? std::string()
                                          : ", but that of " + list_.files[list_.tensors[it->second].file].filename().string() + " does"));
            }
            if (listed[it->second]) {
                throw format_error(where + ": lists tensor " + detail::in_quotes(tensor) + " twice");
            }
            listed[it->second] = true;
        }
        if (entries.size() == list_.tensors.size()) {
            return;
        }
        std::vector<tensor_info> kept;
        for (std::size_t i = 0; i < listed.size(); ++i) {
            tensor_info& t = list_.tensors[i];
            if (!listed[i]) {
                unlisted_.push_back(t.name);
            }
            if (listed[i] || rest == unlisted::include) {
                by_name_.find(t.name)->second = kept.size();
                kept.push_back(std::move(t));
            } else {
                by_name_.erase(t.name);
            }
        }
        list_.tensors = std::move(kept);
    }

    std::filesystem::path root_, directory_;
    tensor_list list_;
    std::unordered_map<std::string, std::size_t, detail::text_hash, std::equal_to<>> by_name_;
    std::vector<std::string> unlisted_;
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/checkpoint/name_table.hpp>
#include <penstock/checkpoint/safetensors.hpp>

#include <algorithm>
#include <numeric>
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

struct text_hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
};

/// Events of model.safetensors.index.json. Only weight_map matters: total_size and the rest are informational and often wrong.
class index_events final : public strict_events {
public:
    /// A line of weight_map: its tensor's name is a part of `names`, its file one of `files`.
    struct entry {
        std::uint64_t begin = 0;
        std::uint32_t length = 0;
        std::uint32_t file = 0;
    };

    /// @param bytes of text: names are not longer together
    index_events(const std::string& path, std::size_t bytes) : strict_events(path) { names.reserve(bytes); }

    [[nodiscard]] std::string_view tensor(const entry& e) const { return std::string_view(names).substr(e.begin, e.length); }

    std::string names;               ///< one after another: the memory of 100,000 strings takes longer to get than their text to read
    std::vector<std::string> files;  ///< as they occur first
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
            key_ = name;  // a copy leaves the parser the memory of `name`
        }
        return true;
    }

    bool string(string_t& text) override {
        if (place_ == place::map) {
            entries.push_back({names.size(), static_cast<std::uint32_t>(key_.size()), file_number(text)});
            names += key_;
            return true;
        }
        return strict_events::string(text);
    }

    bool end_object() override { return leave(); }
    bool end_array() override { return leave(); }

private:
    enum class place : std::uint8_t { start, top, map, skipped };

    std::uint32_t file_number(const std::string& file) {
        auto it = numbers_.find(file);
        if (it == numbers_.end()) {
            it = numbers_.emplace(file, static_cast<std::uint32_t>(files.size())).first;
            files.push_back(file);
        }
        return it->second;
    }

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

    std::unordered_map<std::string, std::uint32_t, text_hash, std::equal_to<>> numbers_;
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
        result.take(read_safetensors_headers(files));
        return result;
    }

    /// Every tensor with its place: files in the order of their names, in each file the order of the data.
    [[nodiscard]] const tensor_list& all() const noexcept { return list_; }

    /// The tensor of that name, or nullptr. Constant time.
    [[nodiscard]] const tensor_info* find(std::string_view name) const {
        const std::optional<std::size_t> at = by_name_.find(list_.tensors, name);
        return at ? &list_.tensors[*at] : nullptr;
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
        const std::string text = detail::read_text(index);
        detail::index_events events(where, text.size());
        nlohmann::json::sax_parse(text, &events);
        if (events.entries.empty()) {
            throw format_error(where + (events.has_map ? ": its weight_map is empty" : ": has no weight_map"));
        }
        check_shard_names(where, events);
        std::vector<std::uint32_t> by_name(events.files.size());
        std::iota(by_name.begin(), by_name.end(), 0u);
        std::sort(by_name.begin(), by_name.end(), [&](std::uint32_t a, std::uint32_t b) { return events.files[a] < events.files[b]; });
        checkpoint result;
        result.root_ = index;
        result.directory_ = index.parent_path();
        std::vector<std::filesystem::path> paths;
        std::vector<std::uint32_t> numbers(by_name.size());  // of a file of `events` among `paths`
        for (const std::uint32_t file : by_name) {
            numbers[file] = static_cast<std::uint32_t>(paths.size());
            paths.push_back(result.directory_ / events.files[file]);
        }
        try {
            result.take(read_safetensors_headers(paths));
        } catch (const error&) {
            check_that_all_are_there(where, paths);
            throw;
        }
        result.keep_listed(where, events, numbers, rest);
        return result;
    }

    /// A shard lies in the directory of its index: its name is a file name and nothing else. (A link may point elsewhere: caches do that.)
    static void check_shard_names(const std::string& where, const detail::index_events& index) {
        for (std::uint32_t i = 0; i < index.files.size(); ++i) {
            const std::string& file = index.files[i];
            if (file.empty() || file == "." || file == ".." || file.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
                const auto first = std::find_if(index.entries.begin(), index.entries.end(), [i](const auto& e) { return e.file == i; });
                throw format_error(where + ": weight_map names the shard " + detail::in_quotes(file) + " for tensor " +
                                   detail::in_quotes(index.tensor(*first)) + ", a file name without a path is wanted");
            }
        }
    }

    /// @throws io_error listing all that are missing.
    static void check_that_all_are_there(const std::string& where, const std::vector<std::filesystem::path>& paths) {
        std::string missing;
        for (const std::filesystem::path& path : paths) {
            std::error_code problem;
            if (!std::filesystem::exists(path, problem)) {
                missing += (missing.empty() ? "" : ", ") + path.filename().string();
            }
        }
        if (!missing.empty()) {
            throw io_error(where + ": names shards that are not there: " + missing);
        }
    }

    /// Takes the tensors of these files, one file after the other.
    void take(std::vector<safetensors_file> files) {
        std::size_t count = 0;
        for (const safetensors_file& file : files) {
            count += file.tensors.size();
        }
        list_.files.reserve(files.size());
        list_.tensors.reserve(count);
        by_name_ = detail::name_table(count);
        for (safetensors_file& file : files) {
            const auto number = static_cast<std::uint32_t>(list_.files.size());
            list_.files.push_back(std::move(file.path));
            for (tensor_info& t : file.tensors) {
                t.file = number;
                list_.tensors.push_back(std::move(t));
                if (const std::optional<std::size_t> other = by_name_.add(list_.tensors, list_.tensors.size() - 1)) {
                    throw format_error("tensor " + detail::in_quotes(list_.tensors.back().name) + " is in two files: " +
                                       list_.files[list_.tensors[*other].file].string() + " and " + list_.files.back().string());
                }
            }
        }
    }

    /// Checks the index against the headers, then leaves out what it does not list.
    /// @param numbers what each file of the index is among the files of this checkpoint
    void keep_listed(const std::string& where, const detail::index_events& index, const std::vector<std::uint32_t>& numbers,
                     unlisted rest) {
        std::vector<bool> listed(list_.tensors.size(), false);
        for (const detail::index_events::entry& entry : index.entries) {
            const std::string_view tensor = index.tensor(entry);
            const std::optional<std::size_t> at = by_name_.find(list_.tensors, tensor);
            if (!at || list_.tensors[*at].file != numbers[entry.file]) {
                throw format_error(
                    where + ": maps tensor " + detail::in_quotes(tensor) + " to " + index.files[entry.file] +
                    ", whose header does not hold it" +
                    (!at ? std::string() : ", but that of " + list_.files[list_.tensors[*at].file].filename().string() + " does"));
            }
            if (listed[*at]) {
                throw format_error(where + ": lists tensor " + detail::in_quotes(tensor) + " twice");
            }
            listed[*at] = true;
        }
        if (index.entries.size() == list_.tensors.size()) {
            return;
        }
        std::vector<tensor_info> kept;
        for (std::size_t i = 0; i < listed.size(); ++i) {
            tensor_info& t = list_.tensors[i];
            if (!listed[i]) {
                unlisted_.push_back(t.name);
            }
            if (listed[i] || rest == unlisted::include) {
                kept.push_back(std::move(t));
            }
        }
        list_.tensors = std::move(kept);
        by_name_ = detail::name_table(list_.tensors.size());
        for (std::size_t i = 0; i < list_.tensors.size(); ++i) {
            by_name_.add(list_.tensors, i);
        }
    }

    std::filesystem::path root_, directory_;
    tensor_list list_;
    detail::name_table by_name_;
    std::vector<std::string> unlisted_;
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/error.hpp>

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

/// Small files read whole, and how names from files are put into messages.

namespace penstock::inline v0_1::detail {

/// `text` between quotation marks, control characters as \u00XX: a name from a file must not steer a terminal.
[[nodiscard]] inline std::string in_quotes(std::string_view text) {
    std::string out = "\"";
    for (const char c : text) {
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
            char code[8];
            std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
            out += code;
        } else {
            out += c;
        }
    }
    return out += '"';
}

/// What `error_code` means, in the words of the operating system.
[[nodiscard]] inline std::string system_text(int error_code) { return std::generic_category().message(error_code); }

/// A regular file open for reading. Move-only.
class input_file {
public:
    /// @throws io_error naming the path: missing, unreadable, a directory or not a regular file.
    explicit input_file(const std::filesystem::path& path) : path_(path.string()) {
        // O_NONBLOCK means nothing to a regular file; without it a named pipe would wait for its writer here.
        do {
            descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        } while (descriptor_ < 0 && errno == EINTR);
        if (descriptor_ < 0) {
            throw io_error(path_ + ": cannot be opened: " + system_text(errno));
        }
        struct stat status {};
        if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
            ::close(descriptor_);
            throw io_error(path_ + (S_ISDIR(status.st_mode) ? ": is a directory, a file is wanted here" : ": is not a regular file"));
        }
        size_ = static_cast<std::uint64_t>(status.st_size);
    }

    input_file(input_file&& other) noexcept
        : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), size_(other.size_) {}
    input_file& operator=(input_file&&) = delete;

    ~input_file() {
        if (descriptor_ >= 0) {
            ::close(descriptor_);
        }
    }

    [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

    /// Fills `into` from byte `offset`. @throws io_error on failure or when the file ends first.
    void read(std::uint64_t offset, std::span<char> into) const {
        std::size_t done = 0;
        while (done < into.size()) {
            const ssize_t got = ::pread(descriptor_, into.data() + done, into.size() - done, static_cast<off_t>(offset + done));
            if (got < 0 && errno == EINTR) {
                continue;
            }
            if (got <= 0) {
                throw io_error(path_ + ": " + std::to_string(into.size()) + " bytes wanted at byte " + std::to_string(offset) + ", " +
                               std::to_string(done) + " got: " + (got < 0 ? system_text(errno) : std::string("the file ends there")));
            }
            done += static_cast<std::size_t>(got);
        }
    }

private:
    std::string path_;
    int descriptor_ = -1;
    std::uint64_t size_ = 0;
};

/// A small text file, whole. @throws io_error; format_error above `limit` bytes, before anything is allocated.
[[nodiscard]] inline std::string read_text(const std::filesystem::path& path, std::uint64_t limit = 512ull << 20) {
    const input_file file(path);
    if (file.size() > limit) {
        throw format_error(path.string() + ": holds " + std::to_string(file.size()) + " bytes, at most " + std::to_string(limit) +
                           " are expected");
    }
    std::string text(file.size(), '\0');
    file.read(0, text);
    return text;
}

/// The parser's own explanation, cut to a line: what it last read may be megabytes long.
[[nodiscard]] inline std::string parse_text(const nlohmann::json::exception& problem) {
    std::string text = problem.what();
    if (const std::size_t bracket = text.find("] "); bracket != std::string::npos) {
        text.erase(0, bracket + 2);
    }
    if (text.size() > 200) {
        text.replace(text.begin() + 200, text.end(), "...");
    }
    text = in_quotes(text);
    return text.substr(1, text.size() - 2);
}

/// Receives the events of nlohmann's parser and refuses each; a reader overrides those it expects. No recursion, so depth costs no stack.
class strict_events : public nlohmann::json_sax<nlohmann::json> {
public:
    /// Messages begin with `where`, a file; `subject` is the part of it that is JSON, where not all of it is.
    explicit strict_events(std::string where, std::string subject = "") : where_(std::move(where)), subject_(std::move(subject)) {}

    bool null() override { return unexpected("null"); }
    bool boolean(bool) override { return unexpected("a boolean"); }
    bool number_integer(number_integer_t value) override { return unexpected("the number " + std::to_string(value)); }
    bool number_unsigned(number_unsigned_t value) override { return unexpected("the number " + std::to_string(value)); }
    bool number_float(number_float_t, const string_t& text) override { return unexpected("the number " + text.substr(0, 40)); }
    bool string(string_t& text) override { return unexpected("the string " + in_quotes(std::string_view(text).substr(0, 40))); }
    bool binary(binary_t&) override { return unexpected("binary data"); }
    bool start_object(std::size_t) override { return unexpected("an object"); }
    bool start_array(std::size_t) override { return unexpected("an array"); }
    bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& problem) override {
        throw format_error(where_ + ": " + subject_ + "is not valid JSON: " + parse_text(problem));
    }

protected:
    /// @throws format_error: what was found at this place and what is wanted there.
    virtual bool unexpected(const std::string& found) = 0;

    [[noreturn]] void fail(const std::string& problem) const { throw format_error(where_ + ": " + problem); }

private:
    std::string where_, subject_;
};

}  // namespace penstock::inline v0_1::detail

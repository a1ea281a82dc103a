#pragma once

#include <penstock/error.hpp>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <istream>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::inline v0_1 {

/// Which experts each layer call needed, in order: what a store records, and what policies are tried on.
///
/// As text: one line "penstock-trace 1"; one line "experts" and the number of experts of each layer; then a line a layer call: the layer, and the
/// experts it needed, ascending. Lines that are empty or begin with '#' are passed over.
///
///     penstock-trace 1
///     experts 128 128
///     0 3 17 96
///     1 5 9 77
class expert_trace {
public:
    expert_trace() = default;
    /// @param experts of each layer.
    explicit expert_trace(std::vector<std::uint32_t> experts) : experts_(std::move(experts)) {}

    [[nodiscard]] const std::vector<std::uint32_t>& experts() const noexcept { return experts_; }
    [[nodiscard]] std::size_t calls() const noexcept { return layer_.size(); }
    [[nodiscard]] std::uint32_t layer(std::size_t call) const { return layer_[call]; }
    [[nodiscard]] std::span<const std::int32_t> needed(std::size_t call) const {
        return {ids_.data() + begin_[call], begin_[call + 1] - begin_[call]};
    }
    /// Over all calls.
    [[nodiscard]] std::size_t requests() const noexcept { return ids_.size(); }

    /// A layer call. Experts may come in any order and repeated.
    /// @throws configuration_error for a layer or an expert that the trace has not.
    void add(std::uint32_t layer, std::span<const std::int32_t> needed) {
        if (layer >= experts_.size()) {
            throw configuration_error("penstock: a trace of " + std::to_string(experts_.size()) + " layers was given layer " +
                                      std::to_string(layer));
        }
        for (const std::int32_t id : needed) {
            if (id < 0 || static_cast<std::uint32_t>(id) >= experts_[layer]) {
                throw configuration_error("penstock: layer " + std::to_string(layer) + " of a trace has " +
                                          std::to_string(experts_[layer]) + " experts and was given expert " + std::to_string(id));
            }
        }
        const auto first = static_cast<std::ptrdiff_t>(ids_.size());
        ids_.insert(ids_.end(), needed.begin(), needed.end());
        std::sort(ids_.begin() + first, ids_.end());
        ids_.erase(std::unique(ids_.begin() + first, ids_.end()), ids_.end());
        layer_.push_back(layer);
        begin_.push_back(ids_.size());
    }

    void clear() {
        ids_.clear();
        layer_.clear();
        begin_ = {0};
    }

    friend std::ostream& operator<<(std::ostream& out, const expert_trace& trace) {
        out << "penstock-trace 1\nexperts";
        for (const std::uint32_t n : trace.experts_) {
            out << ' ' << n;
        }
        out << '\n';
        for (std::size_t c = 0; c < trace.calls(); ++c) {
            out << trace.layer(c);
            for (const std::int32_t id : trace.needed(c)) {
                out << ' ' << id;
            }
            out << '\n';
        }
        return out;
    }

    friend bool operator==(const expert_trace&, const expert_trace&) = default;

private:
    std::vector<std::uint32_t> experts_;
    std::vector<std::int32_t> ids_;
    std::vector<std::uint32_t> layer_;
    std::vector<std::size_t> begin_{0};
};

namespace detail {

/// The numbers of a line.
inline std::vector<std::int32_t> numbers_of(std::string_view line, const std::string& where) {
    std::vector<std::int32_t> list;
    while (true) {
        line.remove_prefix(std::min(line.find_first_not_of(" \t\r"), line.size()));
        if (line.empty()) {
            return list;
        }
        const std::string_view word = line.substr(0, line.find_first_of(" \t\r"));
        std::int32_t value = 0;
        const auto [end, problem] = std::from_chars(word.data(), word.data() + word.size(), value);
        if (problem != std::errc{} || end != word.data() + word.size() || value < 0) {
            throw format_error("penstock: " + where + ": '" + std::string(word) + "' is no layer, expert or count");
        }
        list.push_back(value);
        line.remove_prefix(word.size());
    }
}

}  // namespace detail

/// @param name of the stream, for errors. @throws format_error naming the line.
inline expert_trace read_trace(std::istream& in, const std::string& name = "trace") {
    expert_trace trace;
    std::string line;
    int state = 0;  // what has been read: nothing, the first line, the experts
    for (std::uint64_t number = 1; std::getline(in, line); ++number) {
        const std::string where = name + ", line " + std::to_string(number);
        if (!line.empty() && line.back() == '\r') {
            line.pop_back();
        }
        if (line.empty() || line.front() == '#') {
            continue;
        }
        if (state == 0) {
            if (line != "penstock-trace 1") {
                throw format_error("penstock: " + where + ": 'penstock-trace 1' is wanted, found '" + line.substr(0, 40) + "'");
            }
        } else if (state == 1) {
            if (!line.starts_with("experts ")) {
                throw format_error("penstock: " + where + ": 'experts' and their number in each layer are wanted");
            }
            const std::vector<std::int32_t> experts = detail::numbers_of(std::string_view(line).substr(8), where);
            trace = expert_trace({experts.begin(), experts.end()});
        } else {
            const std::vector<std::int32_t> call = detail::numbers_of(line, where);
            if (call.empty()) {
                continue;
            }
            try {
                trace.add(static_cast<std::uint32_t>(call[0]), std::span(call).subspan(1));
            } catch (const configuration_error& problem) {
                throw format_error(std::string(problem.what()) + " (" + where + ")");
            }
        }
        state = std::min(state + 1, 2);
    }
    if (state < 2) {
        throw format_error("penstock: " + name + " ends before its experts are told");
    }
    return trace;
}

/// @throws io_error, format_error.
inline expert_trace read_trace(const std::filesystem::path& path) {
    std::ifstream in(path);
    if (!in) {
        throw io_error("penstock: cannot open the trace " + path.string());
    }
    return read_trace(in, path.string());
}

/// @throws io_error.
inline void write_trace(const std::filesystem::path& path, const expert_trace& trace) {
    std::ofstream out(path);
    out << trace << std::flush;
    if (!out) {
        throw io_error("penstock: cannot write the trace " + path.string());
    }
}

}  // namespace penstock::inline v0_1

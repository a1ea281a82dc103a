#pragma once

/// The table on standard output, and the same as JSON.

#include "measure.hpp"

#include <nlohmann/json.hpp>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

namespace load_benchmark {

class report {
public:
    /// A fact about the machine or the settings.
    void fact(const std::string& name, const std::string& value) {
        std::printf("%-22s %s\n", name.c_str(), value.c_str());
        facts_[name] = value;
    }

    void group(const std::string& name) {
        group_ = name;
        std::printf("\n%s\n%-50s %12s %9s %9s %8s %8s\n", name.c_str(), "", "bytes", "seconds", "GB/s", "+-", "of link");
        std::fflush(stdout);
    }

    /// A rate beside the link's, which was measured in the same rounds.
    void rate(const candidate& c, const candidate& link, const std::vector<requirement>& must = {}, const std::string& note = {}) {
        const double share = c.gb_per_s() / link.gb_per_s();
        std::printf("%-50s %12llu %9.4f %9.2f %8.2f %8.3f", c.name.c_str(), static_cast<unsigned long long>(c.bytes), c.seconds(),
                    c.gb_per_s(), spread(c.rates), share);
        nlohmann::json row = held_against(c.name, must, note);
        row.update({{"bytes", c.bytes},
                    {"seconds", c.seconds()},
                    {"gb_per_s", c.gb_per_s()},
                    {"spread", spread(c.rates)},
                    {"of_link", share},
                    {"rounds", c.rates.size()}});
        rows_.push_back(std::move(row));
    }

    /// Any other figure.
    void figure(const std::string& name, double value, const std::string& unit, const std::vector<requirement>& must = {},
                const std::string& note = {}) {
        std::printf("%-50s %12.4g %s", name.c_str(), value, unit.c_str());
        nlohmann::json row = held_against(name, must, note);
        row.update({{"value", value}, {"unit", unit}});
        rows_.push_back(std::move(row));
    }

    void note(const std::string& text) {
        std::printf("  %s\n", text.c_str());
        std::fflush(stdout);
        notes_.push_back(group_ + ": " + text);
    }

    /// Says whether what arrived was compared with what was sent, and keeps it in mind for the exit status.
    void verified(const std::string& what, std::size_t wrong, std::size_t looked_at) {
        note(what + (wrong == 0 ? ": " + std::to_string(looked_at) + " ranges are as they were sent"
                                : ": WRONG BYTES in " + std::to_string(wrong) + " of " + std::to_string(looked_at) + " ranges"));
        wrong_ += wrong;
    }

    [[nodiscard]] bool right() const noexcept { return wrong_ == 0; }

    /// How many requirements were met, and the JSON where a file is given.
    void finish(const std::filesystem::path& json) const {
        std::printf("\n");
        for (const auto& [verdict, count] : verdicts_) {
            std::printf("%s: %d  ", verdict.c_str(), count);
        }
        std::printf("\n");
        if (!json.empty()) {
            std::ofstream(json) << nlohmann::json{{"facts", facts_}, {"rows", rows_}, {"notes", notes_}, {"right", right()}}.dump(2)
                                << "\n";
        }
    }

private:
    nlohmann::json held_against(const std::string& name, const std::vector<requirement>& must, const std::string& note) {
        nlohmann::json list = nlohmann::json::array();
        for (const requirement& m : must) {
            const std::string verdict = m.verdict();
            std::printf("  [%s %s %.4g: %.4g, %s]", m.what.c_str(), m.at_most ? "<=" : ">=", m.wanted, m.value, verdict.c_str());
            ++verdicts_[verdict];
            list.push_back({{"what", m.what},
                            {m.at_most ? "at_most" : "at_least", m.wanted},
                            {"value", m.value},
                            {"spread", m.spread},
                            {"verdict", verdict}});
        }
        std::printf(note.empty() ? "\n" : "  (%s)\n", note.c_str());
        std::fflush(stdout);
        return {{"group", group_}, {"name", name}, {"must", std::move(list)}, {"note", note}};
    }

    std::string group_;
    std::map<std::string, int> verdicts_;
    std::size_t wrong_ = 0;
    nlohmann::json facts_ = nlohmann::json::object();
    nlohmann::json rows_ = nlohmann::json::array();
    nlohmann::json notes_ = nlohmann::json::array();
};

}  // namespace load_benchmark

#pragma once

/// What is measured: candidates that alternate in rounds, medians, and how far the rounds lie from them.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace load_benchmark {

template <class Work>
double seconds_of(Work&& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

inline double median(std::vector<double> values) {
    std::ranges::sort(values);
    return values.empty() ? 0 : values[values.size() / 2];
}

/// Median absolute deviation from the median.
inline double spread(std::vector<double> values) {
    const double middle = median(values);
    for (double& v : values) {
        v = std::abs(v - middle);
    }
    return median(std::move(values));
}

/// One thing that is measured: moves `bytes` and returns when the last of them has arrived.
struct candidate {
    std::string name;
    std::uint64_t bytes = 0;
    std::function<void()> move;
    std::function<void()> prepare{};  ///< called before each move; its time does not count
    std::vector<double> rates{};      ///< GB/s (1e9 bytes), by round

    [[nodiscard]] double gb_per_s() const { return median(rates); }
    [[nodiscard]] double seconds() const { return rates.empty() ? 0 : static_cast<double>(bytes) / gb_per_s() / 1e9; }

    double time() {
        if (prepare) {
            prepare();
        }
        return seconds_of(move);
    }
};

/// Runs every candidate once a round, forwards and backwards in turn so that none always follows the same one. A round before the first
/// one does not count: it brings pages, contexts and first calls.
inline void run_rounds(std::vector<candidate>& all, int rounds) {
    for (int round = -1; round < rounds; ++round) {
        for (std::size_t i = 0; i < all.size(); ++i) {
            candidate& c = all[round % 2 == 0 ? i : all.size() - 1 - i];
            const double seconds = c.time();
            if (round >= 0) {
                c.rates.push_back(static_cast<double>(c.bytes) / seconds / 1e9);
            }
        }
    }
}

/// Something that a figure must reach.
struct requirement {
    std::string what;
    double value = 0;
    double wanted = 0;
    double spread = 0;  ///< of the value, over the rounds
    bool at_most = false;

    /// "level" where the margin is under twice the spread.
    [[nodiscard]] std::string verdict() const {
        const double margin = at_most ? wanted - value : value - wanted;
        return std::abs(margin) < 2 * spread ? "level" : margin >= 0 ? "met" : "missed";
    }
};

/// c holds `wanted` times the rate of `base`, which ran in the same rounds.
inline requirement at_least(const candidate& c, double wanted, const candidate& base, std::string what) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < c.rates.size(); ++i) {
        ratios.push_back(c.rates[i] / base.rates[i]);
    }
    return {std::move(what), c.gb_per_s() / base.gb_per_s(), wanted, spread(std::move(ratios))};
}

}  // namespace load_benchmark

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace example {

/// Largest relative difference ||a - b|| / ||b|| over rows of `width` values.
inline double largest_error(const std::vector<float>& a, const std::vector<float>& b, std::size_t width) {
    double worst = a.size() == b.size() ? 0 : INFINITY;
    for (std::size_t row = 0; worst < INFINITY && row + width <= a.size(); row += width) {
        double difference = 0;
        double norm = 0;
        for (std::size_t i = row; i < row + width; ++i) {
            difference += std::pow(double{a[i]} - b[i], 2);
            norm += std::pow(double{b[i]}, 2);
        }
        const double error = std::sqrt(difference / std::max(norm, 1e-300));
        worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
    }
    return worst;
}

}  // namespace example

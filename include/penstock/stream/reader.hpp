#pragma once

#include <penstock/buffer/host_cores.hpp>

#include <cstddef>
#include <optional>
#include <utility>

namespace penstock::inline v0_1::detail {

/// What a reading thread keeps: it stays on the device that it served last, and near the first.
template <class Link>
struct reader_of {
    std::optional<typename Link::guard> on;
    int device = -1;
    bool placed = false;

    void stay_near(int wanted, std::size_t readers) noexcept {
        if (wanted >= 0 && !std::exchange(placed, true)) {
            keep_thread_near(wanted, (readers + 1) / 2);
        }
    }

    void serve(int wanted) {
        if (wanted >= 0 && wanted != device) {
            device = -1;
            on.emplace(wanted);
            device = wanted;
        }
    }
};

}  // namespace penstock::inline v0_1::detail

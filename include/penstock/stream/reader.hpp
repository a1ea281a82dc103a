#pragma once

#include <penstock/buffer/host_cores.hpp>

#include <cstddef>
#include <utility>

namespace penstock::inline v0_1::detail {

/// A reading thread stays near the device that it served first, or near the one that is wanted.
class reader_place {
public:
    void stay_near(int wanted, std::size_t readers) noexcept {
        if (wanted >= 0 && !std::exchange(placed_, true)) {
            keep_thread_near(wanted, (readers + 1) / 2);
        }
    }

private:
    bool placed_ = false;
};

}  // namespace penstock::inline v0_1::detail

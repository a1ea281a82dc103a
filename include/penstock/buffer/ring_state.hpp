#pragma once

#include <penstock/config.hpp>

#include <cstdint>

namespace penstock::inline v0_1 {

/// A place in a ring of `stages`: which stage comes next, and in which lap (`phase` flips at every wrap, as an mbarrier's parity does).
/// Trivially copyable, for the host and for kernels. @pre stages > 0 wherever it is asked for, and always the same
struct ring_state {
    std::uint32_t index = 0;
    std::uint32_t phase = 0;

    PENSTOCK_HD constexpr void advance(std::uint32_t stages) noexcept {
        if (++index == stages) {
            index = 0;
            phase ^= 1u;
        }
    }

    friend PENSTOCK_HD constexpr bool operator==(const ring_state& a, const ring_state& b) noexcept {
        return a.index == b.index && a.phase == b.phase;
    }
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace penstock::inline v0_1 {

/// Sorts pairs by expert on the host: rows[offsets[e]] to rows[offsets[e + 1]] are the pairs whose id is e, ascending. Pairs whose id is
/// negative are left out, and so are not written beyond offsets[experts].
/// @param rows room for ids.size() pairs
/// @param offsets [experts + 1]
/// @throws configuration_error, before anything is written, if an id is not below `experts`
inline void permute_by_expert(std::span<const std::int32_t> ids, std::uint32_t experts, std::int32_t* rows, std::uint32_t* offsets) {
    for (std::size_t p = 0; p < ids.size(); ++p) {
        if (ids[p] >= 0 && static_cast<std::uint32_t>(ids[p]) >= experts) {
            throw configuration_error("penstock: pair " + std::to_string(p) + " asks for expert " + std::to_string(ids[p]) + " of " +
                                      std::to_string(experts));
        }
    }
    std::fill_n(offsets, experts + std::size_t{1}, 0u);
    for (const std::int32_t id : ids) {
        if (id >= 0) {
            ++offsets[id + 1];
        }
    }
    for (std::uint32_t e = 0; e < experts; ++e) {
        offsets[e + 1] += offsets[e];
    }
    // offsets[e] serves as the place of e's next pair and ends where e + 1 began; shifting it by one restores it.
    for (std::size_t p = 0; p < ids.size(); ++p) {
        if (ids[p] >= 0) {
            rows[offsets[ids[p]]++] = static_cast<std::int32_t>(p);
        }
    }
    for (std::uint32_t e = experts; e > 0; --e) {
        offsets[e] = offsets[e - 1];
    }
    offsets[0] = 0;
}

}  // namespace penstock::inline v0_1

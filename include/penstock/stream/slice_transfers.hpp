#pragma once

#include <penstock/model/tensor_slice.hpp>
#include <penstock/stream/transfer_plan.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock::inline v0_1 {

/// Appends the transfers that bring a slice to `destination`, dense: `part.bytes` bytes in the memory of the place.
inline void append(std::vector<transfer>& transfers, const tensor_slice& part, std::byte* destination, std::uint64_t request = 0) {
    for (const slice_range& r : part.ranges) {
        transfer one;
        one.request = request;
        one.file = part.file;
        one.offset = r.offset;
        one.bytes = r.bytes;
        one.destination = destination;
        one.row_bytes = r.row_bytes;
        transfers.push_back(one);
        destination += r.bytes;
    }
}

}  // namespace penstock::inline v0_1

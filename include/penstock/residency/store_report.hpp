#pragma once

#include <penstock/units.hpp>

#include <cstdint>
#include <ostream>

namespace penstock::inline v0_1 {

/// What an expert store did since it was made, and what it holds. Bytes are bytes.
struct store_report {
    std::uint64_t steps = 0;      ///< layer calls
    std::uint64_t hits = 0;       ///< experts found in the compute tier, counted once a layer call
    std::uint64_t misses = 0;     ///< experts that were not there
    std::uint64_t host_hits = 0;  ///< misses that the host tier had
    std::uint64_t evictions = 0;  ///< experts that left the compute tier for another
    std::uint64_t overflow = 0;   ///< misses computed straight from mapped host memory, without a slot
    std::uint64_t waves = 0;      ///< times that slots of a running layer call had to be used again
    std::uint64_t waits = 0;      ///< misses for which the computation had to wait
    double wait_seconds = 0;      ///< host time spent waiting for bytes
    std::uint64_t bytes_from_host = 0;
    std::uint64_t bytes_from_files = 0;

    std::uint64_t hints = 0;              ///< guessed experts that were begun to be brought
    std::uint64_t hints_right = 0;        ///< of these, needed by a step while they were there or on their way
    std::uint64_t hints_late = 0;         ///< of these, still on their way then
    std::uint64_t hints_dropped = 0;      ///< stale, or in the way of what was needed
    std::uint64_t hint_bytes = 0;         ///< of guessed experts; also among the bytes above
    std::uint64_t hint_bytes_wasted = 0;  ///< of those that were dropped, or left again without having been used

    std::uint64_t slots = 0;
    std::uint64_t slot_bytes = 0;
    std::uint64_t host_slots = 0;
    std::uint64_t device_peak_bytes = 0;  ///< compute tier: slots, and everything the store keeps beside them
    std::uint64_t host_peak_bytes = 0;    ///< host tier and staging

    [[nodiscard]] double hit_rate() const noexcept {
        return hits + misses == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(hits + misses);
    }

    friend std::ostream& operator<<(std::ostream& out, const store_report& r) {
        return out << "experts: " << r.hits << " hits, " << r.misses << " misses (" << 100 * r.hit_rate() << " % hits), " << r.evictions
                   << " evictions, " << r.overflow << " computed from host memory, " << r.waves << " further waves\n"
                   << "bytes: " << to_string(bytes{r.bytes_from_host}) << " from the host tier, " << to_string(bytes{r.bytes_from_files})
                   << " from files\n"
                   << "hints: " << r.hints << ", " << r.hints_right << " right (" << r.hints_late << " late), " << r.hints_dropped
                   << " dropped, " << to_string(bytes{r.hint_bytes_wasted}) << " of " << to_string(bytes{r.hint_bytes}) << " wasted\n"
                   << "memory: " << r.slots << " slots of " << to_string(bytes{r.slot_bytes}) << " ("
                   << to_string(bytes{r.device_peak_bytes}) << "), host " << to_string(bytes{r.host_peak_bytes}) << " with " << r.host_slots
                   << " slots\n";
    }
};

}  // namespace penstock::inline v0_1

#pragma once

#include "units.hpp"

/// Called by every unit, with its own copies of the library's inline functions. Include all headers of the library before.
inline facts look() {
    namespace ps = penstock;
    using namespace ps::literals;
    facts seen{};
    seen.round_up = &ps::round_up;
    seen.to_string = &ps::to_string;
    seen.check = &ps::check;
    seen.stream = &typeid(ps::weight_stream<ps::prefetch::depth<3>, ps::chunking::fixed<1_MiB>>);
    seen.ring = &typeid(ps::ring<ps::memory::pageable, ps::prefetch::depth<2>>);
    ps::buffer<float, ps::memory::pageable> numbers{4};
    seen.computed = ps::to_string(ps::bytes{ps::round_up(numbers.size() * sizeof(float), ps::placement_alignment)});
    return seen;
}

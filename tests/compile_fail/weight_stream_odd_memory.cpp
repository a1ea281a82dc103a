#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

struct memory_without_properties {
    using policy_axis = ps::axis::memory;
};

// expected-error {{"penstock: weight_stream's memory kind lacks host_accessible, device_accessible or page_aligned"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<ps::memory::pageable>;
#else
using product = ps::weight_stream<memory_without_properties>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

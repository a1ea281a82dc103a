#include <penstock/buffer/ring.hpp>

namespace ps = penstock;

struct memory_without_properties {
    using policy_axis = ps::axis::memory;
};

// expected-error {{"penstock: ring's memory kind lacks host_accessible, device_accessible or page_aligned"}}
#ifdef PENSTOCK_CORRECT
using product = ps::ring<ps::memory::pageable>;
#else
using product = ps::ring<memory_without_properties>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

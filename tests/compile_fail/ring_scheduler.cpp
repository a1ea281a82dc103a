#include <penstock/buffer/ring.hpp>
#include <penstock/policy/scheduling.hpp>

namespace ps = penstock;

// expected-error {{"penstock: ring is first in, first out, so it takes no scheduler"}}
#ifdef PENSTOCK_CORRECT
using product = ps::ring<>;
#else
using product = ps::ring<ps::scheduler::fifo>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

#include <penstock/buffer/ring.hpp>

namespace ps = penstock;

// expected-error {{"penstock: ring takes policies only: each argument names its axis in a member policy_axis"}}
#ifdef PENSTOCK_CORRECT
using product = ps::ring<ps::memory::pinned>;
#else
using product = ps::ring<ps::memory::pinned, int>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

#include <penstock/buffer/ring.hpp>
#include <penstock/policy/eviction.hpp>

namespace ps = penstock;

// expected-error {{"penstock: ring keeps nothing, so it takes no eviction rule"}}
#ifdef PENSTOCK_CORRECT
using product = ps::ring<>;
#else
using product = ps::ring<ps::eviction::lru>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

#include <penstock/policy/memory.hpp>

namespace ps = penstock;

// expected-error {{"penstock: memory::tiered needs two tiers or more"}}
#ifdef PENSTOCK_CORRECT
static_assert(ps::memory::tiered<ps::memory::device, ps::memory::pinned>::device_accessible);
#else
static_assert(ps::memory::tiered<ps::memory::pinned>::device_accessible);
#endif

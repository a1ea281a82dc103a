#include <penstock/policy/eviction.hpp>

namespace ps = penstock;

// expected-error {{"penstock: the half-life of eviction::lfru is 1 to 2^20 steps"}}
#ifdef PENSTOCK_CORRECT
using policy = ps::eviction::lfru<64>;
#else
using policy = ps::eviction::lfru<0>;
#endif
static_assert(policy::one_use > 0);

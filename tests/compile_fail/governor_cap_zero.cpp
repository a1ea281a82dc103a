#include <penstock/policy/governor.hpp>

namespace ps = penstock;

// expected-error {{"penstock: governor::cap needs at least one byte a second"}}
#ifdef PENSTOCK_CORRECT
using policy = ps::governor::cap<ps::bytes{1}>;
#else
using policy = ps::governor::cap<ps::bytes{0}>;
#endif
static_assert(sizeof(policy) > 0);

#include <penstock/policy/scheduling.hpp>

namespace ps = penstock;

// expected-error {{"penstock: scheduler::first_come needs at least one tile a claim"}}
#ifdef PENSTOCK_CORRECT
using product = ps::scheduler::first_come<1>;
#else
using product = ps::scheduler::first_come<0>;
#endif
static_assert(product::tiles_per_claim < 2);

#include <penstock/policy/scheduling.hpp>

namespace ps = penstock;

// expected-error {{"penstock: scheduler::priority needs at least one level"}}
#ifdef PENSTOCK_CORRECT
ps::scheduler::priority<1>::queue* queue = nullptr;
static_assert(sizeof(ps::scheduler::priority<1>) == 1);
#else
ps::scheduler::priority<0>::queue* queue = nullptr;
static_assert(sizeof(ps::scheduler::priority<0>) == 1);
#endif

#include <penstock/policy/governor.hpp>

namespace ps = penstock;

// expected-error {{"penstock: throttled takes a scheduler with a host queue"}}
#ifdef PENSTOCK_CORRECT
using policy = ps::throttled<ps::scheduler::fifo, ps::governor::adaptive>;
#else
using policy = ps::throttled<ps::scheduler::first_come<>, ps::governor::adaptive>;
#endif
static_assert(sizeof(policy) > 0);

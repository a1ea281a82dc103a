#include <penstock/residency/expert_store.hpp>

namespace ps = penstock;

// expected-error {{"penstock: expert_store takes one scheduler, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_store<ps::scheduler::round_robin>;
#else
using product = ps::expert_store<ps::scheduler::fifo, ps::scheduler::round_robin>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

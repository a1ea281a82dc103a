#include <penstock/residency/expert_store.hpp>

namespace ps = penstock;

// expected-error {{"penstock: expert_store takes one eviction rule, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_store<ps::eviction::lru, ps::prefetch::none>;
#else
using product = ps::expert_store<ps::eviction::lru, ps::prefetch::none, ps::eviction::lru>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

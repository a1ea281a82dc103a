#include <penstock/residency/expert_store.hpp>

namespace ps = penstock;

// expected-error {{"penstock: expert_store takes one prefetch depth, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_store<ps::prefetch::depth<2>>;
#else
using product = ps::expert_store<ps::prefetch::none, ps::prefetch::depth<2>>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

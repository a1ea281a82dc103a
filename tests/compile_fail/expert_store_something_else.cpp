#include <penstock/residency/expert_store.hpp>

namespace ps = penstock;

// expected-error {{"penstock: expert_store takes policies only: each argument names its axis in a member policy_axis"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_store<ps::memory::pinned>;
#else
using product = ps::expert_store<ps::memory::pinned, int>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

#include <penstock/residency/expert_store.hpp>

namespace ps = penstock;

// expected-error {{"penstock: expert_store takes one memory kind, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_store<ps::memory::pageable>;
#else
using product = ps::expert_store<ps::memory::pinned, ps::memory::pageable>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

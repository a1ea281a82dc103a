#include <penstock/residency/expert_store.hpp>

namespace ps = penstock;

// expected-error {{"penstock: expert_store keeps its host tier in memory::pinned or memory::pageable"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_store<ps::memory::pageable>;
#else
using product = ps::expert_store<ps::memory::device>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

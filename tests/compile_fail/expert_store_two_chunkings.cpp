#include <penstock/residency/expert_store.hpp>

namespace ps = penstock;

// expected-error {{"penstock: expert_store takes one chunking, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_store<ps::chunking::fixed<ps::bytes{4096}>, ps::memory::pinned>;
#else
using product = ps::expert_store<ps::chunking::fixed<ps::bytes{4096}>, ps::memory::pinned, ps::chunking::fixed<ps::bytes{8192}>>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

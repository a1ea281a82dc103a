#include <penstock/parallel/expert_parallel.hpp>
#include <penstock/parallel/loopback.hpp>

namespace ps = penstock;

// expected-error {{"penstock: expert_parallel takes a capacity and a choice of replicas, and no other policy"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_parallel<ps::transport::loopback, ps::capacity::fixed>;
#else
using product = ps::expert_parallel<ps::transport::loopback, ps::memory::pinned>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

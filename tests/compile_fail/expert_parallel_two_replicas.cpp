#include <penstock/parallel/expert_parallel.hpp>
#include <penstock/parallel/loopback.hpp>

namespace ps = penstock;

// expected-error {{"penstock: expert_parallel takes one choice of replicas, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_parallel<ps::transport::loopback, ps::replica::nearest>;
#else
using product = ps::expert_parallel<ps::transport::loopback, ps::replica::nearest, ps::replica::spread>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

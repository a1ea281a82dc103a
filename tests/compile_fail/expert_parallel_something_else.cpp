#include <penstock/parallel/expert_parallel.hpp>
#include <penstock/parallel/loopback.hpp>

namespace ps = penstock;

// expected-error {{"penstock: expert_parallel takes policies only: each argument names its axis in a member policy_axis"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_parallel<ps::transport::loopback, ps::capacity::fixed>;
#else
using product = ps::expert_parallel<ps::transport::loopback, int>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

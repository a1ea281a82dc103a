#include <penstock/parallel/expert_parallel.hpp>
#include <penstock/parallel/loopback.hpp>

namespace ps = penstock;

// expected-error {{"penstock: expert_parallel takes one capacity, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_parallel<ps::transport::loopback, ps::capacity::exact>;
#else
using product = ps::expert_parallel<ps::transport::loopback, ps::capacity::exact, ps::capacity::fixed>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

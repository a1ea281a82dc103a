#include <penstock/policy/eviction.hpp>
#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

// expected-error {{"penstock: weight_stream keeps nothing, so it takes no eviction rule"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<>;
#else
using product = ps::weight_stream<ps::eviction::lru>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

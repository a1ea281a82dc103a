#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

// expected-error {{"penstock: weight_stream takes policies only: each argument names its axis in a member policy_axis"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<ps::memory::pinned>;
#else
using product = ps::weight_stream<ps::memory::pinned, int>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

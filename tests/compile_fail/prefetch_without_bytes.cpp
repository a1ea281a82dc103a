#include <penstock/policy/prefetch.hpp>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: prefetch::budget needs more than zero bytes"}}
#ifdef PENSTOCK_CORRECT
static_assert(ps::prefetch::budget<4_B>{}.chunks_ahead(1) == 4);
#else
static_assert(ps::prefetch::budget<0_B>{}.chunks_ahead(1) == 1);
#endif

#include <penstock/policy/prefetch.hpp>

namespace ps = penstock;

// expected-error {{"penstock: prefetch::depth needs at least one slot (prefetch::none is depth 1)"}}
#ifdef PENSTOCK_CORRECT
static_assert(ps::prefetch::depth<1>{}.chunks_ahead(1) == 1);
#else
static_assert(ps::prefetch::depth<0>{}.chunks_ahead(1) == 0);
#endif

#include <penstock/policy/chunking.hpp>

namespace ps = penstock;

// expected-error {{"penstock: chunking::rows needs at least one row"}}
#ifdef PENSTOCK_CORRECT
static_assert(ps::chunking::rows<2>{}.bytes_per_chunk(64, 640) == 128);
#else
static_assert(ps::chunking::rows<0>{}.bytes_per_chunk(64, 640) == 0);
#endif

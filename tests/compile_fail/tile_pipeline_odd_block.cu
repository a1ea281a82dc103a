#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;

// expected-error {{"penstock: tile_pipeline runs in blocks of whole warps, a multiple of 32 threads"}}
#ifdef PENSTOCK_CORRECT
constexpr std::size_t needed = ps::tile_pipeline<>::shared_bytes<96>;
#else
constexpr std::size_t needed = ps::tile_pipeline<>::shared_bytes<100>;
#endif
static_assert(needed > 0);

#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline needs a tile size known at compile time, as chunking::fixed has"}}
#ifdef PENSTOCK_CORRECT
using product = ps::tile_pipeline<ps::chunking::fixed<4_KiB>>;
#else
using product = ps::tile_pipeline<ps::chunking::whole>;
#endif
static_assert(product::stages > 0);

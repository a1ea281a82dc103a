#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline needs a depth known at compile time: prefetch::none, depth or budget"}}
#ifdef PENSTOCK_CORRECT
using product = ps::tile_pipeline<ps::prefetch::budget<16_KiB>>;
#else
using product = ps::tile_pipeline<ps::prefetch::run_time>;
#endif
static_assert(product::stages > 0);

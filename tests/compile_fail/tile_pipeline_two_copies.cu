#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline takes one way of copying, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::tile_pipeline<ps::copies::by_lane>;
#else
using product = ps::tile_pipeline<ps::copies::bulk, ps::copies::by_lane>;
#endif
static_assert(product::stages > 0);

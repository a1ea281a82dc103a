#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline takes one scope, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::tile_pipeline<ps::scope::warp>;
#else
using product = ps::tile_pipeline<ps::scope::warp, ps::scope::block>;
#endif
static_assert(product::stages > 0);

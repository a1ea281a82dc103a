#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline takes one caching, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::tile_pipeline<ps::caching::once>;
#else
using product = ps::tile_pipeline<ps::caching::once, ps::caching::normal>;
#endif
static_assert(product::stages > 0);

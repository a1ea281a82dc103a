#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline needs a scheduler with a device facet: scheduler::fifo, round_robin or first_come"}}
#ifdef PENSTOCK_CORRECT
using product = ps::tile_pipeline<ps::scheduler::round_robin>;
#else
using product = ps::tile_pipeline<ps::scheduler::priority<3>>;
#endif
static_assert(product::stages > 0);

#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline reads where the bytes lie; memory::pageable is not reachable from a kernel"}}
#ifdef PENSTOCK_CORRECT
using product = ps::tile_pipeline<ps::memory::pinned>;
#else
using product = ps::tile_pipeline<ps::memory::pageable>;
#endif
static_assert(product::stages > 0);

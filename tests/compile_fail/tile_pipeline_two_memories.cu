#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline takes one memory kind, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::tile_pipeline<ps::memory::peer>;
#else
using product = ps::tile_pipeline<ps::memory::peer, ps::memory::device>;
#endif
static_assert(product::stages > 0);

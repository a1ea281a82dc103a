#include <penstock/dispatch/tile_pipeline.cuh>
#include <penstock/policy/eviction.hpp>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline keeps nothing, so it takes no eviction rule"}}
#ifdef PENSTOCK_CORRECT
using product = ps::tile_pipeline<ps::memory::device>;
#else
using product = ps::tile_pipeline<ps::memory::device, ps::eviction::lru>;
#endif
static_assert(product::stages > 0);

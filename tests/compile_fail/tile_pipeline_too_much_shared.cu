#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline: the stages of the scopes exceed the shared memory of a block, 227 KiB; take smaller tiles or fewer stages"}}
#ifdef PENSTOCK_CORRECT
using product = ps::tile_pipeline<ps::chunking::fixed<32_KiB>, ps::prefetch::depth<2>, ps::scope::block>;
#else
using product = ps::tile_pipeline<ps::chunking::fixed<32_KiB>, ps::prefetch::depth<8>, ps::scope::block>;
#endif
static_assert(product::stages > 0);

#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline: scheduler::first_come claims tiles from a tile_counter; pass one"}}
__global__ void first(ps::matrix_ref<const float> matrix, [[maybe_unused]] ps::tile_counter* counter, float* out) {
#ifdef PENSTOCK_CORRECT
    ps::tile_pipeline<ps::scheduler::first_come<>> pipe{ps::dynamic_shared(), matrix, counter};
#else
    ps::tile_pipeline<ps::scheduler::first_come<>> pipe{ps::dynamic_shared(), matrix};
#endif
    out[0] = static_cast<float>(pipe.tiles());
}

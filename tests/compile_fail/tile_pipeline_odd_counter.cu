#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: tile_pipeline takes a tile_counter with scheduler::first_come alone"}}
__global__ void first(ps::matrix_ref<const float> matrix, [[maybe_unused]] ps::tile_counter* counter, float* out) {
#ifdef PENSTOCK_CORRECT
    ps::tile_pipeline<ps::scheduler::fifo> pipe{ps::dynamic_shared(), matrix};
#else
    ps::tile_pipeline<ps::scheduler::fifo> pipe{ps::dynamic_shared(), matrix, counter};
#endif
    out[0] = static_cast<float>(pipe.tiles());
}

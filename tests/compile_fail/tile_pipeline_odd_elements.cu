#include <penstock/dispatch/tile_pipeline.cuh>

namespace ps = penstock;

#ifdef PENSTOCK_CORRECT
struct element {
    float value[4];
};
#else
struct element {
    float value[3];
};
#endif

// expected-error {{"penstock: tile_pipeline reads elements of 1, 2, 4, 8 or 16 bytes"}}
__global__ void kernel(ps::matrix_ref<const element> matrix) { ps::tile_pipeline<> pipe{ps::dynamic_shared(), matrix}; }

#include <penstock/cuda/launch.cuh>

__global__ void kernel(int* out, int value) { *out = value; }

// expected-error {{"penstock: launch takes as many arguments as the kernel has parameters"}}
void use(cudaStream_t stream, int* out) {
#ifdef PENSTOCK_CORRECT
    penstock::launch(kernel, 1, 1, 0, stream, out, 4);
#else
    penstock::launch(kernel, 1, 1, 0, stream, out);
#endif
}

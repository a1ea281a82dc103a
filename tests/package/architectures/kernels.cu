#include <penstock/dispatch/cuda_experts.cuh>

PENSTOCK_INSTANTIATE(fp8_block128)

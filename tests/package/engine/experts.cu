#include <penstock/dispatch/cuda_experts.cuh>

PENSTOCK_INSTANTIATE(bf16)

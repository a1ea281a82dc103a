// bound: 90 s, 4000 KiB
#include <penstock/dispatch/cuda_experts.cuh>

PENSTOCK_INSTANTIATE(bf16)

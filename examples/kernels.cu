// The one .cu of a program whose other files are .cpp: it holds every kernel of executor::cuda<>. An engine that knows its formats
// names them, PENSTOCK_INSTANTIATE(bf16, fp8_block128), and uses executor::cuda<format::bf16, format::fp8_block128>.

#include <penstock/dispatch/cuda_experts.cuh>

PENSTOCK_INSTANTIATE()

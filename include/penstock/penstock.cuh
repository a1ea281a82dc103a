#pragma once

#ifndef __CUDACC__
#error "penstock/penstock.cuh holds kernels: compile this file with nvcc, or include penstock/penstock.hpp"
#endif

/// penstock.hpp and the kernels.

#include <penstock/cuda/launch.cuh>
#include <penstock/dispatch/cuda_experts.cuh>
#include <penstock/dispatch/expert_kernels.cuh>
#include <penstock/dispatch/tile_pipeline.cuh>
#include <penstock/penstock.hpp>

#pragma once

/// Floors of the toolchain and the few macros of the library. No other header defines a macro that a user can see.

#include <cuda/version>

#include <penstock/version.hpp>

#if __cplusplus < 202002L
#error "penstock needs C++20: pass -std=c++20 (nvcc's default is C++17; CMake before 3.25.2 does not raise it)"
#endif

#if CCCL_VERSION < 3000000
#error "penstock needs CCCL 3.0 or newer, which CUDA Toolkit 13.0 contains"
#endif

/// Marks a function that kernels may call too. Such a function has one body for both sides.
#ifdef __CUDACC__
#define PENSTOCK_HD __host__ __device__
#else
#define PENSTOCK_HD
#endif

/// One sentence for each way a list of policies can be wrong. `product` is a string literal, the rest is the parameter pack.
#define PENSTOCK_CHECK_POLICIES(product, ...)                                                                         \
    static_assert(::penstock::detail::all_policies<__VA_ARGS__>,                                                      \
                  "penstock: " product " takes policies only: each argument names its axis in a member policy_axis"); \
    static_assert(::penstock::detail::axis_count<::penstock::axis::memory, __VA_ARGS__> <= 1,                         \
                  "penstock: " product " takes one memory kind, two were given");                                     \
    static_assert(::penstock::detail::axis_count<::penstock::axis::chunking, __VA_ARGS__> <= 1,                       \
                  "penstock: " product " takes one chunking, two were given");                                        \
    static_assert(::penstock::detail::axis_count<::penstock::axis::prefetch, __VA_ARGS__> <= 1,                       \
                  "penstock: " product " takes one prefetch depth, two were given");                                  \
    static_assert(::penstock::detail::axis_count<::penstock::axis::scheduling, __VA_ARGS__> <= 1,                     \
                  "penstock: " product " takes one scheduler, two were given");                                       \
    static_assert(::penstock::detail::axis_count<::penstock::axis::eviction, __VA_ARGS__> <= 1,                       \
                  "penstock: " product " takes one eviction rule, two were given")

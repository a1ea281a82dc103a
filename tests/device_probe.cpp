// The main of the device tests without any test: it tells whether there is a GPU to use.
#include <cuda_runtime_api.h>

#include <doctest/doctest.h>

TEST_CASE("a GPU can be used") { CHECK(cudaFree(nullptr) == cudaSuccess); }

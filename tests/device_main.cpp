#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cuda_runtime_api.h>

#include <cstdio>

/// ctest reports a test with this exit status as skipped.
constexpr int skipped = 77;

int main(int argc, char** argv) {
    int devices = 0;
    const cudaError_t result = cudaGetDeviceCount(&devices);
    if (result != cudaSuccess || devices == 0) {
        std::printf("skipped: no GPU can be used here: %s\n", result != cudaSuccess ? cudaGetErrorString(result) : "the driver lists none");
        return skipped;
    }
    return doctest::Context(argc, argv).run();
}

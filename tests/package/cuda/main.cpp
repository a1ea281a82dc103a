#include <penstock/cuda/device.hpp>

#include <cstdio>

long standard_of_the_cu_file();
bool compute_on_the_gpu();

int main() {
    std::printf("C++ %ld in .cpp, %ld in .cu, %d devices\n", __cplusplus, standard_of_the_cu_file(), penstock::device_count());
    const bool right = penstock::device_count() == 0 || compute_on_the_gpu();
    return __cplusplus >= 202002L && standard_of_the_cu_file() >= 202002L && right ? 0 : 1;
}

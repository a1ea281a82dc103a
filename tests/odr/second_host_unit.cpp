#include "everything.hpp"
#include "look.hpp"

#include <cstdlib>

facts second_host_unit() { return look(); }

void throw_from_a_unit() {
    penstock::check(cudaErrorMemoryAllocation, "cudaMalloc");
    std::abort();
}

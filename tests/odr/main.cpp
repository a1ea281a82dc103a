#include "units.hpp"

#include <cstdio>

int main() {
    const facts first = first_host_unit();
    bool same = first == second_host_unit();
#ifdef PENSTOCK_TEST_HAS_CUDA
    same = same && first == first_device_unit() && first == second_device_unit();
#endif
    // An exception of the library that one unit throws is caught by type in another.
    bool caught = false;
    try {
        throw_from_a_unit();
    } catch (const penstock::out_of_memory&) {
        caught = true;
    }
    std::printf("one set of functions and types: %s; exception caught: %s\n", same ? "yes" : "no", caught ? "yes" : "no");
    return same && caught ? 0 : 1;
}

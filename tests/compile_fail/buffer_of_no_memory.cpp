#include <penstock/buffer/buffer.hpp>

namespace ps = penstock;

// expected-error {{"penstock: the second argument of buffer is a memory kind"}}
#ifdef PENSTOCK_CORRECT
using product = ps::buffer<float, ps::memory::pageable>;
#else
using product = ps::buffer<float, int>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

// expected-error {{"penstock: weight_stream allocates its staging; memory::registered and memory::tiered pin or combine memory that exists"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<ps::memory::pinned>;
#else
using product = ps::weight_stream<ps::memory::registered>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

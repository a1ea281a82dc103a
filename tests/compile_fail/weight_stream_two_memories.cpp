#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

// expected-error {{"penstock: weight_stream takes one memory kind, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<ps::memory::pageable>;
#else
using product = ps::weight_stream<ps::memory::pinned, ps::memory::pageable>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

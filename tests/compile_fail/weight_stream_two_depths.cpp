#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

// expected-error {{"penstock: weight_stream takes one prefetch depth, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<ps::prefetch::depth<2>>;
#else
using product = ps::weight_stream<ps::prefetch::none, ps::prefetch::depth<2>>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

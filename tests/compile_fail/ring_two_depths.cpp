#include <penstock/buffer/ring.hpp>

namespace ps = penstock;

// expected-error {{"penstock: ring takes one prefetch depth, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::ring<ps::prefetch::depth<2>>;
#else
using product = ps::ring<ps::prefetch::none, ps::prefetch::depth<2>>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

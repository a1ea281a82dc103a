#include <penstock/buffer/ring.hpp>

namespace ps = penstock;

// expected-error {{"penstock: ring has slots of one size, which chunking::whole does not name"}}
#ifdef PENSTOCK_CORRECT
using product = ps::ring<ps::chunking::run_time>;
#else
using product = ps::ring<ps::chunking::whole>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

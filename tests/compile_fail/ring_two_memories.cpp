#include <penstock/buffer/ring.hpp>

namespace ps = penstock;

// expected-error {{"penstock: ring takes one memory kind, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::ring<ps::memory::pageable>;
#else
using product = ps::ring<ps::memory::pinned, ps::memory::pageable>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

#include <penstock/buffer/ring.hpp>

namespace ps = penstock;

// expected-error {{"penstock: ring hands out host memory to be filled; memory::device, memory::peer and what contains them are destinations"}}
#ifdef PENSTOCK_CORRECT
using product = ps::ring<ps::memory::registered>;
#else
using product = ps::ring<ps::memory::device>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

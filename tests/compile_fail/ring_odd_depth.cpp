#include <penstock/buffer/ring.hpp>

namespace ps = penstock;

struct depth_without_number {
    using policy_axis = ps::axis::prefetch;
};

// expected-error {{"penstock: ring's prefetch depth offers chunks_ahead(chunk_bytes)"}}
#ifdef PENSTOCK_CORRECT
using product = ps::ring<ps::prefetch::none>;
#else
using product = ps::ring<depth_without_number>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

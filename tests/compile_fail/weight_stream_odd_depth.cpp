#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

struct depth_without_number {
    using policy_axis = ps::axis::prefetch;
};

// expected-error {{"penstock: weight_stream's prefetch depth offers chunks_ahead(chunk_bytes)"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<ps::prefetch::none>;
#else
using product = ps::weight_stream<depth_without_number>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

struct chunks_without_size {
    using policy_axis = ps::axis::chunking;
};

// expected-error {{"penstock: weight_stream's chunking offers bytes_per_chunk(row_bytes, total_bytes)"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<ps::chunking::fixed<ps::bytes{4096}>>;
#else
using product = ps::weight_stream<chunks_without_size>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

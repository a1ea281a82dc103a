#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

// expected-error {{"penstock: weight_stream takes one chunking, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<ps::chunking::fixed<ps::bytes{4096}>, ps::memory::pinned>;
#else
using product = ps::weight_stream<ps::chunking::fixed<ps::bytes{4096}>, ps::memory::pinned, ps::chunking::fixed<ps::bytes{8192}>>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

// expected-error {{"penstock: weight_stream takes one scheduler, two were given"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<ps::scheduler::round_robin>;
#else
using product = ps::weight_stream<ps::scheduler::fifo, ps::scheduler::round_robin>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

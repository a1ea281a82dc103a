#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

// expected-error {{"penstock: weight_stream stages in host memory; memory::device, memory::peer and what contains them are destinations"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<ps::memory::write_combined>;
#else
using product = ps::weight_stream<ps::memory::device>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

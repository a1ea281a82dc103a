#include <penstock/policy/chunking.hpp>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: chunking::fixed needs at least 128 bytes, the smallest piece a row is cut into"}}
#ifdef PENSTOCK_CORRECT
static_assert(ps::chunking::fixed<128_B>::size == 128);
#else
static_assert(ps::chunking::fixed<127_B>::size == 127);
#endif

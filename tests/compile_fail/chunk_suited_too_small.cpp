#include <penstock/policy/chunking.hpp>

namespace ps = penstock;
using namespace ps::literals;

// expected-error {{"penstock: chunking::suited needs at least 128 bytes, the smallest piece a row is cut into"}}
#ifdef PENSTOCK_CORRECT
static_assert(ps::chunking::suited<128_B>{}.most == 128);
#else
static_assert(ps::chunking::suited<127_B>{}.most == 127);
#endif

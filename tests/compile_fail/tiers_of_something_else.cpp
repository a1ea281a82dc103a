#include <penstock/policy/chunking.hpp>
#include <penstock/policy/memory.hpp>

namespace ps = penstock;

// expected-error {{"penstock: memory::tiered takes memory kinds only"}}
#ifdef PENSTOCK_CORRECT
using right = ps::memory::tiered<ps::memory::device, ps::memory::pinned>;
right* p = nullptr;
static_assert(sizeof(right) == 1);
#else
using wrong = ps::memory::tiered<ps::memory::device, ps::chunking::whole>;
wrong* p = nullptr;
static_assert(sizeof(wrong) == 1);
#endif

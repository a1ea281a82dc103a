#include <penstock/policy/governor.hpp>

namespace ps = penstock;

struct governs_nothing {};

// expected-error {{"penstock: throttled takes a governor with look, may_go, went and arrived"}}
#ifdef PENSTOCK_CORRECT
using policy = ps::throttled<ps::scheduler::fifo, ps::governor::none>;
#else
using policy = ps::throttled<ps::scheduler::fifo, governs_nothing>;
#endif
static_assert(sizeof(policy) > 0);

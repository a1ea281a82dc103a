#include <penstock/residency/expert_store.hpp>

namespace ps = penstock;

struct for_kernels_only {
    using policy_axis = ps::axis::scheduling;
    struct order {
        static constexpr std::uint32_t tile(std::uint32_t i, std::uint32_t, std::uint32_t, std::uint32_t) { return i; }
    };
};
static_assert(ps::scheduling_policy<for_kernels_only>);

// expected-error {{"penstock: expert_store needs a scheduler with a host queue"}}
#ifdef PENSTOCK_CORRECT
using product = ps::expert_store<ps::scheduler::fifo>;
#else
using product = ps::expert_store<for_kernels_only>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

#include <penstock/stream/weight_stream.hpp>

namespace ps = penstock;

struct for_kernels_only {
    using policy_axis = ps::axis::scheduling;
    struct order {
        static constexpr std::uint32_t tile(std::uint32_t i, std::uint32_t, std::uint32_t, std::uint32_t) { return i; }
    };
};
static_assert(ps::scheduling_policy<for_kernels_only>);

// expected-error {{"penstock: weight_stream needs a scheduler with a host queue"}}
#ifdef PENSTOCK_CORRECT
using product = ps::weight_stream<ps::scheduler::fifo>;
#else
using product = ps::weight_stream<for_kernels_only>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

#include <penstock/residency/expert_store.hpp>

namespace ps = penstock;

struct nobody_leaves {
    using policy_axis = ps::axis::eviction;
#ifdef PENSTOCK_CORRECT
    static constexpr double score(const ps::residency_entry& entry, std::uint64_t) { return static_cast<double>(entry.filled); }
#endif
};

// expected-error {{"penstock: an eviction rule offers score(residency_entry, step)"}}
using product = ps::expert_store<nobody_leaves>;
product* use = nullptr;
static_assert(sizeof(product) > 0);

// bound: 30 s, 1500 KiB
#include <penstock/residency/expert_store.hpp>

template class penstock::basic_expert_store<penstock::memory::pinned, penstock::chunking::fixed<penstock::bytes{8u << 20}>,
                                            penstock::prefetch::depth<24>, penstock::scheduler::priority<3>, penstock::eviction::lru>;

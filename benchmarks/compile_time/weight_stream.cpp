// bound: 20 s, 1000 KiB
#include <penstock/stream/weight_stream.hpp>

template class penstock::basic_weight_stream<penstock::memory::pinned, penstock::chunking::fixed<penstock::bytes{8u << 20}>,
                                             penstock::prefetch::depth<24>, penstock::scheduler::fifo>;

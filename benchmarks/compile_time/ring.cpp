// bound: 8 s, 200 KiB
#include <penstock/buffer/ring.hpp>

template class penstock::basic_ring<penstock::memory::pinned, penstock::chunking::fixed<penstock::bytes{8u << 20}>,
                                    penstock::prefetch::depth<3>>;

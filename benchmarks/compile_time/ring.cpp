// bound: 8 s, 200 KiB
#include <penstock/buffer/ring.hpp>

namespace ps = penstock;

using product = ps::ring<ps::memory::pinned, ps::chunking::fixed<ps::bytes{8u << 20}>, ps::prefetch::depth<3>>;

std::size_t use() { return sizeof(product); }

// bound: 5 s, 100 KiB
#include <penstock/buffer/buffer.hpp>

template class penstock::buffer<float, penstock::memory::pinned>;

#include <penstock/buffer/buffer.hpp>

#include <string>

namespace ps = penstock;

// expected-error {{"penstock: buffer holds trivially copyable elements only, since copies move their bytes"}}
#ifdef PENSTOCK_CORRECT
using product = ps::buffer<char, ps::memory::pageable>;
#else
using product = ps::buffer<std::string, ps::memory::pageable>;
#endif
product* use = nullptr;
static_assert(sizeof(product) > 0);

#include <penstock/checkpoint/checkpoint.hpp>
#include <penstock/penstock.hpp>

#include <cstdio>

namespace ps = penstock;
using namespace ps::literals;

int main() {
    ps::buffer<float, ps::memory::pageable> numbers{16};
    using loader = ps::weight_stream<ps::chunking::fixed<4_MiB>, ps::prefetch::depth<3>>;
    static_assert(ps::chunking_policy<loader::chunking>);
    try {
        ps::checkpoint::open("/does/not/exist");
    } catch (const ps::error& e) {
        std::printf("%zu numbers; as expected: %s\n", numbers.size(), e.what());
        return numbers.size() == 16 ? 0 : 1;
    }
    return 1;
}

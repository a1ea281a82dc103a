#include <penstock/buffer/buffer.hpp>
#include <penstock/buffer/ring.hpp>
#include <penstock/checkpoint/safetensors.hpp>

#include <cstdio>

namespace ps = penstock;
using namespace ps::literals;

int main() {
    ps::buffer<float, ps::memory::pageable> numbers{16};
    ps::ring<ps::memory::pageable, ps::chunking::fixed<4_KiB>, ps::prefetch::depth<2>> ring;
    try {
        static_cast<void>(ps::read_safetensors_header("/does/not/exist"));
    } catch (const ps::error& e) {
        std::printf("%zu numbers, %u slots; as expected: %s\n", numbers.size(), ring.slots(), e.what());
        return numbers.size() == 16 && ring.slots() == 2 ? 0 : 1;
    }
    return 1;
}

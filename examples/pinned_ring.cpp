// A ring of pinned memory by hand: fill a slot, let the copy engine take it, fill the next meanwhile. A slot comes back when its copy is
// done and not before. Without a GPU the same loop runs on pageable memory and copies to the host.

#include <penstock/buffer/buffer.hpp>
#include <penstock/buffer/ring.hpp>
#include <penstock/cuda/stream.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace ps = penstock;
using namespace ps::literals;

constexpr std::size_t total = 250'000'007;  // no multiple of a slot

/// What a reader would bring: 64-bit numbers that tell where they belong.
void fill(std::span<std::byte> slot, std::size_t offset) {
    for (std::size_t i = 0; i + 8 <= slot.size(); i += 8) {
        const std::uint64_t value = (offset + i) * 0x9e3779b97f4a7c15u;
        std::memcpy(slot.data() + i, &value, 8);
    }
}

std::size_t count_wrong(std::span<const std::byte> data, std::size_t slot_bytes) {
    std::vector<std::byte> right(slot_bytes);
    std::size_t wrong = 0;
    for (std::size_t at = 0; at < data.size(); at += slot_bytes) {
        fill(right, at);
        const std::size_t size = std::min(slot_bytes, data.size() - at);
        wrong += std::memcmp(data.data() + at, right.data(), size) != 0;
    }
    return wrong;
}

int report(const char* where, std::size_t wrong, std::chrono::steady_clock::time_point started) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    std::printf("%zu bytes to %s in %.3f s, filling included: %.1f GB/s; wrong slots: %zu\n", total, where, seconds, total / seconds / 1e9,
                wrong);
    return wrong == 0 ? 0 : 1;
}

int to_device() {
    const ps::stream stream;
    ps::buffer<std::byte, ps::memory::device> destination(total);
    const auto started = std::chrono::steady_clock::now();
    ps::ring<ps::memory::pinned, ps::chunking::fixed<8_MiB>, ps::prefetch::depth<3>> ring;
    for (std::size_t at = 0; at < total; at += ring.slot_bytes()) {
        auto slot = ring.acquire();
        fill(slot.bytes(), at);
        slot.copy_async(destination.data() + at, stream.get(), std::min(ring.slot_bytes(), total - at));
    }
    stream.synchronize();
    ps::buffer<std::byte, ps::memory::pageable> back(total);
    destination.copy_async(back.data(), stream.get());
    destination.wait();
    return report("the GPU and back", count_wrong(back.span(), ring.slot_bytes()), started);
}

int to_host() {
    std::vector<std::byte> destination(total);
    const auto started = std::chrono::steady_clock::now();
    ps::ring<ps::memory::pageable, ps::chunking::fixed<8_MiB>, ps::prefetch::depth<3>> ring;
    for (std::size_t at = 0; at < total; at += ring.slot_bytes()) {
        auto slot = ring.acquire();
        fill(slot.bytes(), at);
        slot.copy_to(destination.data() + at, std::min(ring.slot_bytes(), total - at));
    }
    return report("host memory (no GPU here)", count_wrong(destination, ring.slot_bytes()), started);
}

int main() {
    try {
        return ps::device_count() > 0 ? to_device() : to_host();
    } catch (const ps::error& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}

// A policy of your own on every axis: a type that names its axis and offers what docs/concepts.md lists. Nothing to derive from, nothing to
// register; products take it in any order among the library's own.

#include <penstock/buffer/buffer.hpp>
#include <penstock/buffer/host_cores.hpp>
#include <penstock/residency/slot_map.hpp>
#include <penstock/stream/weight_stream.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace ps = penstock;
using namespace ps::literals;

struct big_pages {  // memory: from a boundary of 2 MiB, where the kernel can use huge pages
    using policy_axis = ps::axis::memory;
    static constexpr bool host_accessible = true, device_accessible = false, page_aligned = true;
    static void* allocate(std::size_t n) {
        void* p = n == 0 ? nullptr : std::aligned_alloc(2_MiB, ps::round_up(n, 2_MiB));
        return p != nullptr || n == 0 ? p : throw ps::out_of_memory("no " + ps::to_string(ps::bytes{n}) + " of host memory");
    }
    static void deallocate(void* p, std::size_t) noexcept { std::free(p); }
};

struct unbroken_rows {  // chunking: whole rows, about 256 KiB of them, and a longer row is never cut
    using policy_axis = ps::axis::chunking;
    PENSTOCK_HD constexpr std::uint64_t bytes_per_chunk(std::uint64_t row_bytes, std::uint64_t) const noexcept {
        return row_bytes == 0 ? (256_KiB).count : ps::larger(row_bytes, ps::round_down(256_KiB, row_bytes));
    }
};

struct two_a_core {  // prefetch: as many chunks in flight as keep this machine's cores busy
    using policy_axis = ps::axis::prefetch;
    std::uint32_t chunks = 2 * ps::usable_cores();  // asked once: the answer is in files
    std::uint32_t chunks_ahead(std::uint64_t) const noexcept { return chunks; }
};

struct shortest_first {  // scheduling: the request with the fewest chunks left goes next
    using policy_axis = ps::axis::scheduling;
    struct queue {
        void push(ps::request r) { waiting.push_back({r, 0}); }
        std::optional<ps::chunk> next() {
            std::erase_if(waiting, [](const entry& e) { return e.left() == 0; });
            const auto best = std::ranges::min_element(waiting, {}, &entry::left);
            return best == waiting.end() ? std::nullopt : std::optional(ps::chunk{best->what.id, best->done++});
        }
        struct entry {
            ps::request what;
            std::uint32_t done;
            std::uint32_t left() const { return what.chunks - done; }
        };
        std::vector<entry> waiting;
    };
};

struct least_used {  // eviction: who was asked for least leaves
    using policy_axis = ps::axis::eviction;
    PENSTOCK_HD static constexpr double score(const ps::residency_entry& e, std::uint64_t) noexcept { return static_cast<double>(e.uses); }
};

using mine = ps::weight_stream<shortest_first, two_a_core, big_pages, unbroken_rows>;
static_assert(std::is_same_v<mine, ps::weight_stream<big_pages, unbroken_rows, shortest_first, two_a_core>>);  // any order, one type

struct noting_source final : ps::byte_source {  // byte n of its one "file" is n mod 251; it notes in which order it is read
    void read(std::uint32_t, std::uint64_t offset, std::span<std::byte> into) override {
        order.push_back(offset);
        std::ranges::generate(into, [&] { return static_cast<std::byte>(offset++ % 251); });
    }
    std::string name(std::uint32_t) const override { return "numbers"; }
    std::vector<std::uint64_t> order;  // for one reader
};

int main() {
    noting_source source;
    ps::buffer<std::byte, big_pages> to(4'000'000);
    const ps::transfer wanted[] = {
        {.request = 1, .offset = 0, .bytes = 3'000'000, .destination = to.data(), .row_bytes = 100'000},
        {.request = 2, .offset = 3'000'000, .bytes = 1'000'000, .destination = to.data() + 3'000'000, .row_bytes = 500'000}};
    const ps::stream_report report = mine({.readers = 1}).run(wanted, source, ps::on_host());
    bool right = source.order.front() == 3'000'000 && report.chunks == 15 + 2;
    for (std::size_t i = 0; i < to.size(); ++i) {
        right = right && to.data()[i] == static_cast<std::byte>(i % 251);
    }

    ps::slot_map slots(2);  // what an expert_store<least_used> decides with
    for (const std::uint32_t expert : {7u, 8u}) {
        const std::uint32_t slot = slots.reserve<least_used>(expert, 0)->slot;
        slots.publish(slot);
        slots.unpin(slot);
    }
    slots.touch<least_used>(*slots.find(7), 1);
    right = right && slots.reserve<least_used>(9, 2)->evicted && slots.find(7) && !slots.find(8);
    std::printf("%llu chunks, the shorter request first; expert 8, used least, made room for 9: %s\n",
                static_cast<unsigned long long>(report.chunks), right ? "as wanted" : "WRONG");
    return right ? 0 : 1;
}

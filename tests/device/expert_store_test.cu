#include "../tiny_model.hpp"

#include <penstock/residency/expert_store.hpp>

#include <doctest/doctest.h>

namespace ps = penstock;
using namespace ps::literals;

namespace {

__global__ void spin_then_copy(long long cycles, const std::byte* from, std::byte* to, std::uint64_t count) {
    for (const long long start = clock64(); clock64() - start < cycles;) {
    }
    for (std::uint64_t i = threadIdx.x; i < count; i += blockDim.x) {
        to[i] = from[i];
    }
}

}  // namespace

/// On the caller's memory, since freeing its own would happen to wait as well: the driver does so, and does not promise it.
TEST_CASE("M11 a store that dies waits for what still reads its slots and its host tier") {
    tests::tiny_model tiny;
    const std::uint64_t size = tiny.model.record_bytes();
    ps::buffer<std::byte, ps::memory::device> copies(2 * size);
    ps::buffer<std::byte, ps::memory::device> slots(tiny.slot_bytes());
    ps::buffer<std::byte, ps::memory::pinned> tier(16 * tiny.slot_bytes());
    const ps::stream consumer;
    std::vector<std::uint32_t> experts;
    {
        ps::expert_store<ps::chunking::fixed<4096_B>, ps::prefetch::depth<4>> store(
            tiny.model, {{tiny.slot_bytes()}, {16 * tiny.slot_bytes() + (1u << 20)}}, ps::on_device(0),
            {.compute = {slots.data(), slots.size()}, .host = {tier.data(), tier.size()}});
        store.preload_host();
        const std::vector<std::uint32_t> offsets{0, 1, 2, 2, 2, 2, 2, 2, 2};  // two experts, one slot: one is read where it lies
        auto step = store.begin(0, offsets, consumer.get());
        for (auto ready = step.next(); !ready.empty(); ready = step.next()) {
            for (const ps::expert_work& w : ready) {
                spin_then_copy<<<1, 256, 0, consumer.get()>>>(200'000'000, w.record, copies.data() + experts.size() * size, size);
                ps::check(cudaGetLastError(), "spin_then_copy");
                experts.push_back(w.expert);
            }
        }
        step.finish();
        CHECK(store.report().overflow == 1);
        CHECK(cudaStreamQuery(consumer.get()) == cudaErrorNotReady);
    }
    CHECK(cudaStreamQuery(consumer.get()) == cudaSuccess);
    std::vector<std::byte> back(2 * size);
    ps::check(cudaMemcpy(back.data(), copies.data(), back.size(), cudaMemcpyDeviceToHost), "download");
    REQUIRE(experts.size() == 2);
    CHECK(tiny.is_record(0, experts[0], back.data()));
    CHECK(tiny.is_record(0, experts[1], back.data() + size));
}

TEST_CASE("S04 a guess does not take the place of what a running computation reads, and is right when it is needed") {
    tests::tiny_model tiny;
    const std::uint64_t size = tiny.model.record_bytes();
    ps::buffer<std::byte, ps::memory::device> copies(3 * size);
    const ps::stream consumer;
    ps::expert_store<ps::chunking::fixed<4096_B>, ps::prefetch::depth<4>> store(
        tiny.model, {{3 * tiny.slot_bytes()}, {16 * tiny.slot_bytes() + (1u << 20)}}, ps::on_device(0));
    store.preload_host();
    std::vector<std::uint32_t> experts;
    const auto compute = [&](const std::vector<std::uint32_t>& offsets, long long cycles) {
        auto step = store.begin(0, offsets, consumer.get());
        for (auto ready = step.next(); !ready.empty(); ready = step.next()) {
            for (const ps::expert_work& w : ready) {
                spin_then_copy<<<1, 256, 0, consumer.get()>>>(cycles, w.record, copies.data() + experts.size() * size, size);
                ps::check(cudaGetLastError(), "spin_then_copy");
                experts.push_back(w.expert);
            }
        }
    };
    compute({0, 1, 2, 2, 2, 2, 2, 2, 2}, 200'000'000);
    CHECK(store.hint(std::vector<ps::expert_hint>{{0, 2, 0.5f}, {0, 3, 0.9f}}) == 1);  // one slot is free
    while (store.hints_on_the_way() > 0) {
        store.hint({});
    }
    CHECK(cudaStreamQuery(consumer.get()) == cudaErrorNotReady);  // it arrived beside the computation
    compute({0, 0, 0, 0, 1, 1, 1, 1, 1}, 0);
    CHECK(store.report().hints_right == 1);
    CHECK(store.report().evictions == 0);
    consumer.synchronize();
    std::vector<std::byte> back(3 * size);
    ps::check(cudaMemcpy(back.data(), copies.data(), back.size(), cudaMemcpyDeviceToHost), "download");
    REQUIRE(experts == std::vector<std::uint32_t>{0, 1, 3});
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK(tiny.is_record(0, experts[i], back.data() + i * size));
    }
}

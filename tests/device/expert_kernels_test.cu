#include "device_memory.hpp"
#include "test_expert.hpp"

#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/expert_kernels.cuh>

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>

namespace ps = penstock;
using namespace tests;

namespace {

using format = ps::format::bf16;

/// Prefill's kernels for every call.
struct always_many {
    static constexpr bool many(std::uint32_t, std::uint32_t, std::uint32_t) noexcept { return true; }
};

constexpr std::uint32_t experts = 4, k = 2, most_tokens = 64;
constexpr expert_shape shape{.kind = ps::weight_kind::bf16, .hidden = 256, .intermediate = 192};

/// A layer and a batch for it, on the device.
struct layer_and_batch {
    std::vector<std::unique_ptr<guarded<std::byte>>> records;
    std::unique_ptr<guarded<const std::byte*>> table;
    std::unique_ptr<guarded<std::uint16_t>> hidden;
    std::unique_ptr<guarded<std::int32_t>> ids;
    ps::expert_layout layout;

    layer_and_batch() {
        std::mt19937 random(11);
        std::vector<const std::byte*> addresses;
        for (std::uint32_t e = 0; e < experts; ++e) {
            const test_expert expert = make_expert(shape, random);
            layout = expert.layout;
            records.push_back(std::make_unique<guarded<std::byte>>(expert.record));
            addresses.push_back(records.back()->data());
        }
        table = std::make_unique<guarded<const std::byte*>>(addresses);
        std::normal_distribution<float> normal;
        std::vector<std::uint16_t> x(most_tokens * shape.hidden);
        std::generate(x.begin(), x.end(), [&] { return ps::encode_bf16(normal(random)); });
        hidden = std::make_unique<guarded<std::uint16_t>>(x);
        std::vector<std::int32_t> chosen(most_tokens * k);
        std::generate(chosen.begin(), chosen.end(), [&] { return static_cast<std::int32_t>(random() % experts); });
        ids = std::make_unique<guarded<std::int32_t>>(chosen);
    }

    /// Outputs of the first `tokens` tokens, of calls that follow each other on one workspace that is NaN but for its counters.
    template <class Kernels>
    std::vector<std::vector<float>> run(const Kernels& kernels, const std::vector<std::uint32_t>& token_counts,
                                        std::size_t counter_bytes) const {
        guarded<std::byte> workspace(kernels.workspace_bytes());
        ps::check(cudaMemset(workspace.data(), 0, counter_bytes), "cudaMemset");
        const ps::stream stream;
        std::vector<std::vector<float>> all;
        for (const std::uint32_t tokens : token_counts) {
            guarded<float> out(std::size_t{tokens} * shape.hidden);
            ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            kernels.enqueue({.records = table->data(),
                             .hidden = {hidden->data(), ps::dtype::bf16, tokens, shape.hidden},
                             .ids = ids->data(),
                             .out = {out.data(), ps::dtype::f32, tokens, shape.hidden}},
                            {workspace.data(), workspace.size()}, stream.get());
            stream.synchronize();
            CHECK(out.guards_hold());
            all.push_back(out.get());
        }
        CHECK(workspace.guards_hold());
        return all;
    }
};

}  // namespace

TEST_CASE("calls take the kernels that the selector names, in any order on one workspace") {
    const layer_and_batch l;
    const ps::expert_decode<format> decode(l.layout, experts, most_tokens, k);
    const ps::expert_kernels<format> kernels(l.layout, experts, most_tokens, k);
    const std::vector<std::uint32_t> counts{1, 64, 3, 64, 1};
    const auto few = l.run(decode, counts, decode.counter_bytes());
    const auto got = l.run(kernels, counts, kernels.counter_bytes());
    CHECK_FALSE(kernels.many(1));
    CHECK_FALSE(kernels.many(11));
    CHECK(kernels.many(12) == ps::expert_prefill<format>::runs_here());
    for (const std::size_t i : {0u, 2u, 4u}) {
        CHECK(got[i] == few[i]);
    }
    if (kernels.many(64)) {
        const ps::expert_prefill<format> prefill(l.layout, experts, most_tokens, k);
        const auto many = l.run(prefill, {64}, 0);
        CHECK(got[1] == many[0]);
        CHECK(got[3] == many[0]);
    } else {
        CHECK(got[1] == few[1]);
    }
}

TEST_CASE("a selector of one's own decides, and what one kernel does not serve the other does") {
    const layer_and_batch l;
    const ps::expert_kernels<format, ps::precision::a16, always_many> kernels(l.layout, experts, most_tokens, k);
    CHECK(kernels.many(1) == ps::expert_prefill<format>::runs_here());
    const ps::expert_kernels<format> small(l.layout, experts, 8, k);  // no call of it is for many
    CHECK_FALSE(small.many(8));
    CHECK(small.workspace_bytes() == ps::expert_decode<format>(l.layout, experts, 8, k).workspace_bytes());
}

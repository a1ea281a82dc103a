#include "expert_batch.hpp"

#include <penstock/dispatch/expert_kernels.cuh>

#include <doctest/doctest.h>

namespace ps = penstock;
using namespace tests;

namespace {

using decode = ps::expert_decode<ps::format::bf16>;
using prefill = ps::expert_prefill<ps::format::bf16>;
using kernels = ps::expert_kernels<ps::format::bf16>;

/// Prefill's kernels for every call.
struct always_many {
    static constexpr bool many(std::uint32_t, std::uint32_t, std::uint32_t) noexcept { return true; }
};

constexpr std::uint32_t experts = 4, k = 2, most_tokens = 64;
constexpr expert_shape shape{.kind = ps::weight_kind::bf16, .hidden = 256, .intermediate = 192};

}  // namespace

TEST_CASE("calls take the kernels that the selector names, in any order on one workspace") {
    std::mt19937 random(11);
    const layer l(shape, experts, random);
    const kernels both(l.layout(), experts, most_tokens, k);
    CHECK_FALSE(both.many(1));
    CHECK_FALSE(both.many(11));
    CHECK(both.many(12) == prefill::runs_here());
    guarded<std::byte> workspace(both.workspace_bytes());
    ps::check(cudaMemset(workspace.data(), 0, both.counter_bytes()), "cudaMemset");
    const ps::stream stream;
    for (const std::uint32_t tokens : {1u, 64u, 3u, 64u, 1u}) {
        CAPTURE(tokens);
        const batch b = random_batch<kernels>(l, tokens, k, random);
        call<kernels> one(l, b, true);
        ps::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        both.enqueue(one.step, {workspace.data(), workspace.size()}, stream.get());
        stream.synchronize();
        CHECK(one.out.guards_hold());
        CHECK(one.out.get() == (both.many(tokens) ? run<prefill>(l, b, most_tokens, true) : run<decode>(l, b, most_tokens, true)));
    }
    CHECK(workspace.guards_hold());
}

TEST_CASE("a selector of one's own decides; decode alone serves an object none of whose calls is for many") {
    std::mt19937 random(12);
    const layer l(shape, experts, random);
    const ps::expert_kernels<ps::format::bf16, ps::precision::a16, always_many> many(l.layout(), experts, most_tokens, k);
    CHECK(many.many(1) == prefill::runs_here());
    const kernels few(l.layout(), experts, 8, k);
    CHECK_FALSE(few.many(8));
    CHECK(few.workspace_bytes() == decode(l.layout(), experts, 8, k).workspace_bytes());
}

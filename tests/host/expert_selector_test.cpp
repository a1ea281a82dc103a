#include <penstock/dispatch/expert_selector.hpp>

#include <doctest/doctest.h>

namespace ps = penstock;

TEST_CASE("few tokens an expert take decode's kernels, many take prefill's, by the sizes of the call alone") {
    // DeepSeek-V3: 256 experts, top-8.
    CHECK_FALSE(ps::expert_selector::many(0, 8, 256));
    CHECK_FALSE(ps::expert_selector::many(1, 8, 256));
    CHECK_FALSE(ps::expert_selector::many(128, 8, 256));  // four tokens an expert
    CHECK_FALSE(ps::expert_selector::many(191, 8, 256));
    CHECK(ps::expert_selector::many(192, 8, 256));  // six
    CHECK(ps::expert_selector::many(4096, 8, 256));
    // Mixtral: eight experts, top-2.
    CHECK_FALSE(ps::expert_selector::many(16, 2, 8));
    CHECK(ps::expert_selector::many(32, 2, 8));
    CHECK(ps::expert_selector::many(1u << 31, 16, 1));  // no overflow
}

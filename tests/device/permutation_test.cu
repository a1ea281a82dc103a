#include <penstock/dispatch/cuda_experts.cuh>

#include "device_memory.hpp"

#include <doctest/doctest.h>

#include <algorithm>

namespace ps = penstock;
using namespace tests;

using cuda_executor = ps::executor::cuda<ps::format::f32>;

namespace {

void check_permutation(const std::vector<std::int32_t>& ids, std::uint32_t experts) {
    const auto pairs = static_cast<std::uint32_t>(ids.size());
    CAPTURE(pairs);
    CAPTURE(experts);
    std::vector<std::int32_t> want_rows;
    std::vector<std::uint32_t> want_offsets(experts + 1, 0);
    for (std::int32_t p = 0; p < static_cast<std::int32_t>(pairs); ++p) {
        if (ids[static_cast<std::size_t>(p)] >= 0 && ids[static_cast<std::size_t>(p)] < static_cast<std::int32_t>(experts)) {
            want_rows.push_back(p);
            ++want_offsets[static_cast<std::size_t>(ids[static_cast<std::size_t>(p)]) + 1];
        }
    }
    std::stable_sort(want_rows.begin(), want_rows.end(),
                     [&](std::int32_t a, std::int32_t b) { return ids[static_cast<std::size_t>(a)] < ids[static_cast<std::size_t>(b)]; });
    for (std::uint32_t e = 0; e < experts; ++e) {
        want_offsets[e + 1] += want_offsets[e];
    }

    const guarded<std::int32_t> device_ids(ids);
    guarded<std::int32_t> rows(pairs);
    guarded<std::uint32_t> offsets(experts + 1);
    guarded<std::byte> scratch(cuda_executor::permute_scratch_bytes(pairs, experts));
    cuda_executor(nullptr).permute(device_ids.data(), pairs, experts, rows.data(), offsets.data(), {scratch.data(), scratch.size()});
    CHECK(offsets.get() == want_offsets);
    std::vector<std::int32_t> got = rows.get();
    CHECK(std::all_of(got.begin() + static_cast<std::ptrdiff_t>(want_rows.size()), got.end(),
                      [](std::int32_t r) { return r == -1; }));  // 0xff: not written
    got.resize(want_rows.size());
    CHECK(got == want_rows);
    CHECK(rows.guards_hold());
    CHECK(offsets.guards_hold());
    CHECK(scratch.guards_hold());
}

std::vector<std::int32_t> random_ids(std::size_t pairs, std::uint32_t experts, std::mt19937& random) {
    std::vector<std::int32_t> ids(pairs);
    for (std::int32_t& id : ids) {
        id = random() % 10 == 0 ? -1 : static_cast<std::int32_t>(random() % experts);
    }
    return ids;
}

}  // namespace

TEST_CASE("R19 counts and prefix sums for odd expert numbers") {
    std::mt19937 random(1);
    for (const std::uint32_t experts : {1, 2, 3, 7, 31, 33, 60, 63, 65, 100, 160, 257, 384, 896}) {
        for (const std::uint32_t tokens : {1, 2, 5, 64}) {
            check_permutation(random_ids(std::size_t{tokens} * std::min(8u, experts), experts, random), experts);
        }
    }
}

TEST_CASE("K18 limits that depend on the expert count") {
    std::mt19937 random(2);
    for (const std::uint32_t experts : {128, 256, 511, 512, 513, 896, 1023, 1024, 1025, 2048, 4096}) {
        for (const std::uint32_t tokens : {1, 9, 1000}) {
            check_permutation(random_ids(std::size_t{tokens} * 8, experts, random), experts);
        }
    }
}

TEST_CASE("pair counts around the share of a block") {
    std::mt19937 random(3);
    for (const std::size_t pairs : {1, 3, 4, 5, 2047, 2048, 2049, 4096, 6143, 6145, 20000}) {
        check_permutation(random_ids(pairs, 37, random), 37);
        check_permutation(std::vector<std::int32_t>(pairs, 36), 37);
        check_permutation(std::vector<std::int32_t>(pairs, -1), 37);
    }
}

TEST_CASE("K05 70000 tokens of 8 choices, 70000 experts") {
    std::mt19937 random(4);
    for (const std::size_t tokens : {8191, 8192, 65535, 65536, 70000}) {
        check_permutation(random_ids(tokens * 8, 128, random), 128);
    }
    check_permutation(random_ids(5000, 70000, random), 70000);
}

TEST_CASE("R17 duplicate experts of one token, and ids that no expert has") {
    check_permutation({3, 3, 7, 7, 1, 2, 3, 3, 7, 7, 1, 2}, 8);
    check_permutation({0, 8, 9, -7, 7, 1 << 30, -(1 << 30), 0}, 8);
}

TEST_CASE("K02 zero pairs") {
    const cuda_executor executor(nullptr);
    executor.permute(nullptr, 0, 0, nullptr, nullptr, {});
    executor.permute(nullptr, 0, 8, nullptr, nullptr, {});
    CHECK(cudaGetLastError() == cudaSuccess);
    check_permutation({}, 8);  // the offsets are still written
    check_permutation({5}, 8);
}

TEST_CASE("too little scratch is refused with the size wanted") {
    guarded<std::uint32_t> offsets(9);
    const guarded<std::int32_t> ids(std::vector<std::int32_t>(3000, 1));
    guarded<std::int32_t> rows(3000);
    CHECK_THROWS_WITH_AS(cuda_executor(nullptr).permute(ids.data(), 3000, 8, rows.data(), offsets.data(), {}),
                         "penstock: permute of 3000 pairs to 8 experts needs 64 bytes of scratch, 0 were given", ps::configuration_error);
}

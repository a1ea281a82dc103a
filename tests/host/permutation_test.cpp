#include <penstock/dispatch/permutation.hpp>

#include <doctest/doctest.h>

#include <vector>

namespace ps = penstock;

TEST_CASE("pairs of nobody are left out, the others are sorted by expert and ascending within one") {
    const std::vector<std::int32_t> ids{2, -1, 0, 2, 2, -1, 0, 4};
    std::vector<std::int32_t> rows(8, 99);
    std::vector<std::uint32_t> offsets(7, 99);
    ps::permute_by_expert(ids, 6, rows.data(), offsets.data());
    CHECK(offsets == std::vector<std::uint32_t>{0, 2, 2, 5, 5, 6, 6});
    CHECK(rows == std::vector<std::int32_t>{2, 6, 0, 3, 4, 7, 99, 99});
}

TEST_CASE("all pairs of one expert, the first or the last") {
    for (std::int32_t e : {0, 3}) {
        const std::vector<std::int32_t> ids(5, e);
        std::vector<std::int32_t> rows(5);
        std::vector<std::uint32_t> offsets(5);
        ps::permute_by_expert(ids, 4, rows.data(), offsets.data());
        CHECK(rows == std::vector<std::int32_t>{0, 1, 2, 3, 4});
        for (std::uint32_t i = 0; i < 5; ++i) {
            CHECK(offsets[i] == (static_cast<std::int32_t>(i) > e ? 5u : 0u));
        }
    }
}

TEST_CASE("an id beyond the last expert is refused before anything is written") {
    const std::vector<std::int32_t> ids{0, 4};
    std::vector<std::int32_t> rows(2, 99);
    std::vector<std::uint32_t> offsets(5, 99);
    CHECK_THROWS_WITH_AS(ps::permute_by_expert(ids, 4, rows.data(), offsets.data()), doctest::Contains("pair 1 asks for expert 4 of 4"),
                         ps::configuration_error);
    CHECK(rows[0] == 99);
    CHECK(offsets[0] == 99);
}

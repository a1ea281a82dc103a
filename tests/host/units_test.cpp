#include <penstock/error.hpp>
#include <penstock/units.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <string>

namespace ps = penstock;
using namespace ps::literals;

TEST_CASE("sizes count bytes") {
    static_assert((7_B).count == 7);
    static_assert((3_KiB).count == 3072);
    static_assert((8_MiB).count == 8388608);
    static_assert((5_GiB).count == 5368709120u);
    static_assert(2_Ki == 2048 && 1_Mi == 1048576);
    static_assert(ps::bytes{}.count == 0);
    CHECK(8_MiB + 1 == 8388609u);
}

TEST_CASE("rounding keeps multiples and goes to the neighbouring one otherwise") {
    static_assert(ps::round_up(0, 256) == 0);
    for (const std::uint64_t step : {1u, 2u, 7u, 128u, 256u, 4096u}) {
        for (std::uint64_t n = 0; n < 3 * step + 2; ++n) {
            const std::uint64_t up = ps::round_up(n, step);
            const std::uint64_t down = ps::round_down(n, step);
            CHECK(up % step == 0);
            CHECK(down % step == 0);
            CHECK(up >= n);
            CHECK(up - n < step);
            CHECK(down <= n);
            CHECK(n - down < step);
            CHECK(ps::ceil_div(n, step) == up / step);
        }
    }
}

TEST_CASE("rounding works above four gigabytes") {
    constexpr std::uint64_t n = (std::uint64_t{5} << 32) + 1;
    static_assert(ps::round_up(n, 256) == (std::uint64_t{5} << 32) + 256);
    static_assert(ps::ceil_div(n, 2) == (std::uint64_t{5} << 31) + 1);
    CHECK(ps::round_down(n, 256) == std::uint64_t{5} << 32);
}

TEST_CASE("smaller and larger take the first of equals") {
    static_assert(ps::smaller(2, 3) == 2 && ps::larger(2, 3) == 3);
    static_assert(ps::smaller(-1, -1) == -1 && ps::larger(4u, 4u) == 4u);
    CHECK(ps::larger(std::numeric_limits<std::uint64_t>::max(), std::uint64_t{0}) == std::numeric_limits<std::uint64_t>::max());
}

TEST_CASE("sizes are printed with the unit that fits") {
    CHECK(ps::to_string(ps::bytes{0}) == "0 B");
    CHECK(ps::to_string(ps::bytes{768}) == "768 B");
    CHECK(ps::to_string(ps::bytes{1023}) == "1023 B");
    CHECK(ps::to_string(1_KiB) == "1.0 KiB");
    CHECK(ps::to_string(ps::bytes{12 * 1048576 + 209715}) == "12.2 MiB");
    CHECK(ps::to_string(18_GiB) == "18.0 GiB");
    CHECK(ps::to_string(ps::bytes{std::uint64_t{5000} << 40}) == "5000.0 TiB");
}

TEST_CASE("an error of the runtime says what was done, what went wrong and where") {
    try {
        ps::check(cudaErrorInvalidValue, "copy of a test");
        FAIL("no exception");
    } catch (const ps::cuda_error& e) {
        const std::string text = e.what();
        CHECK(e.code() == cudaErrorInvalidValue);
        CHECK(text.find("copy of a test") != std::string::npos);
        CHECK(text.find("cudaErrorInvalidValue") != std::string::npos);
        CHECK(text.find("units_test.cpp:") != std::string::npos);
    }
}

TEST_CASE("errors of the runtime come as the type of their cause") {
    CHECK_NOTHROW(ps::check(cudaSuccess, "nothing"));
    CHECK_THROWS_AS(ps::check(cudaErrorMemoryAllocation, "an allocation"), ps::out_of_memory);
    CHECK_THROWS_AS(ps::check(cudaErrorIllegalAddress, "a kernel"), ps::device_lost);
    CHECK_THROWS_AS(ps::check(cudaErrorECCUncorrectable, "a kernel"), ps::device_lost);
    CHECK_THROWS_AS(ps::check(cudaErrorNotSupported, "a feature"), ps::cuda_error);
    CHECK_THROWS_AS(ps::check(cudaErrorNotSupported, "a feature"), ps::error);
}

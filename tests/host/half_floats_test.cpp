#include <penstock/model/half_floats.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>

namespace ps = penstock;

TEST_CASE("every f16 and bf16 value survives the way to float and back") {
    for (std::uint32_t b = 0; b < 0x10000; ++b) {
        const auto half = static_cast<std::uint16_t>(b);
        const float f = ps::from_f16(half);
        const float g = ps::from_bf16(half);
        if (std::isnan(f)) {
            CHECK(std::isnan(ps::from_f16(ps::to_f16(f))));
        } else {
            CHECK(ps::to_f16(f) == half);
        }
        if (std::isnan(g)) {
            CHECK(std::isnan(ps::from_bf16(ps::to_bf16(g))));
        } else {
            CHECK(ps::to_bf16(g) == half);
        }
    }
}

TEST_CASE("rounding is to nearest, ties to even, on both sides of every midpoint") {
    std::mt19937 random(3);
    for (int i = 0; i < 200000; ++i) {
        const auto low = static_cast<std::uint16_t>(random() % 0x7bff);  // finite, and the next one is too
        const double a = ps::from_f16(low);
        const double b = ps::from_f16(static_cast<std::uint16_t>(low + 1));
        const auto middle = static_cast<float>((a + b) / 2);
        CHECK(ps::to_f16(middle) == (low % 2 == 0 ? low : low + 1));
        CHECK(ps::to_f16(std::nextafter(middle, 0.0f)) == low);
        CHECK(ps::to_f16(std::nextafter(middle, 1e6f)) == low + 1);
    }
    CHECK(ps::from_f16(ps::to_f16(65519.0f)) == 65504.0f);
    CHECK(std::isinf(ps::from_f16(ps::to_f16(65520.0f))));
    CHECK(ps::to_bf16(std::bit_cast<float>(0x3f808000u)) == 0x3f80);
    CHECK(ps::to_bf16(std::bit_cast<float>(0x3f818000u)) == 0x3f82);
    CHECK(std::isinf(ps::from_bf16(ps::to_bf16(std::numeric_limits<float>::max()))));
}

TEST_CASE("elements of unaligned arrays, and types that hold no float") {
    std::byte raw[9] = {};
    ps::store_float(raw + 1, ps::dtype::f32, 1, 1.5f);
    CHECK(ps::load_float(raw + 1, ps::dtype::f32, 1) == 1.5f);
    ps::store_float(raw + 1, ps::dtype::bf16, 3, -2.0f);
    CHECK(ps::load_float(raw + 1, ps::dtype::bf16, 3) == -2.0f);
    CHECK_THROWS_AS(static_cast<void>(ps::load_float(raw, ps::dtype::i64, 0)), ps::configuration_error);
    CHECK_THROWS_AS(ps::store_float(raw, ps::dtype::u8, 0, 1), ps::configuration_error);
}

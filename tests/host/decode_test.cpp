#include <penstock/dispatch/decode.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>

namespace ps = penstock;

TEST_CASE("every f16 and bf16 value survives the way to float and back") {
    for (std::uint32_t b = 0; b < 0x10000; ++b) {
        const auto half = static_cast<std::uint16_t>(b);
        const float f = ps::decode_f16(half);
        const float g = ps::decode_bf16(half);
        if (std::isnan(f)) {
            CHECK(std::isnan(ps::decode_f16(ps::encode_f16(f))));
        } else {
            CHECK(ps::encode_f16(f) == half);
        }
        if (std::isnan(g)) {
            CHECK(std::isnan(ps::decode_bf16(ps::encode_bf16(g))));
        } else {
            CHECK(ps::encode_bf16(g) == half);
        }
    }
}

TEST_CASE("rounding is to nearest, ties to even, on both sides of every midpoint") {
    std::mt19937 random(3);
    for (int i = 0; i < 200000; ++i) {
        const auto low = static_cast<std::uint16_t>(random() % 0x7bff);  // finite, and the next one is too
        const double a = ps::decode_f16(low);
        const double b = ps::decode_f16(static_cast<std::uint16_t>(low + 1));
        const auto middle = static_cast<float>((a + b) / 2);
        CHECK(ps::encode_f16(middle) == (low % 2 == 0 ? low : low + 1));
        CHECK(ps::encode_f16(std::nextafter(middle, 0.0f)) == low);
        CHECK(ps::encode_f16(std::nextafter(middle, 1e6f)) == low + 1);
    }
    CHECK(ps::decode_f16(ps::encode_f16(65519.0f)) == 65504.0f);
    CHECK(std::isinf(ps::decode_f16(ps::encode_f16(65520.0f))));
    CHECK(ps::encode_bf16(std::bit_cast<float>(0x3f808000u)) == 0x3f80);
    CHECK(ps::encode_bf16(std::bit_cast<float>(0x3f818000u)) == 0x3f82);
    CHECK(std::isinf(ps::decode_bf16(ps::encode_bf16(std::numeric_limits<float>::max()))));
}

TEST_CASE("E4M3: all 256 values, the nearest of any float with ties to even, and what is no number") {
    for (std::uint32_t b = 0; b < 256; ++b) {
        const float value = ps::decode_e4m3(static_cast<std::uint8_t>(b));
        CHECK((std::isnan(value) ? (ps::encode_e4m3(value) & 0x7f) == 0x7f : ps::encode_e4m3(value) == b));
    }
    for (std::uint32_t b = 0; b < 0x7e; ++b) {  // between two neighbours
        const float low = ps::decode_e4m3(static_cast<std::uint8_t>(b)), high = ps::decode_e4m3(static_cast<std::uint8_t>(b + 1));
        const float middle = (low + high) / 2;
        CHECK(ps::encode_e4m3(middle) == (b % 2 == 0 ? b : b + 1));
        CHECK(ps::encode_e4m3(std::nextafter(middle, 1000.0f)) == b + 1);
        CHECK(ps::encode_e4m3(std::nextafter(middle, -1.0f)) == b);
        CHECK(ps::encode_e4m3(-middle) == (0x80 | (b % 2 == 0 ? b : b + 1)));
    }
    CHECK(ps::encode_e4m3(1e30f) == 0x7e);
    CHECK(ps::encode_e4m3(-INFINITY) == 0xfe);
    CHECK(ps::encode_e4m3(1e-30f) == 0);
}

TEST_CASE("elements of unaligned arrays") {
    std::byte raw[9] = {};
    ps::store_element(raw + 1, ps::dtype::f32, 1, 1.5f);
    CHECK(ps::load_element(raw + 1, ps::dtype::f32, 1) == 1.5f);
    ps::store_element(raw + 1, ps::dtype::bf16, 3, -2.0f);
    CHECK(ps::load_element(raw + 1, ps::dtype::bf16, 3) == -2.0f);
}

#include "host_experts_records.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cuda/std/bit>

namespace ps = penstock;
using namespace records;

namespace {

constexpr ps::weight_kind kinds[] = {ps::weight_kind::f32, ps::weight_kind::bf16, ps::weight_kind::f16, ps::weight_kind::fp8_block128,
                                     ps::weight_kind::mxfp4};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// f32 matrices of size n, each a multiple of the identity.
struct diagonal_expert {
    explicit diagonal_expert(std::uint32_t n, float gate = 1, float up = 1, float down = 1)
        : layout(make_layout(ps::weight_kind::f32, {n, n}, arrangement::apart, false)), record(layout.bytes) {
        for (std::uint32_t r = 0; r < n; ++r) {
            put_float(record, layout.gate.offset + 4 * std::uint64_t{r} * (n + 1), gate);
            put_float(record, layout.up.offset + 4 * std::uint64_t{r} * (n + 1), up);
            put_float(record, layout.down.offset + 4 * std::uint64_t{r} * (n + 1), down);
        }
    }

    ps::expert_layout layout;
    std::vector<std::byte> record;
};

float silu(float x) { return x / (1 + std::exp(-x)); }

}  // namespace

TEST_CASE("K01 experts without tokens") {
    std::mt19937 random{1};
    const ps::expert_layout layout = make_layout(ps::weight_kind::bf16, {48, 24}, arrangement::apart, false);
    std::vector<std::vector<std::byte>> record(8);
    std::vector<const std::byte*> where;
    for (auto& r : record) {
        r = random_record(layout, random);
        where.push_back(r.data());
    }
    const ps::executor::host host{2};
    for (const std::vector<std::int32_t>& ids : {std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 7}, {5, 5, 5}, {0}, {7}, {-1, 3, -1}}) {
        const std::vector<float> x = random_floats(ids.size() * 48, random);
        const result r = run_experts(host, layout, where, ids, 1, x);
        std::vector<float> out(ids.size() * 48, no_number);
        const auto tokens = static_cast<std::uint32_t>(ids.size());
        host.combine(r.partial.data(), ids.data(), nullptr, 1, nullptr, {out.data(), ps::dtype::f32, tokens, 48});
        for (std::size_t t = 0; t < ids.size(); ++t) {
            const std::vector<double> wanted = ids[t] < 0 ? std::vector<double>(48) : reference(layout, where[ids[t]], &x[t * 48]);
            CHECK(relative_error(&out[t * 48], wanted, 48) < 1e-5);
            if (ids[t] < 0) {  // nobody's pair is neither written nor read
                CHECK(std::isnan(r.partial[t * 48]));
                CHECK(out[t * 48] == 0.0f);
            }
        }
    }
}

TEST_CASE("K02 zero tokens") {
    const ps::executor::host host{2};
    const ps::expert_layout layout = make_layout(ps::weight_kind::bf16, {8, 8}, arrangement::apart, false);
    host.widen({}, nullptr);
    host.logits({nullptr, ps::dtype::bf16, 8, 8}, nullptr, 0, nullptr);
    host.route({.experts = 8, .top_k = 2}, {.experts = 8}, nullptr, 0, nullptr, nullptr, nullptr);
    std::uint32_t offsets[9];
    std::fill_n(offsets, 9, 7u);
    host.permute(nullptr, 0, 8, nullptr, offsets, {});
    CHECK(std::count(offsets, offsets + 9, 0u) == 9);
    host.experts(layout, {}, nullptr, 2, nullptr, nullptr, nullptr, nullptr);
    const ps::expert_work empty{3, nullptr, 0, 0};
    host.experts(layout, {&empty, 1}, nullptr, 2, nullptr, nullptr, nullptr, nullptr);
    host.shared_gate(nullptr, ps::dtype::f32, nullptr, 0, 8, nullptr);
    host.combine(nullptr, nullptr, nullptr, 2, nullptr, {});

    const diagonal_expert expert(1);
    const result r = run_experts(host, expert.layout, {expert.record.data()}, {0}, 1, {2.0f});
    CHECK(r.partial[0] == doctest::Approx(silu(2) * 2));
}

TEST_CASE("K06 dimensions that fit no tile, in every format and arrangement") {
    std::mt19937 random{6};
    for (ps::host_isa isa : isas()) {
        CAPTURE(std::string(ps::name(isa)));
        const ps::executor::host host{2, isa};
        for (ps::weight_kind kind : kinds) {
            CAPTURE(std::string(ps::name(kind)));
            for (arrangement how : {arrangement::apart, arrangement::concatenated, arrangement::interleaved, arrangement::columns,
                                    arrangement::columns_concatenated, arrangement::columns_interleaved, arrangement::scattered}) {
                CAPTURE(static_cast<int>(how));
                for (shape s : {shape{1, 1}, {37, 41}, {100, 36}, {192, 192}, {320, 192}, {33, 600}, {600, 2}}) {
                    const std::uint64_t shift = random() % 2;
                    CAPTURE(s.hidden);
                    CAPTURE(s.intermediate);
                    const double tolerance = s.intermediate < 10 ? 1e-4 : 1e-5;  // one or two numbers may be small by cancellation
                    ps::expert_layout layout = make_layout(kind, s, how, how == arrangement::interleaved, shift);
                    if (how == arrangement::interleaved) {
                        layout.act = ps::activation::gpt_oss;
                        layout.limit = 1.0f;
                    }
                    const std::vector<std::byte> record = random_record(layout, random);
                    for (std::uint32_t tokens : {1u, 3u, 11u}) {
                        std::vector<float> x = random_floats(std::size_t{tokens} * s.hidden, random);
                        const std::vector<float> scale = random_floats(tokens, random);
                        const std::vector<std::int32_t> ids(tokens, 0);
                        const float* input_scale = tokens == 3 ? scale.data() : nullptr;
                        const result r = run_experts(host, layout, {record.data()}, ids, 1, x, input_scale);
                        for (std::uint32_t t = 0; t < tokens; ++t) {
                            const auto wanted = reference(layout, record.data(), &x[t * s.hidden], input_scale ? scale[t] : 1.0f);
                            REQUIRE(relative_error(&r.partial[t * s.hidden], wanted, s.hidden) < tolerance);
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("K06 dimensions of real models") {
    std::mt19937 random{66};
    const ps::executor::host host;
    for (shape s : {shape{2880, 360}, {4096, 1536}, {2880, 2880}}) {
        const ps::weight_kind kind = s.intermediate == 1536 ? ps::weight_kind::fp8_block128 : ps::weight_kind::mxfp4;
        const ps::expert_layout layout = make_layout(kind, s, arrangement::interleaved, true);
        const std::vector<std::byte> record = random_record(layout, random);
        const std::vector<float> x = random_floats(s.hidden, random);
        const result r = run_experts(host, layout, {record.data()}, {0}, 1, x);
        CHECK(relative_error(r.partial.data(), reference(layout, record.data(), x.data()), s.hidden) < 1e-5);
    }
}

TEST_CASE("K08 rows per expert around the tile size") {
    const std::uint32_t counts[] = {1, 0, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129};
    constexpr std::uint32_t n = 5;
    std::vector<std::int32_t> ids;
    std::vector<diagonal_expert> experts;
    std::vector<const std::byte*> where;
    for (std::uint32_t e = 0; e < std::size(counts); ++e) {
        ids.insert(ids.end(), counts[e], static_cast<std::int32_t>(e));
        experts.emplace_back(n, 1.0f, 1.0f, static_cast<float>(e + 1));
    }
    for (const diagonal_expert& expert : experts) {
        where.push_back(expert.record.data());
    }
    std::mt19937 random{8};
    std::shuffle(ids.begin(), ids.end(), random);
    const std::vector<float> x = random_floats(ids.size() * n, random);
    const ps::executor::host host{3};
    const result r = run_experts(host, experts[0].layout, where, ids, 1, x);
    for (std::size_t t = 0; t < ids.size(); ++t) {
        for (std::uint32_t i = 0; i < n; ++i) {
            const float v = x[t * n + i];
            REQUIRE(r.partial[t * n + i] == doctest::Approx(static_cast<float>(ids[t] + 1) * silu(v) * v).epsilon(1e-5));
        }
    }
}

TEST_CASE("K10 mxfp4: low nibble first, neighbours in a byte") {
    std::array<std::byte, 16> data{};
    data[0] = std::byte{0x21};
    data[15] = std::byte{0x43};
    const std::byte scale{128};
    std::vector<float> wanted(32, 0.0f);
    wanted[0] = 1;
    wanted[1] = 2;
    wanted[30] = 3;
    wanted[31] = 4;
    for (ps::host_isa isa : isas()) {
        std::vector<float> got(32, no_number);
        ps::detail::kernels_for(isa).decode[4]({data.data(), &scale}, 32, got.data());
        CHECK(got == wanted);
    }
}

TEST_CASE("K11 E8M0 scale bytes") {
    const std::array<std::pair<int, std::uint32_t>, 6> wanted{
        {{0, 0x00400000u}, {1, 0x00800000u}, {127, 0x3f800000u}, {128, 0x40000000u}, {254, 0x7f000000u}, {255, 0}}};
    const std::vector<std::byte> data(16, std::byte{0x22});  // 1.0 everywhere
    for (auto [byte, bits] : wanted) {
        CAPTURE(byte);
        const auto scale = static_cast<std::byte>(byte);
        for (ps::host_isa isa : isas()) {
            const ps::detail::host_kernels& kernels = ps::detail::kernels_for(isa);
            std::vector<float> got(32);
            kernels.decode[4]({data.data(), &scale}, 32, got.data());
            std::vector<float> x(32, 0.0f);
            x[5] = 1;
            float sum = 0;
            const ps::detail::stored_run run{data.data(), &scale};
            kernels.dot_one[4](&run, 32, x.data(), &sum);
            got.push_back(sum);
            for (float value : got) {
                if (byte == 255) {
                    REQUIRE(std::isnan(value));
                } else {
                    REQUIRE(cuda::std::bit_cast<std::uint32_t>(value) == bits);
                }
            }
            std::uint16_t bf16 = 0;
            ps::store_element(&bf16, ps::dtype::bf16, 0, got[0]);
            CHECK((byte == 255 ? std::isnan(ps::decode_bf16(bf16)) : bf16 == bits >> 16));
        }
    }
}

TEST_CASE("K13 gpt-oss activation, interleaved and concatenated; plain SwiGLU beside it") {
    const float gate[] = {10, -10, 0.5f, 8}, up[] = {-9, 3, 0.25f, 8};
    const double wanted[] = {-41.999719, -1.623e-6, 0.437986, 55.999625};
    const ps::executor::host host{1};
    for (arrangement how : {arrangement::interleaved, arrangement::concatenated}) {
        ps::expert_layout layout = make_layout(ps::weight_kind::f32, {4, 4}, how, false);
        layout.act = ps::activation::gpt_oss;
        layout.limit = 7;
        std::vector<std::byte> record(layout.bytes);
        for (std::uint64_t i = 0; i < 4; ++i) {  // gate and up of an x of ones are the numbers; down is the identity
            put_float(record, layout.gate.offset + 4 * i * layout.gate.row_stride, gate[i]);
            put_float(record, layout.up.offset + 4 * i * layout.up.row_stride, up[i]);
            put_float(record, layout.down.offset + 4 * 5 * i, 1);
        }
        const std::vector<float> x{1, 0, 0, 0};
        const result oss = run_experts(host, layout, {record.data()}, {0}, 1, x);
        layout.act = ps::activation::swiglu;
        const result plain = run_experts(host, layout, {record.data()}, {0}, 1, x);
        layout.act = ps::activation::swiglu_clamped;
        const result clamped = run_experts(host, layout, {record.data()}, {0}, 1, x);
        for (std::size_t i = 0; i < 4; ++i) {
            CHECK(std::abs(oss.partial[i] - wanted[i]) <= std::abs(wanted[i]) * 4e-4);
            CHECK(plain.partial[i] == doctest::Approx(silu(gate[i]) * up[i]));
            CHECK(clamped.partial[i] == doctest::Approx(silu(std::min(gate[i], 7.0f)) * std::clamp(up[i], -7.0f, 7.0f)));
        }
        CHECK(std::abs(oss.partial[0] - wanted[0]) < 1e-5);
        CHECK(std::abs(oss.partial[3] - wanted[3]) < 1e-5);
    }
}

TEST_CASE("K15 down-projection bias is weighted") {
    ps::expert_layout layout = make_layout(ps::weight_kind::bf16, {3, 2}, arrangement::apart, true);
    std::vector<std::vector<std::byte>> record(2, std::vector<std::byte>(layout.bytes));
    for (std::uint64_t i = 0; i < 3; ++i) {
        put_float(record[0], layout.down.bias_offset + 4 * i, 1);
        put_float(record[1], layout.down.bias_offset + 4 * i, 3);
    }
    const ps::executor::host host{1};
    const std::vector<std::int32_t> ids{0, 1};
    const result r = run_experts(host, layout, {record[0].data(), record[1].data()}, ids, 2, {1, 1, 1});
    const float weights[] = {0.7310586f, 0.2689414f};
    float out[3];
    host.combine(r.partial.data(), ids.data(), weights, 2, nullptr, {out, ps::dtype::f32, 1, 3});
    for (float y : out) {
        CHECK(std::abs(y - 1.537883f) < 1e-6f);
    }
}

TEST_CASE("K16 routing weight on the input or on the output, once") {
    const diagonal_expert expert(1);
    const ps::executor::host host{1};
    const std::int32_t id = 0;
    const float weight = 0.5f;
    float out = 0;
    result r = run_experts(host, expert.layout, {expert.record.data()}, {0}, 1, {2.0f});
    host.combine(r.partial.data(), &id, &weight, 1, nullptr, {&out, ps::dtype::f32, 1, 1});
    CHECK(std::abs(out - 1.761594f) < 1e-6f);
    r = run_experts(host, expert.layout, {expert.record.data()}, {0}, 1, {2.0f}, &weight);
    host.combine(r.partial.data(), &id, nullptr, 1, nullptr, {&out, ps::dtype::f32, 1, 1});
    CHECK(std::abs(out - 0.731059f) < 1e-6f);
}

TEST_CASE("K20 each block of 128 columns has its scale") {
    ps::expert_layout layout = make_layout(ps::weight_kind::fp8_block128, {512, 8}, arrangement::apart, false);
    std::vector<std::byte> record(layout.bytes);
    for (std::uint64_t i = 0; i < 512 * 8; ++i) {
        record[layout.gate.offset + i] = std::byte{0x38};  // 1.0
    }
    const float scales[] = {1, 10, 100, 1000};
    std::memcpy(&record[layout.gate.scale_offset], scales, sizeof scales);
    const std::vector<float> x(512, 1.0f);
    std::vector<const float*> inputs(8, x.data());
    for (ps::host_isa isa : isas()) {
        const ps::detail::host_matrix matrix{&ps::detail::kernels_for(isa), layout.kind, &layout.gate, record.data()};
        ps::detail::host_scratch scratch;
        for (std::uint32_t tokens : {1u, 2u, 7u, 8u}) {
            std::vector<float> out(8 * 8, no_number);
            ps::detail::multiply(matrix, 0, 8, inputs.data(), tokens, out.data(), 8, scratch);
            for (std::uint32_t i = 0; i < 8 * tokens; ++i) {
                CHECK(out[i] == 142208.0f);
            }
        }
    }
}

TEST_CASE("S12 slot index and expert index are not mixed up") {
    // Weights 1, expert e's scales e + 1 and down bias 100 e; three slots for eight experts.
    ps::expert_layout layout = make_layout(ps::weight_kind::fp8_block128, {4, 4}, arrangement::apart, false);
    layout.down.bias_offset = layout.bytes;
    layout.down.bias_stride = 1;
    layout.down.bias_type = ps::dtype::f32;
    layout.bytes += 16;
    const auto write_expert = [&](std::byte* slot, int e) {
        std::fill_n(slot, layout.bytes, std::byte{0x38});
        const auto scale = static_cast<float>(e + 1), bias = static_cast<float>(100 * e);
        for (std::uint64_t offset : {layout.gate.scale_offset, layout.up.scale_offset, layout.down.scale_offset}) {
            std::memcpy(slot + offset, &scale, 4);
        }
        for (std::uint64_t i = 0; i < 4; ++i) {
            std::memcpy(slot + layout.down.bias_offset + 4 * i, &bias, 4);
        }
    };
    std::vector<std::byte> slots(3 * layout.bytes);
    const ps::executor::host host{1};
    const int order[] = {5, 2, 7, 5, 0}, slot_of[] = {0, 1, 2, 0, 1};
    const float x[] = {0.1f, 0.2f, 0.3f, 0.4f};
    for (std::size_t n = 0; n < 5; ++n) {
        std::byte* slot = slots.data() + static_cast<std::size_t>(slot_of[n]) * layout.bytes;
        if (n != 3) {
            write_expert(slot, order[n]);
        }
        const ps::expert_work work{static_cast<std::uint32_t>(order[n]), slot, 0, 1};
        const std::int32_t row = 0;
        float activated[4], partial[4];
        host.experts(layout, {&work, 1}, &row, 1, x, nullptr, activated, partial);
        const auto s = static_cast<float>(order[n] + 1);
        for (float y : partial) {
            CHECK(y == doctest::Approx(4 * s * silu(s) * s + 100 * static_cast<float>(order[n])));
        }
    }
}

TEST_CASE("a pair's bits depend on nothing but its expert and its input") {
    std::mt19937 random{10};
    for (ps::host_isa isa : isas()) {
        for (ps::weight_kind kind : kinds) {
            CAPTURE(std::string(ps::name(kind)));
            for (arrangement how : {arrangement::apart, arrangement::columns_interleaved}) {
                const shape s{200, 77};
                const ps::expert_layout layout = make_layout(kind, s, how, false);
                std::vector<std::vector<std::byte>> record;
                std::vector<const std::byte*> where, elsewhere;
                for (int e = 0; e < 3; ++e) {
                    record.push_back(random_record(layout, random));
                }
                std::vector<std::vector<std::byte>> moved(3);
                for (std::size_t e = 0; e < 3; ++e) {
                    where.push_back(record[e].data());
                    moved[e].assign(3 + e, std::byte{});
                    moved[e].insert(moved[e].end(), record[e].begin(), record[e].end());
                    elsewhere.push_back(moved[e].data() + 3 + e);
                }
                std::vector<std::int32_t> ids(40);
                for (std::int32_t& id : ids) {
                    id = static_cast<std::int32_t>(random() % 4) - 1;
                }
                const std::vector<float> x = random_floats(20 * s.hidden, random);
                const ps::executor::host one{1, isa}, three{3, isa};
                const result all = run_experts(one, layout, where, ids, 2, x);
                const result other = run_experts(three, layout, elsewhere, ids, 2, x, nullptr, true);
                CHECK(same_bits(all.activated, other.activated));
                CHECK(same_bits(all.partial, other.partial));
                for (std::size_t p = 0; p < ids.size(); ++p) {
                    std::vector<std::int32_t> alone(ids.size(), -1);
                    alone[p] = ids[p];
                    const result single = run_experts(one, layout, where, alone, 2, x);
                    CHECK(std::memcmp(&single.partial[p * s.hidden], &all.partial[p * s.hidden], s.hidden * 4) == 0);
                }
            }
        }
    }
}

TEST_CASE("vectorised decoders agree with the scalar ones on every bit pattern") {
    for (ps::host_isa isa : isas()) {
        CAPTURE(std::string(ps::name(isa)));
        const ps::detail::host_kernels& kernels = ps::detail::kernels_for(isa);
        const auto bits = [](float f) { return cuda::std::bit_cast<std::uint32_t>(f); };
        const auto agree = [bits](float a, float b) { return std::isnan(a) ? std::isnan(b) : bits(a) == bits(b); };
        std::vector<std::uint16_t> halves(65536);
        for (std::size_t i = 0; i < halves.size(); ++i) {
            halves[i] = static_cast<std::uint16_t>(i);
        }
        std::vector<float> got(65536);
        kernels.decode[1]({reinterpret_cast<const std::byte*>(halves.data()), nullptr}, 65536, got.data());
        for (std::size_t i = 0; i < 65536; ++i) {
            REQUIRE(agree(got[i], ps::decode_bf16(halves[i])));
        }
        kernels.decode[2]({reinterpret_cast<const std::byte*>(halves.data()), nullptr}, 65536, got.data());
        for (std::size_t i = 0; i < 65536; ++i) {
            REQUIRE(agree(got[i], ps::decode_f16(halves[i])));
            if (!std::isnan(got[i])) {
                REQUIRE(ps::encode_f16(got[i]) == halves[i]);
                REQUIRE(ps::encode_bf16(ps::decode_bf16(halves[i])) == halves[i]);
            }
        }
        std::vector<std::byte> bytes(256);
        for (std::size_t i = 0; i < 256; ++i) {
            bytes[i] = static_cast<std::byte>(i);
        }
        const float scales[] = {0.37f, 3.0f};
        kernels.decode[3]({bytes.data(), reinterpret_cast<const std::byte*>(scales)}, 256, got.data());
        for (std::size_t i = 0; i < 256; ++i) {
            REQUIRE(agree(got[i], ps::decode_e4m3(static_cast<std::uint8_t>(i)) * scales[i / 128]));
        }
        const std::vector<std::byte> exponents(16, std::byte{130});
        kernels.decode[4]({bytes.data(), exponents.data()}, 512, got.data());
        for (std::size_t i = 0; i < 512; ++i) {
            REQUIRE(agree(got[i], 8 * ps::decode_e2m1(static_cast<std::uint32_t>(i % 2 == 0 ? i / 2 % 16 : i / 32))));
        }
    }
    const float e2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (std::uint32_t i = 0; i < 16; ++i) {
        CHECK(ps::decode_e2m1(i) == (i < 8 ? e2m1[i] : -e2m1[i - 8]));
    }
    CHECK(ps::decode_e4m3(0x7e) == 448.0f);
    CHECK(ps::decode_e4m3(0x01) == 0x1p-9f);
    CHECK(std::isnan(ps::decode_e4m3(0xff)));
}

TEST_CASE("hidden states of every float type, and outputs rounded once") {
    const ps::executor::host host{2};
    std::mt19937 random{3};
    const std::vector<float> values = random_floats(3 * 700, random);
    for (ps::dtype type : {ps::dtype::f32, ps::dtype::bf16, ps::dtype::f16}) {
        std::vector<std::byte> stored(values.size() * 4), out(values.size() * 4);
        for (std::size_t i = 0; i < values.size(); ++i) {
            ps::store_element(stored.data(), type, i, values[i]);
        }
        std::vector<float> x(values.size(), no_number);
        host.widen({stored.data(), type, 3, 700}, x.data());
        for (std::size_t i = 0; i < x.size(); ++i) {
            REQUIRE(x[i] == ps::load_element(stored.data(), type, i));
        }
        const std::vector<std::int32_t> ids(3, 0);
        host.combine(values.data(), ids.data(), nullptr, 1, nullptr, {out.data(), type, 3, 700});
        CHECK(std::memcmp(out.data(), stored.data(), values.size() * ps::bits(type) / 8) == 0);
    }
    CHECK_THROWS_WITH_AS(host.widen({nullptr, ps::dtype::i8, 0, 4}, nullptr), doctest::Contains("I8"), ps::configuration_error);
    CHECK_THROWS_AS(host.combine(nullptr, nullptr, nullptr, 1, nullptr, {nullptr, ps::dtype::u8, 0, 4}), ps::configuration_error);
}

TEST_CASE("shared expert's gate and the router's bias") {
    const ps::executor::host host{2};
    std::mt19937 random{4};
    const std::vector<float> x = random_floats(9 * 50, random), weight = random_floats(11 * 50, random), bias = random_floats(11, random);
    std::vector<float> logits(9 * 11, no_number), shared = random_floats(9 * 50, random);
    const std::vector<float> before = shared;
    host.logits({weight.data(), ps::dtype::f32, 11, 50, bias.data(), ps::dtype::f32}, x.data(), 9, logits.data());
    host.shared_gate(weight.data(), ps::dtype::f32, x.data(), 9, 50, shared.data());
    for (std::size_t t = 0; t < 9; ++t) {
        for (std::size_t e = 0; e < 11; ++e) {
            double wanted = bias[e];
            for (std::size_t i = 0; i < 50; ++i) {
                wanted += static_cast<double>(x[t * 50 + i]) * weight[e * 50 + i];
            }
            REQUIRE(std::abs(logits[t * 11 + e] - wanted) < 1e-4);
        }
        const double gate = 1 / (1 + std::exp(-(static_cast<double>(logits[t * 11]) - bias[0])));
        for (std::size_t i = 0; i < 50; ++i) {
            REQUIRE(std::abs(shared[t * 50 + i] - before[t * 50 + i] * gate) < 1e-5);
        }
    }
    CHECK_THROWS_AS(host.logits({weight.data(), ps::dtype::u8, 11, 50}, x.data(), 9, logits.data()), ps::configuration_error);
}

TEST_CASE("a format without loops is refused by name") {
    ps::expert_layout layout = make_layout(ps::weight_kind::bf16, {4, 4}, arrangement::apart, false);
    layout.kind = ps::weight_kind::int4_group;
    const ps::executor::host host{1};
    CHECK_THROWS_WITH_AS(host.experts(layout, {}, nullptr, 1, nullptr, nullptr, nullptr, nullptr), doctest::Contains("int4_group"),
                         ps::configuration_error);
    CHECK_FALSE(ps::executor::host::computes(ps::weight_kind::int4_group));
}

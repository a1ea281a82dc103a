#include <penstock/dispatch/cuda_experts.cuh>

#include "device_memory.hpp"
#include "test_expert.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>

namespace ps = penstock;
using namespace tests;

using cuda_executor = ps::executor::cuda<>;

namespace {

constexpr ps::weight_kind every_kind[] = {ps::weight_kind::f32, ps::weight_kind::bf16, ps::weight_kind::f16, ps::weight_kind::fp8_block128,
                                          ps::weight_kind::mxfp4};
constexpr arrangement every_arrangement[] = {arrangement::rows,          arrangement::rows_alternate,    arrangement::rows_together,
                                             arrangement::columns_apart, arrangement::columns_alternate, arrangement::rows_of_odd_pitch};

bool exists(ps::weight_kind kind, arrangement how) {  // packed formats are row-major
    return kind != ps::weight_kind::mxfp4 || (how != arrangement::columns_apart && how != arrangement::columns_alternate);
}

/// Pairs sorted by expert, and the works of the experts that have any or, if asked, all.
struct sorted_pairs {
    std::vector<std::int32_t> rows;
    std::vector<ps::expert_work> works;
};

sorted_pairs sort_pairs(const std::vector<std::int32_t>& ids, std::uint32_t experts, bool empty_works_too) {
    sorted_pairs s;
    for (std::uint32_t e = 0; e < experts; ++e) {
        const auto first = static_cast<std::uint32_t>(s.rows.size());
        for (std::size_t p = 0; p < ids.size(); ++p) {
            if (ids[p] == static_cast<std::int32_t>(e)) {
                s.rows.push_back(static_cast<std::int32_t>(p));
            }
        }
        const auto count = static_cast<std::uint32_t>(s.rows.size()) - first;
        if (count > 0 || empty_works_too) {
            s.works.push_back({e, nullptr, first, count});
        }
    }
    return s;
}

/// Experts of one layout, their records in device or pinned memory, and a call on them.
struct expert_bench {
    std::vector<test_expert> experts;
    std::vector<std::unique_ptr<guarded<std::byte>>> records;

    expert_bench() = default;

    expert_bench(const expert_shape& shape, std::uint32_t count, std::mt19937& random) {
        for (std::uint32_t e = 0; e < count; ++e) {
            experts.push_back(make_expert(shape, random));
        }
        place(place_of_test::device);
    }

    void place(place_of_test where) {
        records.clear();
        for (const test_expert& e : experts) {
            records.push_back(std::make_unique<guarded<std::byte>>(e.record, where));
        }
    }

    const ps::expert_layout& layout() const { return experts.front().layout; }

    struct result {
        std::vector<float> activated, partial;
    };

    result run(const std::vector<std::int32_t>& rows, std::vector<ps::expert_work> works, std::size_t pairs, std::uint32_t k,
               const std::vector<float>& x, const std::vector<float>& scales) const {
        for (ps::expert_work& w : works) {
            w.record = records[w.expert]->data();
        }
        const guarded<std::int32_t> device_rows(rows);
        const guarded<float> device_x(x);
        const guarded<float> device_scales(scales);
        guarded<float> activated(pairs * layout().intermediate());
        guarded<float> partial(pairs * layout().hidden());
        cuda_executor(nullptr).experts(layout(), works, device_rows.data(), k, device_x.data(),
                                       scales.empty() ? nullptr : device_scales.data(), activated.data(), partial.data());
        result r{activated.get(), partial.get()};
        CHECK(activated.guards_hold());
        CHECK(partial.guards_hold());
        return r;
    }
};

std::vector<std::int32_t> random_ids(std::size_t pairs, std::uint32_t experts, std::mt19937& random) {
    std::vector<std::int32_t> ids(pairs);
    for (std::int32_t& id : ids) {
        id = random() % 6 == 0 ? -1 : static_cast<std::int32_t>(random() % experts);
    }
    return ids;
}

/// Runs a call, compares with float64, and checks that nothing else was written.
expert_bench::result check_call(const expert_bench& bench, const std::vector<std::int32_t>& ids, std::uint32_t k,
                                const std::vector<float>& x, const std::vector<float>& scales, double tolerance) {
    const std::uint32_t h = bench.layout().hidden();
    const std::uint32_t i = bench.layout().intermediate();
    const sorted_pairs sorted = sort_pairs(ids, static_cast<std::uint32_t>(bench.experts.size()), true);
    const expert_bench::result got = bench.run(sorted.rows, sorted.works, ids.size(), k, x, scales);
    for (std::size_t p = 0; p < ids.size(); ++p) {
        CAPTURE(p);
        const float* activated = got.activated.data() + p * i;
        const float* partial = got.partial.data() + p * h;
        if (ids[p] < 0) {
            for (std::uint32_t c = 0; c < i; ++c) {
                REQUIRE(is_poison(activated[c]));
            }
            for (std::uint32_t c = 0; c < h; ++c) {
                REQUIRE(is_poison(partial[c]));
            }
            continue;
        }
        const true_result want =
            evaluate(bench.experts[static_cast<std::size_t>(ids[p])], x.data() + p / k * h, scales.empty() ? 1.0 : scales[p]);
        CHECK(relative_error(activated, want.activated.data(), i) < tolerance);
        CHECK(relative_error(partial, want.partial.data(), h) < tolerance);
    }
    return got;
}

/// A matrix of one value everywhere but where `at` says otherwise, in f32.
test_expert plain_expert(std::uint32_t hidden, std::uint32_t intermediate, ps::activation act = ps::activation::swiglu) {
    std::mt19937 random(1);
    test_expert e = make_expert({ps::weight_kind::f32, hidden, intermediate, arrangement::rows, act, true, ps::dtype::f32}, random);
    std::fill(e.record.begin(), e.record.end(), std::byte{0});
    return e;
}

void set_float(test_expert& e, const ps::matrix_layout& m, std::uint32_t r, std::uint32_t c, float value) {
    std::memcpy(e.record.data() + m.offset + (r * m.row_stride + c * m.col_stride) * 4, &value, 4);
}

void set_bias(test_expert& e, const ps::matrix_layout& m, std::uint32_t r, float value) {
    if (m.bias_type == ps::dtype::f32) {
        std::memcpy(e.record.data() + m.bias_offset + std::uint64_t{r} * m.bias_stride * 4, &value, 4);
    } else {
        std::uint32_t bits;
        std::memcpy(&bits, &value, 4);
        const auto half = static_cast<std::uint16_t>(bits >> 16);
        std::memcpy(e.record.data() + m.bias_offset + std::uint64_t{r} * m.bias_stride * 2, &half, 2);
    }
}

/// The same expert for each token, k = 1.
expert_bench::result run_one(const test_expert& e, const std::vector<float>& x) {
    const std::size_t tokens = x.size() / e.layout.hidden();
    expert_bench bench;
    bench.experts.push_back(e);
    bench.place(place_of_test::device);
    std::vector<std::int32_t> rows(tokens);
    std::iota(rows.begin(), rows.end(), 0);
    return bench.run(rows, {{0, nullptr, 0, static_cast<std::uint32_t>(tokens)}}, tokens, 1, x, {});
}

}  // namespace

TEST_CASE("K06 every format, arrangement and size, against float64") {
    std::mt19937 random(2);
    const std::pair<std::uint32_t, std::uint32_t> sizes[] = {{192, 192}, {100, 36}, {37, 41}, {1, 1}, {64, 128}, {256, 96}, {1024, 64}};
    for (const ps::weight_kind kind : every_kind) {
        for (const arrangement how : every_arrangement) {
            for (const auto& [hidden, intermediate] : sizes) {
                if (!exists(kind, how)) {
                    continue;
                }
                INFO(ps::name(kind), " ", name(how), " ", hidden, " x ", intermediate);
                const auto act = static_cast<ps::activation>(random() % 3);
                const ps::dtype bias_type[] = {ps::dtype::bf16, ps::dtype::f16, ps::dtype::f32};
                expert_bench bench({kind, hidden, intermediate, how, act, random() % 2 == 0, bias_type[random() % 3]}, 3, random);
                const std::uint32_t k = 2;
                const std::vector<float> x = random_floats(std::size_t{5} * hidden, random);
                check_call(bench, random_ids(10, 3, random), k, x, {}, hidden < 64 ? 2e-4 : 3e-5);
            }
        }
    }
}

TEST_CASE("K06 hidden and intermediate 2880 and 4096 x 1536") {
    std::mt19937 random(3);
    for (const ps::weight_kind kind : every_kind) {
        for (const arrangement how : {arrangement::rows, arrangement::rows_alternate, arrangement::columns_alternate}) {
            if (!exists(kind, how) || (how == arrangement::columns_alternate && kind == ps::weight_kind::f32)) {
                continue;
            }
            INFO(ps::name(kind), " ", name(how));
            expert_bench bench({kind, 2880, 2880, how, ps::activation::gpt_oss, true}, 1, random);
            check_call(bench, {0, -1, 0}, 1, random_floats(std::size_t{3} * 2880, random), {}, 3e-5);
        }
    }
    expert_bench bench({ps::weight_kind::fp8_block128, 4096, 1536}, 1, random);
    check_call(bench, {0}, 1, random_floats(4096, random), {}, 3e-5);
}

TEST_CASE("more inputs than shared memory holds: segments") {
    std::mt19937 random(4);
    for (const ps::weight_kind kind :
         {ps::weight_kind::f32, ps::weight_kind::bf16, ps::weight_kind::fp8_block128, ps::weight_kind::mxfp4}) {
        INFO(ps::name(kind));
        expert_bench bench({kind, 7168, 32}, 1, random);
        const std::vector<std::int32_t> ids(9, 0);
        const std::vector<float> x = random_floats(std::size_t{9} * 7168, random);
        const expert_bench::result together = check_call(bench, ids, 1, x, {}, 3e-5);
        for (std::uint32_t p = 0; p < 9; ++p) {
            const std::vector<std::int32_t> rows{static_cast<std::int32_t>(p)};
            const expert_bench::result alone = bench.run(rows, {{0, nullptr, 0, 1}}, 9, 1, x, {});
            CHECK(same_bits(alone.partial.data() + std::size_t{p} * 7168, together.partial.data() + std::size_t{p} * 7168, 7168));
        }
    }
}

TEST_CASE("tokens of a call, input scales, and the same bits alone, among others and from pinned memory") {
    std::mt19937 random(5);
    for (const ps::weight_kind kind : every_kind) {
        for (const arrangement how : every_arrangement) {
            if (!exists(kind, how)) {
                continue;
            }
            for (const std::uint32_t tokens : {1u, 2u, 3u, 8u, 9u, 17u}) {
                INFO(ps::name(kind), " ", name(how), " ", tokens, " tokens");
                const std::uint32_t experts = 4;
                const std::uint32_t k = 2;
                expert_bench bench({kind, 192, 160, how, ps::activation::swiglu_clamped, true}, experts, random);
                std::vector<std::int32_t> ids = random_ids(std::size_t{tokens} * k, experts, random);
                for (std::uint32_t t = 0; t < tokens; t += 2) {
                    ids[std::size_t{t} * k] = 2;  // one expert with many
                }
                const std::vector<float> x = random_floats(std::size_t{tokens} * 192, random);
                std::vector<float> scales(ids.size());
                for (float& s : scales) {
                    s = 0.25f + static_cast<float>(random() % 100) / 100.0f;
                }
                const expert_bench::result together = check_call(bench, ids, k, x, scales, 5e-5);
                const auto compare = [&] {
                    for (std::size_t p = 0; p < ids.size(); ++p) {
                        if (ids[p] < 0) {
                            continue;
                        }
                        const ps::expert_work alone{static_cast<std::uint32_t>(ids[p]), nullptr, 0, 1};
                        const expert_bench::result one = bench.run({static_cast<std::int32_t>(p)}, {alone}, ids.size(), k, x, scales);
                        CHECK(same_bits(one.activated.data() + p * 160, together.activated.data() + p * 160, 160));
                        CHECK(same_bits(one.partial.data() + p * 192, together.partial.data() + p * 192, 192));
                    }
                };
                if (tokens == 9 || tokens == 3) {
                    compare();
                }
                if (tokens == 17 || tokens == 1) {
                    bench.place(place_of_test::pinned);
                    const expert_bench::result pinned = check_call(bench, ids, k, x, scales, 5e-5);
                    CHECK(same_bits(pinned.activated.data(), together.activated.data(), together.activated.size()));
                    CHECK(same_bits(pinned.partial.data(), together.partial.data(), together.partial.size()));
                }
            }
        }
    }
}

TEST_CASE("the same bits whatever the row group of a block: many works at once") {
    std::mt19937 random(6);
    for (const ps::weight_kind kind : {ps::weight_kind::bf16, ps::weight_kind::fp8_block128, ps::weight_kind::mxfp4}) {
        INFO(ps::name(kind));
        expert_bench bench({kind, 512, 2048}, 3, random);
        std::vector<std::int32_t> rows;
        std::vector<ps::expert_work> works;
        for (std::uint32_t p = 0; p < 300; ++p) {  // beyond one launch's works; every work is one pair
            rows.push_back(static_cast<std::int32_t>(p));
            works.push_back({p % 3, nullptr, p, 1});
        }
        const std::vector<float> x = random_floats(std::size_t{300} * 512, random);
        const expert_bench::result all = bench.run(rows, works, 300, 1, x, {});
        for (const std::uint32_t p : {0u, 1u, 127u, 128u, 299u}) {
            CAPTURE(p);
            const true_result want = evaluate(bench.experts[p % 3], x.data() + std::size_t{p} * 512, 1);
            CHECK(relative_error(all.partial.data() + std::size_t{p} * 512, want.partial.data(), 512) < 3e-5);
            const expert_bench::result one = bench.run({static_cast<std::int32_t>(p)}, {{p % 3, nullptr, 0, 1}}, 300, 1, x, {});
            CHECK(same_bits(one.activated.data() + std::size_t{p} * 2048, all.activated.data() + std::size_t{p} * 2048, 2048));
            CHECK(same_bits(one.partial.data() + std::size_t{p} * 512, all.partial.data() + std::size_t{p} * 512, 512));
        }
    }
}

TEST_CASE("inputs that start at any multiple of 4 bytes give the same bits") {
    std::mt19937 random(7);
    expert_bench bench({ps::weight_kind::bf16, 256, 64}, 1, random);
    const std::vector<float> x = random_floats(256, random);
    const expert_bench::result want = bench.run({0}, {{0, nullptr, 0, 1}}, 1, 1, x, {});
    std::vector<float> shifted(257, 0.0f);
    std::copy(x.begin(), x.end(), shifted.begin() + 1);
    const guarded<float> device_x(shifted);
    const guarded<std::int32_t> rows(std::vector<std::int32_t>{0});
    guarded<float> activated(65);
    guarded<float> partial(256);
    const ps::expert_work work{0, bench.records[0]->data(), 0, 1};
    cuda_executor(nullptr).experts(bench.layout(), {&work, 1}, rows.data(), 1, device_x.data() + 1, nullptr, activated.data() + 1,
                                   partial.data());
    CHECK(same_bits(partial.get().data(), want.partial.data(), 256));
}

TEST_CASE("K01 experts without tokens") {
    std::mt19937 random(8);
    expert_bench bench({ps::weight_kind::bf16, 64, 48}, 8, random);
    const std::vector<float> x = random_floats(3 * 64, random);
    check_call(bench, {5, 5, 5}, 1, x, {}, 3e-5);
    check_call(bench, {0, -1, -1}, 1, x, {}, 3e-5);
    check_call(bench, {7, -1, -1}, 1, x, {}, 3e-5);
    check_call(bench, {-1, -1, -1}, 1, x, {}, 3e-5);
}

TEST_CASE("K02 zero works launch nothing") {
    const cuda_executor executor(nullptr);
    std::mt19937 random(9);
    const ps::expert_layout layout = make_layout({ps::weight_kind::bf16, 64, 48});
    executor.experts(layout, {}, nullptr, 8, nullptr, nullptr, nullptr, nullptr);
    const ps::expert_work nobody{0, nullptr, 0, 0};
    executor.experts(layout, {&nobody, 1}, nullptr, 8, nullptr, nullptr, nullptr, nullptr);
    CHECK(cudaGetLastError() == cudaSuccess);
    expert_bench bench({ps::weight_kind::bf16, 64, 48}, 1, random);
    check_call(bench, {0}, 1, random_floats(64, random), {}, 3e-5);
}

TEST_CASE("K03 weights beyond 2^31 elements of the record's start") {
    constexpr std::uint64_t pitch = 1ull << 28;  // elements
    constexpr std::uint32_t hidden = 64;
    constexpr std::uint32_t intermediate = 10;
    std::mt19937 random(10);
    test_expert e = make_expert({ps::weight_kind::bf16, hidden, intermediate}, random);
    ps::expert_layout far = e.layout;
    far.gate.row_stride = far.up.row_stride = pitch;
    far.up.offset = 4096;
    far.down.offset = 8192;
    far.bytes = pitch * 2 * intermediate;
    std::byte* record = nullptr;
    if (cudaMalloc(reinterpret_cast<void**>(&record), far.bytes) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        MESSAGE("not run: ", far.bytes, " bytes of GPU memory are not free");
        return;
    }
    REQUIRE(cudaMemcpy2D(record, pitch * 2, e.record.data() + e.layout.gate.offset, hidden * 2, hidden * 2, intermediate,
                         cudaMemcpyDefault) == cudaSuccess);
    REQUIRE(cudaMemcpy2D(record + 4096, pitch * 2, e.record.data() + e.layout.up.offset, hidden * 2, hidden * 2, intermediate,
                         cudaMemcpyDefault) == cudaSuccess);
    REQUIRE(cudaMemcpy(record + 8192, e.record.data() + e.layout.down.offset, hidden * intermediate * 2, cudaMemcpyDefault) == cudaSuccess);
    const std::vector<float> x = random_floats(hidden, random);
    const guarded<float> device_x(x);
    const guarded<std::int32_t> rows(std::vector<std::int32_t>{0});
    guarded<float> activated(intermediate);
    guarded<float> partial(hidden);
    const ps::expert_work work{0, record, 0, 1};
    cuda_executor(nullptr).experts(far, {&work, 1}, rows.data(), 1, device_x.data(), nullptr, activated.data(), partial.data());
    const true_result want = evaluate(e, x.data(), 1);
    CHECK(relative_error(partial.get().data(), want.partial.data(), hidden) < 3e-5);
    CHECK(cudaFree(record) == cudaSuccess);
}

TEST_CASE("K08 rows per expert around the tile size") {
    const std::uint32_t counts[] = {1, 0, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129};
    constexpr std::uint32_t size = 32;
    std::mt19937 random(11);
    expert_bench bench;
    std::vector<std::int32_t> ids;
    for (std::uint32_t e = 0; e < std::size(counts); ++e) {
        test_expert expert = plain_expert(size, size);
        for (std::uint32_t i = 0; i < size; ++i) {
            set_bias(expert, expert.layout.gate, i, 64.0f);  // silu(64) = 64
            set_float(expert, expert.layout.up, i, i, 1.0f / 64);
            set_float(expert, expert.layout.down, i, i, static_cast<float>(e + 1));
        }
        bench.experts.push_back(expert);
        ids.insert(ids.end(), counts[e], static_cast<std::int32_t>(e));
    }
    bench.place(place_of_test::device);
    std::shuffle(ids.begin(), ids.end(), random);
    const std::vector<float> x = random_floats(ids.size() * size, random);
    const sorted_pairs sorted = sort_pairs(ids, static_cast<std::uint32_t>(std::size(counts)), true);
    const expert_bench::result got = bench.run(sorted.rows, sorted.works, ids.size(), 1, x, {});
    for (std::size_t p = 0; p < ids.size(); ++p) {
        for (std::uint32_t c = 0; c < size; ++c) {
            const float want = x[p * size + c] * static_cast<float>(ids[p] + 1);
            REQUIRE(std::fabs(got.partial[p * size + c] - want) <= 1e-6f * std::fabs(want));
        }
    }
}

namespace {

/// An mxfp4 expert that passes x through to `down`: gate is 64 by its bias, up the identity times 2^-6.
test_expert mxfp4_pass(std::uint32_t hidden) {
    std::mt19937 random(1);
    test_expert e = make_expert({ps::weight_kind::mxfp4, hidden, hidden, arrangement::rows, ps::activation::swiglu, true}, random);
    std::fill(e.record.begin(), e.record.end(), std::byte{0});
    const ps::matrix_layout& up = e.layout.up;
    for (std::uint32_t r = 0; r < hidden; ++r) {
        set_bias(e, e.layout.gate, r, 64.0f);
        e.record[up.offset + (r * up.row_stride + r) / 2] |= static_cast<std::byte>(r % 2 == 0 ? 0x02 : 0x20);
        for (std::uint32_t b = 0; b < up.scale_row_stride; ++b) {
            e.record[up.scale_offset + std::uint64_t{r} * up.scale_row_stride + b] = std::byte{121};
        }
    }
    return e;
}

/// Column c of the expert's down matrix: token c is 1 in column c alone.
std::vector<float> unit_tokens(std::uint32_t hidden) {
    std::vector<float> x(std::size_t{hidden} * hidden, 0.0f);
    for (std::uint32_t t = 0; t < hidden; ++t) {
        x[std::size_t{t} * hidden + t] = 1.0f;
    }
    return x;
}

}  // namespace

TEST_CASE("K10 MXFP4 nibble order: two layouts of the same 16 bytes") {
    test_expert e = mxfp4_pass(32);
    const ps::matrix_layout& down = e.layout.down;
    std::byte* row = e.record.data() + down.offset;
    row[0] = std::byte{0x21};
    row[15] = std::byte{0x43};
    for (std::uint32_t r = 0; r < 32; ++r) {
        e.record[down.scale_offset + r] = std::byte{128};
    }
    const expert_bench::result got = run_one(e, unit_tokens(32));
    for (std::uint32_t c = 0; c < 32; ++c) {
        CAPTURE(c);
        const float want = c == 0 ? 1.0f : c == 1 ? 2.0f : c == 30 ? 3.0f : c == 31 ? 4.0f : 0.0f;
        CHECK(got.partial[std::size_t{c} * 32] == want);  // row 0 of down, column c
        CHECK(got.partial[std::size_t{c} * 32 + 1] == 0.0f);
    }
}

TEST_CASE("K11 E8M0 scale bytes 0, 254 and 255") {
    const unsigned bytes[] = {0, 1, 127, 128, 254, 255};
    const std::uint32_t want[] = {0x00400000, 0x00800000, 0x3f800000, 0x40000000, 0x7f000000, 0};
    test_expert e = mxfp4_pass(32);
    const ps::matrix_layout& down = e.layout.down;
    for (std::uint32_t r = 0; r < std::size(bytes); ++r) {
        e.record[down.offset + r * down.row_stride / 2] = std::byte{0x02};  // code 2 is 1
        e.record[down.scale_offset + r] = static_cast<std::byte>(bytes[r]);
    }
    const expert_bench::result got = run_one(e, unit_tokens(32));
    for (std::uint32_t r = 0; r < std::size(bytes); ++r) {
        CAPTURE(r);
        std::uint32_t bits;
        std::memcpy(&bits, &got.partial[r], 4);
        if (bytes[r] == 255) {
            CHECK(std::isnan(got.partial[r]));
        } else {
            CHECK(bits == want[r]);
        }
    }
}

TEST_CASE("every E2M1, E4M3 and f16 code is decoded to its value") {
    test_expert e = mxfp4_pass(32);
    const ps::matrix_layout& down = e.layout.down;
    for (std::uint32_t r = 0; r < 32; ++r) {
        e.record[down.scale_offset + r] = std::byte{127};
        for (std::uint32_t c = 0; c < 32; c += 2) {
            e.record[down.offset + (r * down.row_stride + c) / 2] = static_cast<std::byte>((r + c) % 16 | (r + c + 1) % 16 << 4);
        }
    }
    const expert_bench::result fp4 = run_one(e, unit_tokens(32));
    for (std::uint32_t r = 0; r < 32; ++r) {
        for (std::uint32_t c = 0; c < 32; ++c) {
            CHECK(fp4.partial[std::size_t{c} * 32 + r] == value_of_e2m1((r + c) % 16));
        }
    }
    for (const ps::weight_kind kind : {ps::weight_kind::fp8_block128, ps::weight_kind::f16}) {
        for (const arrangement how : {arrangement::rows, arrangement::columns_apart, arrangement::rows_of_odd_pitch}) {
            INFO(ps::name(kind), " ", name(how));
            std::mt19937 random(1);
            test_expert codes = make_expert({kind, 256, 16, how, ps::activation::swiglu, true, ps::dtype::f32}, random);
            const ps::matrix_layout& up = codes.layout.up;
            const std::uint64_t size = kind == ps::weight_kind::f16 ? 2 : 1;
            std::fill(codes.record.begin(), codes.record.end(), std::byte{0});
            std::vector<double> want(std::size_t{16} * 256);
            for (std::uint32_t r = 0; r < 16; ++r) {
                set_bias(codes, codes.layout.gate, r, 64.0f);
                for (std::uint32_t c = 0; c < 256; ++c) {
                    const auto code = static_cast<std::uint16_t>(size == 1 ? c : (r << 12 | c << 4 | (c & 15)) & 0xfbff);
                    std::memcpy(codes.record.data() + up.offset + (r * up.row_stride + c * up.col_stride) * size, &code, size);
                    want[std::size_t{r} * 256 + c] = size == 1 ? value_of_half(code, 4, 3) : value_of_half(code, 5, 10);
                }
            }
            if (size == 1) {
                for (std::uint32_t b = 0; b < 2; ++b) {
                    const float one = 1.0f;
                    std::memcpy(codes.record.data() + up.scale_offset + b * 4, &one, 4);
                }
            }
            // One token a column. NaN codes are in columns 127 and 255 of every row, so those stay out of the other columns' sums here.
            if (size == 1) {
                for (std::uint32_t r = 0; r < 16; ++r) {
                    for (const std::uint32_t c : {127u, 255u}) {
                        codes.record[up.offset + r * up.row_stride + c * up.col_stride] = std::byte{0};
                        want[std::size_t{r} * 256 + c] = 0;
                    }
                }
            }
            const expert_bench::result got = run_one(codes, unit_tokens(256));
            for (std::uint32_t r = 0; r < 16; ++r) {
                for (std::uint32_t c = 0; c < 256; ++c) {
                    REQUIRE(got.activated[std::size_t{c} * 16 + r] == static_cast<float>(64.0 * want[std::size_t{r} * 256 + c]));
                }
            }
            if (size == 1) {  // and a NaN code gives NaN
                codes.record[up.offset] = std::byte{0xff};
                CHECK(std::isnan(run_one(codes, unit_tokens(256)).activated[0]));
            }
        }
    }
}

TEST_CASE("K13 gpt-oss activation") {
    const float gates[] = {10, -10, 0.5f, 8};
    const float ups[] = {-9, 3, 0.25f, 8};
    const double want[] = {-41.999719, -1.623e-6, 0.437986, 55.999625};
    for (const arrangement how : {arrangement::rows_together, arrangement::rows_alternate}) {
        INFO(name(how));
        std::mt19937 random(1);
        test_expert e = make_expert({ps::weight_kind::f32, 1, 4, how, ps::activation::gpt_oss}, random);
        e.layout.limit = 7.0f;
        for (std::uint32_t r = 0; r < 4; ++r) {
            set_float(e, e.layout.gate, r, 0, gates[r]);
            set_float(e, e.layout.up, r, 0, ups[r]);
        }
        const expert_bench::result got = run_one(e, {1.0f});
        for (std::uint32_t r = 0; r < 4; ++r) {
            CHECK(std::fabs(got.activated[r] - want[r]) <= 2e-5 * std::fabs(want[r]) + 1e-9);
        }
        e.layout.act = ps::activation::swiglu;
        const expert_bench::result plain = run_one(e, {1.0f});
        for (std::uint32_t r = 0; r < 4; ++r) {
            const double silu = gates[r] / (1 + std::exp(-static_cast<double>(gates[r])));
            CHECK(std::fabs(plain.activated[r] - silu * ups[r]) <= 2e-6 * std::fabs(silu * ups[r]));
        }
    }
}

TEST_CASE("K15 down-projection bias must be weighted") {
    const float biases[] = {1, 3};
    expert_bench bench;
    for (const float b : biases) {
        test_expert e = plain_expert(4, 4);
        for (std::uint32_t r = 0; r < 4; ++r) {
            set_bias(e, e.layout.down, r, b);
        }
        bench.experts.push_back(e);
    }
    bench.place(place_of_test::device);
    const std::vector<ps::expert_work> works{{0, nullptr, 0, 1}, {1, nullptr, 1, 1}};
    const expert_bench::result got = bench.run({0, 1}, works, 2, 2, {1, 1, 1, 1}, {});
    const guarded<float> partial(got.partial);
    const guarded<std::int32_t> ids(std::vector<std::int32_t>{0, 1});
    const guarded<float> weights(std::vector<float>{0.7310586f, 0.2689414f});
    guarded<float> out(4);
    cuda_executor(nullptr).combine(partial.data(), ids.data(), weights.data(), 2, nullptr, {out.data(), ps::dtype::f32, 1, 4});
    for (const float v : out.get()) {
        CHECK(std::fabs(v - 1.537883f) < 1e-6f);
    }
}

TEST_CASE("K16 routing weight applied on the input or the output, once") {
    test_expert e = plain_expert(1, 1);
    set_float(e, e.layout.gate, 0, 0, 1);
    set_float(e, e.layout.up, 0, 0, 1);
    set_float(e, e.layout.down, 0, 0, 1);
    expert_bench bench;
    bench.experts.push_back(e);
    bench.place(place_of_test::device);
    const expert_bench::result output_mode = bench.run({0}, {{0, nullptr, 0, 1}}, 1, 1, {2.0f}, {});
    CHECK(std::fabs(0.5f * output_mode.partial[0] - 1.761594f) < 1e-5f);
    const expert_bench::result input_mode = bench.run({0}, {{0, nullptr, 0, 1}}, 1, 1, {2.0f}, {0.5f});
    CHECK(std::fabs(input_mode.partial[0] - 0.731059f) < 1e-5f);
}

TEST_CASE("K20 block scale applied to the wrong K range") {
    for (const arrangement how :
         {arrangement::rows, arrangement::rows_alternate, arrangement::columns_apart, arrangement::rows_of_odd_pitch}) {
        INFO(name(how));
        std::mt19937 random(1);
        test_expert e = make_expert({ps::weight_kind::fp8_block128, 512, 512, how, ps::activation::swiglu, true, ps::dtype::f32}, random);
        std::fill(e.record.begin(), e.record.end(), std::byte{0});
        const float scales[] = {1, 10, 100, 1000};
        for (std::uint32_t r = 0; r < 512; ++r) {
            set_bias(e, e.layout.gate, r, 64.0f);
            set_bias(e, e.layout.up, r, 0.015625f);
            for (std::uint32_t c = 0; c < 512; ++c) {
                const ps::matrix_layout& down = e.layout.down;
                e.record[down.offset + r * down.row_stride + c * down.col_stride] = std::byte{0x38};  // 1
            }
        }
        for (std::uint32_t b = 0; b < 16; ++b) {
            std::memcpy(e.record.data() + e.layout.down.scale_offset + b * 4, &scales[b % 4], 4);
        }
        for (const std::size_t tokens : {1, 2, 4, 8}) {
            const expert_bench::result got = run_one(e, random_floats(tokens * 512, random));
            for (const float v : got.partial) {
                REQUIRE(v == 142208.0f);
            }
        }
    }
}

TEST_CASE("a format that was not instantiated and a record that is not aligned are refused") {
    const ps::executor::cuda<ps::format::f32> narrow(nullptr);
    std::mt19937 random(1);
    const ps::expert_layout layout = make_layout({ps::weight_kind::bf16, 64, 48});
    CHECK_THROWS_AS(narrow.experts(layout, {}, nullptr, 1, nullptr, nullptr, nullptr, nullptr), ps::configuration_error);
    const guarded<std::byte> record(layout.bytes + 16);
    const ps::expert_work crooked{3, record.data() + 8, 0, 1};
    CHECK_THROWS_WITH_AS(cuda_executor(nullptr).experts(layout, {&crooked, 1}, nullptr, 1, nullptr, nullptr, nullptr, nullptr),
                         "penstock: the record of expert 3 does not start at a multiple of 16 bytes", ps::configuration_error);
}

TEST_CASE("a call is captured in a graph and replays") {
    std::mt19937 random(12);
    expert_bench bench({ps::weight_kind::bf16, 256, 192}, 2, random);
    const std::vector<float> x = random_floats(2 * 256, random);
    const guarded<float> device_x(x);
    const guarded<std::int32_t> rows(std::vector<std::int32_t>{0, 1});
    guarded<float> activated(2 * 192);
    guarded<float> partial(2 * 256);
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    const std::vector<ps::expert_work> works{{0, bench.records[0]->data(), 0, 1}, {1, bench.records[1]->data(), 1, 1}};
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    cuda_executor(stream).experts(bench.layout(), works, rows.data(), 1, device_x.data(), nullptr, activated.data(), partial.data());
    REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&ready, graph, 0) == cudaSuccess);
    for (int i = 0; i < 2; ++i) {
        partial.poison();
        REQUIRE(cudaGraphLaunch(ready, stream) == cudaSuccess);
        REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
        const std::vector<float> got = partial.get();
        for (std::uint32_t p = 0; p < 2; ++p) {
            const true_result want = evaluate(bench.experts[p], x.data() + p * 256, 1);
            CHECK(relative_error(got.data() + p * 256, want.partial.data(), 256) < 3e-5);
        }
    }
    CHECK(cudaGraphExecDestroy(ready) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

#include <penstock/checkpoint/checkpoint.hpp>
#include <penstock/dispatch/decode.hpp>
#include <penstock/model/record_slice.hpp>
#include <penstock/model/shard_plan.hpp>
#include <penstock/stream/file_source.hpp>

#include <doctest/doctest.h>

#include <map>

namespace {

using namespace penstock;

std::vector<std::byte> read(byte_source& files, const expert_parts& parts, std::uint64_t bytes) {
    std::vector<std::byte> record(bytes);
    for (const record_part& p : parts) {
        files.read(p.file, p.offset, std::span(record).subspan(p.record_offset, p.bytes));
    }
    return record;
}

/// Values of the whole expert that its slices hold otherwise, or that no slice holds.
std::size_t wrong_values(const moe_layer_model& layer, std::span<const std::byte> whole, const std::vector<record_slice>& cuts,
                         const std::vector<std::vector<std::byte>>& records) {
    const expert_layout& l = layer.layout;
    std::size_t wrong = 0;
    std::uint32_t row = 0;
    for (std::size_t g = 0; g < cuts.size(); ++g) {
        const expert_layout& s = cuts[g].layout;
        const std::byte* mine = records[g].data();
        for (std::uint32_t r = 0; r < s.intermediate(); ++r, ++row) {
            for (std::uint32_t c = 0; c < l.hidden(); ++c) {
                wrong += weight_at(l.kind, l.gate, whole.data(), row, c) != weight_at(l.kind, s.gate, mine, r, c);
                wrong += weight_at(l.kind, l.up, whole.data(), row, c) != weight_at(l.kind, s.up, mine, r, c);
                float down = weight_at(l.kind, s.down, mine, c, r);
                if (cuts[g].down_scale_column != 0 && l.kind == weight_kind::fp8_block128) {
                    const auto raw = std::to_integer<std::uint8_t>(mine[s.down.offset + c * s.down.row_stride + r * s.down.col_stride]);
                    down = decode_e4m3(raw) * scale_at(l.kind, s.down, mine, c, r + cuts[g].down_scale_column);
                }
                wrong += weight_at(l.kind, l.down, whole.data(), c, row) != down;
            }
            wrong += bias_at(l.gate, whole.data(), row) != bias_at(s.gate, mine, r);
            wrong += bias_at(l.up, whole.data(), row) != bias_at(s.up, mine, r);
        }
    }
    for (std::uint32_t c = 0; c < l.hidden(); ++c) {  // down's bias counts once
        float sum = 0;
        for (std::size_t g = 0; g < cuts.size(); ++g) {
            sum += bias_at(cuts[g].layout.down, records[g].data(), c);
        }
        wrong += sum != bias_at(l.down, whole.data(), c);
    }
    return wrong + (row != l.intermediate());
}

}  // namespace

TEST_CASE("slices of every family's experts hold the values of the whole, each once") {
    for (const char* family :
         {"qwen3_moe", "mixtral", "deepseek_v3_fp8", "deepseek_v3_fp8_odd", "gpt_oss", "gpt_oss_mxfp4", "llama4_text"}) {
        CAPTURE(family);
        const moe_model model = describe(checkpoint::open(std::filesystem::path(PENSTOCK_FIXTURES) / family));
        file_source files(model.files);
        const moe_layer_model& layer = model.layers.back();
        const expert_parts& parts = layer.experts.back();
        const std::vector<std::byte> whole = read(files, parts, layer.layout.bytes);
        for (const std::uint32_t gpus : {1u, 2u, 3u, 5u}) {
            CAPTURE(gpus);
            const shard_plan plan = shard_plan::by_slice(model, gpus, layer.layout.kind == weight_kind::mxfp4 ? 32 : 4);
            std::vector<record_slice> cuts;
            std::vector<std::vector<std::byte>> records;
            std::uint64_t bytes = 0;
            for (std::uint32_t g = 0; g < gpus; ++g) {
                cuts.push_back(slice_record(layer.layout, plan.slice_of(plan.layers() - 1, g), g == 0));
                const expert_parts mine = slice_parts(parts, cuts.back());
                records.push_back(read(files, mine, cuts.back().layout.bytes));
                for (const record_part& p : mine) {
                    bytes += p.bytes;
                    CHECK(p.record_offset + p.bytes <= cuts.back().layout.bytes);
                }
                CHECK(cuts.back().layout.bytes % 16 == 0);
            }
            CHECK(wrong_values(layer, whole, cuts, records) == 0);
            std::uint64_t all = 0;
            for (const record_part& p : parts) {
                all += p.bytes;
            }
            if (layer.layout.kind == weight_kind::fp8_block128) {
                CHECK(bytes >= all);  // a scale whose block is cut is carried twice
            } else {
                CHECK(bytes == all);  // and nothing else is read
            }
        }
    }
}

TEST_CASE("slices that cannot be are refused") {
    expert_layout l;
    l.gate = l.up = {.rows = 96, .cols = 64, .row_stride = 64};
    l.down = {.rows = 64, .cols = 96, .row_stride = 96};
    CHECK_THROWS_AS(static_cast<void>(slice_record(l, {90, 7}, true)), configuration_error);
    CHECK(slice_record(l, {96, 0}, true).ranges.empty());
    CHECK(slice_record(l, {96, 0}, true).layout.bytes == 0);
    l.kind = weight_kind::mxfp4;
    CHECK_THROWS_AS(static_cast<void>(slice_record(l, {16, 32}, true)), configuration_error);
    CHECK_THROWS_AS(static_cast<void>(slice_record(l, {0, 16}, true)), configuration_error);
    l.kind = weight_kind::int4_group;
    CHECK_THROWS_AS(static_cast<void>(slice_record(l, {0, 32}, true)), configuration_error);
    l.kind = weight_kind::bf16;
    CHECK_THROWS_AS(static_cast<void>(slice_parts({}, slice_record(l, {0, 32}, true))), configuration_error);
}

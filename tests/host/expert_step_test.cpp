#include <penstock/dispatch/expert_step.hpp>

#include <doctest/doctest.h>

namespace ps = penstock;
using ps::detail::layout_refusal;
using ps::detail::step_refusal;

namespace {

/// An expert of bf16 that fits: hidden 64, intermediate 32.
ps::expert_layout fitting(ps::weight_kind kind = ps::weight_kind::bf16) {
    ps::expert_layout l;
    l.kind = kind;
    l.gate = {.offset = 0, .rows = 32, .cols = 64, .row_stride = 64};
    l.up = {.offset = 4096, .rows = 32, .cols = 64, .row_stride = 64};
    l.down = {.offset = 8192, .rows = 64, .cols = 32, .row_stride = 32};
    return l;
}

template <class Format>
bool refuses(const ps::expert_layout& l, const char* reason) {
    const auto why = layout_refusal<Format>(l);
    CAPTURE(why.value_or("served"));
    return why && why->find(reason) != std::string::npos;
}

}  // namespace

TEST_CASE("a layout that kernels on tensor cores do not serve is refused by what is wrong with it") {
    using ps::format::bf16;
    CHECK_FALSE(layout_refusal<bf16>(fitting()));
    CHECK(refuses<ps::format::f16>(fitting(), "made for f16, the experts are bf16"));
    const auto with = [](auto&& change) {
        ps::expert_layout l = fitting();
        change(l);
        return l;
    };
    CHECK(refuses<bf16>(with([](auto& l) { l.gate.rows = 0; }), "do not fit"));
    CHECK(refuses<bf16>(with([](auto& l) { l.up.rows = 31; }), "do not fit"));
    CHECK(refuses<bf16>(with([](auto& l) { l.up.cols = 56; }), "do not fit"));
    CHECK(refuses<bf16>(with([](auto& l) { l.down.rows = 72; }), "do not fit"));
    CHECK(refuses<bf16>(with([](auto& l) { l.down.cols = 40; }), "do not fit"));
    CHECK(refuses<bf16>(with([](auto& l) { l.down.col_stride = 2; }), "contiguous"));
    CHECK(refuses<bf16>(with([](auto& l) { l.up.offset = 4104; }), "16 bytes"));
    CHECK(refuses<bf16>(with([](auto& l) { l.gate.row_stride = 68; }), "16 bytes"));
    CHECK(refuses<bf16>(with([](auto& l) { l.gate.cols = l.up.cols = l.down.rows = 60; }), "16 bytes"));
    CHECK_FALSE(layout_refusal<bf16>(with([](auto& l) { l.down.scale_offset = 3; })));  // it has no scales

    ps::expert_layout fp8 = fitting(ps::weight_kind::fp8_block128);
    CHECK_FALSE(layout_refusal<ps::format::fp8_block128>(fp8));
    fp8.down.scale_offset = 10'002;
    CHECK(refuses<ps::format::fp8_block128>(fp8, "4 bytes"));
}

TEST_CASE("a step that does not fit what kernels were made for is refused by what is wrong with it") {
    alignas(256) std::byte memory[1024];
    const std::int32_t rows[1] = {};
    const std::uint32_t offsets[1] = {};
    const ps::expert_step fits{.hidden = {memory, ps::dtype::bf16, 2, 64}, .out = {memory, ps::dtype::f32, 2, 64}};
    const auto why = [&](auto&& change, std::span<const std::byte> workspace) {
        ps::expert_step s = fits;
        change(s);
        return step_refusal(s, workspace, ps::dtype::bf16, 64, 2, 512).value_or("");
    };
    const std::span<const std::byte> room(memory);
    const auto says = [&](auto&& change, const char* reason) {
        const std::string text = why(change, room);
        CAPTURE(text);
        return text.find(reason) != std::string::npos;
    };
    CHECK(why([](auto&) {}, room).empty());
    CHECK(why([](auto&) {}, room.first(512)).empty());
    CHECK(says([](auto& s) { s.hidden.tokens = s.out.tokens = 3; }, "3 tokens, made for 2"));
    CHECK(says([](auto& s) { s.hidden.type = ps::dtype::f16; }, "BF16, 64 a token"));
    CHECK(says([](auto& s) { s.hidden.hidden = 72; }, "BF16, 64 a token"));
    CHECK(says([&](auto& s) { s.hidden.data = memory + 8; }, "multiple of 16"));
    CHECK(says([](auto& s) { s.out.type = ps::dtype::u8; }, "type U8"));
    CHECK(says([](auto& s) { s.out.tokens = 1; }, "as large as"));
    CHECK(says([](auto& s) { s.out.hidden = 72; }, "as large as"));
    CHECK(says([&](auto& s) { s.out.data = memory + 8; }, "no multiple of 16"));
    CHECK(says([&](auto& s) { s.rows = rows; }, "come together"));
    CHECK(says([&](auto& s) { s.offsets = offsets; }, "come together"));
    CHECK_FALSE(says(
        [&](auto& s) {
            s.rows = rows;
            s.offsets = offsets;
        },
        "come together"));
    CHECK(why([](auto&) {}, room.first(511)).find("511 bytes, 512 are needed") != std::string::npos);
    CHECK(why([](auto&) {}, room.subspan(16)).find("multiple of 256") != std::string::npos);
}

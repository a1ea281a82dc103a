#include "stream_fakes.hpp"

#include <doctest/doctest.h>

#include <algorithm>

namespace {

using namespace stream_fakes;

}  // namespace

TEST_CASE("load puts every tensor at a multiple of 256 bytes and finds it by name") {
    const temporary_directory dir;
    write_pattern(dir / "a", 0, 9'000'000);
    write_pattern(dir / "b", 1, 5'000);
    tensor_list list;
    list.files = {dir / "a", dir / "b"};
    list.tensors = {{"third", dtype::u8, {999}, 1, 11, 999},
                    {"first", dtype::bf16, {2000, 1000}, 0, 100, 4'000'000},
                    {"second", dtype::f32, {1000, 1000}, 0, 4'000'100, 4'000'000},
                    {"nothing", dtype::f32, {0, 4}, 1, 5000, 0}};
    weight_stream<> stream;
    std::uint64_t total = 0;
    const loaded_tensors tensors = stream.load(list, on_host(), [&](const progress& p) { total = p.total; });
    CHECK(total == 8'000'999);
    CHECK(tensors.size() == 4);
    CHECK(tensors.report().bytes == 8'000'999);
    for (const tensor_info& t : list.tensors) {
        const tensor_view& v = tensors[t.name];
        CHECK(reinterpret_cast<std::uintptr_t>(v.data) % 256 == 0);
        CHECK(v.type == t.type);
        CHECK(v.shape == t.shape);
        CHECK(v.bytes == t.bytes);
        CHECK(tests::holds({v.data, v.bytes}, t.file, t.offset));
    }
    CHECK_THROWS_WITH_AS(static_cast<void>(tensors["fourth"]), doctest::Contains("\"fourth\""), configuration_error);
    list.tensors.push_back({"beyond", dtype::u8, {10}, 1, 4'991, 10});
    CHECK_THROWS_WITH_AS(static_cast<void>(stream.load(list, on_host())), doctest::Contains("\"beyond\" ends at byte 5001"), io_error);
    list.tensors.back() = {"third", dtype::u8, {10}, 1, 0, 10};
    CHECK_THROWS_WITH_AS(static_cast<void>(stream.load(list, on_host())), doctest::Contains("\"third\" is twice"), configuration_error);
    CHECK(stream.load({}, on_host()).size() == 0);
}

TEST_CASE("small tensors that are neighbours share chunks, in whatever order they are listed") {
    const temporary_directory dir;
    constexpr std::uint64_t tensor_bytes = 64 << 10;
    constexpr std::uint64_t count = 150;
    write_pattern(dir / "a", 0, 100 + count * tensor_bytes);
    write_pattern(dir / "b", 1, count * tensor_bytes);
    tensor_list list;
    list.files = {dir / "a", dir / "b"};
    for (std::uint64_t i = 0; i < 2 * count; ++i) {
        const std::uint64_t n = i * 7 % (2 * count);
        const auto file = static_cast<std::uint32_t>(n / count);
        list.tensors.push_back(
            {std::to_string(n), dtype::bf16, {128, 256}, file, (file == 0 ? 100 : 0) + n % count * tensor_bytes, tensor_bytes});
    }
    weight_stream<> stream;
    const loaded_tensors tensors = stream.load(list, on_host());
    CHECK(tensors.report().chunks == 2 * ceil_div(count * tensor_bytes, 16u << 20));
    CHECK(tensors.report().reads == ceil_div(100 + count * tensor_bytes, 1u << 20) + ceil_div(count * tensor_bytes, 1u << 20));
    for (const tensor_info& t : list.tensors) {
        CHECK(tests::holds({tensors[t.name].data, t.bytes}, t.file, t.offset));
    }
}

TEST_CASE("tensors are loaded into room that was made for them, again and again") {
    const temporary_directory dir;
    write_pattern(dir / "a", 0, 5'000);
    tensor_list list;
    list.files = {dir / "a"};
    list.tensors = {{"x", dtype::u8, {1'000}, 0, 3'000, 1'000}, {"y", dtype::u8, {300}, 0, 10, 300}, {"z", dtype::u8, {7}, 0, 310, 7}};
    weight_stream<> stream;
    file_source files(list.files);
    loaded_tensors room(list, on_host());
    const std::byte* const data = room["y"].data;
    for (int i = 0; i < 3; ++i) {
        std::fill_n(room["x"].data, 1'000, guard);
        room = stream.load(list, std::move(room), files);
        CHECK(room["y"].data == data);
        for (const tensor_info& t : list.tensors) {
            CHECK(tests::holds({room[t.name].data, t.bytes}, 0, t.offset));
        }
        CHECK(room.report().bytes == 1'307);
    }
    const auto refused = [&](auto&& change) {
        tensor_list other = list;
        change(other);
        CHECK_THROWS_WITH_AS(static_cast<void>(stream.load(other, loaded_tensors(list, on_host()), files)),
                             doctest::Contains("was not made for this list"), configuration_error);
    };
    refused([](tensor_list& l) { l.tensors.pop_back(); });
    refused([](tensor_list& l) { l.tensors[0].bytes = 2'000; });
    refused([](tensor_list& l) { std::swap(l.tensors[0].name, l.tensors[1].name); });
    refused([](tensor_list& l) { l.tensors[1].type = dtype::i8; });
}

TEST_CASE("the default chunk follows the source, one that is fixed does not") {
    struct of_small_blocks final : byte_source {
        void read(std::uint32_t, std::uint64_t, std::span<std::byte> into) override { std::ranges::fill(into, std::byte{7}); }
        [[nodiscard]] std::string name(std::uint32_t) const override { return "blocks"; }
        [[nodiscard]] std::uint64_t chunk_bytes(std::uint32_t) const noexcept override { return 1 << 20; }
    } source;
    std::vector<std::byte> to(5 << 20);
    const std::vector<transfer> list{from_file(1, 0, 0, to)};
    CHECK(weight_stream<>().run(list, source, on_host()).chunks == 5);
    CHECK(weight_stream<chunking::fixed<16_MiB>>().run(list, source, on_host()).chunks == 1);
}

TEST_CASE("an error names the tensor whose bytes did not come") {
    const temporary_directory dir;
    write_pattern(dir / "a", 0, 5'000);
    tensor_list list;
    list.files = {dir / "a"};
    list.tensors = {{"first", dtype::u8, {1'000}, 0, 100, 1'000}, {"second", dtype::u8, {900}, 0, 1'100, 900}};
    weight_stream<> stream;
    file_source files(list.files);
    loaded_tensors room(list, on_host());
    struct cut_after_its_size final : byte_source {
        explicit cut_after_its_size(byte_source& f) : from(f) {}
        void read(std::uint32_t file, std::uint64_t offset, std::span<std::byte> into) override { from.read(file, offset, into); }
        [[nodiscard]] std::string name(std::uint32_t file) const override { return from.name(file); }
        [[nodiscard]] std::uint64_t size(std::uint32_t) override { return 5'000; }
        byte_source& from;
    } cut(files);
    std::filesystem::resize_file(dir / "a", 1'500);
    CHECK_THROWS_WITH_AS(
        static_cast<void>(stream.load(list, cut, on_host())),
        doctest::Contains("900 bytes were wanted at offset 1100, 400 were got: the file ends there (in tensor \"second\")"), io_error);
    write_pattern(dir / "a", 0, 5'000);
    const loaded_tensors again = stream.load(list, cut, on_host());
    CHECK(tests::holds({again["second"].data, 900}, 0, 1'100));
}

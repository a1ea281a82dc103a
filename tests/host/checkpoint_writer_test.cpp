#include "checkpoint_files.hpp"

using namespace files;
using penstock::configuration_error;
using penstock::dtype;
using penstock::tensor_to_write;
using penstock::write_safetensors;
using penstock::write_sharded;

namespace {

tensor_to_write with_data(const std::string& name, dtype type, std::vector<std::uint64_t> shape, const std::string& data) {
    tensor_to_write t = shaped(name, type, std::move(shape));
    t.data = std::as_bytes(std::span(data));
    return t;
}

/// Byte i is i * 7 + seed.
tensor_to_write generated(const std::string& name, std::uint64_t bytes, unsigned seed) {
    tensor_to_write t = shaped(name, dtype::u8, {bytes});
    t.generate = [seed](std::span<std::byte> window, std::uint64_t offset) {
        for (std::size_t i = 0; i < window.size(); ++i) {
            window[i] = static_cast<std::byte>((offset + i) * 7 + seed);
        }
    };
    return t;
}

}  // namespace

TEST_CASE("what was written is read back, in the order given") {
    const temporary_directory dir;
    const std::string a = floats({1, 2}), b = "xyz";
    const std::string awkward = std::string("n\0\"\\\x1b", 5) + "\xc3\xa9/";
    const std::string scalar = "ab";
    const tensor_to_write all[] = {with_data("z", dtype::f32, {2}, a), with_data(awkward, dtype::u8, {3, 1}, b),
                                   shaped("empty", dtype::f32, {0, 4}), with_data("s", dtype::bf16, {}, scalar)};
    const std::uint64_t size = write_safetensors(dir / "x.safetensors", all, {{"format", "pt"}, {"note", "a \"b\""}});
    CHECK(size == std::filesystem::file_size(dir / "x.safetensors"));
    CHECK(!std::filesystem::exists(dir / "x.safetensors.partial"));
    const auto file = penstock::read_safetensors_header(dir / "x.safetensors");
    REQUIRE(file.tensors.size() == 4);
    CHECK(file.tensors[0].offset % 8 == 0);
    CHECK(file.metadata.at("note") == "a \"b\"");
    CHECK(file.tensors[0].name == "z");
    CHECK(bytes_of(file.path, file.tensors[0]) == a);
    CHECK(file.tensors[1].name == awkward);
    CHECK(file.tensors[1].shape == std::vector<std::uint64_t>{3, 1});
    CHECK(bytes_of(file.path, file.tensors[1]) == b);
    CHECK(file.tensors[2].bytes == 0);
    CHECK(file.tensors[3].type == dtype::bf16);
    CHECK(bytes_of(file.path, file.tensors[3]) == scalar);
}

TEST_CASE("a generated tensor is asked for window by window") {
    const temporary_directory dir;
    constexpr std::uint64_t bytes = (20u << 20) + 13;
    std::uint64_t reached = 0, largest = 0;
    tensor_to_write t = generated("g", bytes, 3);
    const auto fill = t.generate;
    t.generate = [&](std::span<std::byte> window, std::uint64_t offset) {
        CHECK(offset == reached);
        reached += window.size();
        largest = std::max<std::uint64_t>(largest, window.size());
        fill(window, offset);
    };
    write_safetensors(dir / "g.safetensors", std::span(&t, 1));
    CHECK(reached == bytes);
    CHECK(largest <= 8u << 20);
    const auto file = penstock::read_safetensors_header(dir / "g.safetensors");
    const std::string data = bytes_of(file.path, file.tensors.at(0));
    REQUIRE(data.size() == bytes);
    std::uint64_t wrong = 0;
    for (std::uint64_t i = 0; i < bytes; ++i) {
        wrong += static_cast<unsigned char>(data[i]) != static_cast<unsigned char>(i * 7 + 3);
    }
    CHECK(wrong == 0);
}

TEST_CASE("no tensors make a valid file") {
    const temporary_directory dir;
    write_safetensors(dir / "e", {});
    CHECK(penstock::read_safetensors_header(dir / "e").tensors.empty());
}

TEST_CASE("what cannot be written is refused and leaves nothing behind") {
    const temporary_directory dir;
    const std::string four = floats({1});
    const tensor_to_write twice[] = {with_data("a", dtype::f32, {1}, four), with_data("a", dtype::f32, {1}, four)};
    CHECK(says(refusal<configuration_error>([&] { return write_safetensors(dir / "x", twice); }), {"\"a\"", "twice"}));
    const tensor_to_write wrong[] = {with_data("a", dtype::f32, {2}, four)};
    CHECK(
        says(refusal<configuration_error>([&] { return write_safetensors(dir / "x", wrong); }), {"\"a\"", "takes 8 bytes", "4 are given"}));
    const tensor_to_write reserved[] = {with_data("__metadata__", dtype::f32, {1}, four)};
    CHECK_THROWS_AS(write_safetensors(dir / "x", reserved), configuration_error);
    CHECK(
        says(refusal<penstock::io_error>([&] { return write_safetensors(dir / "no/such/x", std::span(twice).first(1)); }), {"no/such/x"}));
    tensor_to_write failing = shaped("f", dtype::u8, {100});
    failing.generate = [](std::span<std::byte>, std::uint64_t) { throw std::runtime_error("stop"); };
    CHECK_THROWS_AS(write_safetensors(dir / "x", std::span(&failing, 1)), std::runtime_error);
    CHECK(std::filesystem::is_empty(dir.path()));
}

TEST_CASE("a sharded directory is opened like any other") {
    const temporary_directory dir;
    const tensor_to_write tensors[] = {generated("a", 600, 1), generated("b", 600, 2), generated("c", 5000, 3), generated("d", 0, 4),
                                       generated("e", 900, 5)};
    write_sharded(dir / "m", tensors, 1000);
    const auto weights = penstock::checkpoint::open(dir / "m");
    CHECK(weights.all().files.size() == 4);
    CHECK(weights.all().files[0].filename() == "model-00001-of-00004.safetensors");
    CHECK(weights.unreferenced_files().empty());
    for (const tensor_to_write& t : tensors) {
        const penstock::tensor_info* found = weights.find(t.name);
        REQUIRE(found != nullptr);
        std::string wanted(t.bytes(), '\0');
        t.generate(std::as_writable_bytes(std::span(wanted)), 0);
        CHECK(bytes_of(weights.all().files[found->file], *found) == wanted);
    }
    write_sharded(dir / "one", tensors, 1 << 20);
    CHECK(penstock::checkpoint::open(dir / "one").all().files == std::vector<std::filesystem::path>{dir / "one/model.safetensors"});
}

#include "../fault_injection.hpp"
#include "checkpoint_files.hpp"

#include <penstock/stream/weight_stream.hpp>

#include <numeric>

#include <fcntl.h>
#include <unistd.h>

using namespace files;
using penstock::checkpoint;
using penstock::on_host;
using penstock::tensor_list;

namespace {

float first_float(const penstock::tensor_view& t) {
    REQUIRE(t.bytes >= sizeof(float));
    return *reinterpret_cast<const float*>(t.data);  // legal wherever the tensor lay in its file: the destination is aligned
}

/// Those tensors of a list whose names are given.
tensor_list only(const tensor_list& all, std::initializer_list<const char*> names) {
    tensor_list some{.files = all.files, .tensors = {}};
    for (const penstock::tensor_info& t : all.tensors) {
        if (std::find(names.begin(), names.end(), t.name) != names.end()) {
            some.tensors.push_back(t);
        }
    }
    return some;
}

}  // namespace

TEST_CASE("F13 empty tensors are loaded") {
    const temporary_directory dir;
    const auto path = dir.write(
        "x.safetensors",
        st(header({entry("e1", "F32", "[2,0]", 0, 0), entry("a", "F32", "[1]", 0, 4), entry("e2", "F32", "[0]", 4, 4)}), floats({1.5f})));
    penstock::weight_stream<> stream{};
    const auto loaded = stream.load(checkpoint::open(path).all(), on_host());
    CHECK(loaded["e1"].bytes == 0);
    CHECK(loaded["e2"].bytes == 0);
    CHECK(loaded["e1"].shape == std::vector<std::uint64_t>{2, 0});
    CHECK(first_float(loaded["a"]) == 1.5f);
}

TEST_CASE("F15 a filtered load gives the same values as a full one") {
    const temporary_directory dir;
    const auto path = dir.write(
        "x.safetensors",
        st(header({entry("z", "F32", "[1]", 8, 12), entry("a", "F32", "[1]", 0, 4), entry("m", "F32", "[1]", 4, 8)}), floats({1, 2, 3})));
    const checkpoint weights = checkpoint::open(path);
    penstock::weight_stream<> stream{};
    const auto all = stream.load(weights.all(), on_host());
    CHECK(first_float(all["a"]) == 1);
    CHECK(first_float(all["m"]) == 2);
    CHECK(first_float(all["z"]) == 3);
    CHECK(first_float(stream.load(only(weights.all(), {"z"}), on_host())["z"]) == 3);
    const auto outer = stream.load(only(weights.all(), {"a", "z"}), on_host());
    CHECK(first_float(outer["a"]) == 1);
    CHECK(first_float(outer["z"]) == 3);
    CHECK_THROWS_AS(static_cast<void>(outer["m"]), penstock::configuration_error);
}

TEST_CASE("F20 typed views on misaligned bytes") {
    const temporary_directory dir;
    std::string text = header({entry("odd", "U8", "[3]", 0, 3), entry("f", "F32", "[2]", 3, 11)});
    text.resize(penstock::round_up(text.size(), 8), ' ');
    const auto path = dir.write("x.safetensors", st(text, "abc" + floats({1.25f, -2})));
    const checkpoint weights = checkpoint::open(path);
    REQUIRE(weights.find("f")->offset % 4 != 0);
    penstock::weight_stream<> stream{};
    const auto loaded = stream.load(weights.all(), on_host());
    CHECK(reinterpret_cast<std::uintptr_t>(loaded["f"].data) % 256 == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(loaded["odd"].data) % 256 == 0);
    CHECK(first_float(loaded["f"]) == 1.25f);
}

TEST_CASE("F26 one read call larger than the kernel allows") {
    // The last 16 bytes of a tensor that one call of pread cannot fill. Its other bytes are a hole and are not compared.
    const temporary_directory dir;
    const auto path = dir / "x.safetensors";
    const penstock::tensor_to_write tensor = shaped("t", penstock::dtype::u8, {2'147'483'648u + 16});
    write_sparse(path, std::span(&tensor, 1));
    const std::string end = "0123456789abcdef";
    std::fstream(path, std::ios::binary | std::ios::in | std::ios::out).seekp(-16, std::ios::end) << end;
    const checkpoint weights = checkpoint::open(path);
    const penstock::tensor_info& t = *weights.find("t");
    penstock::file_source source(weights.all().files);
    std::string tail(32, 'x');
    source.read(0, t.offset + t.bytes - 32, std::as_writable_bytes(std::span(tail)));
    CHECK(tail == zeros(16) + end);
    const std::string text = refusal<penstock::io_error>([&] {
        source.read(0, t.offset + t.bytes - 16, std::as_writable_bytes(std::span(tail)));
        return 0;
    });
    CHECK(says(text, {path.c_str(), std::to_string(t.offset + t.bytes - 16).c_str(), "32", "16"}));
    if (std::getenv("PENSTOCK_TEST_BIG") != nullptr) {
        penstock::weight_stream<> stream{};
        const auto loaded = stream.load(weights.all(), on_host());
        const penstock::tensor_view& whole = loaded["t"];
        CHECK(std::memcmp(whole.data + whole.bytes - 16, end.data(), 16) == 0);
    }
}

TEST_CASE("F26 short reads and interruptions are continued, and a short file is an error") {
    // A source of the user's own: seven bytes a call, every third interrupted.
    struct hesitant_files final : penstock::byte_source {
        explicit hesitant_files(const std::filesystem::path& path) : path(path), descriptor(::open(path.c_str(), O_RDONLY)) {}
        ~hesitant_files() override { ::close(descriptor); }
        void read(std::uint32_t, std::uint64_t offset, std::span<std::byte> into) override {
            penstock::detail::read_fully(faults::hesitant{::pread}, descriptor, offset, into, [&] { return path.string(); });
        }
        std::string name(std::uint32_t) const override { return path.string(); }
        std::filesystem::path path;
        int descriptor;
    };
    const temporary_directory dir;
    std::string data(96, '\0');
    std::iota(data.begin(), data.end(), '\1');
    const auto path = dir.write("x.safetensors", st(header({entry("t", "F32", "[24]", 0, 96)}), data));
    const checkpoint weights = checkpoint::open(path);
    hesitant_files source(path);
    penstock::weight_stream<> stream({.readers = 2});
    CHECK(std::memcmp(stream.load(weights.all(), source, on_host())["t"].data, data.data(), 96) == 0);
    std::filesystem::resize_file(path, weights.find("t")->offset + 90);
    CHECK(says(refusal<penstock::io_error>([&] { return stream.load(weights.all(), source, on_host()); }),
               {path.c_str(), "96 bytes were wanted", std::to_string(weights.find("t")->offset).c_str(), "90 were got"}));
}

TEST_CASE("F21 one element of every type is loaded byte for byte") {
    const std::vector<std::pair<std::string, std::uint64_t>> types{
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"U16", 2}, {"I16", 2}, {"F16", 2},     {"BF16", 2},    {"U32", 4},    {"I32", 4},
        {"F32", 4},  {"U64", 8}, {"I64", 8}, {"F64", 8}, {"C64", 8}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
    std::string text = "{", data;
    for (const auto& [type, size] : types) {
        text += (data.empty() ? "" : ",") + entry(type, type, "[1]", data.size(), data.size() + size);
        for (std::uint64_t i = 0; i < size; ++i) {
            data += static_cast<char>(data.size() + 1);
        }
    }
    const temporary_directory dir;
    penstock::weight_stream<> stream({.readers = 1});
    const auto loaded = stream.load(checkpoint::open(dir.write("x.safetensors", st(text + "}", data))).all(), on_host());
    REQUIRE(loaded.size() == types.size());
    std::uint64_t at = 0;
    for (const auto& [type, size] : types) {
        CHECK(penstock::name(loaded[type].type) == type);
        REQUIRE(loaded[type].bytes == size);
        CHECK(std::memcmp(loaded[type].data, data.data() + at, size) == 0);
        at += size;
    }
}

TEST_CASE("F22 rows of half bytes are loaded as they lie") {
    const temporary_directory dir;
    penstock::weight_stream<> stream({.readers = 1});
    for (const auto& [shape, size] : {std::pair("[2,8]", 8u), {"[2,5]", 5u}}) {
        const auto path = dir.write("x.safetensors", st(header({entry("t", "F4", shape, 0, size)}), std::string("12345678", size)));
        const auto loaded = stream.load(checkpoint::open(path).all(), on_host());
        CHECK(loaded["t"].bytes == size);
        CHECK(std::memcmp(loaded["t"].data, "12345678", size) == 0);
    }
}

TEST_CASE("F28 unaligned starts and ragged tails do not spill into their neighbours") {
    using penstock::file_access;
    for (const auto& [start, access] : {std::pair<std::size_t, file_access>(512, file_access::buffered),
                                        {1152, file_access::direct},
                                        {512, file_access::direct},
                                        {2272, file_access::direct},
                                        {4095, file_access::direct}}) {
        for (const std::uint64_t bytes : {1u, 4095u, 4096u, 3 * 4096u + 100u}) {
            std::string a(bytes, '\0'), b(bytes, '\0');
            for (std::size_t i = 0; i < bytes; ++i) {
                a[i] = static_cast<char>(i * 3 + 1);
                b[i] = static_cast<char>(i * 5 + 2);
            }
            const std::string shape = "[" + std::to_string(bytes) + "]";
            std::string text = header({entry("a", "U8", shape, 0, bytes), entry("b", "U8", shape, bytes, 2 * bytes)});
            text.resize(start - 8 + (text.size() + 8 > start ? 4096 : 0), ' ');
            const temporary_directory dir;
            const checkpoint weights = checkpoint::open(dir.write("x.safetensors", st(text, a + b)));
            REQUIRE(weights.find("a")->offset % 4096 == start);
            std::vector<std::byte> room(2 * bytes + 3 * 64, std::byte{0xee});
            std::byte *const to_a = room.data() + 64, *const to_b = to_a + bytes + 64;
            std::vector<penstock::transfer> both(2);
            for (std::size_t i = 0; i < 2; ++i) {
                const penstock::tensor_info& t = weights.all().tensors[i];
                both[i].request = i;
                both[i].file = t.file;
                both[i].offset = t.offset;
                both[i].bytes = t.bytes;
                both[i].destination = i == 0 ? to_a : to_b;
            }
            penstock::file_source source(weights.all().files, access);
            penstock::weight_stream<penstock::chunking::fixed<penstock::bytes{4096}>> stream{};
            stream.run(both, source, on_host());
            CHECK(std::memcmp(to_a, a.data(), bytes) == 0);
            CHECK(std::memcmp(to_b, b.data(), bytes) == 0);
            for (const std::byte* guard : {room.data(), to_a + bytes, to_b + bytes}) {
                CHECK(std::all_of(guard, guard + 64, [](std::byte x) { return x == std::byte{0xee}; }));
            }
        }
    }
}

#include "checkpoint_files.hpp"

#include <sys/resource.h>

#include <set>

using namespace files;
using penstock::dtype;
using penstock::format_error;
using penstock::io_error;
using penstock::read_safetensors_header;

namespace {

/// Writes `content` as x.safetensors and reads its header.
penstock::safetensors_file read(const std::string& content) {
    const temporary_directory dir;
    return read_safetensors_header(dir.write("x.safetensors", content));
}

/// What is said against a malformed file; the file is always named.
std::string refused(const std::string& content) {
    const std::string text = refusal<format_error>([&] { return read(content); });
    CHECK(says(text, {"x.safetensors: "}));
    return text;
}

const std::string one = entry("t", "F32", "[1]", 0, 4);

/// 81 bytes, header 57.
const std::string ok = st(header({entry("t", "F32", "[2,2]", 0, 16)}), zeros(16));

}  // namespace

TEST_CASE("F01 shard shorter than its header says") {
    REQUIRE(ok.size() == 81);
    CHECK(read(ok).tensors.size() == 1);
    CHECK(
        says(refused(ok.substr(0, 80)), {"tensor \"t\"", "ends at byte 16 of the data", "the file holds 15", "1 missing", "interrupted"}));
    CHECK(says(refused(ok.substr(0, 65)), {"ends at byte 16", "the file holds 0", "16 missing"}));
    const std::string two = st(header({entry("a", "F32", "[1024]", 0, 4096), entry("b", "F32", "[64]", 4096, 4352)}), zeros(4352));
    CHECK(read(two).tensors.size() == 2);
    CHECK(says(refused(two.substr(0, two.size() - 256)), {"\"b\"", "4352", "4096", "256 missing"}));
}

TEST_CASE("F03 length prefix chosen to wrap or exhaust memory") {
    rusage before{}, after{};
    getrusage(RUSAGE_SELF, &before);
    for (const std::uint64_t length : {~0ull, ~0ull - 5, 1ull << 63}) {
        CHECK(says(refused(st("{}", "", length)), {std::to_string(length).c_str(), "100000000 is the limit"}));
    }
    CHECK(says(refused(st("{}", "", 3)), {"header of 3 bytes", "2 bytes follow", "1 missing"}));
    getrusage(RUSAGE_SELF, &after);
    CHECK(after.ru_maxrss - before.ru_maxrss < 1024);  // KiB
}

TEST_CASE("F03 the header's limit is a decimal hundred million") {
    const temporary_directory dir;
    const auto path = dir.write("x.safetensors", st("{}", "", 100'000'001));
    std::filesystem::resize_file(path, 8 + 100'000'001);
    CHECK(says(refusal<format_error>([&] { return read_safetensors_header(path); }), {"100000001", "100000000 is the limit"}));
}

TEST_CASE("F04 not a safetensors file at all") {
    CHECK(says(refused("<!DOCTYPE html><html>"), {"does not look like safetensors", "HTML"}));
    CHECK(says(refused("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"), {"2336927755350992246", "git-lfs pointer"}));
    CHECK(says(refused(std::string("PK\x03\x04") + zeros(64)), {"does not look like safetensors", "zip archive"}));
}

TEST_CASE("F05 empty and tiny files") {
    CHECK(says(refused(""), {"holds 0 bytes"}));
    CHECK(says(refused(std::string("\x02", 1) + zeros(6)), {"holds 7 bytes"}));
    CHECK(says(refused(st("")), {"header is empty"}));
    CHECK(read(st("{}")).tensors.empty());
    const temporary_directory dir;
    CHECK(says(refusal<io_error>([&] { return read_safetensors_header(dir.path()); }), {dir.path().c_str(), "directory"}));
    CHECK(says(refusal<io_error>([&] { return read_safetensors_header(dir / "nosuch"); }), {"nosuch", "No such file"}));
}

TEST_CASE("F07 header that straddles the first read") {
    const std::string text = header({one});
    for (const std::size_t block : {64u, 4096u, 65536u, 100000u, 1048576u}) {
        for (const int more : {-1, 0, 1, 7, 8}) {
            const std::size_t total = block + static_cast<std::size_t>(more + 8) - 8;
            if (total < 8 + text.size()) {
                continue;
            }
            const auto file = read(st(text + std::string(total - 8 - text.size(), ' '), floats({1})));
            REQUIRE(file.tensors.size() == 1);
            CHECK(file.tensors[0].offset == total);
        }
    }
}

TEST_CASE("F08 duplicate tensor name with different offsets") {
    CHECK(says(refused(st(header({one, entry("t", "F32", "[1]", 4, 8)}), zeros(8))), {"\"t\"", "twice"}));
    CHECK(says(refused(st(header({one, one}), zeros(4))), {"\"t\"", "twice"}));
}

TEST_CASE("F10 overlap, hole, reversed, out of range") {
    const auto pair = [](std::uint64_t b0, std::uint64_t e0, std::uint64_t b1, std::uint64_t e1, std::size_t data) {
        return st(header({entry("a", "F32", "[" + std::to_string((e0 - b0) / 4) + "]", b0, e0),
                          entry("b", "F32", "[" + std::to_string((e1 - b1) / 4) + "]", b1, e1)}),
                  zeros(data));
    };
    CHECK(says(refused(pair(0, 8, 4, 12, 12)), {"\"b\"", "begins at byte 4", "inside tensor \"a\"", "ends at 8"}));
    CHECK(says(refused(pair(0, 4, 8, 12, 12)), {"\"b\"", "begins at byte 8", "hole", "\"a\"", "ends at 4"}));
    CHECK(says(refused(st(header({entry("a", "F32", "[1]", 4, 8)}), zeros(8))), {"\"a\"", "begins at byte 4", "must begin at 0"}));
    CHECK(says(refused(st(header({entry("a", "F32", "[1]", 4, 0)}), zeros(4))), {"\"a\"", "ends at byte 0", "before it begins at 4"}));
    CHECK(says(refused(st(header({entry("a", "F32", "[1]", 0, 4)}), zeros(2))), {"\"a\"", "ends at byte 4", "the file holds 2"}));
    CHECK(
        says(refused(st(header({entry("a", "F32", "[1]", 0, 4)}), zeros(6))), {"end at byte 4", "holds 6", "2 bytes belong to no tensor"}));
}

TEST_CASE("F11 shape larger than the bytes given") {
    CHECK(says(refused(st(header({entry("t", "F32", "[1000,1000]", 0, 4)}), zeros(4))), {"\"t\"", "[1000, 1000]", "4000000", "give it 4"}));
    CHECK(says(refused(st(header({entry("t", "F32", "[1]", 0, 0)}))), {"\"t\"", "takes 4 bytes", "give it 0"}));
    CHECK(says(refused(st(header({entry("t", "F32", "[8589934592,8589934592]", 0, 4)}), zeros(4))), {"\"t\"", "does not fit 64 bits"}));
    CHECK(says(refused(st(header({entry("t", "U8", "[4294967296,4294967296,4]", 0, 0)}))), {"\"t\"", "does not fit 64 bits"}));
    // A product that overflows before its zero is refused too, as the reference does.
    CHECK(says(refused(st(header({entry("t", "U8", "[4294967296,4294967296,0]", 0, 0)}))), {"\"t\"", "does not fit 64 bits"}));
    CHECK(says(refused(st(header({entry("t", "U8", "[18446744073709551616]", 0, 0)}))), {"\"t\"", "shape"}));
}

TEST_CASE("F13 empty tensors") {
    const auto file = read(
        st(header({entry("e1", "F32", "[2,0]", 0, 0), entry("a", "F32", "[1]", 0, 4), entry("e2", "F32", "[0]", 4, 4)}), floats({1.5f})));
    REQUIRE(file.tensors.size() == 3);
    CHECK(file.tensors[0].name == "e1");
    CHECK(file.tensors[0].bytes == 0);
    CHECK(file.tensors[1].name == "a");
    CHECK(file.tensors[1].bytes == 4);
    CHECK(file.tensors[2].name == "e2");
    CHECK(file.tensors[2].bytes == 0);
    CHECK(file.tensors[2].offset == file.bytes);
}

TEST_CASE("F14 rank-0 tensor") {
    const temporary_directory dir;
    const auto file = read_safetensors_header(dir.write("x", st(header({entry("s", "F32", "[]", 0, 4)}), floats({1.5f}))));
    REQUIRE(file.tensors.size() == 1);
    CHECK(file.tensors[0].shape.empty());
    CHECK(float_of(bytes_of(file.path, file.tensors[0])) == 1.5f);
}

TEST_CASE("F15 header order differs from data order") {
    const temporary_directory dir;
    const auto file = read_safetensors_header(
        dir.write("x", st(header({entry("z", "F32", "[1]", 4, 8), entry("a", "F32", "[1]", 0, 4)}), floats({1, 2}))));
    REQUIRE(file.tensors.size() == 2);
    CHECK(file.tensors[0].name == "a");
    CHECK(float_of(bytes_of(file.path, file.tensors[0])) == 1.0f);
    CHECK(file.tensors[1].name == "z");
    CHECK(float_of(bytes_of(file.path, file.tensors[1])) == 2.0f);
}

TEST_CASE("F16 empty __metadata__") {
    CHECK(read(st(header({R"("__metadata__":{})", one}), zeros(4))).tensors.size() == 1);
    const auto last = read(st(header({one, R"("__metadata__":{"dtype":"F32","format":"pt"})"}), zeros(4)));
    CHECK(last.tensors.size() == 1);
    CHECK(last.metadata == std::map<std::string, std::string>{{"dtype", "F32"}, {"format", "pt"}});
}

TEST_CASE("__metadata__ holds strings, once, under different keys") {
    CHECK(says(refused(st(header({R"("__metadata__":{"a":1})", one}), zeros(4))), {"__metadata__", "\"a\"", "strings"}));
    CHECK(says(refused(st(header({R"("__metadata__":{"a":{}})", one}), zeros(4))), {"__metadata__", "strings"}));
    CHECK(says(refused(st(header({R"("__metadata__":[])", one}), zeros(4))), {"__metadata__", "an array"}));
    CHECK(says(refused(st(header({R"("__metadata__":{"a":"1","a":"2"})", one}), zeros(4))), {"__metadata__", "\"a\"", "twice"}));
    CHECK(says(refused(st(header({R"("__metadata__":{})", R"("__metadata__":{})", one}), zeros(4))), {"__metadata__", "twice"}));
}

TEST_CASE("F18 header padding: spaces, leading whitespace, NULs") {
    CHECK(read(st(header({one}) + "   ", zeros(4))).tensors.size() == 1);
    CHECK(says(refused(st(" \t\n" + header({one}), zeros(4))), {"begins with \" \"", "must begin with \"{\""}));
    CHECK(says(refused(st(header({one}) + zeros(3), zeros(4))), {"NUL"}));
    CHECK(says(refused(st(header({one}) + "x", zeros(4))), {"not valid JSON"}));
    CHECK(says(refused(st(header({one}) + zeros(1) + "}", zeros(4))), {"NUL"}));
    CHECK(says(refused(st("[]")), {"must begin with \"{\""}));
    CHECK(says(refused(st("\xef\xbb\xbf" + header({one}), zeros(4))), {"must begin with \"{\""}));
}

TEST_CASE("F21 unused integer or exotic tensor does not spoil the load") {
    const std::pair<const char*, int> types[] = {{"BOOL", 1},    {"U8", 1},      {"I8", 1},          {"U16", 2},        {"I16", 2},
                                                 {"F16", 2},     {"BF16", 2},    {"U32", 4},         {"I32", 4},        {"F32", 4},
                                                 {"U64", 8},     {"I64", 8},     {"F64", 8},         {"C64", 8},        {"F8_E4M3", 1},
                                                 {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1}};
    std::string text = "{", sep;
    std::uint64_t at = 0;
    for (const auto& [type, size] : types) {
        text += std::exchange(sep, ",") + entry(type, type, "[1]", at, at + static_cast<std::uint64_t>(size));
        at += static_cast<std::uint64_t>(size);
    }
    const auto file = read(st(text + "}", zeros(at)));
    REQUIRE(file.tensors.size() == std::size(types));
    for (std::size_t i = 0; i < std::size(types); ++i) {
        CHECK(penstock::name(file.tensors[i].type) == types[i].first);
        CHECK(file.tensors[i].bytes == static_cast<std::uint64_t>(types[i].second));
    }
    CHECK(says(refused(st(header({entry("aa", "Q8_0", "[1]", 0, 4)}), zeros(4))), {"\"aa\"", "unknown dtype", "\"Q8_0\""}));
}

TEST_CASE("F22 sub-byte F4 shapes") {
    CHECK(read(st(header({entry("t", "F4", "[2,8]", 0, 8)}), zeros(8))).tensors[0].bytes == 8);
    CHECK(says(refused(st(header({entry("t", "F4", "[3]", 0, 2)}), zeros(2))), {"\"t\"", "F4 [3]", "byte border"}));
    CHECK(read(st(header({entry("t", "F6_E2M3", "[4]", 0, 3)}), zeros(3))).tensors[0].bytes == 3);
    const auto odd = read(st(header({entry("t", "F4", "[2,5]", 0, 5)}), zeros(5))).tensors[0];
    CHECK(odd.bytes == 5);
    CHECK(says(refusal<penstock::configuration_error>([&] { return penstock::rows_of(odd, 1, 1); }), {"\"t\"", "20 bits", "byte borders"}));
    CHECK(penstock::rows_of(odd, 0, 2).bytes == 5);
}

TEST_CASE("rows of a tensor are byte ranges of its file") {
    const penstock::tensor_info t{.name = "t", .type = dtype::bf16, .shape = {4, 3, 2}, .file = 0, .offset = 100, .bytes = 48};
    CHECK(penstock::rows_of(t, 1, 2).offset == 112);
    CHECK(penstock::rows_of(t, 1, 2).bytes == 24);
    CHECK(penstock::rows_of(t, 4, 0).bytes == 0);
    CHECK(says(refusal<penstock::configuration_error>([&] { return penstock::rows_of(t, 3, 2); }), {"rows 3 to 5", "[4, 3, 2]"}));
    CHECK_THROWS_AS(static_cast<void>(penstock::rows_of(t, 5, ~0ull - 3)), penstock::configuration_error);
    penstock::tensor_info scalar = t;
    scalar.shape.clear();
    CHECK_THROWS_AS(static_cast<void>(penstock::rows_of(scalar, 0, 1)), penstock::configuration_error);
}

TEST_CASE("F24 names with NUL, escapes, slashes") {
    const temporary_directory dir;
    const auto two = read_safetensors_header(
        dir.write("x", st(header({entry(R"(w\u0000x)", "F32", "[1]", 0, 4), entry("w", "F32", "[1]", 4, 8)}), floats({1, 2}))));
    REQUIRE(two.tensors.size() == 2);
    CHECK(two.tensors[0].name == std::string("w\0x", 3));
    CHECK(two.tensors[1].name == "w");
    CHECK(float_of(bytes_of(two.path, two.tensors[1])) == 2.0f);
    CHECK(read(st(header({entry(R"(a\u00e9\/b)", "F32", "[1]", 0, 4)}), zeros(4))).tensors[0].name == "a\xc3\xa9/b");
    CHECK(read(st(header({entry(R"(\ud83d\ude00)", "F32", "[1]", 0, 4)}), zeros(4))).tensors[0].name == "\xf0\x9f\x98\x80");
    CHECK(says(refused(st(header({entry(R"(w\ud800)", "F32", "[1]", 0, 4)}), zeros(4))), {"not valid JSON", "surrogate"}));
    CHECK(says(refused(st(header({entry("w\xff", "F32", "[1]", 0, 4)}), zeros(4))), {"not valid JSON", "UTF-8"}));
    // A name cannot steer the terminal that shows the message.
    CHECK(says(refused(st(header({entry(R"(w\u001b[2J)", "F32", "[2]", 0, 4)}), zeros(4))), {R"("w\u001b[2J")"}));
}

TEST_CASE("F26 tensors beyond two and four gigabytes are placed right") {
    const temporary_directory dir;
    const auto path = dir / "big.safetensors";
    const penstock::tensor_to_write tensors[] = {shaped("first", dtype::u8, {2'147'483'648u + 16}),
                                                 shaped("second", dtype::u8, {3'000'000'000u}), shaped("third", dtype::f32, {4})};
    write_sparse(path, tensors);
    std::fstream(path, std::ios::binary | std::ios::in | std::ios::out).seekp(-16, std::ios::end) << floats({1, 2, 3, 4});
    const auto file = read_safetensors_header(path);
    REQUIRE(file.tensors.size() == 3);
    CHECK(file.tensors[1].offset - file.tensors[0].offset == 2'147'483'664u);
    CHECK(bytes_of(path, file.tensors[2]) == floats({1, 2, 3, 4}));
}

TEST_CASE("deep nesting costs no stack") {
    const std::size_t depth = 1'000'000;
    const std::string nest = std::string(depth, '[') + std::string(depth, ']');
    CHECK(says(refused(st("{\"t\":" + nest + "}")), {"\"t\"", "an array", "an object is wanted"}));
    CHECK(says(refused(st(std::string(depth, '{'))), {"not valid JSON"}));
    // In a field that means nothing it is legal, and skipped.
    const std::string extra =
        R"({"t":{"dtype":"F32","note":)" + nest + R"(,"shape":[1],"other":{"shape":[2],"x":[{}]},"data_offsets":[0,4]}})";
    const auto file = read(st(extra, zeros(4)));
    REQUIRE(file.tensors.size() == 1);
    CHECK(file.tensors[0].shape == std::vector<std::uint64_t>{1});
}

TEST_CASE("every field of a tensor is there once and of its kind") {
    const auto with = [](const std::string& fields) { return st("{\"aa\":{" + fields + "}}", zeros(4)); };
    const std::string type = R"("dtype":"F32")", shape = R"("shape":[1])", offsets = R"("data_offsets":[0,4])";
    CHECK(read(with(offsets + "," + shape + "," + type)).tensors.size() == 1);
    CHECK(says(refused(with(shape + "," + offsets)), {"\"aa\"", "no dtype"}));
    CHECK(says(refused(with(type + "," + offsets)), {"\"aa\"", "no shape"}));
    CHECK(says(refused(with(type + "," + shape)), {"\"aa\"", "no data_offsets"}));
    CHECK(says(refused(with(type + "," + type + "," + shape + "," + offsets)), {"\"aa\"", "dtype twice"}));
    CHECK(says(refused(with(type + "," + shape + "," + shape + "," + offsets)), {"\"aa\"", "shape twice"}));
    CHECK(says(refused(with(R"("dtype":3,)" + shape + "," + offsets)), {"\"aa\"", "the number 3", "dtype", "a string is wanted"}));
    CHECK(says(refused(with(R"("dtype":["F32"],)" + shape + "," + offsets)), {"\"aa\"", "an array", "dtype"}));
    for (const char* dimension : {"-1", "1.0", "1e0", "-0", "\"1\"", "null", "true", "[1]", "{}"}) {
        CHECK(says(refused(with(type + R"(,"shape":[)" + dimension + "]," + offsets)), {"\"aa\"", "shape"}));
    }
    for (const char* wrong : {"[0]", "[0,4,4]", "[]", "[0,-4]", "[0,4.0]", "{}", "4", "null"}) {
        CHECK(says(refused(with(type + "," + shape + R"(,"data_offsets":)" + wrong)), {"\"aa\"", "data_offsets"}));
    }
    for (const char* wrong : {"[]", "[0]"}) {
        CHECK(says(refused(st(R"({"aa":{"dtype":"F32","shape":[0],"data_offsets":)" + std::string(wrong) + "}}")),
                   {"\"aa\"", "2 are wanted"}));
    }
    for (const char* wrong : {"[]", "null", "1", "\"x\"", "true", "1.5"}) {
        CHECK(says(refused(st(R"({"aa":)" + std::string(wrong) + "}")), {"\"aa\"", "an object is wanted"}));
    }
    CHECK(says(refused(st("{\"aa\"")), {"not valid JSON"}));
    CHECK(says(refused(st(header({one}) + header({one}), zeros(4))), {"not valid JSON"}));
}

TEST_CASE("a header of many tensors is read in linear time") {
    constexpr std::uint64_t count = 200'000;
    std::string text = "{", sep;
    for (std::uint64_t i = count; i-- > 0;) {
        text += std::exchange(sep, ",") + entry("model.layers.0.mlp.experts." + std::to_string(i) + ".w", "U8", "[1]", i, i + 1);
    }
    const auto file = read(st(text + "}", zeros(count)));
    REQUIRE(file.tensors.size() == count);
    CHECK(file.tensors[7].name == "model.layers.0.mlp.experts.7.w");
}

TEST_CASE("a file can be read after another was refused") {
    refused(ok.substr(0, 70));
    CHECK(read(ok).tensors[0].offset == 65);
}

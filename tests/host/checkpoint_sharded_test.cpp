#include "checkpoint_files.hpp"

using namespace files;
using penstock::checkpoint;
using penstock::configuration_error;
using penstock::format_error;
using penstock::io_error;

namespace {

constexpr const char *s1 = "model-00001-of-00002.safetensors", *s2 = "model-00002-of-00002.safetensors";
constexpr const char* index_name = "model.safetensors.index.json";

/// A file of one float.
std::string single(const std::string& name, float value) { return st(header({entry(name, "F32", "[1]", 0, 4)}), floats({value})); }

std::string map(std::initializer_list<std::pair<const char*, const char*>> entries) {
    std::string out = "{\"weight_map\":{", sep;
    for (const auto& [tensor, file] : entries) {
        out += std::exchange(sep, ",") + "\"" + tensor + "\":\"" + file + "\"";
    }
    return out + "}}";
}

float value(const checkpoint& weights, const std::string& name) {
    const penstock::tensor_info* t = weights.find(name);
    REQUIRE(t != nullptr);
    return float_of(bytes_of(weights.all().files.at(t->file), *t));
}

/// A directory with two shards, `a` = 1 and `b` = 2, and this index.
struct pair_of_shards : temporary_directory {
    explicit pair_of_shards(const std::string& index = map({{"a", s1}, {"b", s2}})) {
        write(s1, single("a", 1));
        write(s2, single("b", 2));
        write(index_name, index);
    }
};

/// What is said against an index over those shards; it is always named.
std::string refused(const std::string& index) {
    const pair_of_shards dir(index);
    const std::string text = refusal<format_error>([&] { return checkpoint::open(dir.path()); });
    CHECK(says(text, {"model.safetensors.index.json: "}));
    return text;
}

}  // namespace

TEST_CASE("a directory with an index is opened by its path or the index's") {
    const pair_of_shards dir;
    for (const auto& path : {dir.path(), dir / index_name}) {
        const checkpoint weights = checkpoint::open(path);
        CHECK(weights.all().files == std::vector<std::filesystem::path>{dir / s1, dir / s2});
        CHECK(weights.all().tensors.size() == 2);
        CHECK(value(weights, "a") == 1);
        CHECK(value(weights, "b") == 2);
        CHECK(weights.find("c") == nullptr);
        CHECK(weights.unreferenced_files().empty());
        CHECK(weights.unlisted_tensors().empty());
        CHECK(!weights.config());
    }
}

TEST_CASE("a copy and a moved checkpoint find their tensors") {
    const pair_of_shards dir;
    checkpoint weights = checkpoint::open(dir.path());
    const checkpoint copy = weights;
    const checkpoint moved = std::move(weights);
    CHECK(copy.find("a") == &copy.all().tensors[0]);
    CHECK(moved.find("b") == &moved.all().tensors[1]);
}

TEST_CASE("F30 index names a shard that is not there") {
    const temporary_directory dir;
    dir.write(s1, single("a", 1));
    dir.write(index_name, map({{"a", s1}, {"b", s2}, {"c", "model-x.safetensors"}, {"d", s2}}));
    const std::string text = refusal<io_error>([&] { return checkpoint::open(dir.path()); });
    CHECK(says(text, {index_name, s2, "model-x.safetensors"}));
    CHECK(text.find(s1) == std::string::npos);
}

TEST_CASE("F31 extra weight files beside the indexed ones") {
    const pair_of_shards dir;
    dir.write("consolidated.safetensors", single("a", 9));
    dir.write("model.safetensors", single("b", 9));
    dir.write("original/model.safetensors", single("a", 9));
    dir.write("broken.safetensors", "not a safetensors file");
    const checkpoint weights = checkpoint::open(dir.path());
    CHECK(weights.all().files.size() == 2);
    CHECK(value(weights, "a") == 1);
    CHECK(value(weights, "b") == 2);
    CHECK(weights.unreferenced_files().empty());
}

TEST_CASE("F33 same name in two files and no index") {
    const temporary_directory dir;
    const auto one = dir.write("one.safetensors", single("w", 1)), two = dir.write("two.safetensors", single("w", 2));
    const auto other = dir.write("other.safetensors", single("v", 3));
    CHECK(says(refusal<format_error>([&] { return checkpoint::open_files({one, two}); }), {"\"w\"", one.c_str(), two.c_str()}));
    CHECK(says(refusal<format_error>([&] { return checkpoint::open_files({two, one}); }), {"\"w\"", one.c_str(), two.c_str()}));
    for (const auto& list : {std::vector{one, other}, std::vector{other, one}}) {
        const checkpoint weights = checkpoint::open_files(list);
        CHECK(value(weights, "w") == 1);
        CHECK(value(weights, "v") == 3);
    }
}

TEST_CASE("the same name in two indexed shards is refused too") {
    const temporary_directory dir;
    dir.write(s1, single("a", 1));
    dir.write(s2, st(header({entry("a", "F32", "[1]", 0, 4), entry("b", "F32", "[1]", 4, 8)}), floats({5, 2})));
    dir.write(index_name, map({{"a", s1}, {"b", s2}}));
    CHECK(says(refusal<format_error>([&] { return checkpoint::open(dir.path()); }), {"\"a\"", s1, s2}));
}

TEST_CASE("F34 index and shard headers disagree") {
    CHECK(says(refused(map({{"a", s1}, {"b", s1}, {"c", s2}})), {"\"b\"", s1, "does not hold it"}));
    CHECK(says(refused(map({{"a", s2}, {"b", s1}})), {"\"a\"", s2, "does not hold it", "that of", s1}));
    const pair_of_shards dir(map({{"a", s1}}));
    const checkpoint weights = checkpoint::open(dir.path());
    CHECK(weights.all().tensors.size() == 1);
    CHECK(value(weights, "a") == 1);
    CHECK(weights.unreferenced_files() == std::vector<std::filesystem::path>{dir / s2});
}

TEST_CASE("tensors that the index leaves out are left out, or included when asked for") {
    const temporary_directory dir;
    dir.write(s1, st(header({entry("x", "F32", "[1]", 0, 4), entry("a", "F32", "[1]", 4, 8)}), floats({7, 1})));
    dir.write(s2, single("b", 2));
    dir.write(index_name, map({{"a", s1}, {"b", s2}}));
    const checkpoint strict = checkpoint::open(dir.path());
    CHECK(strict.all().tensors.size() == 2);
    CHECK(strict.find("x") == nullptr);
    CHECK(value(strict, "a") == 1);
    CHECK(value(strict, "b") == 2);
    const checkpoint all = checkpoint::open(dir.path(), penstock::unlisted::include);
    CHECK(all.all().tensors.size() == 3);
    CHECK(value(all, "x") == 7);
    for (const checkpoint& weights : {strict, all}) {
        CHECK(weights.unlisted_tensors() == std::vector<std::string>{"x"});
    }
}

TEST_CASE("F35 malformed index") {
    CHECK(says(refused(""), {"not valid JSON"}));
    CHECK(says(refused("[]"), {"an array", "weight_map"}));
    CHECK(says(refused("{}"), {"no weight_map"}));
    CHECK(says(refused(R"({"weight_map":{}})"), {"weight_map is empty"}));
    CHECK(says(refused(R"({"weight_map":{"a":3}})"), {"\"a\"", "the number 3"}));
    CHECK(says(refused(R"({"weight_map":[]})"), {"weight_map is an array"}));
    CHECK(says(refused(R"({"weight_map":null})"), {"weight_map is null"}));
    CHECK(says(refused(R"({"weight_map":{"a":{"file":"x","offset":0,"size":4}}})"), {"\"a\"", "an object", "name of a shard"}));
    CHECK(says(refused(R"({"weight_map":{"a":[]}})"), {"\"a\"", "an array"}));
    CHECK(says(refused(map({{"a", s1}, {"a", s1}, {"b", s2}})), {"\"a\"", "twice"}));
    CHECK(says(refused(map({{"a", s1}}) + "x"), {"not valid JSON"}));
    CHECK(says(refused(std::string("{\"weight_map\":") + std::string(500000, '[')), {"weight_map is an array"}));
}

TEST_CASE("F35 total_size and the rest of the metadata are informational") {
    const std::string body = map({{"a", s1}, {"b", s2}}).substr(1);
    for (const char* more :
         {R"("metadata":{"total_size":1},)", R"("metadata":{"total_size":"8"},)", R"("metadata":{"total_size":1.6e10},)",
          R"("metadata":{},)", R"("metadata":null,)", R"("metadata":[[{"weight_map":{}}]],)", R"("x":{"weight_map":{"a":[1]}},)"}) {
        const pair_of_shards dir(std::string("{") + more + body);
        CHECK(value(checkpoint::open(dir.path()), "b") == 2);
    }
}

TEST_CASE("F35 a byte order mark at the start of the index is accepted") {
    const pair_of_shards dir("\xef\xbb\xbf" + map({{"a", s1}, {"b", s2}}));
    CHECK(value(checkpoint::open(dir.path()), "b") == 2);
}

TEST_CASE("F36 shard names that leave the model folder") {
    // Every one of these files is there and holds the tensor.
    const temporary_directory root;
    const std::string elsewhere = root.write("elsewhere/x.safetensors", single("a", 9));
    root.write("x.safetensors", single("a", 9));
    root.write("model/sub/y.safetensors", single("a", 9));
    root.write(R"(model/..\x.safetensors)", single("a", 9));
    for (const std::string& name :
         {std::string("../x.safetensors"), elsewhere, std::string("sub/../../x.safetensors"), std::string("sub/y.safetensors"),
          std::string(R"(..\\x.safetensors)"), std::string(), std::string("."), std::string(".."), std::string(R"(x\u0000)")}) {
        root.write(std::string("model/") + index_name, R"({"weight_map":{"a":")" + name + "\"}}");
        const std::string text = refusal<format_error>([&] { return checkpoint::open(root / "model"); });
        CHECK(says(text, {index_name, "\"a\"", "without a path"}));
    }
}

TEST_CASE("a shard may be a link to a file elsewhere, as in a download cache") {
    const temporary_directory blobs;
    blobs.write("b1", single("b", 2));
    const temporary_directory dir;
    dir.write(s1, single("a", 1));
    dir.write(index_name, map({{"a", s1}, {"b", s2}}));
    std::filesystem::create_symlink(blobs / "b1", dir / s2);
    CHECK(value(checkpoint::open(dir.path()), "b") == 2);
}

TEST_CASE("a broken shard is named") {
    const pair_of_shards dir;
    dir.write(s2, single("b", 2).substr(0, 60));
    CHECK(says(refusal<format_error>([&] { return checkpoint::open(dir.path()); }), {s2}));
}

TEST_CASE("which files of a directory are opened") {
    const temporary_directory dir;
    CHECK(says(refusal<configuration_error>([&] { return checkpoint::open(dir.path()); }), {dir.path().c_str(), "0 .safetensors"}));
    dir.write("weights.safetensors", single("only", 1));
    CHECK(value(checkpoint::open(dir.path()), "only") == 1);
    dir.write("more.safetensors", single("more", 1));
    CHECK(says(refusal<configuration_error>([&] { return checkpoint::open(dir.path()); }), {"2 .safetensors"}));
    dir.write("model.safetensors", single("model", 1));
    CHECK(checkpoint::open(dir.path()).find("model") != nullptr);
    CHECK(checkpoint::open(dir.path()).all().files.size() == 1);
    dir.write("consolidated.safetensors.index.json", map({{"more", "more.safetensors"}}));
    CHECK(checkpoint::open(dir.path()).find("more") != nullptr);
    dir.write("other.safetensors.index.json", map({{"only", "weights.safetensors"}}));
    CHECK(says(refusal<configuration_error>([&] { return checkpoint::open(dir.path()); }), {"2 *.safetensors.index.json"}));
    dir.write(index_name, map({{"only", "weights.safetensors"}}));
    CHECK(checkpoint::open(dir.path()).find("only") != nullptr);
    const temporary_directory part;
    part.write(s1, single("a", 1));
    CHECK_THROWS_AS(static_cast<void>(checkpoint::open(part.path())), configuration_error);
    CHECK(checkpoint::open(part / s1).find("a") != nullptr);
    CHECK(says(refusal<io_error>([&] { return checkpoint::open(part / "nosuch"); }), {"nosuch", "No such file"}));
}

TEST_CASE("config.json is read when asked for") {
    const pair_of_shards dir;
    dir.write("config.json", R"({"model_type":"x"})");
    CHECK(checkpoint::open(dir.path()).config()->at("model_type") == "x");
    CHECK(!checkpoint::open(dir / s1).config());
    dir.write("config.json", "{");
    const checkpoint weights = checkpoint::open(dir.path());
    CHECK(says(refusal<format_error>([&] { return weights.config(); }), {"config.json", "not valid JSON"}));
    dir.write("config.json", "[]");
    CHECK(says(refusal<format_error>([&] { return weights.config(); }), {"config.json", "an object is wanted"}));
}

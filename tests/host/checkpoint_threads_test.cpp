#include "checkpoint_files.hpp"

#include <array>
#include <atomic>
#include <stdexcept>
#include <thread>
#include <unordered_map>

using namespace files;
using penstock::checkpoint;
using penstock::format_error;
using penstock::io_error;
using penstock::read_safetensors_header;
using penstock::read_safetensors_headers;
using penstock::detail::work_in_order;

namespace {

constexpr int shards = 64, tensors_a_shard = 20, rounds = 100;

std::string shard_name(int number) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", number, shards);
    return name;
}

std::string tensor_name(int shard, int number) { return "layers." + std::to_string(shard) + ".weight." + std::to_string(number); }

/// Each tensor one float, a number that no other has.
float known_value(int shard, int number) { return static_cast<float>(shard * tensors_a_shard + number); }

std::string shard_bytes(int shard) {
    std::string text = "{", data;
    for (int i = 0; i < tensors_a_shard; ++i) {
        const auto begin = static_cast<std::uint64_t>(i) * sizeof(float);
        text += (i == 0 ? "" : ",") + entry(tensor_name(shard, i), "F32", "[1]", begin, begin + sizeof(float));
        data += floats({known_value(shard, i)});
    }
    return st(text + "}", data);
}

/// 64 shards of 20 tensors and an index that begins with the last one.
struct many_shards : temporary_directory {
    many_shards() {
        std::string index;
        for (int shard = shards; shard > 0; --shard) {
            paths.insert(paths.begin(), write(shard_name(shard), shard_bytes(shard)));
            for (int i = 0; i < tensors_a_shard; ++i) {
                index += (index.empty() ? "\"" : ",\"") + tensor_name(shard, i) + "\":\"" + shard_name(shard) + "\"";
            }
        }
        write("model.safetensors.index.json", "{\"weight_map\":{" + index + "}}");
    }

    std::vector<std::filesystem::path> paths;
};

}  // namespace

TEST_CASE("work in order: each piece is done once, by no more threads than are asked for") {
    for (const std::size_t threads : {1, 2, 8}) {
        std::array<std::atomic<int>, 1000> done{};
        std::array<std::thread::id, 1000> by{};
        work_in_order(done.size(), threads, [&](std::size_t i) {
            ++done[i];
            by[i] = std::this_thread::get_id();
        });
        CHECK(std::ranges::all_of(done, [](const auto& times) { return times == 1; }));
        std::ranges::sort(by);
        const auto used = std::unique(by.begin(), by.end()) - by.begin();
        CHECK(static_cast<std::size_t>(used) <= threads);
        if (threads == 1) {
            CHECK(by[0] == std::this_thread::get_id());
        }
    }
    work_in_order(0, 8, [](std::size_t) { FAIL("there is nothing to do"); });
}

TEST_CASE("work in order: the first piece that fails is told, also where a later one fails before it") {
    for (int round = 0; round < rounds; ++round) {
        std::array<std::atomic<bool>, 100> begun{};
        std::atomic<bool> later_failed{false};
        const std::string text = refusal<std::runtime_error>([&] {
            work_in_order(begun.size(), 2, [&](std::size_t i) {
                begun[i] = true;
                if (i == 7) {
                    later_failed = true;
                    later_failed.notify_one();
                    throw std::runtime_error("piece 7");
                }
                if (i == 3) {
                    later_failed.wait(false);  // the other thread comes as far as 7
                    throw std::runtime_error("piece 3");
                }
            });
            return 0;
        });
        CHECK(text == "piece 3");
        CHECK(std::all_of(begun.begin(), begun.begin() + 8, [](const auto& b) { return b.load(); }));
        CHECK(std::none_of(begun.begin() + 8, begun.end(), [](const auto& b) { return b.load(); }));
    }
}

TEST_CASE("headers of many files are those of one after the other") {
    const many_shards dir;
    for (const std::size_t count : {0, 1, 3, 4, shards}) {
        const std::span<const std::filesystem::path> paths = std::span(dir.paths).first(count);
        const std::vector<penstock::safetensors_file> together = read_safetensors_headers(paths);
        REQUIRE(together.size() == count);
        for (std::size_t i = 0; i < count; ++i) {
            const penstock::safetensors_file alone = read_safetensors_header(paths[i]);
            CHECK(together[i].path == paths[i]);
            CHECK(together[i].bytes == alone.bytes);
            REQUIRE(together[i].tensors.size() == alone.tensors.size());
            for (std::size_t t = 0; t < alone.tensors.size(); ++t) {
                CHECK(together[i].tensors[t].name == alone.tensors[t].name);
                CHECK(together[i].tensors[t].offset == alone.tensors[t].offset);
            }
        }
    }
}

TEST_CASE("a checkpoint of many shards: files in the order of their names, every tensor found") {
    const many_shards dir;
    for (const checkpoint& weights : {checkpoint::open(dir.path()), checkpoint::open_files(dir.paths)}) {
        CHECK(weights.all().files == dir.paths);
        REQUIRE(weights.all().tensors.size() == shards * tensors_a_shard);
        for (int shard = 1; shard <= shards; ++shard) {
            for (int i = 0; i < tensors_a_shard; ++i) {
                const penstock::tensor_info* t = weights.find(tensor_name(shard, i));
                REQUIRE(t == &weights.all().tensors[static_cast<std::size_t>((shard - 1) * tensors_a_shard + i)]);
                CHECK(t->file == static_cast<std::uint32_t>(shard - 1));
            }
            CHECK(weights.find(tensor_name(shard, tensors_a_shard)) == nullptr);
        }
        CHECK(float_of(bytes_of(dir.paths[8], *weights.find(tensor_name(9, 7)))) == known_value(9, 7));
    }
}

TEST_CASE("names of the same place and tag in the table are told apart") {
    std::unordered_map<std::size_t, std::string> seen;
    std::vector<penstock::tensor_info> list(3);
    for (int i = 0; list[0].name.empty(); ++i) {
        const std::string name = "tensor " + std::to_string(i);
        const std::size_t hash = std::hash<std::string_view>{}(name);
        const auto [other, fresh] = seen.emplace((hash & ~((std::size_t{1} << 40) - 1)) | (hash & 7), name);
        if (!fresh) {
            list[0].name = other->second;
            list[1].name = list[2].name = name;
        }
    }
    penstock::detail::name_table table(2);  // it has 8 places
    CHECK(!table.add(list, 0));
    CHECK(table.find(list, list[1].name) == std::nullopt);
    CHECK(!table.add(list, 1));
    CHECK(table.add(list, 2) == 1u);
    CHECK(table.find(list, list[0].name) == 0u);
    CHECK(table.find(list, list[1].name) == 1u);
    CHECK(penstock::detail::name_table().find({}, "tensor 0") == std::nullopt);
}

TEST_CASE("of several broken shards the first is named, whichever thread meets its own first") {
    const many_shards dir;
    dir.write(shard_name(12), shard_bytes(12).substr(0, 100));
    dir.write(shard_name(13), "<html>");
    dir.write(shard_name(14), "");
    dir.write(shard_name(15), shard_bytes(1));  // and its tensors are in two files
    dir.write(shard_name(64), shard_bytes(64) + "x");
    for (int round = 0; round < rounds; ++round) {
        CHECK(says(refusal<format_error>([&] { return checkpoint::open(dir.path()); }), {shard_name(12).c_str(), "interrupted"}));
        CHECK(says(refusal<format_error>([&] { return checkpoint::open_files(dir.paths); }), {shard_name(12).c_str(), "interrupted"}));
        CHECK(says(refusal<format_error>([&] { return read_safetensors_headers(std::span(dir.paths).subspan(12)); }),
                   {shard_name(13).c_str(), "HTML"}));
    }
}

TEST_CASE("F30 every missing shard is listed, also where others are broken") {
    const many_shards dir;
    dir.write(shard_name(2), "<html>");
    std::filesystem::remove(dir.paths[40]);
    std::filesystem::remove(dir.paths[62]);
    for (int round = 0; round < rounds; ++round) {
        const std::string text = refusal<io_error>([&] { return checkpoint::open(dir.path()); });
        CHECK(text.ends_with("shards that are not there: " + shard_name(41) + ", " + shard_name(63)));
    }
    CHECK(says(refusal<io_error>([&] { return read_safetensors_headers(std::span(dir.paths).subspan(30)); }),
               {shard_name(41).c_str(), "No such file"}));
}

TEST_CASE("a name in two of many shards: the first two in the order of the files are told") {
    const many_shards dir;
    dir.write(shard_name(50), shard_bytes(20));
    dir.write(shard_name(40), shard_bytes(30));
    for (int round = 0; round < rounds; ++round) {
        CHECK(says(refusal<format_error>([&] { return checkpoint::open(dir.path()); }),
                   {tensor_name(30, 0).c_str(), "in two files", shard_name(30).c_str(), shard_name(40).c_str()}));
    }
}

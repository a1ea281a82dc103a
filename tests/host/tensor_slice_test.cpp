#include <penstock/model/selection.hpp>
#include <penstock/model/tensor_slice.hpp>
#include <penstock/stream/slice_transfers.hpp>
#include <penstock/stream/weight_stream.hpp>

#include <doctest/doctest.h>

#include <cstring>
#include <fstream>
#include <mutex>
#include <set>

#include <unistd.h>

namespace {

using namespace penstock;

/// A file in memory that counts what is read of it.
class counting_source final : public byte_source {
public:
    explicit counting_source(std::vector<std::byte> data) : data_(std::move(data)) {}

    void read(std::uint32_t, std::uint64_t offset, std::span<std::byte> into) override {
        REQUIRE(offset + into.size() <= data_.size());
        std::memcpy(into.data(), data_.data() + offset, into.size());
        const std::lock_guard lock(mutex_);
        ++calls;
        bytes += into.size();
    }
    std::string name(std::uint32_t) const override { return "memory"; }

    std::uint64_t calls = 0, bytes = 0;

private:
    std::vector<std::byte> data_;
    std::mutex mutex_;
};

std::vector<std::byte> numbered(std::size_t size) {
    std::vector<std::byte> data(size);
    for (std::size_t i = 0; i < size; ++i) {
        data[i] = static_cast<std::byte>((i * 0x9e3779b97f4a7c15u) >> 53);
    }
    return data;
}

tensor_info tensor(std::string name, dtype type, std::vector<std::uint64_t> shape, std::uint64_t offset = 0, std::uint32_t file = 0) {
    std::uint64_t n = bits(type);
    for (const std::uint64_t extent : shape) {
        n *= extent;
    }
    return {std::move(name), type, std::move(shape), file, offset, n / 8};
}

std::vector<std::byte> load(counting_source& source, const tensor_slice& part) {
    std::vector<std::byte> dense(part.bytes);
    std::vector<transfer> transfers;
    append(transfers, part, dense.data());
    weight_stream<> stream({.readers = 2});
    const stream_report report = stream.run(transfers, source, on_host());
    CHECK(report.bytes == part.bytes);
    return dense;
}

std::vector<std::uint64_t> sizes(std::uint64_t extent, std::uint64_t parts, std::uint64_t unit) {
    std::vector<std::uint64_t> counts;
    std::uint64_t end = 0;
    for (std::uint64_t p = 0; p < parts; ++p) {
        const index_range r = share_of(extent, parts, p, unit);
        CHECK(r.first == end);
        end = r.end();
        counts.push_back(r.count);
    }
    CHECK(end == extent);
    return counts;
}

using list = std::vector<std::uint64_t>;

}  // namespace

TEST_CASE("shares differ by at most a unit and lie in order") {
    CHECK(sizes(30, 8, 1) == list{4, 4, 4, 4, 4, 4, 3, 3});
    CHECK(sizes(768, 4, 1) == list{192, 192, 192, 192});
    CHECK(sizes(768, 4, 128) == list{256, 256, 128, 128});
    CHECK(sizes(320, 4, 32) == list{96, 96, 64, 64});
    CHECK(sizes(320, 2, 128) == list{256, 64});
    CHECK(sizes(2880, 8, 16) == list{368, 368, 368, 368, 352, 352, 352, 352});
    CHECK(sizes(5, 8, 1) == list{1, 1, 1, 1, 1, 0, 0, 0});
    CHECK(sizes(0, 3, 16) == list{0, 0, 0});
    CHECK_THROWS_AS(static_cast<void>(share_of(8, 0, 0)), configuration_error);
    CHECK_THROWS_AS(static_cast<void>(share_of(8, 2, 2)), configuration_error);
    CHECK_THROWS_AS(static_cast<void>(share_of(8, 2, 0, 0)), configuration_error);
}

TEST_CASE("a slice of the first dimension is one range, of the second one range a row") {
    const tensor_info t = tensor("w", dtype::bf16, {6, 10}, 7);
    const tensor_slice rows = slice(t, 0, {2, 3});
    CHECK(rows.shape == list{3, 10});
    CHECK(rows.ranges == std::vector<slice_range>{{7 + 40, 60, 20}});
    const tensor_slice columns = slice(t, 1, {4, 3});
    CHECK(columns.shape == list{6, 3});
    CHECK(columns.bytes == 36);
    REQUIRE(columns.ranges.size() == 6);
    CHECK(columns.ranges[2] == slice_range{7 + 48, 6, 6});
    CHECK(slice(t, 1, {0, 10}).ranges == std::vector<slice_range>{{7, 120, 20}});
    CHECK(slice(t, 1, {4, 0}).ranges.empty());
    CHECK(slice(t, 1, {4, 0}).shape == list{6, 0});
}

TEST_CASE("the bytes of a slice are those of the tensor, for types of every width") {
    const std::uint64_t before = 5;
    for (const dtype type : {dtype::u8, dtype::bf16, dtype::f32, dtype::f64, dtype::f4, dtype::f6_e2m3}) {
        const tensor_info t = tensor("w", type, {3, 8, 16}, before);
        const std::vector<std::byte> file = numbered(before + t.bytes + 9);
        for (std::size_t d = 0; d < 3; ++d) {
            const index_range range = d == 0 ? index_range{1, 2} : index_range{4, 4};
            counting_source source(file);
            const std::vector<std::byte> got = load(source, slice(t, d, range));
            CHECK(source.bytes == got.size());
            CHECK(source.calls == (d == 0 ? 1 : d == 1 ? 3 : 24));
            std::vector<std::byte> wanted;  // bytes of 4 elements at a time: whole for every type
            const std::uint64_t group = bits(type) * 4 / 8;
            for (std::uint64_t i = 0; i < 3 * 8 * 16; i += 4) {
                const std::uint64_t at[] = {i / 128, i / 16 % 8, i % 16};
                if (at[d] >= range.first && at[d] < range.end()) {
                    const auto from = file.begin() + static_cast<std::ptrdiff_t>(before + i / 4 * group);
                    wanted.insert(wanted.end(), from, from + static_cast<std::ptrdiff_t>(group));
                }
            }
            CHECK(got == wanted);
        }
    }
}

TEST_CASE("borders inside a byte and ranges that are not there are refused by name") {
    const auto refused = [](const tensor_info& t, std::size_t d, index_range r, const char* word) {
        try {
            static_cast<void>(slice(t, d, r));
        } catch (const configuration_error& e) {
            const std::string text = e.what();
            return text.find("\"odd\"") != std::string::npos && text.find(word) != std::string::npos;
        }
        return false;
    };
    const tensor_info f4 = tensor("odd", dtype::f4, {4, 6});
    CHECK(refused(f4, 1, {1, 2}, "inside a byte"));
    CHECK(refused(f4, 1, {0, 3}, "inside a byte"));
    CHECK(slice(f4, 1, {2, 4}).ranges[1] == slice_range{4, 2, 2});
    CHECK(refused(tensor("odd", dtype::f4, {4, 5}), 0, {1, 1}, "inside a byte"));  // rows of two and a half bytes
    CHECK(slice(tensor("odd", dtype::f4, {4, 5}), 0, {2, 2}).ranges[0] == slice_range{5, 5, 0});
    CHECK(refused(tensor("odd", dtype::f6_e3m2, {4, 8}), 1, {2, 4}, "multiples of 4"));
    CHECK(refused(f4, 2, {0, 1}, "dimension 2"));
    CHECK(refused(f4, 0, {3, 2}, "beyond dimension 0"));
    CHECK(refused(f4, 0, {~std::uint64_t{0}, 2}, "beyond dimension 0"));
    tensor_info wrong = f4;
    wrong.bytes = 11;
    CHECK(refused(wrong, 0, {0, 1}, "do not follow"));
    wrong.shape = {1ull << 40, 1ull << 40};
    CHECK(refused(wrong, 0, {0, 1}, "more elements"));
}

TEST_CASE("fp8 slices that cut blocks carry every scale they touch, with their place in the first block") {
    struct use {
        std::uint64_t rows, cols, parts;
        std::size_t dimension;
    };
    for (const use& u :
         {use{768, 256, 4, 0}, use{256, 768, 4, 1}, use{320, 384, 2, 0}, use{384, 320, 4, 1}, use{320, 130, 5, 0}, use{128, 128, 3, 1}}) {
        const tensor_info w = tensor("w", dtype::f8_e4m3, {u.rows, u.cols});
        const tensor_info s = tensor("w_scale_inv", dtype::f32, {ceil_div(u.rows, 128), ceil_div(u.cols, 128)}, w.bytes);
        std::vector<std::byte> file = numbered(w.bytes + s.bytes);
        for (std::uint64_t i = 0; i < s.bytes / 4; ++i) {
            const float value = static_cast<float>(i) + 0.5f;
            std::memcpy(file.data() + w.bytes + i * 4, &value, 4);
        }
        for (std::uint64_t p = 0; p < u.parts; ++p) {
            const index_range r = share_of(w.shape[u.dimension], u.parts, p);
            const block_scaled_slice part = slice_blocks(w, s, u.dimension, r);
            counting_source source(file);
            const std::vector<std::byte> weights = load(source, part.weights), scales = load(source, part.scales);
            CHECK(source.bytes == part.weights.bytes + part.scales.bytes);
            std::size_t wrong = 0;
            for (std::uint64_t i = 0; i < part.weights.shape[0]; ++i) {
                for (std::uint64_t j = 0; j < part.weights.shape[1]; ++j) {
                    const std::uint64_t row = i + (u.dimension == 0 ? r.first : 0), col = j + (u.dimension == 1 ? r.first : 0);
                    float got = 0;
                    const std::uint64_t at = (i + part.first_row) / 128 * part.scales.shape[1] + (j + part.first_column) / 128;
                    std::memcpy(&got, scales.data() + at * 4, 4);
                    wrong += got != static_cast<float>(row / 128 * s.shape[1] + col / 128) + 0.5f;
                    wrong += weights[i * part.weights.shape[1] + j] != file[row * u.cols + col];
                }
            }
            CHECK(wrong == 0);
        }
    }
    // 192 rows a rank: ranks 1 and 2 begin in the middle of a block; four ranks carry 2 + 2 + 2 + 2 rows of the six scale rows.
    const tensor_info w = tensor("w", dtype::f8_e4m3, {768, 128}), s = tensor("s", dtype::f32, {6, 1});
    CHECK(slice_blocks(w, s, 0, {192, 192}).first_row == 64);
    CHECK(slice_blocks(w, s, 0, {192, 192}).scales.ranges == std::vector<slice_range>{{4, 8, 4}});
    CHECK(slice_blocks(w, s, 0, {384, 192}).first_row == 0);
    CHECK(slice_blocks(w, s, 0, {200, 0}).scales.bytes == 0);
    CHECK_THROWS_AS(static_cast<void>(slice_blocks(w, tensor("s", dtype::f32, {5, 1}), 0, {0, 1})), configuration_error);
    CHECK_THROWS_AS(static_cast<void>(slice_blocks(tensor("w", dtype::f8_e4m3, {768}), s, 0, {0, 1})), configuration_error);
}

namespace {

struct small_model {
    small_model() {
        std::uint64_t at = 3;
        const auto add = [&](const std::string& name, std::vector<std::uint64_t> shape) {
            all.tensors.push_back(tensor(name, dtype::bf16, std::move(shape), at));
            at += all.tensors.back().bytes;
        };
        for (const char* layer : {"model.layers.1", "model.layers.10"}) {
            add(std::string(layer) + ".mlp.gate.weight", {4, 6});
            add(std::string(layer) + ".mlp.shared_experts.up_proj.weight", {4, 6});
            for (const char* expert : {"1", "11", "2"}) {
                add(std::string(layer) + ".mlp.experts." + expert + ".up_proj.weight", {5, 6});
                add(std::string(layer) + ".mlp.experts." + expert + ".down_proj.weight", {6, 5});
            }
        }
        add("model.layers.2.mlp.experts.gate_up_proj", {3, 4, 8});
        add("model.layers.2.mlp.experts.down_proj_bias", {3, 4});
        add("block.0.mlp.mlp1_weight", {3, 2, 2});
        add("block.0.mlp.gate.weight", {3, 2});
        data = numbered(at);
        path = std::filesystem::temp_directory_path() / ("penstock-slice-" + std::to_string(getpid()));
        std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
        all.files = {path};
    }
    ~small_model() { std::filesystem::remove(path); }

    /// Loads a selection; every byte is right, and nothing else was read.
    void check(const tensor_list& some) const {
        weight_stream<> stream({.readers = 2});
        const loaded_tensors loaded = stream.load(some, on_host());
        std::uint64_t bytes = 0;
        for (const tensor_info& t : some.tensors) {
            bytes += t.bytes;
            CHECK(loaded[t.name].shape == t.shape);
            CHECK(std::memcmp(loaded[t.name].data, data.data() + t.offset, t.bytes) == 0);
        }
        CHECK(loaded.size() == some.tensors.size());
        CHECK(loaded.report().bytes == bytes);
        CHECK(loaded.report().reads <= some.tensors.size());
    }

    tensor_list all;
    std::vector<std::byte> data;
    std::filesystem::path path;
};

std::vector<std::string> names(const tensor_list& some) {
    std::vector<std::string> result;
    for (const tensor_info& t : some.tensors) {
        result.push_back(t.name);
    }
    return result;
}

using texts = std::vector<std::string>;

}  // namespace

TEST_CASE("one layer, by its prefix") {
    const small_model model;
    const tensor_list layer = below(model.all, "model.layers.1");
    CHECK(layer.tensors.size() == 8);  // and not those of layer 10
    CHECK(names(below(model.all, "model.layers.1.")) == names(layer));
    CHECK(below(model.all, "").tensors.size() == model.all.tensors.size());
    CHECK(names(below(model.all, "block.0.mlp.gate.weight")) == texts{"block.0.mlp.gate.weight"});
    CHECK_THROWS_AS(static_cast<void>(below(model.all, "model.layers.3")), configuration_error);
    model.check(layer);
}

TEST_CASE("tensors by name") {
    const small_model model;
    const texts wanted{"model.layers.10.mlp.gate.weight", "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.weight"};
    const tensor_list some = named(model.all, wanted);
    CHECK(names(some) == texts{"model.layers.1.mlp.gate.weight", "model.layers.10.mlp.gate.weight"});
    model.check(some);
    const texts wrong{"model.layers.1.mlp.gate.weight", "no", "nor.this"};
    CHECK_THROWS_WITH_AS(static_cast<void>(named(model.all, wrong)), "penstock: tensors that are not in the list: \"no\", \"nor.this\"",
                         configuration_error);
}

TEST_CASE("one expert, of its own tensors or of a stack") {
    const small_model model;
    const tensor_list own = one_expert(model.all, "model.layers.10.mlp", 1);
    CHECK(names(own) == texts{"model.layers.10.mlp.experts.1.up_proj.weight", "model.layers.10.mlp.experts.1.down_proj.weight"});
    model.check(own);
    const tensor_list stacked = one_expert(model.all, "model.layers.2.mlp", 2);
    REQUIRE(stacked.tensors.size() == 2);
    CHECK(stacked.tensors[0].shape == list{4, 8});
    CHECK(stacked.tensors[1].shape == list{4});
    const tensor_info stack = named(model.all, texts{"model.layers.2.mlp.experts.gate_up_proj"}).tensors[0];
    CHECK(stacked.tensors[0].offset == stack.offset + 2 * stack.bytes / 3);
    model.check(stacked);
    CHECK(names(one_expert(model.all, "block.0.mlp", 1)) == texts{"block.0.mlp.mlp1_weight"});
    CHECK_THROWS_AS(static_cast<void>(one_expert(model.all, "model.layers.10.mlp", 3)), configuration_error);
    CHECK_THROWS_AS(static_cast<void>(one_expert(model.all, "model.layers.2.mlp", 3)), configuration_error);
}

TEST_CASE("a list cut by bytes: every tensor once, stretches in order") {
    const small_model model;
    for (const std::uint32_t parts : {1u, 2u, 3u, 50u}) {
        const std::vector<tensor_list> lists = split_by_bytes(model.all, parts);
        REQUIRE(lists.size() == parts);
        std::uint64_t end = 0;
        std::multiset<std::string> seen;
        for (const tensor_list& l : lists) {
            CHECK(l.files == model.all.files);
            for (const tensor_info& t : l.tensors) {
                CHECK(t.offset >= end);
                end = t.offset + t.bytes;
                seen.insert(t.name);
            }
        }
        const texts all = names(model.all);
        CHECK(seen == std::multiset<std::string>(all.begin(), all.end()));
    }
    const auto halves =
        split_by_bytes({{}, {tensor("a", dtype::u8, {40}), tensor("b", dtype::u8, {40}, 40), tensor("c", dtype::u8, {80}, 80)}}, 2);
    CHECK(names(halves[0]) == texts{"a", "b"});
    CHECK(split_by_bytes({}, 2)[1].tensors.empty());
    CHECK_THROWS_AS(static_cast<void>(split_by_bytes(model.all, 0)), configuration_error);
}

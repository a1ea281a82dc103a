#include "../fault_injection.hpp"
#include "../tiny_model.hpp"
#include "checkpoint_files.hpp"

#include <penstock/buffer/registration.hpp>
#include <penstock/buffer/ring.hpp>
#include <penstock/residency/expert_store.hpp>

#include <array>

namespace {

using namespace penstock;
using namespace penstock::literals;
using faults::anonymous_memory;
using faults::had_by;
using faults::ledger;
using files::content;
using files::entry;
using files::header;
using files::refusal;
using files::says;
using files::st;
using tests::temporary_directory;
using tests::write_pattern;

using pageable_ration = faults::rationed<memory::pageable>;
static_assert(allocating_memory<pageable_ration>);

/// A list of one tensor of each file.
tensor_list whole_files(const std::vector<std::filesystem::path>& paths) {
    tensor_list list{paths, {}};
    for (std::uint32_t f = 0; f < paths.size(); ++f) {
        const std::uint64_t size = std::filesystem::file_size(paths[f]);
        list.tensors.push_back({"tensor " + std::to_string(f), dtype::u8, {size}, f, 0, size});
    }
    return list;
}

/// The bytes of a safetensors file of one tensor `name` of 8 bytes at data offset 0, followed by two empty ones.
std::string shard(const std::string& name, char value) {
    return st(
        header({entry(name, "U8", "[8]", 0, 8), entry(name + ".none", "U8", "[0]", 8, 8), entry(name + ".flat", "F32", "[3,0]", 8, 8)}),
        std::string(8, value));
}

}  // namespace

TEST_CASE("M03 drivers that do not lock a file mapping read-only, or at all") {
    const temporary_directory dir;
    const auto path = write_pattern(dir / "a", 3, 4096);
    std::vector<std::byte> bytes(4096);
    tests::fill(bytes, 3);
    struct driver {
        bool knows_read_only;
        std::size_t largest;
        const char* how;
        const char* condition;
    };
    for (const driver& d :
         {driver{true, faults::no_limit, "registered, read-only", "registered mapping (registered, read-only)"},
          driver{false, faults::no_limit, "registered", "registered mapping (registered)"},
          driver{false, 4095, "pageable (cudaHostRegister: ", "pread (registered mapping refused: pageable (cudaHostRegister: "}}) {
        ledger books;
        books.locking.largest = d.largest;
        {
            const basic_registration<faults::locking> lock(std::span<const std::byte>(bytes), {&books, d.knows_read_only});
            CHECK(lock.how().starts_with(d.how));
            CHECK(lock.pinned() == (d.largest >= 4096));
            CHECK(books.bytes() == (lock.pinned() ? 4096 : 0));
            CHECK(tests::holds(lock.bytes(), 3));
        }
        CHECK(books.clean());
        {
            basic_mapped_source<faults::locking> mapping({path}, {}, {&books, d.knows_read_only});
            const bytes_in_place there = mapping.in_place(0, 0, 4096);
            CHECK((there.data != nullptr) == (d.largest >= 4096));
            CHECK((there.data == nullptr || tests::holds({there.data, 4096}, 3)));
            CHECK(mapping.condition(0).starts_with(d.condition));
            const loaded_tensors loaded = weight_stream<>({.readers = 1}).load(whole_files({path}), mapping, on_host());
            CHECK(tests::holds({loaded["tensor 0"].data, 4096}, 3));
        }
        CHECK(books.clean());
    }
}

TEST_CASE("M16 a shard that is corrupt, then a whole one in its place") {
    const temporary_directory dir;
    const std::array<std::filesystem::path, 3> paths{dir.write("1.safetensors", shard("a", 1)), dir.write("2.safetensors", shard("b", 2)),
                                                     dir.write("3.safetensors", shard("c", 3))};
    const std::string good = content(paths[1]);
    weight_stream<> stream({.readers = 2});
    const auto open = [&] { return checkpoint::open_files({paths.begin(), paths.end()}); };
    const checkpoint before = open();
    for (const std::string& bad : {good.substr(0, good.size() - 1), good.substr(0, 20), std::string(), std::string(good.size(), 'x')}) {
        dir.write("2.safetensors", bad);
        CHECK(says(refusal<format_error>(open), {paths[1].c_str()}));
        if (bad.size() < good.size()) {  // one that was whole when it was opened
            CHECK(says(refusal<io_error>([&] { return stream.load(before.all(), on_host()); }), {paths[1].c_str()}));
        }
    }
    dir.write("2.safetensors", good);
    const loaded_tensors loaded = stream.load(open().all(), on_host());
    CHECK(loaded.size() == 9);
    CHECK(std::to_integer<int>(loaded["b"].data[7]) == 2);
}

TEST_CASE("M16 an error at any read gives everything back, and the retry works") {
    const temporary_directory dir;
    const std::vector<std::filesystem::path> paths{write_pattern(dir / "a", 0, 5'000'000), write_pattern(dir / "b", 1, 6'000'000),
                                                   write_pattern(dir / "c", 2, 5'000'000)};
    const tensor_list list = whole_files(paths);
    file_source files(paths);
    faults::faulty_source source(files);
    source.most = 100'000;
    source.delay = std::chrono::microseconds(100);
    weight_stream<chunking::fixed<512_KiB>> stream({.readers = 3});
    static_cast<void>(stream.load(list, source, on_host()));
    CHECK(source.bytes == 16'000'000);
    CHECK(source.reads >= 20);
    const std::uint64_t before = anonymous_memory();
    for (std::int64_t k = 0; k < 20; ++k) {
        source.reads = 0;
        source.failing_read = k;
        const std::string text = refusal<io_error>([&] { return stream.load(list, source, on_host()); });
        CHECK(says(text, {dir.path().c_str(), "bytes were wanted at offset", "were got: a fault was injected"}));
        source.failing_read = -1;
        const loaded_tensors again = stream.load(list, source, on_host());
        for (std::uint32_t f = 0; f < 3; ++f) {
            const tensor_view& t = again["tensor " + std::to_string(f)];
            CHECK(tests::holds({t.data, t.bytes}, f));
        }
    }
    CHECK(anonymous_memory() < before + 8_MiB);  // a buffer of a load is twice that
}

TEST_CASE("M16 a kind of memory of the user's own that fails at the k-th request") {
    for (int k = 0; k < 21; ++k) {
        ledger books;
        books.allocating.failing_call = k;
        pageable_ration::books = &books;
        const auto take_all = [] {
            const ring<pageable_ration, chunking::fixed<1000_B>, prefetch::depth<3>> slots;
            std::vector<buffer<std::byte, pageable_ration>> buffers;
            for (std::size_t i = 1; i < 20; ++i) {
                buffers.emplace_back(i * 1000);
                tests::fill(buffers.back().span(), i);
            }
            for (std::size_t i = 1; i < 20; ++i) {
                CHECK(tests::holds(buffers[i - 1].span(), i));
            }
            return pageable_ration::books->bytes();
        };
        if (k < 20) {
            CHECK(says(refusal<out_of_memory>(take_all), {"a test's memory ran out", k == 0 ? "12288" : "000 bytes were asked for"}));
            CHECK(books.allocating.calls == k + 1);
            CHECK(books.clean());
        }
        books.allocating.failing_call = -1;
        CHECK(take_all() == 3 * 4096 + 190'000);
        CHECK(books.clean());
    }
    pageable_ration::books = nullptr;
}

TEST_CASE("M18 tensors at the same place of different files are different tensors") {
    const temporary_directory dir;
    dir.write("1.safetensors", shard("a", 1));
    dir.write("2.safetensors", shard("b", 2));
    weight_stream<> stream({.readers = 2});
    for (const bool a_first : {true, false}) {
        std::vector<std::filesystem::path> paths{dir / "1.safetensors", dir / "2.safetensors"};
        if (!a_first) {
            std::swap(paths[0], paths[1]);
        }
        const checkpoint weights = checkpoint::open_files(paths);
        REQUIRE(weights.find("a")->offset == weights.find("b")->offset);
        tensor_list list = weights.all();
        if (!a_first) {
            std::reverse(list.tensors.begin(), list.tensors.end());
        }
        const loaded_tensors loaded = stream.load(list, on_host());
        CHECK(loaded.size() == 6);
        CHECK(std::string(reinterpret_cast<const char*>(loaded["a"].data), 8) == std::string(8, '\1'));
        CHECK(std::string(reinterpret_cast<const char*>(loaded["b"].data), 8) == std::string(8, '\2'));
        CHECK(loaded["a.none"].bytes == 0);
        CHECK(loaded["b.flat"].shape == std::vector<std::uint64_t>{3, 0});
        CHECK(loaded["b.none"].type == dtype::u8);
    }
}

TEST_CASE("M18 the cache tells experts apart that lie at the same place of different files") {
    const tests::tiny_model tiny(2, 2);
    const temporary_directory dir;
    const std::uint64_t size = std::filesystem::file_size(tiny.path());
    moe_model model = tiny.model;
    model.files = {write_pattern(dir / "0", 0, size), write_pattern(dir / "1", 1, size), write_pattern(dir / "2", 2, size),
                   write_pattern(dir / "3", 3, size)};
    const expert_parts place = tiny.model.layers[0].experts[0];  // of every expert of both layers, each in a file of its own
    for (std::uint32_t key = 0; key < 4; ++key) {
        for (record_part& part : model.layers[key / 2].experts[key % 2] = place) {
            part.file = key;
        }
    }
    const auto holds_its_file = [&](std::uint32_t key, const std::byte* record) {
        return std::all_of(place.begin(), place.end(), [&](const record_part& p) {
            return tests::holds({record + p.record_offset, p.bytes}, key, p.offset);
        });
    };
    for (const std::uint64_t slots : {1, 2, 4}) {
        auto store = make_expert_store(model, {{slots * tiny.slot_bytes()}, {2 * tiny.slot_bytes()}}, on_host());
        for (const std::uint32_t key : {0, 1, 2, 3, 3, 2, 1, 0, 2, 0, 3, 1}) {
            const std::vector<std::uint32_t> offsets =
                key % 2 == 0 ? std::vector<std::uint32_t>{0, 1, 1} : std::vector<std::uint32_t>{0, 0, 1};
            auto step = store.begin(key / 2, offsets);
            const std::span<const expert_work> ready = step.next();
            REQUIRE(ready.size() == 1);
            CHECK(ready[0].expert == key % 2);
            CHECK(holds_its_file(key, ready[0].record));
            step.finish();
        }
    }
}

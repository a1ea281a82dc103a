#include "../fault_injection.hpp"
#include "../known_bytes.hpp"

#include <penstock/stream/weight_stream.hpp>

#include <doctest/doctest.h>

namespace {

using namespace penstock;
using tests::temporary_directory;
using tests::write_pattern;

/// Writes the file's pages to the disk and drops them. Whether they went: a file system in memory keeps them.
bool drop_pages(const std::filesystem::path& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY);
    REQUIRE(descriptor >= 0);
    ::fsync(descriptor);
    ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
    const bool gone = detail::cached_part(descriptor) < detail::hardly_any;
    ::close(descriptor);
    return gone;
}

double cached(const std::filesystem::path& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY);
    REQUIRE(descriptor >= 0);
    const double part = detail::cached_part(descriptor);
    ::close(descriptor);
    return part;
}

using faults::ledger;
using faults::locking;
using source = basic_chosen_source<locking>;
constexpr std::uint64_t mib = std::uint64_t{1} << 20;

transfer from_file(std::uint64_t offset, std::span<std::byte> to) {
    transfer t;
    t.offset = offset;
    t.bytes = to.size();
    t.destination = to.data();
    return t;
}

}  // namespace

TEST_CASE("read once: what is in the page cache by buffered reads, what is not by direct I/O") {
    std::vector<std::byte> to(mib);
    for (const char* folder : {"/tmp", "/var/tmp", "/dev/shm"}) {
        if (!std::filesystem::is_directory(folder)) {
            continue;
        }
        const temporary_directory dir(folder);
        const auto path = write_pattern(dir / "a", 0, 2 * mib);
        {
            source files({path});
            CHECK(files.condition(0).empty());
            files.read(0, 77, to);
            CHECK(tests::holds(to, 0, 77));
            CHECK(files.condition(0) == "pread, in the page cache (read once)");
            CHECK(files.in_place(0, 0, 100).data == nullptr);
            CHECK_THROWS_WITH_AS(static_cast<void>(files.pinned(0, 0, 16)), doctest::Contains("read once"), configuration_error);
        }
        if (drop_pages(path)) {
            source files({path});
            files.read(0, 77, to);
            CHECK(tests::holds(to, 0, 77));
            const std::string how = files.condition(0);
            MESSAGE(std::string(folder) << ": " << how);
            CHECK((how == "direct reads, from the disk (read once)" || how.find("direct reads refused (") == 0));
        } else {
            MESSAGE(std::string(folder) << ": keeps its pages, no direct read is chosen");
        }
    }
}

TEST_CASE("the page cache is kept or dropped by choice") {
    std::vector<std::byte> to(2 * mib);
    for (const char* folder : {"/tmp", "/var/tmp"}) {
        const temporary_directory dir(folder);
        const auto path = write_pattern(dir / "a", 0, 2 * mib);
        if (!drop_pages(path)) {
            MESSAGE(std::string(folder) << ": keeps its pages");
            continue;
        }
        for (const page_cache choice : {page_cache::keep, page_cache::drop}) {
            {
                file_source files({path}, file_access::buffered, choice);
                files.read(0, 0, to);
                CHECK(tests::holds(to, 0, 0));
            }
            CHECK(cached(path) == (choice == page_cache::keep ? 1.0 : 0.0));
        }
    }
}

TEST_CASE("read repeatedly or used in place: a locked mapping, and reads where it is refused") {
    const temporary_directory dir;
    const auto path = write_pattern(dir / "a", 0, 2 * mib);
    std::vector<std::byte> to(1000);
    for (const source_use use : {source_use::repeated, source_use::in_place}) {
        const std::string wish = use == source_use::repeated ? "read repeatedly" : "used in place";
        ledger locked;
        {
            source files({path}, {.use = use}, {}, locking{&locked});
            const bytes_in_place part = files.in_place(0, 5, 1000);
            CHECK(tests::holds({part.data, 1000}, 0, 5));
            CHECK(files.condition(0) == "registered mapping (registered, read-only) (" + wish + ")");
            CHECK(tests::holds({files.pinned(0, 16, 100), 100}, 0, 16));
            files.read(0, 5, to);
            CHECK(tests::holds(to, 0, 5));
            files.refuse_in_place(0, "a device says no");
            CHECK(files.in_place(0, 5, 1000).data == nullptr);
            CHECK(files.condition(0) == "pread, in the page cache (registered mapping refused: a device says no)");
        }
        CHECK(locked.clean());
        source refused({path}, {.use = use}, {}, locking{});
        CHECK(refused.in_place(0, 5, 1000).data == nullptr);
        refused.read(0, 5, to);
        CHECK(tests::holds(to, 0, 5));
        CHECK(refused.condition(0).find(
                  "pread, in the page cache (registered mapping refused: pageable (cudaHostRegister: operation not supported") == 0);
        source missing({dir / "none"}, {.use = use}, {}, locking{});
        CHECK_THROWS_WITH_AS(missing.read(0, 0, to), doctest::Contains("No such file"), io_error);
    }
}

TEST_CASE("what is read repeatedly is mapped once it is in the page cache") {
    const temporary_directory dir("/var/tmp");
    const auto path = write_pattern(dir / "a", 0, 2 * mib);
    if (!drop_pages(path)) {
        MESSAGE("the file system keeps its pages");
        return;
    }
    ledger locked;
    source files({path}, {.use = source_use::repeated}, {}, locking{&locked});
    CHECK(files.in_place(0, 0, 100).data == nullptr);
    std::vector<std::byte> to(2 * mib);
    files.read(0, 0, to);
    CHECK(tests::holds(to, 0, 0));
    CHECK(files.condition(0) == "pread, from the disk (read repeatedly: to be mapped when it is in the page cache)");
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    CHECK(files.in_place(0, 0, 100).data != nullptr);
}

TEST_CASE("transfers are turned into copies from locked memory piece by piece, and cover every byte once") {
    const temporary_directory dir;
    const auto path = write_pattern(dir / "a", 0, 40 * mib);
    ledger locked;
    source files({path}, {.use = source_use::in_place}, {.segment_bytes = 16 * mib}, locking{&locked});
    std::vector<std::byte> to(40 * mib);
    std::vector<transfer> list{from_file(5, std::span(to).first(1000)), from_file(7, std::span(to).subspan(2000, 0)),
                               from_file(10'000, std::span(to).subspan(10'000, 39 * mib))};
    list[0].memory = to.data() + 5000;  // memory of the caller's stays what it is
    const std::vector<transfer> result = detail::taken_in_place(list, files);
    REQUIRE(result.size() == 5);
    CHECK(result[0].memory == list[0].memory);
    CHECK_FALSE(result[0].memory_is_pinned);
    CHECK(result[1].bytes == 0);
    std::uint64_t at = 10'000;
    for (std::size_t i = 2; i < 5; ++i) {
        CHECK(result[i].offset == at);
        CHECK(result[i].destination == to.data() + at);
        CHECK(result[i].memory_is_pinned);
        CHECK(tests::holds({result[i].memory, result[i].bytes}, 0, at));
        CHECK((at + result[i].bytes) % (16 * mib) == (i < 4 ? 0 : 10'000 + 7 * mib));
        at += result[i].bytes;
    }
    CHECK(at == 10'000 + 39 * mib);
    // No copy crosses from one lock into the next.
    const transfer_plan plan(std::span<const transfer>(result), chunking::run_time{bytes{12 * mib}});
    CHECK(plan.bytes() == 39 * mib + 1000);
    CHECK(plan.pieces().size() >= 1 + 2 + 2 + 1);
    for (const planned_piece& p : plan.pieces()) {
        CHECK(std::any_of(result.begin(), result.end(), [&](const transfer& t) {
            return t.memory != nullptr && p.memory >= t.memory && p.memory + p.bytes <= t.memory + t.bytes;
        }));
    }
    source once({path}, {}, {}, locking{&locked});
    CHECK(detail::taken_in_place(list, once).empty());
    source nothing({path}, {.use = source_use::in_place}, {}, locking{});
    CHECK(detail::taken_in_place(list, nothing).empty());
}

namespace {

/// Counts what it is asked, and has every second piece of 1000 bytes in place.
struct every_second_piece final : byte_source {
    explicit every_second_piece(std::uint64_t size) : data(size) { tests::fill(data, 0); }
    void read(std::uint32_t, std::uint64_t offset, std::span<std::byte> into) override {
        std::copy_n(data.data() + offset, into.size(), into.data());
    }
    [[nodiscard]] std::string name(std::uint32_t) const override { return "pieces"; }
    [[nodiscard]] bytes_in_place in_place(std::uint32_t, std::uint64_t offset, std::uint64_t) override {
        ++asked;
        const std::uint64_t piece = offset / 1000;
        return {piece % 2 == 1 ? data.data() + offset : nullptr, (piece + 1) * 1000 - offset, data.data() + piece};
    }
    std::vector<std::byte> data;
    int asked = 0;
};

}  // namespace

TEST_CASE("a source is asked once for neighbours, and its pieces need not fit the transfers") {
    every_second_piece source(20'000);
    std::vector<std::byte> to(20'000);
    std::vector<transfer> list;
    for (std::uint64_t at = 0; at < 9'900; at += 33) {
        list.push_back(from_file(at, std::span(to).subspan(at, 33)));
    }
    list.push_back(from_file(10'500, std::span(to).subspan(10'500, 9'000)));
    list.push_back(from_file(0, std::span(to).subspan(0, 10)));  // back to the start
    const std::vector<transfer> result = detail::taken_in_place(list, source);
    CHECK(source.asked == 10 + 10 + 1);
    std::vector<int> times(20'000, 0);
    for (const transfer& t : result) {
        CHECK((t.memory != nullptr) == (t.offset / 1000 % 2 == 1));
        CHECK(t.offset / 1000 == (t.offset + t.bytes - 1) / 1000);
        CHECK(t.destination == to.data() + t.offset);
        if (t.memory != nullptr) {
            CHECK(t.memory == source.data.data() + t.offset);
        }
        for (std::uint64_t i = 0; i < t.bytes; ++i) {
            ++times[t.offset + i];
        }
    }
    for (std::uint64_t i = 0; i < 20'000; ++i) {
        CHECK(times[i] == (i < 10 ? 2 : i < 9'900 || (i >= 10'500 && i < 19'500) ? 1 : 0));
    }
}

TEST_CASE("load chooses by itself, says what it chose, and takes a source of the caller's") {
    const temporary_directory dir;
    tensor_list list;
    list.files = {write_pattern(dir / "a", 0, 3 * mib)};
    list.tensors = {{"one", dtype::u8, {mib}, 0, 100, mib}, {"two", dtype::u8, {mib}, 0, mib + 100, mib}};
    weight_stream<> stream({.readers = 2});
    const loaded_tensors chosen = stream.load(list, on_host());
    CHECK(chosen.report().source == "pread, in the page cache (read once)");
    CHECK(tests::holds({chosen["two"].data, mib}, 0, mib + 100));
    file_source direct(list.files, file_access::direct);
    const loaded_tensors given = stream.load(list, direct, on_host());
    CHECK(given.report().source.find("direct reads") == 0);
    CHECK(tests::holds({given["one"].data, mib}, 0, 100));
    const loaded_tensors dropped = stream.load(list, on_host(), {}, {}, {.cache = page_cache::drop});
    CHECK(tests::holds({dropped["one"].data, mib}, 0, 100));
    list.tensors.push_back({"beyond", dtype::u8, {10}, 0, 3 * mib - 5, 10});
    CHECK_THROWS_WITH_AS(static_cast<void>(stream.load(list, direct, on_host())), doctest::Contains("\"beyond\" ends at byte"), io_error);
}

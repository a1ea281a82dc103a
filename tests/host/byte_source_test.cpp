#include "../fault_injection.hpp"
#include "../known_bytes.hpp"

#include <penstock/stream/file_source.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <thread>

namespace {

using namespace penstock;
using tests::temporary_directory;
using tests::write_pattern;

/// pread of a file of `size` bytes by formula.
auto file_of(std::uint64_t size) {
    return [size](int, void* to, std::size_t wanted, off_t offset) {
        const auto at = static_cast<std::uint64_t>(offset);
        const std::size_t n = at >= size ? 0 : std::min(wanted, static_cast<std::size_t>(size - at));
        tests::fill({static_cast<std::byte*>(to), n}, 0, at);
        return static_cast<ssize_t>(n);
    };
}

std::string named() { return "a file"; }

}  // namespace

TEST_CASE("F26 short and interrupted reads are continued") {
    faults::hesitant read{file_of(200)};
    std::vector<std::byte> to(96);
    detail::read_fully(read, 3, 11, to, named);
    CHECK(tests::holds(to, 0, 11));
    CHECK(read.calls == 20);
    faults::hesitant ends{file_of(100)};
    CHECK_THROWS_WITH_AS(detail::read_fully(ends, 3, 11, to, named),
                         "a file: 96 bytes were wanted at offset 11, 89 were got: the file ends there", io_error);
    const auto broken = [](int, void*, std::size_t, off_t) -> ssize_t {
        errno = EIO;
        return -1;
    };
    CHECK_THROWS_WITH_AS(detail::read_fully(broken, 3, 0, to, named), doctest::Contains("0 were got: Input/output error"), io_error);
    detail::read_fully(broken, 3, 0, {}, named);
}

TEST_CASE("F26 one read call larger than the kernel allows") {
    // No byte is touched: the shim looks at what is asked for.
    std::size_t largest = 0;
    std::uint64_t sum = 0;
    const auto read = [&](int, void*, std::size_t wanted, off_t offset) {
        CHECK(static_cast<std::uint64_t>(offset) == sum);
        largest = std::max(largest, wanted);
        const std::size_t n = std::min<std::size_t>(wanted, 2'147'479'552);
        sum += n;
        return static_cast<ssize_t>(n);
    };
    std::byte one{};
    detail::read_fully(read, 3, 0, std::span(&one, (std::size_t{5} << 30) + 16), named);
    CHECK(sum == (std::uint64_t{5} << 30) + 16);
    CHECK(largest <= 2'147'479'552);
    // And a real file, sparse, with its bytes at the far end.
    const temporary_directory dir;
    const auto path = write_pattern(dir / "sparse", 0, 0);
    std::filesystem::resize_file(path, 2'147'483'648u);
    std::ofstream(path, std::ios::binary | std::ios::app).write("0123456789abcdef", 16);
    file_source files({path});
    std::vector<std::byte> tail(32);
    files.read(0, 2'147'483'632u, tail);
    CHECK(std::all_of(tail.begin(), tail.begin() + 16, [](std::byte b) { return b == std::byte{0}; }));
    CHECK(std::string(reinterpret_cast<const char*>(tail.data()) + 16, 16) == "0123456789abcdef");
}

TEST_CASE("files are read from anywhere, by many threads, and say what they are") {
    const temporary_directory dir;
    file_source files({write_pattern(dir / "a", 0, 100'000), write_pattern(dir / "empty", 0, 0)});
    CHECK(files.condition(0).empty());
    {
        std::vector<std::jthread> threads;
        std::atomic<int> wrong{0};
        for (std::uint64_t n = 0; n < 8; ++n) {
            threads.emplace_back([&, n] {
                for (std::uint64_t i = 0; i < 50; ++i) {
                    std::vector<std::byte> to(1 + (n * 977 + i * 31) % 5000);
                    files.read(0, n * 10'000 + i, to);
                    wrong += !tests::holds(to, 0, n * 10'000 + i);
                }
            });
        }
        threads.clear();
        CHECK(wrong == 0);
    }
    CHECK(files.size(0) == 100'000);
    CHECK(files.size(1) == 0);
    CHECK(files.in_page_cache(0));
    CHECK_FALSE(files.in_page_cache(1));
    CHECK(files.condition(0) == "pread, in the page cache");
    CHECK(files.name(0) == (dir / "a").string());
    CHECK(files.name(7) == "file number 7");
    files.read(1, 0, {});
    std::vector<std::byte> to(10);
    CHECK_THROWS_WITH_AS(files.read(0, 99'995, to), doctest::Contains("10 bytes were wanted at offset 99995, 5 were got"), io_error);
    CHECK_THROWS_AS(files.read(0, 1'000'000, to), io_error);
    CHECK_THROWS_AS(files.read(2, 0, to), configuration_error);
    file_source missing({dir / "none", dir.path()});
    CHECK_THROWS_WITH_AS(missing.read(0, 0, to), doctest::Contains("No such file"), io_error);
    CHECK_THROWS_WITH_AS(missing.read(1, 0, to), doctest::Contains("Is a directory"), io_error);
}

TEST_CASE("F28 direct I/O with unaligned start and ragged tail") {
    std::vector<std::filesystem::path> folders{std::filesystem::temp_directory_path()};
    for (const char* other : {"/dev/shm", "/var/tmp"}) {  // one that refuses direct I/O, one that may serve it
        if (std::filesystem::is_directory(other)) {
            folders.emplace_back(other);
        }
    }
    for (const auto& folder : folders) {
        const temporary_directory dir(folder);
        for (const file_access access : {file_access::buffered, file_access::direct}) {
            for (const std::size_t start : {0, 512, 1152, 2272, 4095}) {
                for (const std::size_t length : {1, 4095, 4096, 3 * 4096 + 100}) {
                    const std::size_t size = start + 2 * length;  // ends where it will
                    file_source files({write_pattern(dir / "f", 0, size)}, access);
                    for (const std::size_t shift : {std::size_t{0}, start % 4096, std::size_t{17}}) {
                        std::byte* memory = static_cast<std::byte*>(memory::pageable::allocate(size + 8192));
                        std::fill_n(memory, size + 8192, std::byte{0xA5});
                        std::byte* to = memory + 64 + shift;
                        {
                            std::jthread neighbour([&] { files.read(0, start + length, {to + length, length}); });
                            files.read(0, start, {to, length});
                        }
                        CHECK(tests::holds({to, 2 * length}, 0, start));
                        CHECK(to[-1] == std::byte{0xA5});
                        CHECK(to[2 * length] == std::byte{0xA5});
                        std::byte* aligned = memory + 4096 + start % 4096;  // file and memory on a page together
                        files.read(0, start, {aligned, length});
                        CHECK(tests::holds({aligned, length}, 0, start));
                        memory::pageable::deallocate(memory, 0);
                    }
                    std::vector<std::byte> beyond(length + 1);
                    CHECK_THROWS_AS(files.read(0, start + length, beyond), io_error);
                    CHECK((access == file_access::buffered || files.condition(0).find("direct reads") == 0));
                }
            }
        }
    }
}

TEST_CASE("F28 direct reads that are refused at a read go on through the page cache") {
    const auto refuses = [](int, void*, std::size_t, off_t) -> ssize_t {
        errno = EINVAL;
        return -1;
    };
    std::vector<std::byte> to(10);
    CHECK_THROWS_AS(detail::read_direct(refuses, 3, 0, to, named), detail::direct_refused);
    // Short and interrupted direct reads, in every alignment: each call starts on a page.
    for (const std::uint64_t offset : {0, 1, 4095, 4096, 5000}) {
        faults::hesitant read{file_of(100'000), 5000};
        bool on_pages = true;
        const auto strict = [&](int d, void* p, std::size_t size, off_t at) {
            on_pages = on_pages && at % 4096 == 0 && size % 4096 == 0 && reinterpret_cast<std::uintptr_t>(p) % 4096 == 0;
            return read(d, p, size, at);
        };
        auto* memory = static_cast<std::byte*>(memory::pageable::allocate(64 << 10));
        for (const std::uint64_t shift : {offset % 4096, std::uint64_t{3}}) {
            detail::read_direct(strict, 3, offset, {memory + shift, 50'001}, named);
            CHECK(tests::holds({memory + shift, 50'001}, 0, offset));
        }
        CHECK(on_pages);
        CHECK_THROWS_WITH_AS(detail::read_direct(strict, 3, 90'000, {memory, 10'001}, named),
                             doctest::Contains("10000 were got: the file ends there"), io_error);
        memory::pageable::deallocate(memory, 0);
    }
}

#include <penstock/stream/mapped_source.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

namespace {

using namespace penstock;

struct temporary_directory {
    temporary_directory() {
        std::string name = (std::filesystem::temp_directory_path() / "penstock-XXXXXX").string();
        REQUIRE(::mkdtemp(name.data()) != nullptr);
        path = name;
    }
    ~temporary_directory() { std::filesystem::remove_all(path); }
    std::filesystem::path path;
};

std::byte pattern(std::uint64_t offset) { return static_cast<std::byte>((offset * 0x9e3779b97f4a7c15u) >> 56); }

std::filesystem::path write_file(const temporary_directory& dir, const char* name, std::size_t size) {
    std::vector<std::byte> data(size);
    for (std::size_t i = 0; i < size; ++i) {
        data[i] = pattern(i);
    }
    std::ofstream(dir.path / name, std::ios::binary).write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(size));
    return dir.path / name;
}

bool holds(std::span<const std::byte> data, std::uint64_t offset) {
    for (std::size_t i = 0; i < data.size(); ++i) {
        if (data[i] != pattern(offset + i)) {
            return false;
        }
    }
    return true;
}

/// A driver that locks what the test lets it lock.
struct books {
    std::size_t largest = ~std::size_t{0};  ///< more than this in one call is refused
    std::size_t in_all = ~std::size_t{0};   ///< and more than this altogether
    bool read_only = true;                  ///< whether it knows the flag
    bool there = true;
    std::map<void*, std::size_t> locked;
    int calls = 0;

    [[nodiscard]] std::size_t sum() const {
        std::size_t n = 0;
        for (const auto& [p, size] : locked) {
            n += size;
        }
        return n;
    }
};

struct locking {
    books* b = nullptr;

    [[nodiscard]] bool available() const noexcept { return b->there; }
    cudaError_t lock(void* p, std::size_t size, unsigned flags) const {
        ++b->calls;
        if ((flags & cudaHostRegisterReadOnly) != 0 && !b->read_only) {
            return cudaErrorNotSupported;
        }
        if (size > b->largest || b->sum() + size > b->in_all) {
            return cudaErrorMemoryAllocation;
        }
        CHECK(b->locked.emplace(p, size).second);
        return cudaSuccess;
    }
    void unlock(void* p) const noexcept { b->locked.erase(p); }
};

using source = basic_mapped_source<locking>;
constexpr std::uint64_t mib = std::uint64_t{1} << 20;

}  // namespace

TEST_CASE("a mapping gives the file's bytes where they lie, piece by piece, and locks no more than is asked for") {
    const temporary_directory dir;
    books b;
    {
        source files({write_file(dir, "a", 5 * mib + 17), write_file(dir, "empty", 0)}, {.segment_bytes = mib}, locking{&b});
        CHECK(files.condition(0) == "pread");
        bytes_in_place part = files.in_place(0, 3 * mib - 5, 100);
        CHECK(part.bytes == 5);
        CHECK(holds({part.data, part.bytes}, 3 * mib - 5));
        CHECK(b.sum() == mib);
        const bytes_in_place next = files.in_place(0, 3 * mib, 95);
        CHECK(next.bytes == 95);
        CHECK(next.data == part.data + 5);
        CHECK(next.lock != part.lock);
        CHECK(b.sum() == 2 * mib);
        CHECK(files.in_place(0, 3 * mib + 7, 1).lock == next.lock);
        CHECK(b.calls == 2);
        part = files.in_place(0, 5 * mib, 17);
        CHECK(part.bytes == 17);
        CHECK(holds({part.data, 17}, 5 * mib));
        CHECK(files.in_place(0, 5 * mib, 18).data == nullptr);  // reading says what is wrong with it
        CHECK(files.in_place(1, 0, 1).data == nullptr);
        CHECK(files.size(0) == 5 * mib + 17);
        CHECK(files.size(1) == 0);
        CHECK(files.condition(0) == "registered mapping (registered, read-only)");
        std::vector<std::byte> to(1000);
        files.read(0, 4 * mib - 500, to);
        CHECK(holds(to, 4 * mib - 500));
        CHECK_THROWS_WITH_AS(files.read(0, 5 * mib, to), doctest::Contains("1000 bytes were wanted at offset 5242880, 17 were got"),
                             io_error);
        CHECK_THROWS_AS(static_cast<void>(files.in_place(2, 0, 1)), configuration_error);
        CHECK_THROWS_AS(source({}, {.segment_bytes = 3 * mib}, locking{&b}), configuration_error);
    }
    CHECK(b.locked.empty());
    source missing({dir.path / "none"}, {}, locking{&b});
    CHECK_THROWS_WITH_AS(static_cast<void>(missing.in_place(0, 0, 1)), doctest::Contains("No such file"), io_error);
}

TEST_CASE("a mapping steps down: plain locks, smaller pieces, reads") {
    const temporary_directory dir;
    const auto path = write_file(dir, "a", 100 * mib);
    {
        books b;
        b.read_only = false;
        source files({path}, {}, locking{&b});
        CHECK(files.in_place(0, 0, 100 * mib).bytes == 100 * mib);
        CHECK(files.condition(0) == "registered mapping (registered)");
    }
    {
        books b;  // M05: as a whole it fails, in parts it goes
        b.largest = 20 * mib;
        source files({path}, {}, locking{&b});
        std::uint64_t done = 0;
        while (done < 100 * mib) {
            const bytes_in_place part = files.in_place(0, done, 100 * mib - done);
            REQUIRE(part.data != nullptr);
            CHECK(part.bytes <= 16 * mib);
            CHECK(holds({part.data, 100}, done));
            done += part.bytes;
        }
        CHECK(b.sum() == 100 * mib);
        CHECK(files.condition(0).find("out of memory") != std::string::npos);
    }
    {
        books b;  // a limit in the middle
        b.in_all = 50 * mib;
        {
            source files({path}, {.segment_bytes = 16 * mib}, locking{&b});
            std::uint64_t in_place = 0;
            for (std::uint64_t done = 0; done < 100 * mib;) {
                const bytes_in_place part = files.in_place(0, done, 100 * mib - done);
                in_place += part.data != nullptr ? part.bytes : 0;
                done += part.bytes;
            }
            CHECK(in_place == 48 * mib);
            CHECK(
                files.condition(0).find(
                    "registered mapping (registered, read-only); in part pread (registered mapping refused: pageable (cudaHostRegister") ==
                0);
        }
        CHECK(b.locked.empty());
    }
    {
        books b;
        b.there = false;
        source files({path}, {}, locking{&b});
        CHECK(files.in_place(0, 0, 10).data == nullptr);
        CHECK(b.calls == 0);
        CHECK(files.condition(0) == "pread (registered mapping refused: pageable (no CUDA device))");
        std::vector<std::byte> to(77);
        files.read(0, 5, to);
        CHECK(holds(to, 5));
    }
    {
        books b;
        source files({path}, {}, locking{&b});
        CHECK(files.in_place(0, 0, 10).data != nullptr);
        files.refuse_in_place(0, "a device did not take it");
        CHECK(files.in_place(0, 0, 10).data == nullptr);
        CHECK(files.condition(0) == "pread (registered mapping refused: a device did not take it)");
    }
}

TEST_CASE("a file that is cut or written under its mapping gives an error or its new bytes, and no signal") {
    const temporary_directory dir;
    const auto path = write_file(dir, "a", 2 * mib);
    books b;
    source files({path}, {}, locking{&b});
    CHECK(files.in_place(0, 0, 2 * mib).data != nullptr);
    std::filesystem::resize_file(path, mib);
    CHECK(files.in_place(0, 0, 100).data == nullptr);
    std::vector<std::byte> to(2 * mib);
    CHECK_THROWS_WITH_AS(files.read(0, 0, to), doctest::Contains("1048576 were got"), io_error);
    files.read(0, 0, std::span(to).first(mib));
    CHECK(holds(std::span(to).first(mib), 0));
    CHECK(files.condition(0).find("changed after it was mapped") != std::string::npos);
}

TEST_CASE("kernels are given aligned, locked bytes or a refusal by name") {
    const temporary_directory dir;
    const auto path = write_file(dir, "a", 3 * mib);
    books b;
    source files({path}, {.segment_bytes = mib}, locking{&b});
    CHECK(holds({files.pinned(0, 16, 2 * mib), 2 * mib}, 16));
    CHECK_THROWS_WITH_AS(static_cast<void>(files.pinned(0, 8, 100)), doctest::Contains("offset 8 cannot be used in place"),
                         configuration_error);
    CHECK(files.pinned(0, 8, 100, 8) != nullptr);
    CHECK_THROWS_WITH_AS(static_cast<void>(files.pinned(0, 0, 3 * mib + 1)), doctest::Contains(path.string().c_str()), configuration_error);
}

TEST_CASE("several threads lock and read one mapping") {
    const temporary_directory dir;
    const auto path = write_file(dir, "a", 8 * mib);
    books b;
    source files({path}, {.segment_bytes = mib}, locking{&b});
    std::atomic<int> wrong{0};
    {
        std::vector<std::jthread> threads;
        for (std::uint64_t n = 0; n < 6; ++n) {
            threads.emplace_back([&, n] {
                std::vector<std::byte> to(1000);
                for (std::uint64_t i = 0; i < 40; ++i) {
                    const std::uint64_t at = (n * 7919 + i * 199'999) % (8 * mib - 1000);
                    const bytes_in_place part = files.in_place(0, at, 1000);
                    files.read(0, at, to);
                    wrong += part.data == nullptr || !holds({part.data, part.bytes}, at) || !holds(to, at);
                    static_cast<void>(files.condition(0));
                }
            });
        }
    }
    CHECK(wrong == 0);
    CHECK(b.sum() == 8 * mib);
}

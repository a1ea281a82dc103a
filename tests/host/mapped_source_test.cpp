#include "../fault_injection.hpp"
#include "../known_bytes.hpp"

#include <penstock/stream/mapped_source.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <thread>

namespace {

using namespace penstock;
using tests::temporary_directory;
using tests::write_pattern;

using faults::had_by;
using faults::ledger;
using faults::locking;
using source = basic_mapped_source<locking>;
constexpr std::uint64_t mib = std::uint64_t{1} << 20;

}  // namespace

TEST_CASE("a mapping gives the file's bytes where they lie, piece by piece, and locks no more than is asked for") {
    const temporary_directory dir;
    ledger b;
    {
        source files({write_pattern(dir / "a", 0, 5 * mib + 17), write_pattern(dir / "empty", 0, 0)}, {.segment_bytes = mib}, locking{&b});
        CHECK(files.condition(0) == "pread");
        bytes_in_place part = files.in_place(0, 3 * mib - 5, 100);
        CHECK(part.bytes == 5);
        CHECK(tests::holds({part.data, part.bytes}, 0, 3 * mib - 5));
        CHECK(b.bytes() == mib);
        const bytes_in_place next = files.in_place(0, 3 * mib, 95);
        CHECK(next.bytes == 95);
        CHECK(next.data == part.data + 5);
        CHECK(next.lock != part.lock);
        CHECK(b.bytes() == 2 * mib);
        CHECK(files.in_place(0, 3 * mib + 7, 1).lock == next.lock);
        CHECK(b.locking.calls == 2);
        part = files.in_place(0, 5 * mib, 17);
        CHECK(part.bytes == 17);
        CHECK(tests::holds({part.data, 17}, 0, 5 * mib));
        CHECK(files.in_place(0, 5 * mib, 18).data == nullptr);  // reading says what is wrong with it
        CHECK(files.in_place(1, 0, 1).data == nullptr);
        CHECK(files.size(0) == 5 * mib + 17);
        CHECK(files.size(1) == 0);
        CHECK(files.condition(0) == "registered mapping (registered, read-only)");
        std::vector<std::byte> to(1000);
        files.read(0, 4 * mib - 500, to);
        CHECK(tests::holds(to, 0, 4 * mib - 500));
        CHECK_THROWS_WITH_AS(files.read(0, 5 * mib, to), doctest::Contains("1000 bytes were wanted at offset 5242880, 17 were got"),
                             io_error);
        CHECK_THROWS_AS(static_cast<void>(files.in_place(2, 0, 1)), configuration_error);
        CHECK_THROWS_AS(source({}, {.segment_bytes = 3 * mib}, locking{&b}), configuration_error);
    }
    CHECK(b.clean());
    source missing({dir / "none"}, {}, locking{&b});
    CHECK_THROWS_WITH_AS(static_cast<void>(missing.in_place(0, 0, 1)), doctest::Contains("No such file"), io_error);
}

TEST_CASE("a mapping steps down: plain locks, smaller pieces, reads") {
    const temporary_directory dir;
    const auto path = write_pattern(dir / "a", 0, 100 * mib);
    {
        ledger b;
        source files({path}, {}, locking{&b, false});
        CHECK(files.in_place(0, 0, 100 * mib).bytes == 100 * mib);
        CHECK(files.condition(0) == "registered mapping (registered)");
    }
    {
        ledger b;  // M05: as a whole it fails, in parts it goes
        b.locking.largest = 20 * mib;
        source files({path}, {}, locking{&b});
        std::uint64_t done = 0;
        while (done < 100 * mib) {
            const bytes_in_place part = files.in_place(0, done, 100 * mib - done);
            REQUIRE(part.data != nullptr);
            CHECK(part.bytes <= 16 * mib);
            CHECK(tests::holds({part.data, 100}, 0, done));
            done += part.bytes;
        }
        CHECK(b.bytes() == 100 * mib);
        CHECK(files.condition(0).find("out of memory") != std::string::npos);
    }
    {
        ledger b;  // a limit in the middle
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
        CHECK(b.clean());
    }
    {
        ledger b;
        source files({path}, {}, locking{&b, true, false});
        CHECK(files.in_place(0, 0, 10).data == nullptr);
        CHECK(b.locking.calls == 0);
        CHECK(files.condition(0) == "pread (registered mapping refused: pageable (no CUDA device))");
        std::vector<std::byte> to(77);
        files.read(0, 5, to);
        CHECK(tests::holds(to, 0, 5));
    }
    {
        ledger b;
        source files({path}, {}, locking{&b});
        CHECK(files.in_place(0, 0, 10).data != nullptr);
        files.refuse_in_place(0, "a device did not take it");
        CHECK(files.in_place(0, 0, 10).data == nullptr);
        CHECK(files.condition(0) == "pread (registered mapping refused: a device did not take it)");
    }
}

TEST_CASE("a file that is cut or written under its mapping gives an error or its new bytes, and no signal") {
    const temporary_directory dir;
    const auto path = write_pattern(dir / "a", 0, 2 * mib);
    ledger b;
    source files({path}, {}, locking{&b});
    CHECK(files.in_place(0, 0, 2 * mib).data != nullptr);
    std::filesystem::resize_file(path, mib);
    CHECK(files.in_place(0, 0, 100).data == nullptr);
    std::vector<std::byte> to(2 * mib);
    CHECK_THROWS_WITH_AS(files.read(0, 0, to), doctest::Contains("1048576 were got"), io_error);
    files.read(0, 0, std::span(to).first(mib));
    CHECK(tests::holds(std::span(to).first(mib), 0, 0));
    CHECK(files.condition(0).find("changed after it was mapped") != std::string::npos);
}

TEST_CASE("kernels are given aligned, locked bytes or a refusal by name") {
    const temporary_directory dir;
    const auto path = write_pattern(dir / "a", 0, 3 * mib);
    ledger b;
    source files({path}, {.segment_bytes = mib}, locking{&b});
    CHECK(tests::holds({files.pinned(0, 16, 2 * mib), 2 * mib}, 0, 16));
    CHECK_THROWS_WITH_AS(static_cast<void>(files.pinned(0, 8, 100)), doctest::Contains("offset 8 cannot be used in place"),
                         configuration_error);
    CHECK(files.pinned(0, 8, 100, 8) != nullptr);
    CHECK_THROWS_WITH_AS(static_cast<void>(files.pinned(0, 0, 3 * mib + 1)), doctest::Contains(path.string().c_str()), configuration_error);
}

TEST_CASE("several threads lock and read one mapping") {
    const temporary_directory dir;
    const auto path = write_pattern(dir / "a", 0, 8 * mib);
    ledger b;
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
                    wrong += part.data == nullptr || !tests::holds({part.data, part.bytes}, 0, at) || !tests::holds(to, 0, at);
                    static_cast<void>(files.condition(0));
                }
            });
        }
    }
    CHECK(wrong == 0);
    CHECK(b.bytes() == 8 * mib);
}

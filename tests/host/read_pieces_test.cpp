#include "stream_fakes.hpp"

#include <penstock/stream/file_source.hpp>

using namespace stream_fakes;

namespace {

/// Answers as preadv does, with at most `most` bytes a call and every third call interrupted.
struct hesitant {
    std::uint64_t size;
    std::size_t most;
    int calls = 0;

    ssize_t operator()(int, const struct iovec* vectors, int count, off_t offset) {
        if (++calls % 3 == 0) {
            errno = EINTR;
            return -1;
        }
        std::size_t done = 0;
        for (int i = 0; i < count; ++i) {
            for (std::size_t b = 0; b < vectors[i].iov_len; ++b) {
                const std::uint64_t at = static_cast<std::uint64_t>(offset) + done;
                if (done == most || at >= size) {
                    return static_cast<ssize_t>(done);
                }
                static_cast<std::byte*>(vectors[i].iov_base)[b] = pattern(5, at);
                ++done;
            }
        }
        return static_cast<ssize_t>(done);
    }
};

/// Pieces with gaps of all kinds: none, small, at the limit, beyond it, and none of their own bytes.
std::vector<read_piece> pieces_in(std::vector<std::byte>& room, std::uint64_t from) {
    std::vector<read_piece> pieces;
    std::uint64_t offset = from, at = 0;
    for (int i = 0; i < 700; ++i) {
        const std::size_t size = static_cast<std::size_t>(i % 7 == 3 ? 0 : 1 + i * 31 % 90);
        pieces.push_back({offset, std::span<std::byte>(room.data() + at, size)});
        constexpr std::uint64_t gap[] = {0, 1, 50, 0, 4096, 3, 4097, 0};
        offset += size + gap[i % 8];
        at += size + 1;  // with a guard between them
    }
    return pieces;
}

void check(const std::vector<read_piece>& pieces, std::uint64_t file) {
    for (const read_piece& p : pieces) {
        CHECK(tests::holds(p.into, file, p.offset));
        CHECK(*(p.into.data() + p.into.size()) == guard);
    }
}

}  // namespace

TEST_CASE("F26 pieces come whole from short and interrupted reads, with nothing between them touched") {
    for (const std::size_t most : {1u, 7u, 1000u, 10'000'000u}) {
        std::vector<std::byte> room(80'000, guard);
        const std::vector<read_piece> pieces = pieces_in(room, 11);
        hesitant read{10'000'000, most};
        detail::read_scattered(read, 3, pieces, [] { return std::string("a file"); });
        check(pieces, 5);
    }
    std::vector<std::byte> room(80'000, guard);
    const std::vector<read_piece> pieces = pieces_in(room, 11);
    hesitant ends{pieces[40].offset + 5, 1000};
    try {
        detail::read_scattered(ends, 3, pieces, [] { return std::string("a file"); });
        FAIL("a file that ends was read");
    } catch (const read_error& e) {
        CHECK(e.at() == pieces[40].offset + 5);
        CHECK(std::string(e.what()).find("a file: ") == 0);
        CHECK(std::string(e.what()).find("the file ends there") != std::string::npos);
    }
    detail::read_scattered(ends, 3, {}, [] { return std::string(); });
}

TEST_CASE("one call brings what lies together, and no call more than it may") {
    std::vector<std::byte> room(100'000);
    std::vector<read_piece> pieces;
    for (std::uint64_t i = 0; i < 2000; ++i) {
        pieces.push_back({i * 20, std::span<std::byte>(room.data() + i * 10, 10)});
    }
    hesitant read{10'000'000, 10'000'000};
    detail::read_scattered(read, 3, pieces, [] { return std::string(); });
    CHECK(read.calls == 4 + 1);  // 512 pieces a call; one was interrupted
}

TEST_CASE("F28 pieces of real files, through the page cache and past it") {
    const temporary_directory dir;
    write_pattern(dir / "a", 0, 2'000'000);
    for (const file_access access : {file_access::buffered, file_access::direct}) {
        file_source files({dir / "a"}, access);
        for (const std::uint64_t from : {0u, 4095u, 4096u, 100'001u}) {
            std::vector<std::byte> room(80'000, guard);
            const std::vector<read_piece> pieces = pieces_in(room, from);
            files.read_pieces(0, pieces);
            check(pieces, 0);
        }
        std::vector<std::byte> room(80'000, guard);
        const std::vector<read_piece> beyond = pieces_in(room, 1'990'000);
        CHECK_THROWS_WITH_AS(files.read_pieces(0, beyond), doctest::Contains("the file ends there"), read_error);
    }
}

#pragma once

#include <penstock/kv/block_pool.hpp>
#include <penstock/stream/file_source.hpp>
#include <penstock/stream/weight_stream.hpp>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

/// A pool's stored blocks in a file: a head, an index of keys, and the blocks from a page border on, [blocks, layers, 2, tokens, heads,
/// head_size], whatever the order in the pool. Numbers are little-endian. Head and index have a checksum; the blocks have none.

namespace penstock::inline v0_1 {

namespace detail {

struct block_file_head {
    std::array<char, 8> magic{'p', 'e', 'n', 's', 't', 'o', 'K', 'V'};
    std::array<char, 16> type{};  ///< its name, filled with zeros
    std::uint32_t version = 1;
    std::uint32_t tokens = 0;
    std::uint32_t layers = 0;
    std::uint32_t heads = 0;
    std::uint32_t head_size = 0;
    std::uint32_t blocks = 0;
    std::uint64_t checksum = 0;  ///< of this head, with zero here, and the index
};
static_assert(sizeof(block_file_head) == 56 && std::is_trivially_copyable_v<block_file_head>);

struct block_file_entry {
    block_key key;
    std::uint32_t before = block_index::none;
    std::uint32_t zero = 0;
};
static_assert(sizeof(block_file_entry) == 24 && std::is_trivially_copyable_v<block_file_entry>);

[[nodiscard]] inline block_file_head head_of(const block_geometry& g, std::uint32_t blocks) {
    block_file_head head;
    const std::string_view type = name(g.type);
    std::copy(type.begin(), type.end(), head.type.begin());
    head.tokens = g.tokens;
    head.layers = g.layers;
    head.heads = g.heads;
    head.head_size = g.head_size;
    head.blocks = blocks;
    return head;
}

/// FNV-1a, 64 bits.
[[nodiscard]] inline std::uint64_t checksum_of(block_file_head head, std::span<const block_file_entry> index) noexcept {
    std::uint64_t sum = 0xcbf29ce484222325u;
    head.checksum = 0;
    const auto add = [&](std::span<const std::byte> bytes) {
        for (const std::byte b : bytes) {
            sum = (sum ^ static_cast<std::uint64_t>(b)) * 0x100000001b3u;
        }
    };
    add(std::as_bytes(std::span(&head, 1)));
    add(std::as_bytes(index));
    return sum;
}

[[nodiscard]] inline std::uint64_t first_block_at(std::uint32_t blocks) noexcept {
    return round_up(sizeof(block_file_head) + std::uint64_t{blocks} * sizeof(block_file_entry), memory::page_bytes);
}

/// A file that takes its name when it is whole; else nothing is left of it.
class file_in_the_making {
public:
    explicit file_in_the_making(std::filesystem::path path)
        : path_(std::move(path)), partial_(path_.string() + ".partial-" + std::to_string(::getpid())) {
        file_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);  // what users wrote is nobody else's
        if (file_ < 0) {
            fail("cannot be made");
        }
    }
    file_in_the_making(const file_in_the_making&) = delete;
    file_in_the_making& operator=(const file_in_the_making&) = delete;
    ~file_in_the_making() {
        if (file_ >= 0) {
            ::close(file_);
            ::unlink(partial_.c_str());
        }
    }

    void write(std::span<const std::byte> bytes) {
        while (!bytes.empty()) {
            const ssize_t n = ::write(file_, bytes.data(), std::min<std::size_t>(bytes.size(), std::size_t{1} << 30));
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n <= 0) {
                fail("cannot be written");
            }
            bytes = bytes.subspan(static_cast<std::size_t>(n));
        }
    }

    void finish() {
        if (::fsync(file_) != 0) {
            fail("cannot be written");
        }
        if (::rename(partial_.c_str(), path_.c_str()) != 0) {
            fail("cannot be put in its place");
        }
        ::close(std::exchange(file_, -1));
    }

private:
    [[noreturn]] void fail(const char* what) const {
        throw io_error(path_.string() + ": a file of KV blocks " + what + ": " + std::generic_category().message(errno));
    }

    std::filesystem::path path_, partial_;
    int file_ = -1;
};

template <class T>
void read_into(std::ifstream& file, const std::filesystem::path& path, std::span<T> into) {
    if (!file.read(reinterpret_cast<char*>(into.data()), static_cast<std::streamsize>(into.size_bytes()))) {
        throw io_error(path.string() + ": a file of KV blocks cannot be read");
    }
}

/// The index of a file of blocks of this geometry, checked as far as it can be without reading the blocks.
[[nodiscard]] inline std::vector<block_file_entry> read_index(const std::filesystem::path& path, const block_geometry& wanted) {
    std::error_code why;
    const std::uint64_t size = std::filesystem::file_size(path, why);
    std::ifstream file(path, std::ios::binary);
    if (why || !file) {
        throw io_error(path.string() + ": cannot be opened" + (why ? ": " + why.message() : ""));
    }
    block_file_head head;
    if (size < sizeof head) {
        throw format_error(path.string() + ": " + std::to_string(size) + " bytes are no file of KV blocks");
    }
    read_into(file, path, std::span(&head, 1));
    const block_file_head expected = head_of(wanted, head.blocks);
    if (head.magic != expected.magic) {
        throw format_error(path.string() + ": is no file of KV blocks");
    }
    if (head.version != expected.version) {
        throw format_error(path.string() + ": is a file of KV blocks of version " + std::to_string(head.version) + ", version " +
                           std::to_string(expected.version) + " is known");
    }
    if (head.type != expected.type || head.tokens != wanted.tokens || head.layers != wanted.layers || head.heads != wanted.heads ||
        head.head_size != wanted.head_size) {
        const std::string type(head.type.begin(), std::find(head.type.begin(), head.type.end(), '\0'));
        throw configuration_error(path.string() + ": holds KV blocks of " + std::to_string(head.tokens) + " tokens x " +
                                  std::to_string(head.layers) + " layers x " + std::to_string(head.heads) + " heads x " +
                                  std::to_string(head.head_size) + " " + type + ", the pool has " + to_string(wanted));
    }
    const std::uint64_t whole = first_block_at(head.blocks) + (head.blocks == 0 ? 0 : block_layout(wanted, head.blocks).bytes());
    if (size != whole) {
        throw format_error(path.string() + ": " + std::to_string(head.blocks) + " KV blocks make a file of " + std::to_string(whole) +
                           " bytes, this one has " + std::to_string(size));
    }
    std::vector<block_file_entry> index(head.blocks);
    read_into(file, path, std::span(index));
    if (checksum_of(head, index) != head.checksum) {
        throw format_error(path.string() + ": the index of KV blocks is spoilt");
    }
    std::unordered_set<block_key, hash_of_key> seen;
    for (std::uint32_t i = 0; i < index.size(); ++i) {
        if ((index[i].before >= i && index[i].before != block_index::none) || !seen.insert(index[i].key).second) {
            throw format_error(path.string() + ": the index of KV blocks does not make sense at block " + std::to_string(i));
        }
    }
    return index;
}

}  // namespace detail

/// Writes all stored blocks to a file, which takes its name when it is whole; a file of that name is replaced. The blocks stay pinned
/// meanwhile; other threads go on. Synchronous. @return how many blocks. @throws io_error; then there is no new file
template <class Eviction>
std::uint32_t save_blocks(block_pool<Eviction>& pool, const std::filesystem::path& path) {
    const auto all = pool.everything();
    std::vector<detail::block_file_entry> index;
    for (const auto& e : all.entries) {
        index.push_back({e.key, e.before});
    }
    const auto blocks = static_cast<std::uint32_t>(index.size());
    const block_layout& layout = pool.layout();
    detail::block_file_head head = detail::head_of(layout.geometry(), blocks);
    head.checksum = detail::checksum_of(head, index);
    detail::file_in_the_making file(path);
    file.write(std::as_bytes(std::span(&head, 1)));
    file.write(std::as_bytes(std::span(index)));
    const std::vector<std::byte> padding(detail::first_block_at(blocks) - sizeof head - index.size() * sizeof(detail::block_file_entry));
    file.write(padding);
    const std::uint32_t together = layout.order() == block_order::block_first ? layout.geometry().layers : 1;
    for (const std::uint32_t b : all.blocks.blocks()) {
        for (std::uint32_t l = 0; l < layout.geometry().layers; l += together) {
            file.write({pool.memory().at(b, l), together * layout.layer_bytes()});
        }
    }
    file.finish();
    return blocks;
}

/// Brings the blocks of a file into free blocks of a pool, by a weight stream; those that it stores already, and those that somebody is
/// filling with what comes behind them, are left out. They are found when all of them are there: when it throws, none is, and the pool is
/// as it was. Synchronous. @return how many were brought
/// @throws format_error for a file that is no such file, or not all of one; configuration_error for another geometry, and for keys that are
/// stored in another order; out_of_memory for too few free blocks; io_error, and what Stream::run() throws
template <class Eviction, class Stream>
std::uint32_t restore_blocks(block_pool<Eviction>& pool, const std::filesystem::path& path, Stream& stream, progress_callback callback = {},
                             std::stop_token stop = {}) {
    const block_layout& layout = pool.layout();
    const std::vector<detail::block_file_entry> index = detail::read_index(path, layout.geometry());
    std::vector<typename block_pool<Eviction>::stored_block> entries;
    for (const detail::block_file_entry& e : index) {
        entries.push_back({e.key, e.before});
    }
    auto added = pool.add(entries);
    const std::uint32_t together = layout.order() == block_order::block_first ? layout.geometry().layers : 1;
    const std::uint64_t begin = detail::first_block_at(static_cast<std::uint32_t>(index.size()));
    std::vector<transfer> list;
    for (std::size_t i = 0; i < added.entries.size(); ++i) {
        for (std::uint32_t l = 0; l < layout.geometry().layers; l += together) {
            transfer t;
            t.offset = begin + added.entries[i] * layout.block_bytes() + l * layout.layer_bytes();
            t.bytes = together * layout.layer_bytes();
            t.destination = pool.memory().at(added.reserved.blocks()[i], l);
            list.push_back(t);
        }
    }
    file_source file({path});
    stream.run(list, file, on_host(), std::move(callback), std::move(stop));
    added.reserved.publish();
    return static_cast<std::uint32_t>(added.entries.size());
}

}  // namespace penstock::inline v0_1

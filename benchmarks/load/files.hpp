#pragma once

/// The files that are loaded: random bytes, on the disk and in the page cache before anything is timed.

#include "measure.hpp"

#include <penstock/buffer/host_cores.hpp>
#include <penstock/checkpoint/checkpoint.hpp>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace load_benchmark {

namespace ps = penstock;
using namespace ps::literals;

inline unsigned cores() { return ps::usable_cores(); }

/// work(i) for each i < count, each on a thread of its own. Throws what one of them threw.
template <class Work>
void on_threads(unsigned count, Work&& work) {
    std::exception_ptr problem;
    std::mutex mutex;
    {
        std::vector<std::jthread> team;
        for (unsigned i = 0; i < count; ++i) {
            team.emplace_back([&, i] {
                try {
                    work(i);
                } catch (...) {
                    const std::lock_guard lock(mutex);
                    problem = std::current_exception();
                }
            });
        }
    }
    if (problem) {
        std::rethrow_exception(problem);
    }
}

/// Bytes that no later use can mistake for others: xorshift, eight at a time, another row for each seed.
inline void fill_random(std::span<std::byte> window, std::uint64_t seed) {
    std::uint64_t state = (seed + 1) * 0x9e3779b97f4a7c15u;
    for (std::size_t at = 0; at < window.size(); at += 8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        std::memcpy(&window[at], &state, std::min<std::size_t>(8, window.size() - at));
    }
}

/// The same by all cores.
inline void fill_random_everywhere(std::span<std::byte> memory) {
    std::atomic<std::size_t> next{0};
    on_threads(cores(), [&](unsigned) {
        constexpr std::size_t piece = std::size_t{4} << 20;
        for (std::size_t at; (at = next.fetch_add(piece)) < memory.size();) {
            fill_random(memory.subspan(at, std::min(piece, memory.size() - at)), at);
        }
    });
}

class open_file {
public:
    open_file(const std::filesystem::path& path, int flags) : path_(path.string()), number_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
        if (number_ < 0) {
            fail("cannot be opened");
        }
    }
    open_file(const open_file&) = delete;
    ~open_file() { ::close(number_); }

    [[nodiscard]] int number() const noexcept { return number_; }
    [[nodiscard]] std::uint64_t size() const { return std::filesystem::file_size(path_); }

    void write(std::span<const std::byte> bytes, std::uint64_t at) const {
        for (std::size_t done = 0; done < bytes.size();) {
            const ssize_t n = ::pwrite(number_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(at + done));
            if (n < 0 && errno != EINTR) {
                fail("cannot be written");
            }
            done += n > 0 ? static_cast<std::size_t>(n) : 0;
        }
    }

    void flush() const {
        if (::fsync(number_) != 0) {
            fail("cannot be flushed");
        }
    }

    [[noreturn]] void fail(const std::string& what) const { throw ps::io_error(path_ + ": " + what + ": " + std::strerror(errno)); }

private:
    std::string path_;
    int number_;
};

/// Bytes of data of these tensors.
inline std::uint64_t data_bytes(std::span<const ps::tensor_to_write> tensors) {
    std::uint64_t sum = 0;
    for (const ps::tensor_to_write& t : tensors) {
        sum += t.bytes();
    }
    return sum;
}

/// Header and a hole of the right size; what is not written later reads as zeros. @return where the data begins
inline std::uint64_t write_header(const open_file& file, std::span<const ps::tensor_to_write> tensors) {
    const std::string header = ps::detail::safetensors_header(tensors, {{"format", "pt"}});
    file.write(std::as_bytes(std::span(header)), 0);
    if (::ftruncate(file.number(), static_cast<off_t>(header.size() + data_bytes(tensors))) != 0) {
        file.fail("cannot be made longer");
    }
    return header.size();
}

/// One file of these tensors, random bytes, flushed to the disk: pages that wait to be written would be written during the rounds.
inline void write_random(const std::filesystem::path& path, std::span<const ps::tensor_to_write> tensors) {
    const open_file file(path, O_RDWR | O_CREAT | O_TRUNC);
    const std::uint64_t begin = write_header(file, tensors);
    const std::uint64_t end = begin + data_bytes(tensors);
    const std::uint64_t seed = std::hash<std::string>{}(path.filename().string());
    std::atomic<std::uint64_t> next{begin};
    on_threads(std::min(cores(), 8u), [&](unsigned) {
        constexpr std::uint64_t piece = std::uint64_t{4} << 20;
        std::vector<std::byte> window(piece);
        for (std::uint64_t at; (at = next.fetch_add(piece)) < end;) {
            const std::span part = std::span(window).first(std::min(piece, end - at));
            fill_random(part, seed + at);
            file.write(part, at);
        }
    });
    file.flush();
}

/// Which shard each tensor is in. @return size of the file
inline std::uint64_t write_index(const std::filesystem::path& directory, nlohmann::json weight_map) {
    const std::string text = nlohmann::json{{"metadata", nlohmann::json::object()}, {"weight_map", std::move(weight_map)}}.dump(2);
    const open_file file(directory / "model.safetensors.index.json", O_WRONLY | O_CREAT | O_TRUNC);
    file.write(std::as_bytes(std::span(text)), 0);
    file.flush();
    return text.size();
}

/// A model directory: shards of at most `shard_bytes` of data, and their index.
/// @param write called with each shard's path and tensors
template <class Write>
void write_shards(const std::filesystem::path& directory, std::span<const ps::tensor_to_write> tensors, std::uint64_t shard_bytes,
                  Write&& write) {
    std::vector<std::size_t> ends;
    std::uint64_t filled = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (filled > 0 && filled + tensors[i].bytes() > shard_bytes) {
            ends.push_back(i);
            filled = 0;
        }
        filled += tensors[i].bytes();
    }
    ends.push_back(tensors.size());
    nlohmann::json weight_map = nlohmann::json::object();
    for (std::size_t shard = 0, first = 0; shard < ends.size(); first = ends[shard++]) {
        char name[64];
        std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", shard + 1, ends.size());
        const std::span<const ps::tensor_to_write> part = tensors.subspan(first, ends[shard] - first);
        write(directory / name, part);
        for (const ps::tensor_to_write& t : part) {
            weight_map[t.name] = name;
        }
    }
    write_index(directory, std::move(weight_map));
}

/// Gives up the pages of a file. What is dirty stays, so it is flushed first.
inline void drop_from_page_cache(const std::filesystem::path& path) {
    const open_file file(path, O_RDONLY);
    file.flush();
    static_cast<void>(::posix_fadvise(file.number(), 0, 0, POSIX_FADV_DONTNEED));
}

/// Share of a file's pages that are in the page cache, all of them asked.
inline double share_in_page_cache(const std::filesystem::path& path) {
    const open_file file(path, O_RDONLY);
    const std::uint64_t size = file.size();
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    void* mapping = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.number(), 0);
    if (mapping == MAP_FAILED) {
        file.fail("cannot be mapped");
    }
    std::vector<unsigned char> there(ps::ceil_div(size, page));
    const bool told = ::mincore(mapping, size, there.data()) == 0;
    ::munmap(mapping, size);
    if (!told) {
        file.fail("its pages cannot be looked at");
    }
    const auto present = std::ranges::count_if(there, [](unsigned char p) { return (p & 1) != 0; });
    return static_cast<double>(present) / static_cast<double>(there.size());
}

}  // namespace load_benchmark

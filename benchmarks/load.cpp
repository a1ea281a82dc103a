/// benchmark_load [GIB] [JSON]: files and host memory to one GPU. Candidates and baselines alternate in one process; every figure is a median
/// of rounds with its spread, in GB/s (1e9 bytes) and as a share of the link, which is measured in the same rounds. Without a GPU: exit 77.

#include <penstock/buffer/arena.hpp>
#include <penstock/checkpoint/checkpoint.hpp>
#include <penstock/penstock.hpp>
#include <penstock/stream/mapped_source.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <random>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

namespace ps = penstock;
using namespace ps::literals;

namespace {

double seconds_of(const std::function<void()>& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// One thing that is measured: moves `bytes` and returns when the last of them has arrived.
struct candidate {
    std::string name;
    std::uint64_t bytes;
    std::function<void()> move;
    std::vector<double> rates{};

    [[nodiscard]] double median() {
        std::ranges::sort(rates);
        return rates[rates.size() / 2];
    }
    /// Median absolute deviation from the median.
    [[nodiscard]] double spread() {
        const double middle = median();
        std::vector<double> away;
        for (const double r : rates) {
            away.push_back(std::abs(r - middle));
        }
        std::ranges::sort(away);
        return away[away.size() / 2];
    }
};

/// A safetensors file of equal tensors, random bytes; in the page cache when this returns.
void write_tensors(const std::filesystem::path& path, std::uint64_t total, std::uint64_t tensor_bytes) {
    std::vector<ps::tensor_to_write> list;
    auto random = std::make_shared<std::mt19937_64>(7);
    for (std::uint64_t i = 0; i < total / tensor_bytes; ++i) {
        list.push_back({.name = "t" + std::to_string(i),
                        .type = ps::dtype::u8,
                        .shape = {tensor_bytes},
                        .data = {},
                        .generate = [random](std::span<std::byte> window, std::uint64_t) {
                            for (std::size_t at = 0; at + 8 <= window.size(); at += 8) {
                                const std::uint64_t value = (*random)();
                                std::memcpy(&window[at], &value, 8);
                            }
                        }});
    }
    ps::write_safetensors(path, list);
}

/// The loop to beat: each thread preads into its own pair of pinned buffers and copies from them.
void plain_loop(const std::filesystem::path& path, std::byte* to, std::uint64_t total, std::byte* pinned, unsigned threads,
                std::uint64_t piece) {
    const int file = ::open(path.c_str(), O_RDONLY);
    std::atomic<std::uint64_t> next{0};
    {
        std::vector<std::jthread> team;
        for (unsigned t = 0; t < threads; ++t) {
            team.emplace_back([&, t] {
                const ps::stream stream(0);
                ps::event done[2];
                for (unsigned i = 0;; ++i) {
                    const std::uint64_t at = next.fetch_add(piece);
                    if (at >= total) {
                        break;
                    }
                    const std::uint64_t size = std::min(piece, total - at);
                    std::byte* slot = pinned + (t * 2 + i % 2) * piece;
                    done[i % 2].synchronize();
                    for (std::uint64_t got = 0; got < size;) {
                        const ssize_t n = ::pread(file, slot + got, size - got, static_cast<off_t>(at + got));
                        if (n <= 0) {
                            std::abort();
                        }
                        got += static_cast<std::uint64_t>(n);
                    }
                    ps::check(cudaMemcpyAsync(to + at, slot, size, cudaMemcpyHostToDevice, stream.get()), "cudaMemcpyAsync");
                    done[i % 2].record(stream.get());
                }
                stream.synchronize();
            });
        }
    }
    ::close(file);
}

/// All tensors of a file into one slab, one request: nobody waits for a single one.
std::vector<ps::transfer> whole_file(const ps::tensor_list& list, std::byte* to) {
    std::vector<ps::transfer> transfers;
    std::uint64_t at = 0;
    for (const ps::tensor_info& t : list.tensors) {
        transfers.push_back({.request = 0, .file = t.file, .offset = t.offset, .bytes = t.bytes, .destination = to + at});
        at += t.bytes;
    }
    return transfers;
}

}  // namespace

int main(int argc, char** argv) {
    if (ps::device_count() == 0) {
        std::printf("SKIPPED: this benchmark needs a GPU\n");
        return 77;
    }
    const std::uint64_t total = (argc > 1 ? std::stoull(argv[1]) : 8) << 30;
    const std::filesystem::path folder = std::filesystem::temp_directory_path() / ("penstock-load-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder);
    const std::filesystem::path large = folder / "large.safetensors";
    const std::filesystem::path small = folder / "small.safetensors";
    write_tensors(large, total, 9_MiB);
    write_tensors(small, total / 4, 64_KiB);
    const ps::tensor_list large_list = ps::checkpoint::open(large).all();
    const ps::tensor_list small_list = ps::checkpoint::open(small).all();
    const std::uint64_t large_bytes = large_list.tensors.size() * 9_MiB;
    const std::uint64_t small_bytes = small_list.tensors.size() * 64_KiB;

    double alloc_seconds = 0;
    const double arena_seconds = seconds_of([] { ps::arena four(4_GiB, {.device = 0}); });
    alloc_seconds = seconds_of([] { ps::buffer<std::byte, ps::memory::pinned> four(4_GiB); });

    ps::buffer<std::byte, ps::memory::device> there(total);
    ps::arena here(total, {.device = 0});
    std::memset(here.data(), 0x5a, here.size());
    std::vector<std::byte> pageable(1_GiB, std::byte{1});
    ps::file_source large_files(large_list.files), small_files(small_list.files);
    ps::mapped_source mapped(large_list.files);
    const ps::stream stream(0);
    const ps::place device = ps::on_device(0, stream.get());
    const auto copy = [&](const void* from, std::uint64_t bytes) {
        ps::check(cudaMemcpyAsync(there.data(), from, bytes, cudaMemcpyHostToDevice, stream.get()), "cudaMemcpyAsync");
        stream.synchronize();
    };
    ps::weight_stream<> defaults;
    ps::weight_stream<ps::chunking::fixed<8_MiB>> eight;
    ps::weight_stream<ps::chunking::fixed<4_MiB>> four;
    defaults.reserve(0);
    const std::vector<ps::transfer> from_memory{
        {.memory = here.data(), .memory_is_pinned = true, .bytes = total, .destination = there.data()}};
    const std::vector<ps::transfer> large_transfers = whole_file(large_list, there.data());
    const std::vector<ps::transfer> small_transfers = whole_file(small_list, there.data());

    std::vector<candidate> all;
    all.push_back({"link: one pinned copy of 1 GiB", 1_GiB, [&] { copy(here.data(), 1_GiB); }});
    all.push_back({"pageable copy of 1 GiB", 1_GiB, [&] { copy(pageable.data(), 1_GiB); }});
    all.push_back({"pinned memory, 8 MiB chunks", total, [&] { eight.run(from_memory, large_files, device); }});
    all.push_back({"pinned memory, 4 MiB chunks", total, [&] { four.run(from_memory, large_files, device); }});
    all.push_back({"page cache, plain loop 12 x 4 MiB x 2", large_bytes,
                   [&] { plain_loop(large, there.data(), large_bytes, here.data(), 12, 4_MiB); }});
    all.push_back({"page cache, 9 MiB tensors, defaults", large_bytes, [&] { defaults.run(large_transfers, large_files, device); }});
    all.push_back({"page cache, 64 KiB tensors, one slab", small_bytes, [&] { defaults.run(small_transfers, small_files, device); }});
    all.push_back({"registered mapping, second and later loads", large_bytes, [&] { defaults.run(large_transfers, mapped, device); }});
    const int rounds = argc > 3 ? std::stoi(argv[3]) : 15;
    for (int round = -1; round < rounds; ++round) {
        for (candidate& c : all) {
            const double seconds = seconds_of(c.move);
            if (round >= 0) {
                c.rates.push_back(static_cast<double>(c.bytes) / seconds / 1e9);
            }
        }
    }

    const double link = all[0].median();
    nlohmann::json rows = nlohmann::json::array();
    std::printf("%-52s %12s %8s %8s %8s\n", "", "bytes", "GB/s", "+-", "of link");
    for (candidate& c : all) {
        std::printf("%-52s %12llu %8.2f %8.2f %8.3f\n", c.name.c_str(), static_cast<unsigned long long>(c.bytes), c.median(), c.spread(),
                    c.median() / link);
        rows.push_back(
            {{"name", c.name}, {"bytes", c.bytes}, {"gb_per_s", c.median()}, {"spread", c.spread()}, {"of_link", c.median() / link}});
    }
    std::printf("4 GiB pinned: arena %.3f s (%s), cudaHostAlloc %.3f s, ratio %.2f\nstaging of the defaults: %s, %s\n", arena_seconds,
                here.how().c_str(), alloc_seconds, alloc_seconds / arena_seconds,
                ps::to_string(ps::bytes{defaults.staging_bytes()}).c_str(), defaults.staging_how().c_str());
    if (argc > 2) {
        std::ofstream(argv[2])
            << nlohmann::json{{"rows", rows}, {"arena_seconds", arena_seconds}, {"host_alloc_seconds", alloc_seconds}}.dump(2) << "\n";
    }
    std::filesystem::remove_all(folder);
    return 0;
}

#pragma once

/// Rows without files: the link, pinned memory, and how pinned memory is had.

#include "bench.hpp"
#include "process.hpp"

#include <array>
#include <sstream>

namespace load_benchmark {

inline void link_rows(bench& b) {
    const ps::arena pageable(1_GiB);
    fill_random_everywhere(pageable.bytes());
    std::vector<candidate> rows{b.link().row()};
    rows.push_back({"pageable copy of 1 GiB", pageable.size(), [&] { b.link().copy(pageable.data()); }});
    run_rounds(rows, b.how.rounds);
    for (const candidate& c : rows) {
        b.out.rate(c, rows[0]);
    }
}

inline void pinned_rows(bench& b) {
    const ps::arena from(b.how.bytes, {.device = 0});
    fill_random_everywhere(from.bytes());
    device_memory to(b.how.bytes);
    ps::file_source nothing({});
    ps::weight_stream<ps::chunking::fixed<8_MiB>> eight;
    ps::weight_stream<ps::chunking::fixed<4_MiB>> four;
    std::vector<ps::transfer> all(1);
    all[0].memory = from.data();
    all[0].memory_is_pinned = from.pinned();
    all[0].bytes = from.size();
    all[0].destination = to.data();
    std::vector<candidate> rows{b.link().row()};
    rows.push_back({"pinned memory, 8 MiB chunks", from.size(), [&] { eight.run(all, nothing, b.device); }});
    rows.push_back({"pinned memory, 4 MiB chunks", from.size(), [&] { four.run(all, nothing, b.device); }});
    run_rounds(rows, b.how.rounds);
    b.out.rate(rows[0], rows[0]);
    b.out.rate(rows[1], rows[0], {at_least(rows[1], 0.98, rows[0], "of the link")}, from.how());
    b.out.rate(rows[2], rows[0], {at_least(rows[2], 0.965, rows[0], "of the link")});
    spoil(0, to.data(), to.size());
    eight.run(all, nothing, b.device);
    b.out.verified("pinned memory", wrong_ranges(all, {}, ranges_looked_at), ranges_looked_at);
}

/// How a fresh process gets 4 GiB of pinned memory.
enum class pinning_way : std::uint8_t { arena, host_alloc, steps };

inline constexpr const char* pinning_names[] = {"arena", "cudaHostAlloc", "steps"};

/// The work of the fresh process: writes its seconds, and for the steps those of touching and of registering. The context is there before.
inline int pin_in_this_process(const std::string& way) {
    constexpr std::size_t size = 4_GiB;
    ps::check(cudaSetDevice(0), "cudaSetDevice");
    ps::check(cudaFree(nullptr), "cudaFree");
    if (way == pinning_names[0]) {
        std::optional<ps::arena> arena;
        const double seconds = seconds_of([&] { arena.emplace(size, ps::arena_options{.device = 0}); });
        std::printf("%.4f %s\n", seconds, arena->how().c_str());
    } else if (way == pinning_names[1]) {
        void* memory = nullptr;
        const double seconds =
            seconds_of([&] { ps::check(cudaHostAlloc(&memory, size, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc"); });
        std::printf("%.4f\n", seconds);
        ps::check(cudaFreeHost(memory), "cudaFreeHost");
    } else {
        void* memory = MAP_FAILED;
        const double touching = seconds_of([&] {
            memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) {
                throw ps::out_of_memory("4 GiB cannot be mapped");
            }
            static_cast<void>(::madvise(memory, size, MADV_HUGEPAGE));
            const unsigned count = std::min(cores(), 16u);
            on_threads(count, [&](unsigned i) {
                auto* begin = static_cast<volatile char*>(memory);
                for (std::size_t at = size / count * i; at < (i + 1 == count ? size : size / count * (i + 1)); at += 4096) {
                    begin[at] = 0;
                }
            });
        });
        const double registering = seconds_of(
            [&] { ps::check(cudaHostRegister(memory, size, cudaHostRegisterPortable | cudaHostRegisterMapped), "cudaHostRegister"); });
        std::printf("%.4f %.4f %.4f\n", touching + registering, touching, registering);
        ps::check(cudaHostUnregister(memory), "cudaHostUnregister");
        ::munmap(memory, size);
    }
    return 0;
}

inline void pinning_rows(bench& b) {
    constexpr int processes = 5;
    std::vector<double> seconds[3], touching, registering;
    std::string how;
    for (int i = 0; i < processes; ++i) {
        for (int way = 0; way < 3; ++way) {
            std::istringstream text(output_of_self({"--pin", pinning_names[way]}));
            text >> seconds[way].emplace_back();
            if (way == static_cast<int>(pinning_way::steps)) {
                text >> touching.emplace_back() >> registering.emplace_back();
            } else if (way == static_cast<int>(pinning_way::arena)) {
                std::getline(text >> std::ws, how);
            }
        }
    }
    const auto each = [](const std::vector<double>& values) {
        std::string text;
        for (const double v : values) {
            char one[16];
            std::snprintf(one, sizeof one, "%s%.3f", text.empty() ? "" : ", ", v);
            text += one;
        }
        return text;
    };
    const auto [arena, alloc, steps] = std::array{median(seconds[0]), median(seconds[1]), median(seconds[2])};
    b.out.figure("4 GiB of pinned arena, fresh process", arena, "s", {{"seconds", arena, 0.25, spread(seconds[0]), true}},
                 each(seconds[0]) + "; " + how);
    b.out.figure("cudaHostAlloc of 4 GiB, fresh process", alloc, "s", {}, each(seconds[1]));
    b.out.figure("cudaHostAlloc over arena", alloc / arena, "times");
    b.out.figure("steps by hand: map and touch, huge pages", median(touching), "s", {}, each(touching));
    b.out.figure("steps by hand: cudaHostRegister", median(registering), "s", {}, each(registering));
    b.out.figure("steps by hand: together", steps, "s", {}, each(seconds[2]));
}

}  // namespace load_benchmark

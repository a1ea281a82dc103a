#pragma once

/// Files in the page cache to one GPU.

#include "bench.hpp"
#include "process.hpp"

#include <penstock/stream/mapped_source.hpp>

#include <numeric>
#include <random>

namespace load_benchmark {

/// Pins the ring of a stream, and says what that took.
inline void reserve(bench& b, ps::weight_stream<>& loader) {
    const double seconds = seconds_of([&] { loader.reserve(0); });
    const auto mib = static_cast<double>(loader.staging_bytes()) / 1048576;
    b.out.figure("ring", mib, "MiB", {{"MiB", mib, 256, 0, true}}, loader.staging_how());
    b.out.figure("to pin the ring", seconds, "s");
}

inline void large_rows(bench& b) {
    const ps::tensor_list& list = b.files.get(file_kind::large);
    ps::weight_stream<> loader;
    reserve(b, loader);
    tensor_load load(loader, list, b.device, chosen(list));

    std::vector<loop_setting> settings;
    for (const unsigned threads : {8u, 12u, 16u}) {
        for (const std::uint64_t piece : {2_MiB, 4_MiB, 8_MiB}) {
            settings.push_back({threads, piece});
        }
    }
    const ps::arena pinned(loop_bytes(settings), {.device = 0});
    const std::uint64_t size = std::filesystem::file_size(list.files[0]);
    device_memory to(size);
    const auto loop_of = [&](loop_setting how) {
        return std::make_shared<file_loop<>>(list.files[0], 0, size, to.data(), pinned.bytes(), how);
    };
    const auto row_of = [](std::shared_ptr<file_loop<>> loop, const std::string& name) {
        return candidate{name, loop->bytes(), [loop] { loop->run(); }};
    };
    const loop_setting best = best_of(
        settings,
        [&](loop_setting how) {
            std::vector<candidate> one{row_of(loop_of(how), "")};
            run_rounds(one, 3);
            return one[0].gb_per_s();
        },
        [&](const std::string& text) { b.out.note("plain loop, " + text); });

    const std::shared_ptr<file_loop<>> loop = loop_of(best);
    std::vector<candidate> rows{b.link().row(), row_of(loop, "page cache, plain loop " + best.text()),
                                load.row("page cache, 9 MiB tensors, defaults")};
    run_rounds(rows, b.how.rounds);
    b.out.rate(rows[0], rows[0]);
    b.out.rate(rows[1], rows[0]);
    b.out.rate(rows[2], rows[0], {at_least(rows[2], 0.96, rows[0], "of the link"), at_least(rows[2], 1, rows[1], "of the plain loop")},
               load.source());
    b.out.verified("plain loop", wrong_of(*loop, list.files[0], to.data()), ranges_looked_at);
    b.out.verified(load.source(), load.wrong(), ranges_looked_at);
}

inline void mapping_rows(bench& b) {
    const ps::tensor_list& list = b.files.get(file_kind::large);
    ps::weight_stream<> loader;
    const auto mapped = [&] { return std::make_unique<ps::mapped_source>(list.files); };
    tensor_load first(loader, list, b.device, mapped, true);
    tensor_load later(loader, list, b.device, mapped);
    std::vector<candidate> rows{b.link().row(), first.row("registered mapping, first load"),
                                later.row("registered mapping, second and later loads")};
    run_rounds(rows, b.how.rounds);
    b.out.rate(rows[0], rows[0]);
    b.out.rate(rows[1], rows[0], {}, first.source());
    b.out.rate(rows[2], rows[0], {at_least(rows[2], 0.98, rows[0], "of the link")}, later.source());
    b.out.verified(later.source(), later.wrong(), ranges_looked_at);
}

inline void small_rows(bench& b) {
    const ps::tensor_list& list = b.files.get(file_kind::small);
    ps::weight_stream<> loader;
    loader.reserve(0);
    tensor_load load(loader, list, b.device, chosen(list));

    // Every tensor at a place of its own, 256 bytes of nothing behind it, neighbours in the file far from each other.
    std::vector<std::uint64_t> order(list.tensors.size());
    std::iota(order.begin(), order.end(), std::uint64_t{0});
    std::ranges::shuffle(order, std::mt19937_64(11));
    device_memory to(order.size() * (64_KiB + 256));
    std::vector<ps::transfer> scattered(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        scattered[i].file = list.tensors[i].file;
        scattered[i].offset = list.tensors[i].offset;
        scattered[i].bytes = list.tensors[i].bytes;
        scattered[i].destination = to.data() + order[i] * (64_KiB + 256);
    }
    ps::chosen_source files(list.files);
    std::string source;
    std::vector<candidate> rows{b.link().row(), load.row("page cache, 64 KiB tensors, one slab")};
    rows.push_back(
        {"page cache, 64 KiB tensors, scattered", load.bytes(), [&] { source = loader.run(scattered, files, b.device).source; }});
    run_rounds(rows, b.how.rounds);
    b.out.rate(rows[0], rows[0]);
    b.out.rate(rows[1], rows[0], {at_least(rows[1], 0.93, rows[0], "of the link")}, load.source());
    b.out.rate(rows[2], rows[0], {}, source);
    b.out.verified("one slab: " + load.source(), load.wrong(), ranges_looked_at);
    spoil(0, to.data(), to.size());
    loader.run(scattered, files, b.device);
    b.out.verified("scattered: " + source, wrong_ranges(scattered, list.files, ranges_looked_at), ranges_looked_at);
}

inline void mixture_rows(bench& b) {
    const ps::tensor_list& list = b.files.get(file_kind::mixture);
    ps::weight_stream<> loader;
    loader.reserve(0);
    tensor_load load(loader, list, b.device, chosen(list));
    std::vector<candidate> rows{b.link().row(), load.row("page cache, Qwen3-30B's tensors")};
    run_rounds(rows, b.how.rounds);
    b.out.rate(rows[0], rows[0]);
    b.out.rate(rows[1], rows[0], {at_least(rows[1], 0.94, rows[0], "of the link")},
               std::to_string(list.tensors.size()) + " tensors, " + std::to_string(list.files.size()) + " files; " + load.source());
    b.out.verified(load.source(), load.wrong(), ranges_looked_at);
}

/// The first load of a stream, and what it takes of the host beside the ring.
inline void growth_rows(bench& b) {
    const ps::tensor_list& list = b.files.get(file_kind::mixture);
    static_cast<void>(b.link());  // the context is there
    ps::weight_stream<> loader;
    reserve(b, loader);
    tensor_load load(loader, list, b.device, chosen(list), true);
    double seconds[2] = {};
    std::uint64_t growth[2] = {};
    for (int i = 0; i < 2; ++i) {
        growth[i] = growth_during([&] {
            load.prepare();
            seconds[i] = seconds_of([&] { load.move(); });
        });
    }
    const auto mib = static_cast<double>(std::max(growth[0], growth[1])) / 1048576;
    b.out.figure(
        "anonymous memory beside ring and context", mib, "MiB more", {{"MiB", mib, 64, 0, true}},
        "source, list and load; first load " + ps::to_string(ps::bytes{growth[0]}) + ", second " + ps::to_string(ps::bytes{growth[1]}));
    b.out.figure("first load of this stream", seconds[0], "s", {}, "second " + std::to_string(seconds[1]) + " s");
}

}  // namespace load_benchmark

#pragma once

/// A file that is not in the page cache.

#include "bench.hpp"

namespace load_benchmark {

inline void cold_rows(bench& b) {
    const ps::tensor_list& list = b.files.get(file_kind::cold);
    const std::filesystem::path& path = list.files[0];
    const std::uint64_t size = std::filesystem::file_size(path);
    double most_cached = 0;
    const auto drop = [&] {
        drop_from_page_cache(path);
        most_cached = std::max(most_cached, share_in_page_cache(path));
    };
    ps::weight_stream<> loader;
    loader.reserve(0);
    tensor_load load(loader, list, b.device, chosen(list), true);

    std::vector<loop_setting> settings;
    for (const std::uint64_t piece : {1_MiB, 4_MiB}) {
        for (const unsigned threads : {1u, 2u, 4u, 8u, 16u, 32u}) {
            settings.push_back({threads, piece});
        }
    }
    const ps::arena pinned(loop_bytes(settings), {.device = 0});
    device_memory to(ps::round_up(size, 4_MiB));
    const auto loop_of = [&](loop_setting how, std::uint64_t bytes) {
        return std::make_shared<file_loop<>>(path, O_DIRECT, bytes, to.data(), pinned.bytes(), how);
    };
    const std::uint64_t part = std::min<std::uint64_t>(size, 512_MiB);
    loop_setting best{};
    try {
        best = best_of(
            settings,
            [&](loop_setting how) {
                const auto loop = loop_of(how, part);
                std::vector<candidate> one{{"", loop->bytes(), [&] { loop->run(); }, drop}};
                run_rounds(one, 2);
                return one[0].gb_per_s();
            },
            [&](const std::string& text) { b.out.note("direct loop, " + text); });
    } catch (const ps::io_error& refusal) {
        b.out.note(std::string("not measured, the file system does not serve direct I/O: ") + refusal.what());
        return;
    }

    const auto loop = loop_of(best, size);
    const loop_setting same_depth{static_cast<unsigned>(loader.readers()), 1_MiB};
    const auto as_deep = loop_of(same_depth, size);
    std::vector<candidate> rows{
        b.link().row(),
        {"cold file, direct loop " + best.text(), loop->bytes(), [&] { loop->run(); }, drop},
        load.row("cold file, defaults"),
        {"cold file, direct loop at the readers' depth, " + same_depth.text(), as_deep->bytes(), [&] { as_deep->run(); }, drop}};
    rows[2].prepare = [&, prepare = rows[2].prepare] {
        drop();
        prepare();  // opens the file, so that it finds what there is now
    };
    drop();
    const double one_round = rows[1].time() + rows[2].time();
    const int rounds = one_round < 3 ? b.how.rounds : std::min(b.how.rounds, std::max(5, static_cast<int>(45 / one_round)));
    if (rounds < b.how.rounds) {
        b.out.note(std::to_string(rounds) + " rounds: one takes " + std::to_string(one_round) + " s");
    }
    run_rounds(rows, rounds);
    b.out.rate(rows[0], rows[0]);
    b.out.rate(rows[1], rows[0]);
    std::vector<requirement> must{at_least(rows[2], 0.95, rows[1], "of the direct loop")};
    must.push_back({"direct reads chosen", load.source().find("direct reads") != std::string::npos ? 1.0 : 0.0, 1, 0});
    b.out.rate(rows[2], rows[0], must, load.source());
    b.out.rate(rows[3], rows[0]);
    b.out.figure("of the file in the page cache before, at most", most_cached * 100, "%", {{"%", most_cached * 100, 1, 0, true}});
    b.out.verified("direct loop", wrong_of(*loop, path, to.data()), ranges_looked_at);
    drop();
    b.out.verified(load.source(), load.wrong(), ranges_looked_at);
}

}  // namespace load_benchmark

#pragma once

/// Two GPUs, each its own half over its own link.

#include "bench.hpp"

#include <penstock/model/selection.hpp>

namespace load_benchmark {

/// Half of the bytes in pinned memory near a GPU, and what brings them there.
class pinned_half {
public:
    pinned_half(int device, std::uint64_t bytes) : device_(device), from_(bytes, {.device = device}), stream_(device), all_(1) {
        const ps::device_guard on(device);
        to_ = device_memory(bytes);
        fill_random_everywhere(from_.bytes());
        all_[0].memory = from_.data();
        all_[0].memory_is_pinned = from_.pinned();
        all_[0].bytes = bytes;
        all_[0].destination = to_.data();
    }

    void move() { loader_.run(all_, nothing_, ps::on_device(device_, stream_.get())); }

    [[nodiscard]] std::size_t wrong() {
        spoil(device_, to_.data(), to_.size());
        move();
        return wrong_ranges(all_, {}, ranges_looked_at);
    }

private:
    int device_;
    ps::arena from_;
    ps::stream stream_;
    std::vector<ps::transfer> all_;
    device_memory to_;
    ps::file_source nothing_{{}};
    ps::weight_stream<ps::chunking::fixed<8_MiB>> loader_{ps::stream_options{.device = device_}};
};

inline void two_pinned_rows(bench& b) {
    const std::uint64_t each = b.how.bytes / 2;
    pinned_half first(0, each), second(1, each);
    std::vector<candidate> rows{b.link().row()};
    rows.push_back({"pinned memory, one GPU alone", each, [&] { first.move(); }});
    rows.push_back({"pinned memory, the other alone", each, [&] { second.move(); }});
    rows.push_back({"pinned memory, two GPUs", 2 * each, [&] { on_threads(2, [&](unsigned g) { (g == 0 ? first : second).move(); }); }});
    run_rounds(rows, b.how.rounds);
    for (std::size_t i = 0; i < 3; ++i) {
        b.out.rate(rows[i], rows[0]);
    }
    b.out.rate(rows[3], rows[0], {at_least(rows[3], 1.9, rows[1], "of one GPU alone")});
    b.out.verified("pinned memory, two GPUs", first.wrong() + second.wrong(), 2 * ranges_looked_at);
}

inline void two_cached_rows(bench& b) {
    const std::vector<ps::tensor_list> halves = ps::split_by_bytes(b.files.get(file_kind::large), 2);
    const int readers = static_cast<int>(std::clamp(cores() / 2, 2u, 12u));
    const ps::stream second_stream(1);
    const ps::place places[2] = {b.device, ps::on_device(1, second_stream.get())};
    ps::weight_stream<> loaders[2] = {ps::weight_stream<>({.readers = readers, .device = 0}),
                                      ps::weight_stream<>({.readers = readers, .device = 1})};
    std::vector<std::unique_ptr<tensor_load>> loads;
    for (int g = 0; g < 2; ++g) {
        loaders[g].reserve(g);
        loads.push_back(std::make_unique<tensor_load>(loaders[g], halves[g], places[g], chosen(halves[g])));
    }
    const ps::arena from(2_GiB), to(2_GiB);
    fill_random_everywhere(from.bytes());
    std::uint64_t sum = 0;
    std::vector<candidate> rows{b.link().row(), loads[0]->row("page cache, one GPU alone, its half")};
    rows.push_back({"page cache, two GPUs, each its half", loads[0]->bytes() + loads[1]->bytes(),
                    [&] { on_threads(2, [&](unsigned g) { loads[g]->move(); }); },
                    [&] {
                        loads[0]->prepare();
                        loads[1]->prepare();
                    }});
    rows.push_back({"host memory read, all cores", from.size(), [&] { sum += read_everywhere(from.bytes()); }});
    rows.push_back({"host memory copied, all cores (bytes copied)", from.size(), [&] { copy_everywhere(from.bytes(), to.data()); }});
    run_rounds(rows, b.how.rounds);
    for (const candidate& c : rows) {
        b.out.rate(c, rows[0]);
    }
    b.out.note(std::to_string(readers) + " readers for each GPU; two GPUs over one: " +
               std::to_string(rows[2].gb_per_s() / rows[1].gb_per_s()) + "; sum of the words read " + std::to_string(sum));
    b.out.verified("page cache, two GPUs", loads[0]->wrong() + loads[1]->wrong(), 2 * ranges_looked_at);
}

inline void two_gpu_rows(bench& b) {
    if (ps::device_count() < 2) {
        b.out.note("SKIPPED: this needs two GPUs");
        return;
    }
    two_pinned_rows(b);
    two_cached_rows(b);
}

}  // namespace load_benchmark

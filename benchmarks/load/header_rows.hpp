#pragma once

/// Headers alone, and a checkpoint of many shards up to the first tensor on the GPU.

#include "bench.hpp"
#include "process.hpp"

#include <fstream>
#include <optional>

#include <malloc.h>

namespace load_benchmark {

/// `count` tensors by the names of Qwen3-30B-A3B's, going on past its 48 layers where more are wanted.
inline std::vector<ps::tensor_to_write> many_tensors(std::size_t count) {
    std::vector<ps::tensor_to_write> list;
    for (int layer = 0; list.size() < count; ++layer) {
        add_qwen3_30b_layer(list, layer);
    }
    list.resize(count);
    return list;
}

/// A file of the right size in which only header and first tensor are written: nothing else of it is read.
inline void write_hollow(const std::filesystem::path& path, std::span<const ps::tensor_to_write> tensors) {
    const open_file file(path, O_RDWR | O_CREAT | O_TRUNC);
    const std::uint64_t begin = write_header(file, tensors);
    std::vector<std::byte> first(tensors[0].bytes());
    fill_random(first, std::hash<std::string>{}(tensors[0].name));
    file.write(first, begin);
}

/// Bytes of header text of a file.
inline std::uint64_t header_bytes(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    unsigned char length[8] = {};
    file.read(reinterpret_cast<char*>(length), sizeof length);
    std::uint64_t bytes = 0;
    for (int i = 7; i >= 0; --i) {
        bytes = bytes << 8 | length[i];
    }
    return bytes + sizeof length;
}

struct header_figures {
    candidate one_core, shards_one_core, shards, opened;
    std::filesystem::path folder;
};

/// Writes the files into `folder` and times them; needs no GPU.
inline header_figures time_headers(const std::filesystem::path& folder, int rounds) {
    const std::filesystem::path single = folder / "headers.safetensors";
    write_hollow(single, many_tensors(20000));
    header_figures result;
    result.folder = folder / "shards";
    std::filesystem::create_directories(result.folder);
    const std::vector<ps::tensor_to_write> all = many_tensors(1000 * 128);
    std::vector<std::filesystem::path> paths;
    std::uint64_t headers = 0;
    nlohmann::json weight_map = nlohmann::json::object();
    for (std::size_t s = 0; s < 1000; ++s) {
        char name[64];
        std::snprintf(name, sizeof name, "model-%05zu-of-01000.safetensors", s + 1);
        const auto part = std::span(all).subspan(s * 128, 128);
        write_hollow(paths.emplace_back(result.folder / name), part);
        headers += header_bytes(paths.back());
        for (const ps::tensor_to_write& t : part) {
            weight_map[t.name] = name;
        }
    }
    const std::uint64_t index = write_index(result.folder, std::move(weight_map));

    // What was read before is given up outside of the time, and its memory to the system: a program that starts has none, and without that
    // the allocator would put the pieces of one row together in the time of the next.
    std::vector<ps::safetensors_file> read;
    std::optional<ps::checkpoint> opened;
    const auto clear = [&] {
        read = {};
        opened.reset();
        ::malloc_trim(0);
    };
    std::vector<candidate> rows(4);
    rows[0] = {"headers, one core", header_bytes(single),
               [&] {
                   const on_one_core here;
                   read.push_back(ps::read_safetensors_header(single));
               },
               clear};
    rows[1] = {"headers, 1000 shards, one core", headers,
               [&] {
                   const on_one_core here;
                   read = ps::read_safetensors_headers(paths);
               },
               clear};
    rows[2] = {"headers, 1000 shards", headers, [&] { read = ps::read_safetensors_headers(paths); }, clear};
    rows[3] = {"open, 1000 shards", headers + index, [&] { opened = ps::checkpoint::open(result.folder); }, clear};
    run_rounds(rows, rounds);
    result.one_core = rows[0];
    result.shards_one_core = rows[1];
    result.shards = rows[2];
    result.opened = rows[3];
    return result;
}

inline void header_rows(bench& b) {
    const header_figures found = time_headers(b.files.empty_folder(), b.how.rounds);
    const auto megabytes = [](const candidate& c) { return c.gb_per_s() * 1e3; };
    const auto must = [&](const candidate& c, double wanted) {
        return std::vector<requirement>{{"MB/s", megabytes(c), wanted, spread(c.rates) * 1e3}};
    };
    const auto size = [](const candidate& c, const std::string& what) {
        return std::to_string(c.bytes) + " bytes of " + what + " in " + std::to_string(c.seconds()) + " s";
    };
    b.out.figure("header of 20000 tensors, one core", megabytes(found.one_core), "MB/s", must(found.one_core, 60),
                 size(found.one_core, "header"));
    b.out.figure("headers of 1000 shards of 128 tensors, all cores", megabytes(found.shards), "MB/s", must(found.shards, 400),
                 size(found.shards, "headers") + "; one core " + std::to_string(megabytes(found.shards_one_core)) + " MB/s");
    b.out.figure("open of the 1000 shards by their index", megabytes(found.opened), "MB/s", {},
                 size(found.opened, "headers and index") + ", +- " + std::to_string(spread(found.opened.rates) * 1e3) + " MB/s");

    static_cast<void>(b.link());  // the context is there
    ps::weight_stream<> loader;
    loader.reserve(0);
    std::vector<double> seconds;
    std::size_t wrong = 0;
    for (int round = -1; round < b.how.rounds; ++round) {
        std::optional<ps::loaded_tensors> loaded;
        ps::tensor_list one;
        const double took = seconds_of([&] {
            const ps::checkpoint opened = ps::checkpoint::open(found.folder);
            one.files = opened.all().files;
            one.tensors = {*opened.find("model.layers.0.input_layernorm.weight")};
            loaded.emplace(loader.load(one, b.device));
        });
        if (round >= 0) {
            seconds.push_back(took);
        }
        ps::transfer sent;
        sent.file = one.tensors[0].file;
        sent.offset = one.tensors[0].offset;
        sent.bytes = one.tensors[0].bytes;
        sent.destination = loaded->begin()->second.data;
        wrong = wrong_ranges(std::span(&sent, 1), one.files, 2);
    }
    b.out.figure("1000 shards, from open to a tensor on the GPU", median(seconds), "s", {}, "+- " + std::to_string(spread(seconds)) + " s");
    b.out.verified("first tensor", wrong, 2);
}

}  // namespace load_benchmark

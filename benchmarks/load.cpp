/// benchmark_load [--gib N=8] [--rounds N=15] [--json FILE] [--folder DIR] [--only GROUP,...]: files and host memory to one GPU, or two.
/// Candidates and baselines alternate in one process; every figure is a median of rounds with its spread (median absolute deviation), in
/// GB/s (1e9 bytes) and as a share of the link, which is measured in the same rounds. A margin under twice the spread is "level". Exit
/// status 77 without a GPU, 1 where bytes arrived wrong.

#include "load/cold_rows.hpp"
#include "load/file_rows.hpp"
#include "load/header_rows.hpp"
#include "load/memory_rows.hpp"
#include "load/two_gpu_rows.hpp"

#include <ctime>
#include <iostream>
#include <sstream>

namespace {

using namespace load_benchmark;

struct row_group {
    const char* name;
    void (*run)(bench&);
};

/// Fresh processes pin before there are large files in the page cache; groups that share files follow one another.
constexpr row_group groups[] = {{"pinning", pinning_rows},      {"headers", header_rows}, {"link", link_rows},
                                {"pinned memory", pinned_rows}, {"large", large_rows},    {"mapping", mapping_rows},
                                {"two gpus", two_gpu_rows},     {"small", small_rows},    {"mixture", mixture_rows},
                                {"growth", growth_rows},        {"cold", cold_rows}};

std::string group_names() {
    std::string names;
    for (const row_group& g : groups) {
        names += (names.empty() ? "" : ", ") + std::string(g.name);
    }
    return names;
}

std::uint64_t number(const std::string& option, const std::string& text) {
    if (text.empty() || text.size() > 6 || text.find_first_not_of("0123456789") != std::string::npos || std::stoull(text) == 0) {
        throw ps::configuration_error(option + " wants a number of at least 1, not \"" + text + "\"");
    }
    return std::stoull(text);
}

settings parse(int argc, char** argv) {
    settings how;
    for (int i = 1; i < argc; i += 2) {
        const std::string option = argv[i];
        if (i + 1 == argc) {
            throw ps::configuration_error(option + ": a value is missing");
        }
        const std::string value = argv[i + 1];
        if (option == "--gib") {
            how.bytes = number(option, value) << 30;
        } else if (option == "--rounds") {
            how.rounds = static_cast<int>(number(option, value));
        } else if (option == "--json") {
            how.json = value;
        } else if (option == "--folder") {
            how.folder = value;
        } else if (option == "--only") {
            std::istringstream parts(value);
            for (std::string part; std::getline(parts, part, ',');) {
                if (std::ranges::none_of(groups, [&](const row_group& g) { return settings{.only = {part}}.wanted(g.name); })) {
                    throw ps::configuration_error("--only: no group is called \"" + part + "\"; there are " + group_names());
                }
                how.only.push_back(part);
            }
        } else {
            throw ps::configuration_error("unknown option " + option +
                                          "; there are --gib N, --rounds N, --json FILE, --folder DIR, --only GROUP,... of " +
                                          group_names());
        }
    }
    return how;
}

std::string version_text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

std::string driver_text() {
    std::ifstream file("/proc/driver/nvidia/version");
    std::string line;
    return std::getline(file, line) ? line : "unknown";
}

void print_facts(bench& b) {
    for (int g = 0; g < ps::device_count(); ++g) {
        cudaDeviceProp about{};
        ps::check(cudaGetDeviceProperties(&about, g), "cudaGetDeviceProperties");
        b.out.fact("GPU " + std::to_string(g), std::string(about.name) + ", NUMA node " + std::to_string(ps::numa_node(g)));
    }
    int runtime = 0, driver = 0;
    ps::check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    ps::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    const std::time_t now = std::time(nullptr);
    char date[32];
    std::strftime(date, sizeof date, "%Y-%m-%d %H:%M UTC", std::gmtime(&now));
    const ps::weight_stream<> defaults;
    using chunking = ps::weight_stream<>::chunking;
    b.out.fact("driver", driver_text());
    b.out.fact("CUDA", "runtime " + version_text(runtime) + ", driver for " + version_text(driver));
    b.out.fact("date", date);
    b.out.fact("cores", std::to_string(cores()));
    b.out.fact("readers", std::to_string(defaults.readers()));
    b.out.fact("chunk", ps::to_string(ps::bytes{chunking{}.bytes_per_chunk(0, std::uint64_t{1} << 40)}));
    b.out.fact("staging", ps::to_string(ps::bytes{defaults.staging_bytes_needed()}));
    b.out.fact("bytes", ps::to_string(ps::bytes{b.how.bytes}));
    b.out.fact("rounds", std::to_string(b.how.rounds));
    b.out.fact("folder", b.files.folder().string());
}

}  // namespace

int main(int argc, char** argv) try {
    if (ps::device_count() == 0) {
        std::printf("SKIPPED: this benchmark needs a GPU\n");
        return 77;
    }
    if (argc == 3 && std::string(argv[1]) == "--pin") {
        return pin_in_this_process(argv[2]);
    }
    bench b(parse(argc, argv));
    print_facts(b);
    for (const row_group& g : groups) {
        if (b.how.wanted(g.name)) {
            b.out.group(g.name);
            const double seconds = seconds_of([&] { g.run(b); });
            b.out.note(std::string(g.name) + ": " + std::to_string(seconds) + " s in all");
        }
    }
    b.out.finish(b.how.json);
    return b.out.right() ? 0 : 1;
} catch (const std::exception& problem) {
    std::cerr << problem.what() << '\n';
    return 2;
}

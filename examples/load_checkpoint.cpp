// Loads a safetensors checkpoint to one or more GPUs, or to host memory where there is none, and prints a table: a line for each GPU.
// Without a path it writes a small checkpoint first, loads that, and compares every byte.

#include <penstock/checkpoint/checkpoint.hpp>
#include <penstock/model/selection.hpp>
#include <penstock/stream/link_speed.hpp>
#include <penstock/stream/load_sharded.hpp>

#include <CLI/CLI.hpp>

#include <cstdlib>
#include <iostream>
#include <optional>

namespace ps = penstock;
using namespace ps::literals;

/// 24 tensors whose bytes follow from their place, in files of 16 MiB.
struct small_checkpoint {
    static std::byte made(std::uint64_t tensor, std::uint64_t offset) {
        return static_cast<std::byte>(((tensor << 40 | offset) * 0x9e3779b97f4a7c15u) >> 56);
    }

    small_checkpoint() {
        std::string name = (std::filesystem::temp_directory_path() / "penstock-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) {
            throw ps::io_error(name + ": cannot be made");
        }
        path = name;
        std::vector<ps::tensor_to_write> list;
        for (std::uint64_t t = 0; t < 24; ++t) {
            const auto generate = [t](std::span<std::byte> window, std::uint64_t offset) {
                for (std::size_t i = 0; i < window.size(); ++i) {
                    window[i] = made(t, offset + i);
                }
            };
            list.push_back({"layer." + std::to_string(t) + ".weight", ps::dtype::bf16, {1000 + t, 1001}, {}, generate});
        }
        ps::write_sharded(path, list, 16_MiB);
    }
    ~small_checkpoint() { std::filesystem::remove_all(path); }

    /// Tensors of all parts whose bytes are as written.
    static std::size_t right(const std::vector<ps::loaded_tensors>& parts) {
        std::size_t count = 0;
        for (const ps::loaded_tensors& part : parts) {
            for (const auto& [name, tensor] : part) {
                std::vector<std::byte> data(tensor.bytes);
                if (part.where().on_host()) {
                    std::copy_n(tensor.data, data.size(), data.begin());
                } else {
                    ps::check(cudaMemcpy(data.data(), tensor.data, data.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
                }
                std::size_t same = 0;
                while (same < data.size() && data[same] == made(std::stoull(name.substr(6)), same)) {
                    ++same;
                }
                count += same == data.size();
            }
        }
        return count;
    }

    std::filesystem::path path;
};

int main(int argc, char** argv) try {
    CLI::App app("Loads a safetensors checkpoint to GPUs.");
    std::filesystem::path path;
    unsigned gpus = 1;
    app.add_option("path", path, "directory, index or .safetensors file; none: a small checkpoint is made");
    app.add_option("--gpus", gpus, "GPUs that share the tensors; without a GPU, as many places in host memory")->check(CLI::PositiveNumber);
    CLI11_PARSE(app, argc, argv);

    std::optional<small_checkpoint> own;
    const auto weights = ps::checkpoint::open(path.empty() ? own.emplace().path : path);
    std::vector<ps::place> places(gpus, ps::on_host());
    std::vector<double> link(gpus, 0);
    for (unsigned g = 0; ps::device_count() > 0 && g < gpus; ++g) {
        places[g] = ps::on_device(static_cast<int>(g));
        link[g] = ps::link_gb_per_s(static_cast<int>(g));
    }
    ps::sharded_tensors loaded = ps::load_sharded(ps::split_by_bytes(weights.all(), gpus), places, {.callback = ps::progress_bar{}});

    std::cout << weights.all().tensors.size() << " tensors in " << weights.all().files.size() << " files, " << loaded.seconds
              << " s in all\n";
    for (unsigned g = 0; g < gpus; ++g) {
        loaded.reports[g].link_gb_per_s = link[g];
    }
    std::cout << loaded.reports;
    if (own) {
        const bool right = small_checkpoint::right(loaded.parts) == 24;
        std::cout << (right ? "every byte is as written\n" : "WRONG BYTES\n");
        return right ? 0 : 1;
    }
} catch (const ps::error& e) {
    std::cerr << e.what() << '\n';
    return 2;
}

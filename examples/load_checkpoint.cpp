// Loads a checkpoint to the GPU, or to host memory where there is none.
//
//     load_checkpoint [DIRECTORY or FILE.safetensors]
//
// Without an argument it writes a small checkpoint first, loads that, and compares every byte.

#include <penstock/checkpoint/checkpoint.hpp>
#include <penstock/stream/weight_stream.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ps = penstock;
using namespace ps::literals;

/// Byte `offset` of tensor number `tensor` of the small checkpoint.
std::byte made(std::uint64_t tensor, std::uint64_t offset) { return static_cast<std::byte>(((tensor << 40 | offset) * 0x9e3779b97f4a7c15u) >> 56); }

struct small_checkpoint {
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

    /// Tensors whose bytes are not what was written.
    std::size_t wrong(const ps::loaded_tensors& tensors) const {
        std::size_t count = 0;
        for (const auto& [name, tensor] : tensors) {
            const std::uint64_t number = std::stoull(name.substr(6));
            std::vector<std::byte> data(tensor.bytes);
            if (tensors.where().on_host()) {
                std::memcpy(data.data(), tensor.data, data.size());
            } else {
                ps::check(cudaMemcpy(data.data(), tensor.data, data.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
            }
            bool same = true;
            for (std::size_t i = 0; i < data.size(); ++i) {
                same = same && data[i] == made(number, i);
            }
            count += !same;
        }
        return count + (tensors.size() == 24 ? 0 : 1);
    }

    std::filesystem::path path;
};

int main(int argc, char** argv) {
    try {
        std::optional<small_checkpoint> own;
        const std::filesystem::path path = argc > 1 ? std::filesystem::path(argv[1]) : own.emplace().path;
        const auto weights = ps::checkpoint::open(path);
        const ps::place where = ps::device_count() > 0 ? ps::on_device(0) : ps::on_host();
        ps::weight_stream<> loader{};
        const ps::loaded_tensors tensors = loader.load(weights.all(), where, ps::progress_bar{});

        const ps::stream_report& r = tensors.report();
        std::printf("place    %s\n", where.on_host() ? "host memory (no GPU here)" : "GPU 0");
        std::printf("tensors  %zu in %zu files\n", tensors.size(), weights.all().files.size());
        std::printf("bytes    %llu in %llu chunks\n", static_cast<unsigned long long>(r.bytes), static_cast<unsigned long long>(r.chunks));
        std::printf("seconds  %.3f\nGB/s     %.2f\nsource   %s\nstaging  %s\n", r.seconds, r.gb_per_s(), r.source.c_str(), loader.staging_how().c_str());
        if (own) {
            const std::size_t wrong = own->wrong(tensors);
            std::printf("check    %s\n", wrong == 0 ? "every byte is as written" : "WRONG BYTES");
            return wrong == 0 ? 0 : 1;
        }
        return 0;
    } catch (const ps::error& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 2;
    }
}

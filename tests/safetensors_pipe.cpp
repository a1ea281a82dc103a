/// Reads every tensor of a safetensors file or model directory into host memory and writes them to one new file, with the metadata of the
/// file. For tests that hold both sides against another implementation.
///
///     safetensors_pipe IN OUT
///
/// Exit 0, or 2 with the reason on standard error.

#include <penstock/checkpoint/checkpoint.hpp>
#include <penstock/stream/weight_stream.hpp>

#include <cstdio>

namespace ps = penstock;

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: safetensors_pipe IN OUT\n");
        return 2;
    }
    try {
        const std::filesystem::path in = argv[1];
        const ps::checkpoint weights = ps::checkpoint::open(in);
        ps::weight_stream<> stream({.readers = 2});
        const ps::loaded_tensors loaded = stream.load(weights.all(), ps::on_host());
        std::vector<ps::tensor_to_write> tensors;
        for (const ps::tensor_info& t : weights.all().tensors) {
            const ps::tensor_view& view = loaded[t.name];
            tensors.push_back({t.name, view.type, view.shape, {view.data, view.bytes}, {}});
        }
        const bool one_file = std::filesystem::is_regular_file(in);
        ps::write_safetensors(argv[2], tensors, one_file ? ps::read_safetensors_header(in).metadata : std::map<std::string, std::string>());
    } catch (const std::exception& problem) {
        std::fprintf(stderr, "%s\n", problem.what());
        return 2;
    }
    return 0;
}

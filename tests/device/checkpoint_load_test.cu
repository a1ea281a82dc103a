#include "../host/checkpoint_files.hpp"
#include "gpu_work.hpp"

#include <penstock/stream/weight_stream.hpp>

#include <doctest/doctest.h>

namespace {

using namespace penstock;
using files::entry;
using files::floats;
using files::header;
using files::st;

/// Copies whole 16-byte words.
static __global__ void copy_words(const uint4* from, uint4* to, unsigned words) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
        to[i] = from[i];
    }
}

/// A tensor's bytes by way of a kernel that reads them in words of 16 bytes, and the bytes of the last, broken word by a copy.
std::string by_words(const tensor_view& t) {
    const auto words = static_cast<unsigned>(t.bytes / sizeof(uint4));
    buffer<std::byte, memory::device> copy(words * sizeof(uint4));
    if (words > 0) {
        launch(copy_words, 4, 128, 0, nullptr, reinterpret_cast<const uint4*>(t.data), reinterpret_cast<uint4*>(copy.data()), words);
        check(cudaDeviceSynchronize(), "copy_words");
    }
    std::vector<std::byte> bytes = tests::from_device(copy.data(), copy.size());
    const std::vector<std::byte> rest = tests::from_device(t.data + copy.size(), t.bytes - copy.size());
    bytes.insert(bytes.end(), rest.begin(), rest.end());
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

TEST_CASE("F13 empty tensors are loaded to a GPU, alone too") {
    const tests::temporary_directory dir;
    const checkpoint all = checkpoint::open(dir.write(
        "x.safetensors",
        st(header({entry("e1", "F32", "[2,0]", 0, 0), entry("a", "F32", "[1]", 0, 4), entry("e2", "F32", "[0]", 4, 4)}), floats({1.5f}))));
    const checkpoint none = checkpoint::open(dir.write("y.safetensors", st(header({entry("e", "F32", "[0]", 0, 0)}))));
    weight_stream<> stream;
    const loaded_tensors loaded = stream.load(all.all(), on_device(0));
    CHECK(loaded.size() == 3);
    CHECK(loaded["e1"].bytes == 0);
    CHECK(loaded["e2"].bytes == 0);
    CHECK(files::float_of(by_words(loaded["a"])) == 1.5f);
    CHECK(stream.load(none.all(), on_device(0))["e"].bytes == 0);
    CHECK(stream.load(tensor_list{}, on_device(0)).size() == 0);
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("F20 tensors at any offset of their file are read in words of 16 bytes on a GPU") {
    const tests::temporary_directory dir;
    weight_stream<> stream;
    for (const std::size_t odd : {1u, 3u, 7u, 15u, 17u}) {
        std::string data(odd + 4'000, '\0');
        tests::fill(std::as_writable_bytes(std::span(data)), odd);
        const std::string odd_shape = "[" + std::to_string(odd) + "]";
        const checkpoint weights = checkpoint::open(dir.write(
            "x.safetensors", st(header({entry("odd", "U8", odd_shape, 0, odd), entry("f", "F32", "[250,4]", odd, odd + 4'000)}), data)));
        for (const source_use use : {source_use::once, source_use::in_place}) {
            const loaded_tensors loaded = stream.load(weights.all(), on_device(0), {}, {}, {.use = use});
            for (const auto& [name, tensor] : loaded) {
                CHECK(reinterpret_cast<std::uintptr_t>(tensor.data) % 256 == 0);
            }
            CHECK(by_words(loaded["odd"]) == data.substr(0, odd));
            CHECK(by_words(loaded["f"]) == data.substr(odd));
            CHECK(cudaGetLastError() == cudaSuccess);
        }
    }
}

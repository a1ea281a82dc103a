#pragma once

#include <penstock/model/dtype.hpp>

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

namespace penstock::inline v0_1 {

/// Where a tensor's bytes lie: `offset` counts from the start of file number `file` of the list that goes with it.
struct tensor_info {
    std::string name;
    dtype type = dtype::u8;
    std::vector<std::uint64_t> shape;
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
};

/// Tensors of one checkpoint, to be streamed somewhere.
struct tensor_list {
    std::vector<std::filesystem::path> files;
    std::vector<tensor_info> tensors;
};

/// A row-major matrix that someone else owns. Trivially copyable: kernels take it by value.
template <class T>
struct matrix_ref {
    T* data = nullptr;
    std::uint32_t rows = 0;
    std::uint32_t cols = 0;
};

/// Hidden states of any float type, [tokens, hidden] row-major, in the memory of the executor that gets them.
struct activations {
    const void* data = nullptr;
    dtype type = dtype::f32;  ///< f32, bf16 or f16
    std::uint32_t tokens = 0;
    std::uint32_t hidden = 0;
};

/// As `activations`, to be written.
struct activations_out {
    void* data = nullptr;
    dtype type = dtype::f32;  ///< f32, bf16 or f16
    std::uint32_t tokens = 0;
    std::uint32_t hidden = 0;
};

}  // namespace penstock::inline v0_1

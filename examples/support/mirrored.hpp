#pragma once

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/model/tensor.hpp>
#include <penstock/stream/place.hpp>

#include <cstring>
#include <optional>
#include <vector>

/// Arrays in the memory of a place, for programs that run on the host and on a GPU.
namespace example {

namespace ps = penstock;

/// `count` values from the memory of `at`.
template <class T>
std::vector<T> fetch(const T* from, std::size_t count, ps::place at) {
    std::vector<T> values(count);
    if (count > 0 && at.on_host()) {
        std::memcpy(values.data(), from, count * sizeof(T));
    } else if (count > 0) {
        ps::check(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost), "copy of a result");
    }
    return values;
}

/// An array in the memory of a place.
template <class T>
class mirrored {
public:
    mirrored(std::size_t count, ps::place at) : at_(at), count_(count) {
        at.on_host() ? (void)host_.emplace(count) : (void)device_.emplace(count);
    }

    [[nodiscard]] T* data() noexcept { return device_ ? device_->data() : host_->data(); }
    [[nodiscard]] std::vector<T> fetch() { return example::fetch<T>(data(), count_, at_); }

    void assign(const std::vector<T>& values) {
        if (at_.on_host()) {
            std::memcpy(data(), values.data(), values.size() * sizeof(T));
        } else {
            ps::check(cudaMemcpy(data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy of an input");
        }
    }

private:
    ps::place at_;
    std::size_t count_;
    std::optional<ps::buffer<T, ps::memory::pageable>> host_;
    std::optional<ps::buffer<T, ps::memory::device>> device_;
};

/// Runs one layer and waits for its output, on either executor.
template <class Layer>
void forward(Layer& layer, ps::activations in, ps::activations_out out) {
    if constexpr (requires { layer.forward(in, out); }) {
        layer.forward(in, out);
    } else {
        const ps::stream stream;
        layer.forward_async(in, out, nullptr, stream.get());
        stream.synchronize();
    }
}

}  // namespace example

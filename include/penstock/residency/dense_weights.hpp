#pragma once

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/device.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/decode.hpp>
#include <penstock/dispatch/expert_work.hpp>
#include <penstock/model/moe_model.hpp>
#include <penstock/stream/weight_stream.hpp>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

namespace penstock::inline v0_1 {

/// The weights of the MoE layers that every token needs: routers and shared experts, resident in the compute place for as long as this lives.
/// Correction biases are kept in float32, whatever the file holds, since rounding them changes the choice of experts.
class dense_weights {
public:
    struct layer {
        router_ref router;
        const std::byte* shared = nullptr;  ///< record of the shared expert
        const void* shared_gate = nullptr;
        dtype shared_gate_type = dtype::bf16;
    };

    /// Bytes of the compute place that the model's dense weights take.
    [[nodiscard]] static std::uint64_t bytes_needed(const moe_model& model) {
        std::uint64_t sum = 0;
        for (const moe_layer_model& l : model.layers) {
            sum += padded(l.router_weight.bytes) + padded(l.router_bias ? l.router_bias->bytes : 0) +
                   padded(l.correction_bias ? l.routing.experts * sizeof(float) : 0);
            if (l.shared) {
                sum += padded(l.shared->layout.bytes) + padded(l.shared->gate ? l.shared->gate->bytes : 0);
            }
        }
        return sum;
    }

    /// Reads them through `loader`. @param given memory of the caller's in the compute place, `bytes_needed` of it, 256-byte aligned; else it is allocated.
    /// @throws io_error, out_of_memory, configuration_error.
    template <class Stream>
    dense_weights(const moe_model& model, byte_source& files, Stream& loader, place compute, std::span<std::byte> given = {})
        : bytes_(bytes_needed(model)) {
        if (!given.empty() && given.size() < bytes_) {
            throw configuration_error("penstock: dense weights of this model need " + std::to_string(bytes_) + " bytes, " +
                                      std::to_string(given.size()) + " were given");
        }
        std::byte* at = given.empty() ? allocate(compute) : given.data();
        std::vector<transfer> list;
        std::vector<std::pair<std::byte*, std::vector<float>>> biases;
        const auto place_tensor = [&](const tensor_info& t) {
            list.push_back({.request = list.size(), .file = t.file, .offset = t.offset, .bytes = t.bytes, .destination = at});
            return std::exchange(at, at + padded(t.bytes));
        };
        for (const moe_layer_model& l : model.layers) {
            layer out;
            out.router = {
                .weight = place_tensor(l.router_weight), .type = l.router_weight.type, .experts = l.routing.experts, .hidden = l.hidden};
            if (l.router_bias) {
                out.router.bias = place_tensor(*l.router_bias);
                out.router.bias_type = l.router_bias->type;
            }
            if (l.correction_bias) {
                biases.emplace_back(at, read_floats(files, *l.correction_bias));
                out.router.correction_bias = reinterpret_cast<const float*>(at);
                at += padded(l.routing.experts * sizeof(float));
            }
            if (l.shared) {
                out.shared = at;
                for (const record_part& p : l.shared->parts) {
                    list.push_back({.request = list.size(),
                                    .file = p.file,
                                    .offset = p.offset,
                                    .bytes = p.bytes,
                                    .destination = at + p.record_offset,
                                    .row_bytes = p.row_bytes});
                }
                at += padded(l.shared->layout.bytes);
                if (l.shared->gate) {
                    out.shared_gate = place_tensor(*l.shared->gate);
                    out.shared_gate_type = l.shared->gate->type;
                }
            }
            layers_.push_back(out);
        }
        if (compute.on_host()) {
            loader.run(list, files, compute);
        } else {
            const stream copies(compute.device);
            loader.run(list, files, on_device(compute.device, copies.get()));
        }
        for (const auto& [to, values] : biases) {
            if (compute.on_host()) {
                std::memcpy(to, values.data(), values.size() * sizeof(float));
            } else {
                const device_guard here(compute.device);
                check(cudaMemcpy(to, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice), "copy of a correction bias");
            }
        }
    }

    [[nodiscard]] const layer& operator[](std::size_t l) const { return layers_[l]; }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

private:
    [[nodiscard]] static std::uint64_t padded(std::uint64_t n) noexcept { return round_up(n, placement_alignment); }

    std::byte* allocate(place compute) {
        if (compute.on_host()) {
            on_host_.emplace(bytes_);
            return on_host_->data();
        }
        const device_guard here(compute.device);
        on_device_.emplace(bytes_);
        return on_device_->data();
    }

    static std::vector<float> read_floats(byte_source& files, const tensor_info& t) {
        if (t.type != dtype::f32 && t.type != dtype::bf16 && t.type != dtype::f16) {
            throw configuration_error("penstock: " + t.name + " is " + std::string(name(t.type)) + ", F32, BF16 or F16 is wanted");
        }
        std::vector<std::byte> raw(t.bytes);
        files.read(t.file, t.offset, raw);
        std::vector<float> values(t.bytes * 8 / bits(t.type));
        for (std::size_t i = 0; i < values.size(); ++i) {
            values[i] = load_element(raw.data(), t.type, i);
        }
        return values;
    }

    std::uint64_t bytes_;
    std::optional<buffer<std::byte, memory::pageable>> on_host_;
    std::optional<buffer<std::byte, memory::device>> on_device_;
    std::vector<layer> layers_;
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/buffer/host_cores.hpp>
#include <penstock/checkpoint/checkpoint.hpp>
#include <penstock/dispatch/decode.hpp>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

/// A checkpoint in Qwen3-30B-A3B's layout and shapes with random bf16 weights: what `moe_stream` opens when no model is at hand.
namespace example {

namespace ps = penstock;

/// A reproducible stream of bf16 values, normal enough: the sum of four uniform bytes, scaled to the deviation that keeps activations of size 1.
class weight_noise {
public:
    explicit weight_noise(std::uint64_t seed, float deviation) {
        for (std::uint64_t i = 0; i < table_.size(); ++i) {  // sums of four bytes: 0 to 1020, deviation 147.8
            table_[i] = ps::encode_bf16((static_cast<float>(i) - 510) / 147.8f * deviation);
        }
        state_ = seed * 0x9e3779b97f4a7c15u + 1;
    }

    void fill(std::span<std::byte> window) {
        for (std::size_t at = 0; at + 1 < window.size(); at += 4) {
            state_ ^= state_ << 13;
            state_ ^= state_ >> 7;
            state_ ^= state_ << 17;
            const std::uint64_t bits = state_ * 0x2545f4914f6cdd1du;
            for (std::size_t half = 0; half < 2 && at + half * 2 + 1 < window.size(); ++half) {
                const std::uint64_t b = bits >> (half * 32);
                const std::uint64_t sum = (b & 255) + ((b >> 8) & 255) + ((b >> 16) & 255) + ((b >> 24) & 255);
                std::memcpy(&window[at + half * 2], &table_[sum], 2);
            }
        }
    }

private:
    std::array<std::uint16_t, 1024> table_{};
    std::uint64_t state_;
};

/// Writes `layers` MoE layers, one shard each, an index and a config.json to `directory`. Shards are written by several threads.
inline void write_random_checkpoint(const std::filesystem::path& directory, std::uint32_t layers, std::uint32_t hidden = 2048,
                                    std::uint32_t intermediate = 768, std::uint32_t experts = 128, std::uint32_t top_k = 8) {
    std::filesystem::create_directories(directory);
    const auto shard_name = [&](std::uint32_t l) {
        char text[64];
        std::snprintf(text, sizeof text, "model-%05u-of-%05u.safetensors", l + 1, layers);
        return std::string(text);
    };
    const auto tensors_of = [&](std::uint32_t l) {
        std::vector<ps::tensor_to_write> list;
        const std::string block = "model.layers." + std::to_string(l) + ".mlp.";
        const auto add = [&](const std::string& name, std::uint64_t rows, std::uint64_t cols, float size_of_output = 1) {
            const std::uint64_t seed = (std::uint64_t{l} << 32) + list.size();
            auto noise = std::make_shared<weight_noise>(seed, size_of_output / std::sqrt(static_cast<float>(cols)));
            list.push_back({.name = block + name,
                            .type = ps::dtype::bf16,
                            .shape = {rows, cols},
                            .data = {},
                            .generate = [noise](std::span<std::byte> window, std::uint64_t) { noise->fill(window); }});
        };
        add("gate.weight", experts, hidden);
        for (std::uint32_t e = 0; e < experts; ++e) {
            const std::string expert = "experts." + std::to_string(e) + ".";
            add(expert + "gate_proj.weight", intermediate, hidden);
            add(expert + "up_proj.weight", intermediate, hidden);
            add(expert + "down_proj.weight", hidden, intermediate, 0.25f);  // a layer adds to the residual and does not replace it
        }
        return list;
    };
    std::atomic<std::uint32_t> next{0};
    {
        std::vector<std::jthread> writers;
        for (unsigned t = 0; t < std::min(layers, ps::usable_cores()); ++t) {
            writers.emplace_back([&] {
                for (std::uint32_t l = next++; l < layers; l = next++) {
                    ps::write_safetensors(directory / shard_name(l), tensors_of(l));
                }
            });
        }
    }
    nlohmann::json map = nlohmann::json::object();
    for (std::uint32_t l = 0; l < layers; ++l) {
        for (const ps::tensor_to_write& t : tensors_of(l)) {
            map[t.name] = shard_name(l);
        }
    }
    std::ofstream(directory / "model.safetensors.index.json")
        << nlohmann::json{{"metadata", nlohmann::json::object()}, {"weight_map", map}};
    std::ofstream(directory / "config.json") << nlohmann::json{
        {"model_type", "qwen3_moe"},   {"hidden_size", hidden},        {"moe_intermediate_size", intermediate},
        {"num_experts", experts},      {"num_experts_per_tok", top_k}, {"norm_topk_prob", true},
        {"num_hidden_layers", layers}, {"decoder_sparse_step", 1},     {"mlp_only_layers", nlohmann::json::array()},
        {"hidden_act", "silu"},        {"torch_dtype", "bfloat16"}};
}

}  // namespace example

#pragma once

#include <penstock/dispatch/decode.hpp>
#include <penstock/model/moe_model.hpp>

#include <unistd.h>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

/// A small model filled by hand over one raw file of random bf16 weights, for tests of what lies above files.
namespace tests {

namespace ps = penstock;

class tiny_model {
public:
    explicit tiny_model(std::uint32_t layers = 2, std::uint32_t experts = 8, std::uint32_t hidden = 64, std::uint32_t intermediate = 48,
                        std::uint32_t top_k = 2) {
        static std::atomic<int> number{0};
        path_ = std::filesystem::temp_directory_path() / ("penstock-tiny-" + std::to_string(getpid()) + "-" + std::to_string(number++));
        std::mt19937 random(17);
        std::normal_distribution<float> normal(0.0f, 0.125f);
        const auto append = [&](std::uint64_t values) {
            const std::uint64_t at = bytes_.size();
            bytes_.resize(at + values * 2);
            for (std::uint64_t i = 0; i < values; ++i) {
                ps::store_element(bytes_.data() + at, ps::dtype::bf16, i, normal(random));
            }
            return at;
        };
        bytes_.resize(6);  // nothing in the file is aligned to more than two bytes
        model.family = "by hand";
        model.files = {path_};
        for (std::uint32_t l = 0; l < layers; ++l) {
            ps::moe_layer_model m;
            m.layer = l;
            m.hidden = hidden;
            m.intermediate = intermediate;
            m.routing = {.experts = experts, .top_k = top_k, .renormalise = true};
            m.router_weight = {"router",
                               ps::dtype::bf16,
                               {experts, hidden},
                               0,
                               append(std::uint64_t{experts} * hidden),
                               std::uint64_t{experts} * hidden * 2};
            const std::uint64_t matrix = std::uint64_t{hidden} * intermediate * 2;
            const std::uint64_t up_at = ps::layout::expert_major::next(matrix);
            const std::uint64_t down_at = ps::layout::expert_major::next(up_at + matrix);
            m.layout.kind = ps::weight_kind::bf16;
            m.layout.gate = {.offset = 0, .rows = intermediate, .cols = hidden, .row_stride = hidden};
            m.layout.up = {.offset = up_at, .rows = intermediate, .cols = hidden, .row_stride = hidden};
            m.layout.down = {.offset = down_at, .rows = hidden, .cols = intermediate, .row_stride = intermediate};
            m.layout.bytes = down_at + matrix;
            for (std::uint32_t e = 0; e < experts; ++e) {
                ps::expert_parts parts;
                for (const std::uint64_t record_offset : {std::uint64_t{0}, up_at, down_at}) {
                    parts.push_back(
                        {0, append(matrix / 2), matrix, record_offset, record_offset == down_at ? intermediate * 2 : hidden * 2});
                }
                m.experts.push_back(parts);
            }
            model.layers.push_back(std::move(m));
        }
        std::ofstream(path_, std::ios::binary)
            .write(reinterpret_cast<const char*>(bytes_.data()), static_cast<std::streamsize>(bytes_.size()));
    }

    tiny_model(const tiny_model&) = delete;
    ~tiny_model() {
        std::error_code ignored;
        std::filesystem::remove(path_, ignored);
    }

    /// Whether `record` holds the parts of that expert.
    [[nodiscard]] bool is_record(std::uint32_t layer, std::uint32_t expert, const std::byte* record) const {
        for (const ps::record_part& p : model.layers[layer].experts[expert]) {
            if (std::memcmp(record + p.record_offset, bytes_.data() + p.offset, p.bytes) != 0) {
                return false;
            }
        }
        return true;
    }

    [[nodiscard]] std::uint64_t slot_bytes() const { return ps::round_up(model.record_bytes(), ps::placement_alignment); }
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

    ps::moe_model model;

private:
    std::filesystem::path path_;
    std::vector<std::byte> bytes_;
};

}  // namespace tests

#pragma once

/// Which tensors the files hold, and the folder they lie in: one set at a time, for the sake of the disk.

#include "files.hpp"

namespace load_benchmark {

inline std::vector<ps::tensor_to_write> equal_tensors(std::uint64_t total, std::uint64_t each) {
    std::vector<ps::tensor_to_write> list;
    for (std::uint64_t i = 0; i < std::max<std::uint64_t>(total / each, 1); ++i) {
        list.push_back({"t" + std::to_string(i), ps::dtype::u8, {each}, {}, {}});
    }
    return list;
}

/// Tensors of one layer of Qwen3-30B-A3B by the names and shapes of its checkpoint, in the order of its files.
inline void add_qwen3_30b_layer(std::vector<ps::tensor_to_write>& list, int number) {
    const std::string layer = "model.layers." + std::to_string(number) + ".";
    const auto add = [&](const std::string& name, std::vector<std::uint64_t> shape) {
        list.push_back({layer + name + ".weight", ps::dtype::bf16, std::move(shape), {}, {}});
    };
    add("input_layernorm", {2048});
    for (int e = 0; e < 128; ++e) {
        const std::string expert = "mlp.experts." + std::to_string(e) + ".";
        add(expert + "down_proj", {2048, 768});
        add(expert + "gate_proj", {768, 2048});
        add(expert + "up_proj", {768, 2048});
    }
    add("mlp.gate", {128, 2048});
    add("post_attention_layernorm", {2048});
    add("self_attn.k_norm", {128});
    add("self_attn.k_proj", {512, 2048});
    add("self_attn.o_proj", {2048, 4096});
    add("self_attn.q_norm", {128});
    add("self_attn.q_proj", {4096, 2048});
    add("self_attn.v_proj", {512, 2048});
}

/// The embedding and as many layers as fit, at least one.
inline std::vector<ps::tensor_to_write> qwen3_30b(std::uint64_t most) {
    std::vector<ps::tensor_to_write> list{{"model.embed_tokens.weight", ps::dtype::bf16, {151936, 2048}, {}, {}}};
    add_qwen3_30b_layer(list, 0);
    const std::uint64_t layer = data_bytes(std::span(list).subspan(1));
    std::uint64_t size = data_bytes(list);
    for (int l = 1; l < 48 && size + layer <= most; ++l, size += layer) {
        add_qwen3_30b_layer(list, l);
    }
    return list;
}

enum class file_kind : std::uint8_t { none, large, small, mixture, cold };

/// A folder of its own, removed by the destructor.
class model_files {
public:
    model_files(const std::filesystem::path& parent, std::uint64_t bytes) : bytes_(bytes) {
        std::filesystem::create_directories(parent);
        std::string name = (parent / "penstock-load-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) {
            throw ps::io_error(name + ": cannot be made: " + std::strerror(errno));
        }
        folder_ = name;
    }
    model_files(const model_files&) = delete;
    ~model_files() {
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }

    [[nodiscard]] const std::filesystem::path& folder() const noexcept { return folder_; }

    /// A folder for what a group writes itself; the files of before are removed.
    [[nodiscard]] std::filesystem::path empty_folder() {
        kind_ = file_kind::none;
        for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
            std::filesystem::remove_all(entry);
        }
        return folder_;
    }

    /// Tensors of these files, which are written unless they are there; those of another kind are removed.
    [[nodiscard]] const ps::tensor_list& get(file_kind kind) {
        if (kind == kind_) {
            return list_;
        }
        const std::filesystem::path folder = empty_folder();
        const std::filesystem::path single = folder / "model.safetensors";
        const double seconds = seconds_of([&] {
            if (kind == file_kind::mixture) {
                write_shards(folder, qwen3_30b(bytes_), 4_GiB, write_random);
            } else if (kind == file_kind::cold) {
                write_random(single, equal_tensors(std::min<std::uint64_t>(bytes_, 4_GiB), 9_MiB));
            } else {
                write_random(single, equal_tensors(bytes_, kind == file_kind::small ? 64_KiB : 9_MiB));
            }
        });
        list_ = ps::checkpoint::open(folder).all();
        std::printf("  %zu tensors in %zu files written in %.1f s\n", list_.tensors.size(), list_.files.size(), seconds);
        std::fflush(stdout);
        kind_ = kind;
        return list_;
    }

private:
    std::uint64_t bytes_;
    std::filesystem::path folder_;
    file_kind kind_ = file_kind::none;
    ps::tensor_list list_;
};

inline std::uint64_t data_bytes(const ps::tensor_list& list) {
    std::uint64_t sum = 0;
    for (const ps::tensor_info& t : list.tensors) {
        sum += t.bytes;
    }
    return sum;
}

}  // namespace load_benchmark

#pragma once

#include <penstock/model/tensor_slice.hpp>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

/// Parts of a checkpoint's tensor list: lists themselves, with the same files, so that weight_stream::load takes them. Nothing is read here,
/// and a load of a part reads that part alone.

namespace penstock::inline v0_1 {

/// Whether `name` is `prefix` or lies below it: "model.layers.1" holds "model.layers.1.mlp.gate.weight" and not "model.layers.10.…". With or
/// without a dot at its end; the empty prefix holds everything.
[[nodiscard]] constexpr bool lies_below(std::string_view name, std::string_view prefix) noexcept {
    return name.starts_with(prefix) &&
           (prefix.empty() || prefix.ends_with('.') || name.size() == prefix.size() || name[prefix.size()] == '.');
}

/// The tensors below a prefix, such as one layer. @throws configuration_error when there is none
[[nodiscard]] inline tensor_list below(const tensor_list& all, std::string_view prefix) {
    tensor_list some{all.files, {}};
    std::copy_if(all.tensors.begin(), all.tensors.end(), std::back_inserter(some.tensors),
                 [&](const tensor_info& t) { return lies_below(t.name, prefix); });
    if (some.tensors.empty()) {
        throw configuration_error("penstock: no tensor lies below \"" + std::string(prefix) + "\"");
    }
    return some;
}

/// The tensors of these names, in the order of `all`; a name may be there twice. @throws configuration_error listing the names that are not there
[[nodiscard]] inline tensor_list named(const tensor_list& all, std::span<const std::string> names) {
    std::unordered_map<std::string_view, bool> found;
    for (const std::string& name : names) {
        found.emplace(name, false);
    }
    tensor_list some{all.files, {}};
    for (const tensor_info& t : all.tensors) {
        if (const auto it = found.find(t.name); it != found.end()) {
            it->second = true;
            some.tensors.push_back(t);
        }
    }
    std::string missing;
    for (const std::string& name : names) {
        if (bool& there = found.at(name); !there) {
            there = true;  // a name is told once
            missing += (missing.empty() ? "\"" : ", \"") + name + "\"";
        }
    }
    if (!missing.empty()) {
        throw configuration_error("penstock: tensors that are not in the list: " + missing);
    }
    return some;
}

/// One expert of the MoE block named `block` ("model.layers.7.mlp"): the tensors below block.experts.E; where a block stacks its experts
/// (block.experts.gate_up_proj…, block.mlp1_weight.blocks…), slice E of each stack under the stack's name, without the first dimension.
/// @throws configuration_error when the block has no such expert
[[nodiscard]] inline tensor_list one_expert(const tensor_list& all, std::string_view block, std::uint32_t expert) {
    const std::string experts = std::string(block) + ".experts.", own = experts + std::to_string(expert) + ".";
    const std::string mlp = std::string(block) + ".mlp";
    const auto stacked = [&](std::string_view name) {
        if (name.starts_with(experts)) {
            return name.size() > experts.size() && (name[experts.size()] < '0' || name[experts.size()] > '9');
        }
        return name.starts_with(mlp) && name.size() > mlp.size() + 1 && (name[mlp.size()] == '1' || name[mlp.size()] == '2') &&
               name[mlp.size() + 1] == '_';
    };
    tensor_list some{all.files, {}};
    for (const tensor_info& t : all.tensors) {
        if (t.name.starts_with(own)) {
            some.tensors.push_back(t);
        } else if (stacked(t.name) && !t.shape.empty() && expert < t.shape[0]) {
            some.tensors.push_back(element_of(t, expert));
        }
    }
    if (some.tensors.empty()) {
        throw configuration_error("penstock: \"" + std::string(block) + "\" has no expert " + std::to_string(expert));
    }
    return some;
}

/// Cuts a list, as it lies in the files, into `parts` runs of about equal bytes: each reads one stretch. Some are empty where tensors are few.
/// @throws configuration_error for no parts
[[nodiscard]] inline std::vector<tensor_list> split_by_bytes(const tensor_list& all, std::uint32_t parts) {
    if (parts == 0) {
        throw configuration_error("penstock: a list of tensors cannot be cut into 0 parts");
    }
    std::vector<tensor_info> sorted = all.tensors;
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const tensor_info& a, const tensor_info& b) { return a.file != b.file ? a.file < b.file : a.offset < b.offset; });
    std::uint64_t total = 0, before = 0;
    for (const tensor_info& t : sorted) {
        total += t.bytes;
    }
    std::vector<tensor_list> lists(parts, tensor_list{all.files, {}});
    for (tensor_info& t : sorted) {
        // The part in which the middle of the tensor falls; double is exact enough to choose one.
        const double middle = static_cast<double>(before) + static_cast<double>(t.bytes) / 2;
        const double at = total == 0 ? 0 : middle / static_cast<double>(total) * parts;
        before += t.bytes;
        lists[smaller(static_cast<std::uint32_t>(at), parts - 1)].tensors.push_back(std::move(t));
    }
    return lists;
}

}  // namespace penstock::inline v0_1

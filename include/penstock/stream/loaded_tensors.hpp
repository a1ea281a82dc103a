#pragma once

#include <penstock/buffer/buffer.hpp>
#include <penstock/buffer/host_region.hpp>
#include <penstock/model/tensor.hpp>
#include <penstock/stream/place.hpp>
#include <penstock/stream/ticket.hpp>
#include <penstock/stream/transfer_plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace penstock::inline v0_1 {

/// A loaded tensor: row-major, `data` in the memory of the place, 256-byte aligned.
struct tensor_view {
    dtype type = dtype::u8;
    std::vector<std::uint64_t> shape;
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
};

/// Tensors in one buffer of host or device memory, which it owns. Move-only.
class loaded_tensors {
public:
    /// Room for all tensors of the list, in the order in which they lie in the files. Nothing is loaded yet.
    /// @throws out_of_memory; configuration_error for a name that is there twice
    loaded_tensors(const tensor_list& list, place where) : where_(where) {
        make_room(list);
        make_views(list);
    }

    /// @throws configuration_error naming the tensor that is not there
    [[nodiscard]] const tensor_view& operator[](std::string_view name) const {
        const auto found = views_.find(name);
        if (found == views_.end()) {
            throw configuration_error("penstock: tensor \"" + std::string(name) + "\" is not among the " + std::to_string(views_.size()) +
                                      " loaded ones");
        }
        return found->second;
    }

    [[nodiscard]] bool contains(std::string_view name) const { return views_.find(name) != views_.end(); }
    [[nodiscard]] std::size_t size() const noexcept { return views_.size(); }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }  ///< of the buffer
    [[nodiscard]] place where() const noexcept { return where_; }
    [[nodiscard]] const stream_report& report() const noexcept { return report_; }

    /// (name, tensor_view) in the order of the names.
    [[nodiscard]] auto begin() const noexcept { return views_.begin(); }
    [[nodiscard]] auto end() const noexcept { return views_.end(); }

private:
    template <class, class, class, class>
    friend class basic_weight_stream;

    /// For a stream, which makes the views while the bytes are on their way.
    loaded_tensors() = default;

    /// Places the tensors, in the order in which they lie in the files, and allocates their memory.
    void make_room(const tensor_list& list) {
        offsets_.resize(list.tensors.size());
        for (const std::uint32_t i : in_file_order(list)) {
            offsets_[i] = bytes_;
            bytes_ += round_up(list.tensors[i].bytes, placement_alignment);
        }
        base_ = allocate();
    }

    static std::vector<std::uint32_t> in_file_order(const tensor_list& list) {
        std::vector<std::uint32_t> order(list.tensors.size());
        std::iota(order.begin(), order.end(), 0u);
        const auto before = [&](std::uint32_t a, std::uint32_t b) {
            const tensor_info& x = list.tensors[a];
            const tensor_info& y = list.tensors[b];
            return x.file != y.file ? x.file < y.file : x.offset < y.offset;
        };
        if (!std::is_sorted(order.begin(), order.end(), before)) {
            std::stable_sort(order.begin(), order.end(), before);
        }
        return order;
    }

    /// What brings the tensors of the list, for which the room was made. Gaps between them are the room's own.
    [[nodiscard]] std::vector<transfer> transfers(const tensor_list& list) const {
        std::vector<transfer> all;
        all.reserve(list.tensors.size());
        for (const std::uint32_t i : in_file_order(list)) {
            const tensor_info& t = list.tensors[i];
            transfer one;
            one.file = t.file;
            one.offset = t.offset;
            one.bytes = t.bytes;
            one.destination = base_ + offsets_[i];
            one.padding = round_up(t.bytes, placement_alignment) - t.bytes;
            all.push_back(one);
        }
        return all;
    }

    /// That the list's tensors fit where the transfers will bring them.
    void check_sizes_of(const tensor_list& list) const {
        std::uint64_t at = 0;
        bool same = list.tensors.size() == offsets_.size();
        for (const std::uint32_t i : same ? in_file_order(list) : std::vector<std::uint32_t>()) {
            same = same && offsets_[i] == at;
            at += round_up(list.tensors[i].bytes, placement_alignment);
        }
        if (!same || at != bytes_) {
            refuse(list);
        }
    }

    /// That the views are the list's.
    void check_names_of(const tensor_list& list) const {
        bool same = list.tensors.size() == views_.size();
        for (std::size_t i = 0; same && i < offsets_.size(); ++i) {
            const tensor_info& t = list.tensors[i];
            const auto found = views_.find(t.name);
            same = found != views_.end() && found->second.data == base_ + offsets_[i] && found->second.bytes == t.bytes &&
                   found->second.type == t.type && found->second.shape == t.shape;
        }
        if (!same) {
            refuse(list);
        }
    }

    [[noreturn]] void refuse(const tensor_list& list) const {
        throw configuration_error("penstock: room for " + std::to_string(offsets_.size()) + " tensors was not made for this list of " +
                                  std::to_string(list.tensors.size()));
    }

    void make_views(const tensor_list& list) {
        for (std::size_t i = 0; i < list.tensors.size(); ++i) {
            const tensor_info& t = list.tensors[i];
            if (!views_.emplace(t.name, tensor_view{t.type, t.shape, base_ + offsets_[i], t.bytes}).second) {
                throw configuration_error("penstock: tensor \"" + t.name + "\" is twice in the list to be loaded");
            }
        }
    }

    std::byte* allocate() {
        if (where_.on_host()) {
            host_ = detail::host_region<detail::cuda_pinning>(bytes_, {}, {});
            return host_.data();
        }
        const device_guard on(where_.device);
        device_ = buffer<std::byte, memory::device>(bytes_);
        return device_.data();
    }

    place where_;
    std::uint64_t bytes_ = 0;
    detail::host_region<detail::cuda_pinning> host_;
    buffer<std::byte, memory::device> device_;
    std::map<std::string, tensor_view, std::less<>> views_;
    std::byte* base_ = nullptr;
    std::vector<std::uint64_t> offsets_;  ///< in the buffer, by position in the list
    stream_report report_;
};

}  // namespace penstock::inline v0_1

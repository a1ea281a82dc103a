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
        for_each_in_file_order(list, [&](std::size_t i) {
            offsets_[i] = bytes_;
            bytes_ += round_up(list.tensors[i].bytes, placement_alignment);
        });
        base_ = allocate();
    }

    /// Calls `work(i)` for each tensor's number in the list; lists of 100,000 are in order as a rule.
    template <class Work>
    static void for_each_in_file_order(const tensor_list& list, Work&& work) {
        const auto before = [](const tensor_info& a, const tensor_info& b) {
            return a.file != b.file ? a.file < b.file : a.offset < b.offset;
        };
        if (std::is_sorted(list.tensors.begin(), list.tensors.end(), before)) {
            for (std::size_t i = 0; i < list.tensors.size(); ++i) {
                work(i);
            }
            return;
        }
        std::vector<std::size_t> order(list.tensors.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::stable_sort(order.begin(), order.end(),
                         [&](std::size_t a, std::size_t b) { return before(list.tensors[a], list.tensors[b]); });
        for (const std::size_t i : order) {
            work(i);
        }
    }

    /// What brings the tensors of the list, neighbours already made one. Gaps between them are the room's own.
    /// @throws configuration_error where the room was made for other sizes
    [[nodiscard]] std::vector<transfer> transfers(const tensor_list& list) const {
        std::vector<transfer> all;
        std::uint64_t at = 0;
        bool same = list.tensors.size() == offsets_.size();
        const auto add = [&](std::size_t i) {
            const tensor_info& t = list.tensors[i];
            same = same && offsets_[i] == at;
            at += round_up(t.bytes, placement_alignment);
            std::byte* const to = base_ + offsets_[i];
            if (transfer* last = all.empty() ? nullptr : &all.back(); last != nullptr && last->file == t.file &&
                                                                      last->offset + last->bytes == t.offset &&
                                                                      last->destination + last->bytes == to) {
                last->bytes += t.bytes;
            } else {
                transfer& one = all.emplace_back();
                one.file = t.file;
                one.offset = t.offset;
                one.bytes = t.bytes;
                one.destination = to;
            }
            all.back().padding = round_up(t.bytes, placement_alignment) - t.bytes;
        };
        if (same) {
            for_each_in_file_order(list, add);
        }
        if (!same || at != bytes_) {
            refuse(list);
        }
        return all;
    }

    /// That the views are the list's.
    void check_names_of(const tensor_list& list) const {
        for (std::size_t i = 0; i < list.tensors.size(); ++i) {
            const tensor_info& t = list.tensors[i];
            const auto& [name, view] = *nodes_[i];
            if (name != t.name || view.bytes != t.bytes || view.type != t.type || view.shape != t.shape) {
                refuse(list);
            }
        }
    }

    [[noreturn]] void refuse(const tensor_list& list) const {
        throw configuration_error("penstock: room for " + std::to_string(offsets_.size()) + " tensors was not made for this list of " +
                                  std::to_string(list.tensors.size()));
    }

    void make_views(const tensor_list& list) {
        nodes_.reserve(list.tensors.size());
        for (std::size_t i = 0; i < list.tensors.size(); ++i) {
            const tensor_info& t = list.tensors[i];
            const auto [node, is_new] = views_.emplace(t.name, tensor_view{t.type, t.shape, base_ + offsets_[i], t.bytes});
            if (!is_new) {
                throw configuration_error("penstock: tensor \"" + t.name + "\" is twice in the list to be loaded");
            }
            nodes_.push_back(&*node);
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
    using view_map = std::map<std::string, tensor_view, std::less<>>;
    view_map views_;
    std::vector<const view_map::value_type*> nodes_;  ///< of views_, by position in the list
    std::byte* base_ = nullptr;
    std::vector<std::uint64_t> offsets_;  ///< in the buffer, by position in the list
    stream_report report_;
};

}  // namespace penstock::inline v0_1

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
    /// Room for all tensors of the list, which are ordered as they lie in the files. Nothing is loaded yet.
    /// @throws out_of_memory; configuration_error for a name that is there twice
    loaded_tensors(const tensor_list& list, place where) : where_(where) {
        std::vector<std::size_t> order(list.tensors.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            const tensor_info& x = list.tensors[a];
            const tensor_info& y = list.tensors[b];
            return x.file != y.file ? x.file < y.file : x.offset < y.offset;
        });
        std::vector<std::uint64_t> offset(list.tensors.size());
        for (const std::size_t i : order) {
            offset[i] = bytes_;
            bytes_ += round_up(list.tensors[i].bytes, placement_alignment);
        }
        std::byte* base = allocate();
        for (const std::size_t i : order) {
            const tensor_info& t = list.tensors[i];
            const bool fresh = views_.emplace(t.name, tensor_view{t.type, t.shape, base + offset[i], t.bytes}).second;
            if (!fresh) {
                throw configuration_error("penstock: tensor \"" + t.name + "\" is twice in the list to be loaded");
            }
            transfer one;
            one.file = t.file;
            one.offset = t.offset;
            one.bytes = t.bytes;
            one.destination = base + offset[i];
            transfers_.push_back(one);
        }
    }

    /// @throws configuration_error naming the tensor that is not there
    [[nodiscard]] const tensor_view& operator[](std::string_view name) const {
        const auto found = views_.find(name);
        if (found == views_.end()) {
            throw configuration_error("penstock: tensor \"" + std::string(name) + "\" is not among the " + std::to_string(views_.size()) + " loaded ones");
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
    std::vector<transfer> transfers_;  ///< of the load that fills the buffer; emptied by it
    stream_report report_;
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/buffer/host_memory.hpp>
#include <penstock/cuda/device.hpp>
#include <penstock/error.hpp>
#include <penstock/model/moe_model.hpp>
#include <penstock/units.hpp>

#include <limits>
#include <string>

namespace penstock::inline v0_1 {

/// Let the library choose: nine tenths of free device memory, or seven tenths of available host memory, at most what the model needs.
/// A store that computes on the host takes no host tier unless it is given one: its compute tier is host memory already.
inline constexpr bytes automatic{std::numeric_limits<std::uint64_t>::max()};

/// Hard limits of an expert store, inclusive of slots, rounding and staging. The weights every token needs (routers, shared experts) and the
/// caller's workspace are not in them.
struct budgets {
    bytes device = automatic;  ///< the compute tier: device memory, or the host memory that stands for it on the host executor
    bytes host = automatic;    ///< host tier and staging
};

/// How a budget is spent.
struct store_size {
    std::uint64_t slot_bytes = 0;
    std::uint32_t slots = 0;
    std::uint32_t host_slots = 0;

    [[nodiscard]] std::uint64_t compute_bytes() const noexcept { return slots * slot_bytes; }
    [[nodiscard]] std::uint64_t host_bytes() const noexcept { return host_slots * slot_bytes; }
};

namespace detail {

inline std::uint64_t free_device_memory(int device) {
    const device_guard here(device);
    std::size_t free = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
}

}  // namespace detail

/// Slots of both tiers for a model under budgets.
/// @param device ordinal of the compute place, -1 for the host. @param staging_bytes what file-to-device streaming needs of host memory.
/// @throws configuration_error naming the least budget that works.
inline store_size plan_store(const moe_model& model, budgets limits, int device, std::uint64_t staging_bytes) {
    if (model.layers.empty()) {
        throw configuration_error("penstock: an expert_store needs a model with at least one MoE layer");
    }
    std::uint64_t experts = 0;
    std::uint32_t top_k = 0;
    for (const moe_layer_model& layer : model.layers) {
        experts += layer.experts.size();
        top_k = larger(top_k, layer.routing.top_k);
    }
    if (experts > std::numeric_limits<std::uint32_t>::max()) {
        throw configuration_error("penstock: an expert_store counts experts in 32 bits; this model has " + std::to_string(experts));
    }
    const bool on_host = device < 0;
    store_size size;
    size.slot_bytes = round_up(larger<std::uint64_t>(model.record_bytes(), 1), placement_alignment);

    std::uint64_t budget = limits.device;
    if (limits.device == automatic) {
        budget = on_host ? available_host_memory() / 10 * 7 : detail::free_device_memory(device) / 10 * 9;
    }
    size.slots = static_cast<std::uint32_t>(smaller(experts, budget / size.slot_bytes));
    if (size.slots == 0) {
        throw configuration_error("penstock: device budget " + to_string(bytes{budget}) + " holds no expert of this model: one slot is " +
                                  to_string(bytes{size.slot_bytes}) + " (" + std::to_string(size.slot_bytes) +
                                  " bytes), which is the least; " + to_string(bytes{size.slot_bytes * top_k}) + " keep one token's " +
                                  std::to_string(top_k) + " experts");
    }

    if (limits.host == automatic && on_host) {
        return size;
    }
    // Files pass through staging on their way to a device, whatever the host tier holds: at least the weights that every token needs.
    const std::uint64_t host = limits.host == automatic ? available_host_memory() / 10 * 7 : limits.host.count;
    const std::uint64_t staging = on_host ? 0 : staging_bytes;
    if (host < staging) {
        throw configuration_error("penstock: host budget " + to_string(bytes{host}) + " does not hold the staging ring: " +
                                  to_string(bytes{staging}) + " are the least (chunk size and a page x prefetch depth)");
    }
    size.host_slots = static_cast<std::uint32_t>(smaller(experts, (host - staging) / size.slot_bytes));
    return size;
}

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/dispatch/host_experts.hpp>
#include <penstock/error.hpp>
#include <penstock/model/record.hpp>
#include <penstock/parallel/host_rows.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace penstock::inline v0_1 {

/// The experts of one rank on the host executor: a function object for expert_parallel::run. What it works in stays between calls.
class experts_on_host {
public:
    /// @param records of this rank's experts, by local id. @param scales_input the weight multiplies the expert's input (Llama-4)
    experts_on_host(const executor::host& executor, const expert_layout& layout, std::vector<const std::byte*> records,
                    bool scales_input = false)
        : executor_(&executor), layout_(layout), records_(std::move(records)), scales_input_(scales_input) {}

    void operator()(const expert_rows& rows, activations_out sums) {
        if (rows.experts != records_.size()) {
            throw configuration_error("penstock: experts_on_host has the records of " + std::to_string(records_.size()) +
                                      " experts, this rank holds " + std::to_string(rows.experts));
        }
        works_.clear();
        for (std::uint32_t e = 0; e < rows.experts; ++e) {
            if (rows.offsets[e + std::size_t{1}] > rows.offsets[e]) {
                works_.push_back({e, records_[e], rows.offsets[e], rows.offsets[e + std::size_t{1}] - rows.offsets[e]});
            }
        }
        const std::size_t pairs = std::size_t{rows.rows} * rows.top_k;
        x_.resize(std::size_t{rows.rows} * rows.width);
        activated_.resize(pairs * layout_.gate.rows);
        partial_.resize(pairs * rows.width);
        widen(rows, x_.data());
        executor_->experts(layout_, works_, rows.pairs, rows.top_k, x_.data(), scales_input_ ? rows.weights : nullptr, activated_.data(),
                           partial_.data());
        executor_->combine(partial_.data(), rows.ids, scales_input_ ? nullptr : rows.weights, rows.top_k, nullptr, sums);
    }

private:
    const executor::host* executor_;
    expert_layout layout_;
    std::vector<const std::byte*> records_;
    bool scales_input_;
    std::vector<expert_work> works_;
    std::vector<float> x_, activated_, partial_;
};

}  // namespace penstock::inline v0_1

#pragma once

#include <penstock/buffer/buffer.hpp>
#include <penstock/cuda/event.hpp>
#include <penstock/dispatch/decode.hpp>
#include <penstock/dispatch/expert_work.hpp>
#include <penstock/model/moe_model.hpp>
#include <penstock/residency/dense_weights.hpp>
#include <penstock/residency/expert_hints.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <type_traits>
#include <vector>

namespace penstock::inline v0_1 {

/// Guesses what a layer will need by running its router on the hidden state of a layer before it, which a residual connection changes little
/// on the way. An expert's confidence is the largest of its routing weights over the tokens, as a part of its token's sum.
/// @tparam Executor executor::host, or executor::cuda<...>
template <class Executor>
class router_predictor {
    template <class T>
    using working = buffer<T, std::conditional_t<Executor::on_device, memory::device, memory::pageable>>;

public:
    /// For up to `max_tokens` tokens. On the current device. Model and weights outlive it. @throws out_of_memory
    router_predictor(const moe_model& model, const dense_weights& dense, std::uint32_t max_tokens)
        : model_(model), dense_(dense), max_tokens_(max_tokens) {
        std::uint64_t hidden = 0, experts = 0, top_k = 0;
        for (const moe_layer_model& m : model.layers) {
            hidden = larger<std::uint64_t>(hidden, m.hidden);
            experts = larger<std::uint64_t>(experts, m.routing.experts);
            top_k = larger<std::uint64_t>(top_k, m.routing.top_k);
        }
        x_.emplace(hidden * max_tokens);
        logits_.emplace(experts * max_tokens);
        ids_.emplace(top_k * max_tokens);
        weights_.emplace(top_k * max_tokens);
        if constexpr (Executor::on_device) {
            host_ids_.emplace(top_k * max_tokens);
            host_weights_.emplace(top_k * max_tokens);
        }
    }

    /// Asks for a guess of what layer `layer` needs if it gets `hidden` [tokens, hidden]. A host executor is done when this returns; another
    /// one has enqueued it on `stream`, its own. A guess that was not taken is forgotten.
    /// @throws configuration_error for a layer that is not there, too many tokens, or another width
    void guess(Executor& executor, std::uint32_t layer, activations hidden, [[maybe_unused]] cudaStream_t stream = nullptr) {
        if (layer >= model_.layers.size() || hidden.tokens > max_tokens_ || hidden.hidden != model_.layers[layer].hidden) {
            throw configuration_error("penstock: router_predictor: layer " + std::to_string(layer) + " of " +
                                      std::to_string(model_.layers.size()) + ", hidden states [" + std::to_string(hidden.tokens) + ", " +
                                      std::to_string(hidden.hidden) + "] with at most " + std::to_string(max_tokens_) + " tokens wanted");
        }
        const moe_layer_model& m = model_.layers[layer];
        layer_ = layer;
        pairs_ = std::uint64_t{hidden.tokens} * m.routing.top_k;
        executor.widen(hidden, x_->data());
        executor.logits(dense_[layer].router, x_->data(), hidden.tokens, logits_->data());
        executor.route(m.routing, dense_[layer].router, logits_->data(), hidden.tokens, nullptr, ids_->data(), weights_->data());
        if constexpr (Executor::on_device) {
            check(cudaMemcpyAsync(host_ids_->data(), ids_->data(), pairs_ * sizeof(std::int32_t), cudaMemcpyDeviceToHost, stream),
                  "copy of predicted experts");
            check(cudaMemcpyAsync(host_weights_->data(), weights_->data(), pairs_ * sizeof(float), cudaMemcpyDeviceToHost, stream),
                  "copy of their weights");
            done_.record(stream);
        }
    }

    /// The guess, for expert_store::hint(). Nothing while there is none, or it is not ready: it does not wait. The same guess once.
    [[nodiscard]] std::vector<expert_hint> take() {
        if (pairs_ == 0 || !done_.ready()) {
            return {};
        }
        const std::int32_t* ids = Executor::on_device ? host_ids_->data() : ids_->data();
        const float* weights = Executor::on_device ? host_weights_->data() : weights_->data();
        const std::uint32_t k = model_.layers[layer_].routing.top_k;
        std::map<std::uint32_t, float> surest;
        for (std::uint64_t first = 0; first < pairs_; first += k) {
            float sum = 0;
            for (std::uint64_t p = first; p < first + k; ++p) {
                sum += ids[p] >= 0 ? weights[p] : 0;
            }
            for (std::uint64_t p = first; p < first + k; ++p) {
                if (ids[p] >= 0) {
                    float& of_expert = surest[static_cast<std::uint32_t>(ids[p])];
                    of_expert = larger(of_expert, sum > 0 ? weights[p] / sum : 0);
                }
            }
        }
        pairs_ = 0;
        std::vector<expert_hint> guesses;
        for (const auto& [expert, confidence] : surest) {
            guesses.push_back({layer_, expert, confidence});
        }
        return guesses;
    }

private:
    const moe_model& model_;
    const dense_weights& dense_;
    std::uint32_t max_tokens_;
    std::uint32_t layer_ = 0;
    std::uint64_t pairs_ = 0;
    std::optional<working<float>> x_, logits_, weights_;
    std::optional<working<std::int32_t>> ids_;
    std::optional<buffer<std::int32_t, memory::pinned>> host_ids_;
    std::optional<buffer<float, memory::pinned>> host_weights_;
    event done_;
};

}  // namespace penstock::inline v0_1

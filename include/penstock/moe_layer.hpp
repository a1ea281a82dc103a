#pragma once

#include <penstock/dispatch/host_experts.hpp>
#include <penstock/layer_workspace.hpp>
#include <penstock/residency/dense_weights.hpp>
#include <penstock/residency/expert_store.hpp>

#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

namespace penstock::inline v0_1 {

/// What a call with the engine's own router brings: ids [tokens, k] and weights [tokens, k], in the executor's memory. Id -1 is nobody.
struct choices {
    const std::int32_t* ids = nullptr;
    const float* weights = nullptr;
    std::uint32_t top_k = 0;
};

/// The MoE layers of a store's model, ready to run: dense weights and one workspace, which the layers share, so that calls run one after
/// another. `Executor` is executor::host or executor::cuda<Formats...>, the same place as the store's.
template <class Executor, class Store>
class moe_layers {
public:
    class layer;

    struct options {
        std::uint32_t max_tokens = 1;         ///< most tokens of a call
        std::span<std::byte> workspace{};     ///< the caller's, workspace_bytes() of it in the executor's memory; else allocated
        std::span<std::byte> dense_memory{};  ///< the caller's, dense_weights::bytes_needed(model) of it; else allocated
        unsigned threads = 0;                 ///< of the host executor; 0: all cores
    };

    /// Workspace for calls of at most `max_tokens` tokens, in bytes of the executor's memory.
    [[nodiscard]] static std::uint64_t workspace_bytes(const moe_model& model, std::uint32_t max_tokens) {
        std::uint64_t most = 0;
        for (const moe_layer_model& l : model.layers) {
            most = larger(most, layer_workspace::bytes_needed<Executor>(l, max_tokens, l.routing.top_k));
        }
        return most;
    }

    moe_layers(Store& store, options wanted)
        : store_(store),
          max_tokens_(wanted.max_tokens),
          dense_(store.model(), store.files(), store.loader(), store.compute(), wanted.dense_memory),
          workspace_(wanted.workspace) {
        if (store.compute().on_host() == Executor::on_device) {
            throw configuration_error(std::string("penstock: this executor computes on the ") + (Executor::on_device ? "device" : "host") +
                                      ", but the store keeps its slots on the " + (Executor::on_device ? "host" : "device"));
        }
        const std::uint64_t needed = workspace_bytes(store.model(), max_tokens_);
        if (workspace_.empty()) {
            workspace_ = {allocate(needed), needed};
        } else if (workspace_.size() < needed) {
            throw configuration_error("penstock: a workspace for " + std::to_string(max_tokens_) + " tokens needs " +
                                      std::to_string(needed) + " bytes, " + std::to_string(workspace_.size()) + " were given");
        }
        std::vector<std::int32_t> every_token(max_tokens_);
        std::iota(every_token.begin(), every_token.end(), 0);
        if constexpr (Executor::on_device) {
            const device_guard here(store.compute().device);
            read_back_.emplace(max_experts + 1 + 1 + std::uint64_t{max_tokens_} * max_top_k);
            decided_.emplace();
            every_token_ = device_every_token_.emplace(max_tokens_).data();
            check(cudaMemcpy(device_every_token_->data(), every_token.data(), max_tokens_ * sizeof(std::int32_t), cudaMemcpyHostToDevice),
                  "copy of row numbers");
        } else {
            host_.emplace(wanted.threads);
            host_every_token_ = std::move(every_token);
            every_token_ = host_every_token_.data();
        }
        for (std::uint32_t l = 0; l < store.model().layers.size(); ++l) {
            layers_.push_back(layer(*this, l));
        }
    }

    moe_layers(const moe_layers&) = delete;
    moe_layers& operator=(const moe_layers&) = delete;

    [[nodiscard]] auto begin() noexcept { return layers_.begin(); }
    [[nodiscard]] auto end() noexcept { return layers_.end(); }
    [[nodiscard]] std::size_t size() const noexcept { return layers_.size(); }
    [[nodiscard]] layer& operator[](std::size_t l) { return layers_[l]; }
    [[nodiscard]] const dense_weights& dense() const noexcept { return dense_; }
    [[nodiscard]] std::uint64_t workspace_size() const noexcept { return workspace_.size(); }

private:
    std::byte* allocate(std::uint64_t needed) {
        if constexpr (Executor::on_device) {
            const device_guard here(store_.compute().device);
            return device_workspace_.emplace(needed).data();
        } else {
            return host_workspace_.emplace(needed).data();
        }
    }

    Store& store_;
    std::uint32_t max_tokens_;
    dense_weights dense_;
    std::span<std::byte> workspace_;
    std::optional<buffer<std::byte, memory::pageable>> host_workspace_;
    std::optional<buffer<std::byte, memory::device>> device_workspace_;
    std::optional<buffer<std::uint32_t, memory::pinned>> read_back_;  ///< offsets, the live count, the engine's ids
    std::optional<event> decided_;
    std::vector<std::int32_t> host_every_token_;
    std::optional<buffer<std::int32_t, memory::device>> device_every_token_;
    const std::int32_t* every_token_ = nullptr;  ///< 0, 1, ...: the rows of a shared expert
    std::optional<executor::host> host_;
    std::vector<layer> layers_;
};

/// One MoE layer: route, bring the experts, compute, combine. Shapes: hidden and output are [tokens, hidden] with tokens at most max_tokens.
template <class Executor, class Store>
class moe_layers<Executor, Store>::layer {
public:
    [[nodiscard]] const moe_layer_model& model() const noexcept { return owner_->store_.model().layers[number_]; }

    /// Host executor: routes with the model's router and returns when `output` is written. @param live number of tokens that count; rows past
    /// it choose nobody, and their output is zero. @throws configuration_error for shapes that do not fit, io_error and format_error from files.
    void forward(activations hidden, activations_out output, std::optional<std::uint32_t> live = {}) requires(!Executor::on_device) {
        const auto count = static_cast<std::int32_t>(smaller(live.value_or(hidden.tokens), hidden.tokens));
        run(*owner_->host_, hidden, output, nullptr, &count, nullptr);
    }

    /// Host executor: the same with the engine's choice of experts.
    void experts(activations hidden, choices chosen, activations_out output,
                 std::optional<std::uint32_t> live = {}) requires(!Executor::on_device) {
        const auto count = static_cast<std::int32_t>(smaller(live.value_or(hidden.tokens), hidden.tokens));
        run(*owner_->host_, hidden, output, &chosen, &count, nullptr);
    }

    /// CUDA executor: enqueues the layer on `stream`. It waits on the host for the routing, since this store decides there, and not for the
    /// result. @param live_tokens device pointer to the number of tokens that count, or null for all.
    /// @throws configuration_error also when `stream` is being captured.
    void forward_async(activations hidden, activations_out output, const std::int32_t* live_tokens,
                       cudaStream_t stream) requires(Executor::on_device) {
        const device_guard here(owner_->store_.compute().device);
        Executor executor(stream);
        run(executor, hidden, output, nullptr, live_tokens, stream);
    }

    /// CUDA executor: the same with the engine's choice of experts.
    void experts_async(activations hidden, choices chosen, activations_out output, const std::int32_t* live_tokens,
                       cudaStream_t stream) requires(Executor::on_device) {
        const device_guard here(owner_->store_.compute().device);
        Executor executor(stream);
        run(executor, hidden, output, &chosen, live_tokens, stream);
    }

    /// The choices of the last forward call, [tokens, k], in the executor's memory: valid until the next call of any layer.
    [[nodiscard]] choices last_choices() const noexcept { return last_; }

private:
    friend class moe_layers;

    layer(moe_layers& owner, std::uint32_t number) : owner_(&owner), number_(number) {}

    /// What the host knows of the routing before it brings experts.
    struct decision {
        const std::uint32_t* offsets;
        std::uint32_t live;
    };

    void run(Executor& executor, activations hidden, activations_out output, const choices* chosen, const std::int32_t* live,
             cudaStream_t stream) {
        const moe_layer_model& m = model();
        const std::uint32_t tokens = hidden.tokens;
        const std::uint32_t k = chosen != nullptr ? chosen->top_k : m.routing.top_k;
        check_shapes(m, hidden, output, k);
        if (tokens == 0) {
            last_ = {nullptr, nullptr, k};
            return;
        }
        if constexpr (Executor::on_device) {
            if (is_capturing(stream)) {
                throw configuration_error(
                    "penstock: this expert_store decides on the host, so its layers cannot be captured in a CUDA graph");
            }
        }
        const auto& dense = owner_->dense_[number_];
        layer_workspace w;
        w.place<Executor>(m, tokens, k, owner_->workspace_);

        executor.widen(hidden, w.x);
        if (chosen == nullptr) {
            executor.logits(dense.router, w.x, tokens, w.logits);
            executor.route(m.routing, dense.router, w.logits, tokens, live, w.ids, w.weights);
            last_ = {w.ids, w.weights, k};
        } else {
            last_ = *chosen;
        }
        if (chosen != nullptr && !Executor::on_device) {
            check_ids(chosen->ids, tokens, k);
        }
        executor.permute(last_.ids, tokens * k, m.routing.experts, w.rows, w.offsets, w.scratch);
        const decision d = decide(w, chosen, tokens, live, stream);

        typename Store::step step = owner_->store_.begin(number_, {d.offsets, m.routing.experts + 1}, stream);
        const float* input_scale = m.routing.scales_input ? last_.weights : nullptr;
        bool shared_done = !m.shared.has_value();
        while (true) {
            const std::span<const expert_work> ready = step.next();
            executor.experts(m.layout, ready, w.rows, k, w.x, input_scale, w.activated, w.partial);
            if (!shared_done) {  // under the copies that the first next() has started
                compute_shared(executor, dense, w, d.live, stream);
                shared_done = true;
            }
            if (ready.empty()) {
                break;
            }
        }
        executor.combine(w.partial, last_.ids, m.routing.scales_input ? nullptr : last_.weights, k, m.shared ? w.shared : nullptr, output);
        step.finish();
    }

    [[noreturn]] static void refuse(const std::string& what) { throw configuration_error("penstock: moe_layer: " + what); }

    void check_shapes(const moe_layer_model& m, activations hidden, activations_out output, std::uint32_t k) const {
        if (hidden.hidden != m.hidden || output.hidden != m.hidden || hidden.tokens != output.tokens) {
            refuse("hidden states are [" + std::to_string(hidden.tokens) + ", " + std::to_string(hidden.hidden) + "] and the output [" +
                   std::to_string(output.tokens) + ", " + std::to_string(output.hidden) + "], [tokens, " + std::to_string(m.hidden) +
                   "] is wanted of both");
        }
        if (hidden.tokens > owner_->max_tokens_) {
            refuse(std::to_string(hidden.tokens) + " tokens, but the layers were made for at most " + std::to_string(owner_->max_tokens_));
        }
        if (k == 0 || k > m.routing.top_k) {
            refuse("top_k is " + std::to_string(k) + ", 1 to " + std::to_string(m.routing.top_k) +
                   " is wanted, for which the workspace was made");
        }
    }

    /// @param ids in host memory
    void check_ids(const std::int32_t* ids, std::uint32_t tokens, std::uint32_t k) const {
        const auto experts = static_cast<std::int32_t>(model().routing.experts);
        for (std::size_t p = 0; p < std::size_t{tokens} * k; ++p) {
            if (ids[p] >= experts) {
                refuse("token " + std::to_string(p / k) + " asks for expert " + std::to_string(ids[p]) + " of " + std::to_string(experts));
            }
        }
    }

    /// Brings the offsets, the live count and the engine's ids to the host.
    decision decide(const layer_workspace& w, const choices* chosen, std::uint32_t tokens, const std::int32_t* live, cudaStream_t stream) {
        const std::uint32_t experts = model().routing.experts;
        const std::uint32_t* offsets = w.offsets;
        std::uint32_t count = tokens;
        if constexpr (Executor::on_device) {
            const std::int32_t* ids = chosen != nullptr ? chosen->ids : nullptr;
            std::uint32_t* at_host = owner_->read_back_->data();
            check(cudaMemcpyAsync(at_host, w.offsets, (experts + 1) * sizeof(std::uint32_t), cudaMemcpyDeviceToHost, stream),
                  "copy of expert offsets");
            if (live != nullptr) {
                check(cudaMemcpyAsync(at_host + experts + 1, live, sizeof(std::int32_t), cudaMemcpyDeviceToHost, stream),
                      "copy of the live count");
            }
            if (ids != nullptr) {
                check(cudaMemcpyAsync(at_host + experts + 2, ids, std::uint64_t{tokens} * chosen->top_k * sizeof(std::int32_t),
                                      cudaMemcpyDeviceToHost, stream),
                      "copy of expert ids");
            }
            owner_->decided_->record(stream);
            owner_->decided_->synchronize();
            if (ids != nullptr) {  // the permutation has left out what is out of range: nothing was touched by it
                check_ids(reinterpret_cast<const std::int32_t*>(at_host + experts + 2), tokens, chosen->top_k);
            }
            offsets = at_host;
            count = live != nullptr ? at_host[experts + 1] : tokens;
        } else if (live != nullptr) {
            count = static_cast<std::uint32_t>(*live);
        }
        return {offsets, static_cast<std::uint32_t>(smaller(static_cast<std::int32_t>(count) < 0 ? 0 : count, tokens))};
    }

    void compute_shared(Executor& executor, const dense_weights::layer& dense, const layer_workspace& w, std::uint32_t live,
                        cudaStream_t stream) const {
        const moe_layer_model& m = model();
        if (live < w.tokens) {  // the output of rows that nobody lives in is zero
            const std::size_t dead = std::size_t{w.tokens - live} * m.hidden * sizeof(float);
            if constexpr (Executor::on_device) {
                check(cudaMemsetAsync(w.shared + std::size_t{live} * m.hidden, 0, dead, stream), "cudaMemsetAsync");
            } else {
                std::memset(w.shared + std::size_t{live} * m.hidden, 0, dead);
            }
        }
        if (live == 0) {
            return;
        }
        const expert_work all{0, dense.shared, 0, live};
        executor.experts(m.shared->layout, {&all, 1}, owner_->every_token_, 1, w.x, nullptr, w.shared_activated, w.shared);
        if (dense.shared_gate != nullptr) {
            executor.shared_gate(dense.shared_gate, dense.shared_gate_type, w.x, live, m.hidden, w.shared);
        }
    }

    moe_layers* owner_;
    std::uint32_t number_;
    choices last_;
};

/// The layers of `store` for an executor: `auto layers = make_moe_layers<executor::host>(store, {.max_tokens = 8});`
template <class Executor, class Store>
[[nodiscard]] moe_layers<Executor, Store> make_moe_layers(Store& store, typename moe_layers<Executor, Store>::options wanted) {
    return moe_layers<Executor, Store>(store, wanted);
}

}  // namespace penstock::inline v0_1

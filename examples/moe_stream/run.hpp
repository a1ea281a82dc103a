#pragma once

#include "ceilings.hpp"
#include "token_walk.hpp"

#include "../support/compare.hpp"
#include "../support/mirrored.hpp"
#include "../support/with_store.hpp"

#include <unistd.h>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

/// Decode steps through all MoE layers of a store, timed, and what they cost.
namespace example {

struct run_result {
    std::string name;
    std::vector<double> step_seconds;  ///< sorted
    ps::store_report report;
    double floor_seconds = 0;    ///< summed: for each layer call the longer of link time and compute-memory time
    std::vector<float> outputs;  ///< hidden state after the last layer, of every counted step
    std::uint64_t layer_calls = 0;

    [[nodiscard]] double total() const { return std::accumulate(step_seconds.begin(), step_seconds.end(), 0.0); }
    [[nodiscard]] double median() const { return step_seconds[step_seconds.size() / 2]; }
    [[nodiscard]] double p99() const { return step_seconds[std::min(step_seconds.size() - 1, step_seconds.size() * 99 / 100)]; }
    [[nodiscard]] std::uint64_t moved() const { return report.bytes_from_files + report.bytes_from_host; }
};

/// One token batch on its way through the layers: h is the residual, x its normalised form, out a layer's result.
template <class Layers, class Store>
class walker {
public:
    walker(Layers& layers, Store& store, std::uint32_t tokens, float kept)
        : layers_(layers),
          store_(store),
          tokens_(tokens),
          hidden_(store.model().layers[0].hidden),
          walk_(tokens, hidden_, kept),
          h_(values(), store.compute()),
          x_(values(), store.compute()),
          out_(values(), store.compute()) {
        if (!store.compute().on_host()) {
            stream_.emplace();
        }
    }

    void begin_step() { h_.assign(walk_.next()); }

    /// Enqueues, or on the host runs, layer l.
    void layer(std::size_t l) {
        float* addend = l == 0 ? nullptr : out_.data();
        const ps::activations in{x_.data(), ps::dtype::f32, tokens_, hidden_};
        const ps::activations_out out{out_.data(), ps::dtype::f32, tokens_, hidden_};
        if constexpr (requires { layers_[l].forward(in, out); }) {
            residual_norm_on_host(h_.data(), addend, x_.data(), tokens_, hidden_);
            layers_[l].forward(in, out);
        } else {
            residual_norm_on_device(h_.data(), addend, x_.data(), tokens_, hidden_, stream_->get());
            layers_[l].forward_async(in, out, nullptr, stream_->get());
        }
    }

    void finish_step() {
        if constexpr (requires { layers_[0].forward(ps::activations{}, ps::activations_out{}); }) {
            residual_norm_on_host(h_.data(), out_.data(), x_.data(), tokens_, hidden_);
        } else {
            residual_norm_on_device(h_.data(), out_.data(), x_.data(), tokens_, hidden_, stream_->get());
            stream_->synchronize();
        }
    }

    void synchronize() {
        if (stream_) {
            stream_->synchronize();
        }
    }

    [[nodiscard]] std::size_t values() const { return std::size_t{tokens_} * hidden_; }
    [[nodiscard]] std::vector<float> state() { return h_.fetch(); }
    [[nodiscard]] std::vector<float> input() { return x_.fetch(); }
    [[nodiscard]] std::vector<float> output() { return out_.fetch(); }
    [[nodiscard]] std::vector<std::int32_t> ids(std::size_t l) {
        return fetch(layers_[l].last_choices().ids, std::size_t{tokens_} * store_.model().layers[l].routing.top_k, store_.compute());
    }

private:
    Layers& layers_;
    Store& store_;
    std::uint32_t tokens_;
    std::uint32_t hidden_;
    token_walk walk_;
    mirrored<float> h_, x_, out_;
    std::optional<ps::stream> stream_;
};

/// Runs `steps` steps after a few that do not count; the walk is the same every time.
template <class Layers, class Store>
run_result run_steps(const std::string& name, Layers& layers, Store& store, std::uint32_t tokens, std::uint32_t steps, float kept,
                     const ceilings& machine) {
    run_result r;
    r.name = name;
    walker<Layers, Store> w(layers, store, tokens, kept);
    const std::uint32_t warm = std::min(steps, 4u);
    const bool live_line = isatty(STDERR_FILENO) != 0;
    ps::store_report before;
    for (std::uint32_t s = 0; s < warm + steps; ++s) {
        if (s == warm) {
            store.reset_counters();
            before = {};
        }
        w.begin_step();
        const double seconds = seconds_of([&] {
            for (std::size_t l = 0; l < layers.size(); ++l) {
                w.layer(l);
                const ps::store_report now = store.report();
                const auto bytes =
                    static_cast<double>(now.bytes_from_host + now.bytes_from_files - before.bytes_from_host - before.bytes_from_files);
                const auto read =
                    static_cast<double>((now.hits + now.misses - before.hits - before.misses) * store.model().layers[l].layout.bytes);
                r.floor_seconds += s < warm ? 0 : std::max(bytes / machine.link, read / machine.read) / 1e9;
                before = now;
            }
            w.finish_step();
        });
        if (s >= warm) {
            r.step_seconds.push_back(seconds);
            const std::vector<float> state = w.state();
            r.outputs.insert(r.outputs.end(), state.begin(), state.end());
        }
        if (live_line) {
            std::fprintf(stderr, "\r%s: step %u of %u, %.1f ms, %.0f %% hits   ", name.c_str(), s + 1, warm + steps, seconds * 1e3,
                         100 * store.report().hit_rate());
        }
    }
    if (live_line) {
        std::fprintf(stderr, "\r%60s\r", "");
    }
    std::ranges::sort(r.step_seconds);
    r.report = store.report();
    r.layer_calls = std::uint64_t{steps} * layers.size();
    return r;
}

/// Records of experts, read with plain calls, for an answer that owes nothing to streams, stores and slots.
inline std::vector<std::byte> read_record(ps::byte_source& files, const ps::expert_parts& parts, std::uint64_t bytes) {
    std::vector<std::byte> record(bytes);
    for (const ps::record_part& p : parts) {
        files.read(p.file, p.offset, std::span(record).subspan(p.record_offset, p.bytes));
    }
    return record;
}

/// One layer on the host executor, expert records read with plain calls.
inline std::vector<float> plain_answer(const ps::moe_layer_model& m, const ps::dense_weights::layer& dense, ps::byte_source& files,
                                       const std::vector<float>& x, std::uint32_t tokens) {
    ps::executor::host host;
    const std::uint32_t k = m.routing.top_k;
    const std::uint32_t pairs = tokens * k;
    std::vector<float> logits(std::size_t{tokens} * m.routing.experts), weights(pairs), activated(std::size_t{pairs} * m.intermediate);
    std::vector<float> partial(std::size_t{pairs} * m.hidden), shared, out(std::size_t{tokens} * m.hidden);
    std::vector<std::int32_t> ids(pairs), rows(pairs), every_token(tokens);
    std::vector<std::uint32_t> offsets(m.routing.experts + 1);
    std::vector<std::byte> scratch(ps::executor::host::permute_scratch_bytes(pairs, m.routing.experts));
    host.logits(dense.router, x.data(), tokens, logits.data());
    host.route(m.routing, dense.router, logits.data(), tokens, nullptr, ids.data(), weights.data());
    host.permute(ids.data(), pairs, m.routing.experts, rows.data(), offsets.data(), scratch);
    for (std::uint32_t e = 0; e < m.routing.experts; ++e) {
        if (offsets[e + 1] > offsets[e]) {
            const std::vector<std::byte> record = read_record(files, m.experts[e], m.layout.bytes);
            const ps::expert_work work{e, record.data(), offsets[e], offsets[e + 1] - offsets[e]};
            host.experts(m.layout, {&work, 1}, rows.data(), k, x.data(), m.routing.scales_input ? weights.data() : nullptr,
                         activated.data(), partial.data());
        }
    }
    if (m.shared) {
        std::iota(every_token.begin(), every_token.end(), 0);
        activated.resize(std::size_t{tokens} * m.shared->layout.intermediate());
        shared.resize(out.size());
        const ps::expert_work all{0, dense.shared, 0, tokens};
        host.experts(m.shared->layout, {&all, 1}, every_token.data(), 1, x.data(), nullptr, activated.data(), shared.data());
        if (dense.shared_gate != nullptr) {
            host.shared_gate(dense.shared_gate, dense.shared_gate_type, x.data(), tokens, m.hidden, shared.data());
        }
    }
    host.combine(partial.data(), ids.data(), m.routing.scales_input ? nullptr : weights.data(), k, m.shared ? shared.data() : nullptr,
                 {out.data(), ps::dtype::f32, tokens, m.hidden});
    return out;
}

}  // namespace example

#pragma once

#include <penstock/dispatch/activation.hpp>
#include <penstock/dispatch/decode.hpp>
#include <penstock/dispatch/detail/host_kernels.hpp>
#include <penstock/dispatch/detail/host_kernels_avx2.hpp>
#include <penstock/dispatch/detail/host_kernels_avx512.hpp>
#include <penstock/dispatch/detail/host_projection.hpp>
#include <penstock/dispatch/expert_work.hpp>
#include <penstock/dispatch/permutation.hpp>
#include <penstock/dispatch/routing.hpp>
#include <penstock/dispatch/thread_pool.hpp>
#include <penstock/error.hpp>
#include <penstock/model/record.hpp>
#include <penstock/model/tensor.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace penstock::inline v0_1 {

/// The instruction sets for which the host executor has loops of its own.
enum class host_isa : std::uint8_t { portable, avx2, avx512 };

[[nodiscard]] constexpr const char* name(host_isa isa) noexcept {
    return isa == host_isa::avx512 ? "avx512" : isa == host_isa::avx2 ? "avx2" : "portable";
}

/// The best one that this machine runs.
[[nodiscard]] inline host_isa best_host_isa() noexcept {
#if defined(__x86_64__)
    // Every processor with AVX2 has F16C, whose name clang 14 does not know here.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
        return wide ? host_isa::avx512 : host_isa::avx2;
    }
#endif
    return host_isa::portable;
}

namespace detail {

[[nodiscard]] inline const host_kernels& kernels_for(host_isa isa) {
#if defined(__x86_64__)
    if (isa == host_isa::avx512) {
        return avx512::kernels;
    }
    if (isa == host_isa::avx2) {
        return avx2::kernels;
    }
#endif
    if (isa != host_isa::portable) {
        throw configuration_error(std::string("penstock: this build has no host loops for ") + name(isa));
    }
    return portable::kernels;
}

/// The weight format with the same bits as a float type. @throws configuration_error for other types
[[nodiscard]] inline weight_kind kind_of(dtype type, const char* what) {
    switch (type) {
        case dtype::f32: return weight_kind::f32;
        case dtype::bf16: return weight_kind::bf16;
        case dtype::f16: return weight_kind::f16;
        default:
            throw configuration_error(std::string("penstock: ") + what + " of type " + std::string(name(type)) +
                                      "; F32, BF16 and F16 are served");
    }
}

}  // namespace detail

namespace executor {

/// Computes MoE layers on the host, for every weight format that `visit` knows, with float32 arithmetic. Members return when their work is
/// done. They may be called from several threads, and then go one after another. Zero tokens, pairs or works are legal and touch no
/// pointer. Pointers are in host memory; records may lie at any byte.
///
/// Same bits: on one machine, what `experts` writes for a pair depends on the record's bytes, its layout, the pair's input row and scale
/// alone: not on the other pairs of the call, the order or number of works, the threads, or where the record lies.
class host {
public:
    static constexpr bool on_device = false;

    /// @param threads that work on a call, the caller's own among them; 0: as many as the process may use. The others are the executor's.
    explicit host(unsigned threads = 0) : host(threads, best_host_isa()) {}

    /// With the loops of `isa`, which this machine must run. @throws configuration_error if this build has none
    host(unsigned threads, host_isa isa)
        : kernels_(&detail::kernels_for(isa)),
          isa_(isa),
          pool_(std::make_unique<thread_pool>(threads)),
          scratch_(std::make_unique<detail::host_scratch[]>(pool_->size())) {}

    [[nodiscard]] unsigned threads() const noexcept { return pool_->size(); }

    [[nodiscard]] host_isa isa() const noexcept { return isa_; }

    /// Whether `experts` serves layouts of this kind.
    [[nodiscard]] static constexpr bool computes(weight_kind kind) noexcept { return kind != weight_kind::int4_group; }

    /// x [tokens, hidden] = hidden, in float32. @throws configuration_error for a type that is not f32, bf16 or f16
    void widen(activations hidden, float* x) const {
        const auto kind = static_cast<std::size_t>(detail::kind_of(hidden.type, "hidden states"));
        const std::uint64_t row_bytes = static_cast<std::uint64_t>(hidden.hidden) * bits(hidden.type) / 8;
        pool_->run(row_blocks(hidden.tokens, hidden.hidden), [&](std::size_t item, unsigned) {
            for_rows(item, hidden.tokens, hidden.hidden, [&](std::uint64_t t) {
                kernels_->decode[kind]({static_cast<const std::byte*>(hidden.data) + t * row_bytes, nullptr}, hidden.hidden,
                                       x + t * hidden.hidden);
            });
        });
    }

    /// logits [tokens, experts] = router weight . x (+ bias), accumulated in float32.
    void logits(const router_ref& router, const float* x, std::uint32_t tokens, float* logits) const {
        if (tokens == 0) {
            return;
        }
        const weight_kind kind = detail::kind_of(router.type, "router weights");
        matrix_layout layout{.rows = router.experts, .cols = router.hidden, .row_stride = router.hidden};
        const detail::host_matrix matrix{kernels_, kind, &layout, static_cast<const std::byte*>(router.weight)};
        const std::uint32_t step = detail::rows_per_item(kind, layout);
        const std::uint64_t blocks = ceil_div(router.experts, step);
        pool_->run(blocks * ceil_div(tokens, detail::host_tokens), [&](std::size_t item, unsigned worker) {
            const auto first = static_cast<std::uint32_t>(item % blocks) * step;
            const auto token = static_cast<std::uint32_t>(item / blocks) * detail::host_tokens;
            const std::uint32_t rows = smaller(step, router.experts - first);
            const std::uint32_t count = smaller(detail::host_tokens, tokens - token);
            const float* inputs[detail::host_tokens]{};
            for (std::uint32_t t = 0; t < count; ++t) {
                inputs[t] = x + std::uint64_t{token + t} * router.hidden;
            }
            float* out = logits + std::uint64_t{token} * router.experts + first;
            detail::multiply(matrix, first, rows, inputs, count, out, router.experts, scratch_[worker]);
            for (std::uint32_t t = 0; t < count && router.bias != nullptr; ++t) {
                for (std::uint32_t i = 0; i < rows; ++i) {
                    out[std::uint64_t{t} * router.experts + i] += load_element(router.bias, router.bias_type, first + i);
                }
            }
        });
    }

    /// ids, weights [tokens, top_k] by `rule`. @param live number of tokens that count, or null for all: rows past it get id -1 and
    /// weight 0. @throws configuration_error for a rule that cannot be followed, before anything is written
    void route(const routing_rule& rule, const router_ref& router, const float* logits, std::uint32_t tokens, const std::int32_t* live,
               std::int32_t* ids, float* weights) const {
        validate(rule);
        const std::uint32_t k = rule.top_k;
        const std::uint32_t counted = live == nullptr ? tokens : smaller(tokens, static_cast<std::uint32_t>(larger(*live, 0)));
        pool_->run(row_blocks(tokens, rule.experts), [&](std::size_t item, unsigned worker) {
            float* choices = scratch_[worker].take(0, rule.experts);
            for_rows(item, tokens, rule.experts, [&](std::uint64_t t) {
                if (t < counted) {
                    route_token(lane_group_of_one{}, rule, logits + t * rule.experts, router.correction_bias, choices, ids + t * k,
                                weights + t * k);
                } else {
                    std::fill_n(ids + t * k, k, -1);
                    std::fill_n(weights + t * k, k, 0.0f);
                }
            });
        });
    }

    /// Bytes that `permute` needs for `scratch`: none.
    [[nodiscard]] static constexpr std::size_t permute_scratch_bytes(std::uint32_t, std::uint32_t) noexcept { return 0; }

    /// rows [pairs]: the pairs sorted by expert, ascending within one; offsets [experts + 1]: where each expert's pairs begin. Pairs whose
    /// id is negative are left out; rows past offsets[experts] are not written. @throws configuration_error for an id beyond the last
    void permute(const std::int32_t* ids, std::uint32_t pairs, std::uint32_t experts, std::int32_t* rows, std::uint32_t* offsets,
                 std::span<std::byte>) const {
        permute_by_expert({ids, pairs}, experts, rows, offsets);
    }

    /// For each pair p of each work, of token p / k: activated[p] = act(gate x, up x), partial[p] = down activated[p] + bias. Nothing is
    /// written for other pairs.
    /// @param rows as `permute` left them
    /// @param x [tokens, hidden]
    /// @param input_scale [tokens * k], multiplies the pair's input; may be null
    /// @param activated [tokens * k, intermediate]
    /// @param partial [tokens * k, hidden]
    /// @throws configuration_error for weights that no loop computes with
    void experts(const expert_layout& layout, std::span<const expert_work> works, const std::int32_t* rows, std::uint32_t k, const float* x,
                 const float* input_scale, float* activated, float* partial) const {
        visit(layout.kind, [](auto) {});  // throws for a kind without loops
        const activation_rule rule = rule_of(layout);
        const std::uint32_t step = smaller(detail::rows_per_item(layout.kind, layout.gate), detail::rows_per_item(layout.kind, layout.up));
        each_block(works, layout.gate.rows, step, [&](const expert_work& work, std::uint32_t first, std::uint32_t count, unsigned worker) {
            detail::host_scratch& scratch = scratch_[worker];
            float* gates = scratch.take(1, detail::host_tokens * std::size_t{step});
            float* ups = scratch.take(2, detail::host_tokens * std::size_t{step});
            const detail::host_matrix gate{kernels_, layout.kind, &layout.gate, work.record};
            const detail::host_matrix up{kernels_, layout.kind, &layout.up, work.record};
            each_few_pairs(work, rows, [&](const std::int32_t* pairs, std::uint32_t tokens) {
                const float* inputs[detail::host_tokens]{};
                for (std::uint32_t t = 0; t < tokens; ++t) {
                    inputs[t] = input_of(x, input_scale, pairs[t], k, layout.gate.cols, t, scratch);
                }
                detail::multiply(gate, first, count, inputs, tokens, gates, step, scratch);
                detail::multiply(up, first, count, inputs, tokens, ups, step, scratch);
                for (std::uint32_t t = 0; t < tokens; ++t) {
                    float* out = activated + static_cast<std::uint64_t>(pairs[t]) * layout.gate.rows + first;
                    for (std::uint32_t i = 0; i < count; ++i) {
                        out[i] = activate(rule, gates[t * std::size_t{step} + i] + bias_at(layout.gate, work.record, first + i),
                                          ups[t * std::size_t{step} + i] + bias_at(layout.up, work.record, first + i));
                    }
                }
            });
        });
        const std::uint32_t down_step = detail::rows_per_item(layout.kind, layout.down);
        each_block(works, layout.down.rows, down_step,
                   [&](const expert_work& work, std::uint32_t first, std::uint32_t count, unsigned worker) {
                       detail::host_scratch& scratch = scratch_[worker];
                       float* sums = scratch.take(1, detail::host_tokens * std::size_t{down_step});
                       const detail::host_matrix down{kernels_, layout.kind, &layout.down, work.record};
                       each_few_pairs(work, rows, [&](const std::int32_t* pairs, std::uint32_t tokens) {
                           const float* inputs[detail::host_tokens]{};
                           for (std::uint32_t t = 0; t < tokens; ++t) {
                               inputs[t] = activated + static_cast<std::uint64_t>(pairs[t]) * layout.down.cols;
                           }
                           detail::multiply(down, first, count, inputs, tokens, sums, down_step, scratch);
                           for (std::uint32_t t = 0; t < tokens; ++t) {
                               float* out = partial + static_cast<std::uint64_t>(pairs[t]) * layout.down.rows + first;
                               for (std::uint32_t i = 0; i < count; ++i) {
                                   out[i] = sums[t * std::size_t{down_step} + i] + bias_at(layout.down, work.record, first + i);
                               }
                           }
                       });
                   });
    }

    /// shared[t] *= sigmoid(weight . x[t]). @param weight [hidden] f32, bf16 or f16 @param shared [tokens, hidden]
    void shared_gate(const void* weight, dtype type, const float* x, std::uint32_t tokens, std::uint32_t hidden, float* shared) const {
        const auto kind = static_cast<std::size_t>(detail::kind_of(type, "shared expert's gate"));
        pool_->run(row_blocks(tokens, hidden), [&](std::size_t item, unsigned) {
            for_rows(item, tokens, hidden, [&](std::uint64_t t) {
                const detail::stored_run run{static_cast<const std::byte*>(weight), nullptr};
                float logit = 0.0f;
                kernels_->dot_one[kind](&run, hidden, x + t * hidden, &logit);
                const float gate = 1.0f / (1.0f + ::expf(-logit));
                for (std::uint64_t i = t * hidden; i < (t + 1) * hidden; ++i) {
                    shared[i] *= gate;
                }
            });
        });
    }

    /// out[t] = sum over j, ascending, of weights[t, j] * partial[t * k + j], + shared[t], in float32 and rounded once; pairs whose id is
    /// negative are skipped. Every row of `out` is written.
    /// @param weights [tokens, k]; null: every weight is 1
    /// @param shared [tokens, hidden], or null
    void combine(const float* partial, const std::int32_t* ids, const float* weights, std::uint32_t k, const float* shared,
                 activations_out out) const {
        static_cast<void>(detail::kind_of(out.type, "output"));
        pool_->run(row_blocks(out.tokens, out.hidden), [&](std::size_t item, unsigned worker) {
            float* row = scratch_[worker].take(0, out.hidden);
            for_rows(item, out.tokens, out.hidden, [&](std::uint64_t t) {
                std::fill_n(row, out.hidden, 0.0f);
                for (std::uint64_t p = t * k; p < (t + 1) * k; ++p) {
                    if (ids[p] >= 0) {
                        const float weight = weights != nullptr ? weights[p] : 1.0f;
                        kernels_->add_columns(partial + p * out.hidden, 0, &weight, 1, out.hidden, row);
                    }
                }
                if (shared != nullptr) {
                    const float one = 1.0f;
                    kernels_->add_columns(shared + t * out.hidden, 0, &one, 1, out.hidden, row);
                }
                for (std::uint32_t i = 0; i < out.hidden; ++i) {
                    store_element(out.data, out.type, t * out.hidden + i, row[i]);
                }
            });
        });
    }

private:
    /// Rows of an elementwise member that one item takes: enough to be worth a thread's while.
    static constexpr std::uint32_t rows_in_block(std::uint32_t columns) noexcept { return larger(1u, 16384 / larger(columns, 1u)); }

    static constexpr std::size_t row_blocks(std::uint32_t rows, std::uint32_t columns) noexcept {
        return ceil_div(rows, rows_in_block(columns));
    }

    template <class F>
    static void for_rows(std::size_t block, std::uint32_t rows, std::uint32_t columns, F&& f) {
        const std::uint64_t first = block * rows_in_block(columns);
        const std::uint64_t end = smaller<std::uint64_t>(rows, first + rows_in_block(columns));
        for (std::uint64_t r = first; r < end; ++r) {
            f(r);
        }
    }

    /// f(work, first row, rows, worker) for every block of `step` rows of every work that has pairs, in parallel.
    template <class F>
    void each_block(std::span<const expert_work> works, std::uint32_t rows, std::uint32_t step, F&& f) const {
        const std::uint64_t blocks = ceil_div(rows, step);
        pool_->run(works.size() * blocks, [&](std::size_t item, unsigned worker) {
            const expert_work& work = works[item / blocks];
            const auto first = static_cast<std::uint32_t>(item % blocks) * step;
            if (work.count > 0) {
                f(work, first, smaller(step, rows - first), worker);
            }
        });
    }

    /// f(pairs, tokens) for the pairs of a work, host_tokens at a time.
    template <class F>
    static void each_few_pairs(const expert_work& work, const std::int32_t* rows, F&& f) {
        for (std::uint32_t done = 0; done < work.count; done += detail::host_tokens) {
            f(rows + work.first + done, smaller(detail::host_tokens, work.count - done));
        }
    }

    /// The input row of a pair: in x, or scaled into the worker's memory.
    static const float* input_of(const float* x, const float* input_scale, std::int32_t pair, std::uint32_t k, std::uint32_t columns,
                                 std::uint32_t place, detail::host_scratch& scratch) {
        const float* row = x + static_cast<std::uint64_t>(static_cast<std::uint32_t>(pair) / k) * columns;
        if (input_scale == nullptr) {
            return row;
        }
        float* scaled = scratch.take(3, detail::host_tokens * std::size_t{columns}) + std::size_t{place} * columns;
        for (std::uint32_t c = 0; c < columns; ++c) {
            scaled[c] = row[c] * input_scale[pair];
        }
        return scaled;
    }

    const detail::host_kernels* kernels_;
    host_isa isa_;
    std::unique_ptr<thread_pool> pool_;
    std::unique_ptr<detail::host_scratch[]> scratch_;  ///< one for each worker
};

}  // namespace executor
}  // namespace penstock::inline v0_1

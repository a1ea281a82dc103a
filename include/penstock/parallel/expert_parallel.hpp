#pragma once

#include <penstock/buffer/buffer.hpp>
#include <penstock/parallel/dispatch_plan.hpp>
#include <penstock/parallel/placement.hpp>
#include <penstock/parallel/row_exchange.hpp>
#include <penstock/parallel/rows.hpp>
#include <penstock/parallel/transport.hpp>
#include <penstock/policy/axis.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace penstock::inline v0_1 {

namespace axis {

/// How much room there is for rows.
struct capacity {};

}  // namespace axis

namespace capacity {

/// The counts are exchanged first and buffers grow to them: any routing fits as long as there is memory.
struct exact {
    using policy_axis = axis::capacity;
};

/// Room for expert_parallel_options::rows is taken at setup and never grows. A call that needs more throws capacity_exceeded on every rank.
struct fixed {
    using policy_axis = axis::capacity;
};

}  // namespace capacity

/// A rank needs room for more rows than were set up. Every rank throws it from the same call, nothing was sent, and a next call may follow.
class capacity_exceeded : public configuration_error {
public:
    using configuration_error::configuration_error;
};

struct expert_parallel_options {
    std::uint32_t hidden = 0;   ///< a multiple of 16 bytes
    std::uint32_t top_k = 0;    ///< up to 16
    dtype type = dtype::bf16;   ///< of hidden states, and of the rows that come back: f32, bf16 or f16
    bool fp8_dispatch = false;  ///< rows go out in E4M3 with a scale for 128 elements
    std::uint32_t rows = 0;     ///< capacity::fixed: the most that a rank sends, and the most that it receives

    [[nodiscard]] constexpr row_format format() const noexcept { return {hidden, top_k, fp8_dispatch ? dtype::f8_e4m3 : type, type}; }
};

/// What one call moved, seen from one rank.
struct exchange_report {
    std::uint64_t rows_sent = 0;      ///< those to the rank itself among them
    std::uint64_t rows_crossing = 0;  ///< sent to other ranks
    std::uint64_t rows_received = 0;
    std::uint64_t pairs_received = 0;  ///< rows that the experts compute
    std::uint64_t dispatch_bytes = 0;  ///< to other ranks, ids, weights and scales included
    std::uint64_t combine_bytes = 0;   ///< back to other ranks
};

/// Experts spread over ranks: tokens visit the ranks that hold their experts, and come back summed.
///
/// Every rank makes the same calls in the same order with the same placement, also one that has no tokens or no experts. A token crosses once
/// to each rank that it visits; the owner sends one row back, weighted and accumulated in float32, in the payload's type; these are added in
/// rank order. So a result has the same bits in every run, whatever the timing. Ids below 0 and tokens past the live count cost nothing.
///
/// One object has one exchange under way. To run the dispatch of one micro-batch under the experts of another, use two, each with an endpoint
/// of its own: begin_dispatch of one, experts of the other, finish_dispatch.
///
/// Failure: what any member throws is told to all ranks, except capacity_exceeded, which all throw; the others throw rank_failed with this
/// rank and the reason. Then the buffers are given back, and only a new object on a new world goes on.
template <expert_transport Transport, class Capacity, class Replica>
class basic_expert_parallel {
public:
    using transport_type = Transport;

    /// @throws configuration_error for a format that is not served; out_of_memory with capacity::fixed
    basic_expert_parallel(Transport endpoint, const expert_parallel_options& options)
        : transport_(std::move(endpoint)), options_(options), format_(options.format()) {
        guarded([&] {
            format_.validate();
            to_.resize(transport_.ranks());
            counts_.resize(transport_.ranks());
            from_.resize(transport_.ranks() + std::size_t{1});
            if constexpr (fixed_capacity) {
                exchange_.reserve(format_, options.rows, options.rows);
            }
        });
    }

    [[nodiscard]] std::uint32_t rank() const noexcept { return transport_.rank(); }
    [[nodiscard]] std::uint32_t ranks() const noexcept { return transport_.ranks(); }
    [[nodiscard]] const row_format& format() const noexcept { return format_; }
    [[nodiscard]] Transport& endpoint() noexcept { return transport_; }

    /// Bytes of the transport's memory that are held.
    [[nodiscard]] std::uint64_t bytes_held() const noexcept { return exchange_.bytes(); }

    /// What the call under way, or else the last one, moved.
    [[nodiscard]] const exchange_report& report() const noexcept { return report_; }

    /// Tells all ranks that this one cannot go on.
    void fail(const std::string& reason) noexcept {
        transport_.fail(rank(), reason);
        release();
    }

    /// Sends this rank's tokens off. What `tokens` points to is read before the return, or in the order of the transport.
    void begin_dispatch(const expert_placement& placement, const routed_tokens& tokens) {
        guarded([&] {
            expect(step::idle, "begin_dispatch");
            check_tokens(placement, tokens);
            tokens_ = tokens.hidden.tokens;
            plan_.template make<Replica>(placement, rank(), steps_.ids_on_host(tokens, format_.top_k), format_.top_k);
            agree_on_counts();
            experts_ = static_cast<std::uint32_t>(placement.experts_of(rank()).size());
            exchange_.reserve(format_, plan_.rows(), from_.back());
            exchange_.reserve_experts(experts_);
            steps_.pack(plan_, tokens, format_, exchange_.outgoing());
            exchange_.list_dispatch(format_, plan_.to(), from_);
            transport_.begin_exchange(exchange_.sends(), exchange_.receives());
            report_ = {};
            report_.rows_sent = plan_.rows();
            report_.rows_crossing = plan_.rows() - plan_.rows_to(rank());
            report_.rows_received = from_.back();
            report_.dispatch_bytes = report_.rows_crossing * format_.dispatch_bytes();
            report_.combine_bytes = (from_.back() - counts_[rank()]) * format_.sum_bytes();
            step_ = step::dispatching;
        });
    }

    /// The rows of this rank's experts, grouped by expert. They stay until the next dispatch begins.
    const expert_rows& finish_dispatch() {
        guarded([&] {
            expect(step::dispatching, "finish_dispatch");
            transport_.finish_exchange();
            const row_arrays in = exchange_.incoming();
            steps_.group(in.ids, from_.back(), format_.top_k, experts_, exchange_.pairs(), exchange_.offsets());
            rows_ = {.hidden = in.hidden,
                     .type = format_.type,
                     .scales = format_.scales() > 0 ? in.scales : nullptr,
                     .rows = from_.back(),
                     .width = format_.hidden,
                     .top_k = format_.top_k,
                     .experts = experts_,
                     .ids = in.ids,
                     .weights = in.weights,
                     .pairs = exchange_.pairs(),
                     .offsets = exchange_.offsets(),
                     .from = from_};
            if constexpr (!Transport::on_device) {
                report_.pairs_received = rows_.offsets[experts_];
            }
            step_ = step::dispatched;
        });
        return rows_;
    }

    const expert_rows& dispatch(const expert_placement& placement, const routed_tokens& tokens) {
        begin_dispatch(placement, tokens);
        return finish_dispatch();
    }

    /// [rows, hidden]: where the experts' weighted sums go, one row for each received row, every row of it.
    [[nodiscard]] activations_out sums() noexcept { return {exchange_.sums(), format_.sums, from_.back(), format_.hidden}; }

    /// Sends sums() back.
    void begin_combine() {
        guarded([&] {
            expect(step::dispatched, "begin_combine");
            exchange_.list_combine(format_, from_, plan_.to());
            transport_.begin_exchange(exchange_.sends(), exchange_.receives());
            step_ = step::combining;
        });
    }

    /// out [tokens, hidden], f32, bf16 or f16: for each token the rows that came back, added in float32 by ascending rank, + shared, rounded
    /// once. Tokens past the live count become 0.
    /// @param shared [tokens, hidden], this rank's own shared experts on this rank's own tokens; or null
    void finish_combine(const float* shared, activations_out out) {
        guarded([&] {
            expect(step::combining, "finish_combine");
            check_out(out);
            transport_.finish_exchange();
            steps_.add_up(plan_, format_, exchange_.returned(), shared, out);
            step_ = step::idle;
        });
    }

    void combine(const float* shared, activations_out out) {
        begin_combine();
        finish_combine(shared, out);
    }

    /// Dispatch, experts, combine.
    /// @param experts (const expert_rows&, activations_out sums): writes, for each row, the weighted sum over its experts that are here
    /// @param shared (const routed_tokens&) -> const float*: the shared experts of this rank's tokens [tokens, hidden] or null; called once,
    /// while rows are under way
    template <class Experts, class Shared>
    void run(const expert_placement& placement, const routed_tokens& tokens, Experts&& experts, Shared&& shared, activations_out out) {
        guarded([&] { check_out(out, tokens.hidden.tokens); });
        begin_dispatch(placement, tokens);
        const float* added = guarded([&]() -> const float* { return shared(tokens); });
        const expert_rows& rows = finish_dispatch();
        guarded([&] { experts(rows, sums()); });
        combine(added, out);
    }

    template <class Experts>
    void run(const expert_placement& placement, const routed_tokens& tokens, Experts&& experts, activations_out out) {
        run(
            placement, tokens, std::forward<Experts>(experts), [](const routed_tokens&) -> const float* { return nullptr; }, out);
    }

private:
    static constexpr bool fixed_capacity = std::is_same_v<Capacity, capacity::fixed>;

    enum class step : std::uint8_t { idle, dispatching, dispatched, combining };

    /// f(), and what it throws is told to the others first.
    template <class F>
    decltype(auto) guarded(F&& f) {
        try {
            return f();
        } catch (const capacity_exceeded&) {
            throw;
        } catch (const rank_failed&) {
            release();
            throw;
        } catch (const std::exception& e) {
            fail(e.what());
            throw;
        } catch (...) {
            fail("it threw something that is no std::exception");
            throw;
        }
    }

    void release() noexcept { exchange_ = {}; }

    void expect(step wanted, const char* call) const {
        if (step_ != wanted) {
            throw configuration_error(std::string("penstock: expert_parallel: ") + call +
                                      " out of turn; the order is begin_dispatch, finish_dispatch, begin_combine, finish_combine");
        }
    }

    void check_tokens(const expert_placement& placement, const routed_tokens& tokens) const {
        const auto refuse = [](const std::string& why) { throw configuration_error("penstock: expert_parallel: " + why); };
        if (placement.ranks() != ranks()) {
            refuse("a placement on " + std::to_string(placement.ranks()) + " ranks in a world of " + std::to_string(ranks()));
        }
        if (tokens.hidden.tokens > 0 && (tokens.hidden.hidden != format_.hidden || tokens.hidden.type != format_.sums)) {
            refuse("hidden states of " + std::to_string(tokens.hidden.hidden) + " " + std::string(name(tokens.hidden.type)) +
                   "; set up for " + std::to_string(format_.hidden) + " " + std::string(name(format_.sums)));
        }
    }

    void check_out(const activations_out& out) const { check_out(out, tokens_); }

    void check_out(const activations_out& out, std::uint32_t tokens) const {
        const bool served = out.type == dtype::f32 || out.type == dtype::bf16 || out.type == dtype::f16;
        if (out.tokens != tokens || (tokens > 0 && (out.hidden != format_.hidden || !served))) {
            throw configuration_error("penstock: expert_parallel: an output of " + std::to_string(out.tokens) + " x " +
                                      std::to_string(out.hidden) + " " + std::string(name(out.type)) + " for " + std::to_string(tokens) +
                                      " x " + std::to_string(format_.hidden));
        }
    }

    /// Tells every rank how many rows it will get; with a fixed capacity, all learn whether it holds everywhere.
    void agree_on_counts() {
        for (std::uint32_t d = 0; d < ranks(); ++d) {
            to_[d] = plan_.rows_to(d);
        }
        transport_.exchange_counts(to_, counts_);
        std::uint64_t received = 0;
        for (std::uint32_t s = 0; s < ranks(); ++s) {
            from_[s] = static_cast<std::uint32_t>(received);
            received += counts_[s];
        }
        from_[ranks()] = static_cast<std::uint32_t>(received);
        // Pairs are numbered in 31 bits.
        if (received * format_.top_k > 0x7fffffffu) {
            throw configuration_error("penstock: expert_parallel: " + std::to_string(received) + " rows come to rank " +
                                      std::to_string(rank()) + ", more than can be numbered");
        }
        if constexpr (fixed_capacity) {
            check_capacity(larger(plan_.rows(), from_.back()));
        }
    }

    void check_capacity(std::uint32_t needed) {
        std::vector<std::uint32_t>& needs = needed_;
        needs.resize(ranks());
        to_.assign(ranks(), needed > options_.rows ? needed : 0);
        transport_.exchange_counts(to_, needs);
        std::uint32_t worst = 0;
        for (std::uint32_t r = 1; r < ranks(); ++r) {
            worst = needs[r] > needs[worst] ? r : worst;
        }
        if (needs[worst] > 0) {
            to_.assign(ranks(), options_.rows);
            transport_.exchange_counts(to_, counts_);
            throw capacity_exceeded("penstock: expert_parallel: rank " + std::to_string(worst) + " needs room for " +
                                    std::to_string(needs[worst]) + " rows, " + std::to_string(counts_[worst]) +
                                    " are set up; nothing was sent");
        }
    }

    Transport transport_;
    expert_parallel_options options_;
    row_format format_;
    typename Transport::row_steps steps_{};
    row_exchange<typename Transport::memory> exchange_;
    dispatch_plan plan_;
    step step_ = step::idle;
    std::uint32_t tokens_ = 0;                ///< of the call, those past the live count among them
    std::uint32_t experts_ = 0;               ///< that this rank holds
    std::vector<std::uint32_t> to_, counts_;  ///< [ranks]: to each rank, from each rank
    std::vector<std::uint32_t> needed_;       ///< [ranks], of capacity::fixed
    std::vector<std::uint32_t> from_;         ///< [ranks + 1]: received rows before each rank's
    expert_rows rows_;
    exchange_report report_;
};

namespace detail {

template <class Transport, class... Ps>
struct make_expert_parallel {
    PENSTOCK_CHECK_POLICIES("expert_parallel", Ps...);
    static_assert(axis_count<axis::capacity, Ps...> <= 1, "penstock: expert_parallel takes one capacity, two were given");
    static_assert(axis_count<axis::replica, Ps...> <= 1, "penstock: expert_parallel takes one choice of replicas, two were given");
    static_assert(axis_count<axis::capacity, Ps...> + axis_count<axis::replica, Ps...> == sizeof...(Ps),
                  "penstock: expert_parallel takes a capacity and a choice of replicas, and no other policy");
    using type = basic_expert_parallel<Transport, pick_policy<axis::capacity, capacity::exact, Ps...>,
                                       pick_policy<axis::replica, replica::spread, Ps...>>;
};

}  // namespace detail

/// @tparam Ps in any order: capacity::exact (default) or capacity::fixed; replica::spread (default), replica::nearest or one of the user's
template <expert_transport Transport, class... Ps>
using expert_parallel = typename detail::make_expert_parallel<Transport, Ps...>::type;

}  // namespace penstock::inline v0_1

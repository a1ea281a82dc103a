#pragma once

#include <penstock/parallel/expert_parallel.hpp>
#include <penstock/parallel/host_rows.hpp>
#include <penstock/parallel/loopback.hpp>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <exception>
#include <random>
#include <string>
#include <thread>
#include <vector>

/// Worlds of threads, tokens routed at random, and experts simple enough that what they give is known in double.
namespace parallel_world {

namespace ps = penstock;
using ps::transport::loopback;

/// What each rank threw, or null: f(endpoint) on a thread for each rank.
template <class F>
std::vector<std::exception_ptr> on_every_rank(std::uint32_t ranks, F&& f, std::chrono::milliseconds limit = std::chrono::seconds(60)) {
    std::vector<loopback> endpoints = loopback::world(ranks, limit);
    std::vector<std::exception_ptr> thrown(ranks);
    std::vector<std::thread> threads;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        threads.emplace_back([&, r, endpoint = std::move(endpoints[r])]() mutable {
            try {
                f(std::move(endpoint));
            } catch (...) {
                thrown[r] = std::current_exception();
            }
        });
    }
    for (std::thread& t : threads) {
        t.join();
    }
    return thrown;
}

inline std::string text_of(const std::exception_ptr& e) {
    try {
        if (e != nullptr) {
            std::rethrow_exception(e);
        }
    } catch (const std::exception& what) {
        return what.what();
    }
    return {};
}

/// Tokens of all ranks, and where they are routed.
struct batch {
    std::uint32_t hidden = 0, top_k = 0, experts = 0;
    ps::dtype type = ps::dtype::f32;
    std::vector<std::uint32_t> tokens;           ///< by rank
    std::vector<std::vector<std::byte>> rows;    ///< by rank: [tokens, hidden]
    std::vector<std::vector<std::int32_t>> ids;  ///< by rank: [tokens, top_k]
    std::vector<std::vector<float>> weights;     ///< likewise
};

/// `skew` 0: distinct experts evenly; larger: the lower experts more and more often. A few choices are -1.
inline batch random_batch(std::mt19937& random, std::uint32_t hidden, std::uint32_t top_k, std::uint32_t experts, ps::dtype type,
                          std::vector<std::uint32_t> tokens, double skew = 0) {
    batch b{hidden, top_k, experts, type, std::move(tokens), {}, {}, {}};
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<double> uniform(0, 1);
    for (const std::uint32_t n : b.tokens) {
        std::vector<std::byte>& rows = b.rows.emplace_back(std::size_t{n} * hidden * ps::bits(type) / 8);
        for (std::size_t i = 0; i < std::size_t{n} * hidden; ++i) {
            ps::store_element(rows.data(), type, i, normal(random));
        }
        std::vector<std::int32_t>& ids = b.ids.emplace_back();
        std::vector<float>& weights = b.weights.emplace_back();
        for (std::uint32_t t = 0; t < n; ++t) {
            std::vector<char> taken(experts, 0);
            for (std::uint32_t j = 0; j < top_k; ++j) {
                std::int32_t e = -1;
                if (j < experts && random() % 16 != 0) {
                    do {
                        e = static_cast<std::int32_t>(std::pow(uniform(random), 1 + skew) * experts);
                    } while (taken[e] != 0);
                    taken[e] = 1;
                }
                ids.push_back(e);
                weights.push_back(static_cast<float>(uniform(random)));
            }
        }
    }
    return b;
}

inline double factor_of(std::uint32_t expert) { return 0.5 + 0.125 * (expert % 7); }

/// Element i of what expert e makes of a row x.
inline double expert_at(std::uint32_t e, auto&& x, std::uint32_t hidden, std::uint32_t i) {
    return factor_of(e) * x(i) - 0.25 * x((i + e + 1) % hidden);
}

/// All that one rank should get, in double. @param live tokens that count @param shared_factor times x is added
inline std::vector<double> reference(const batch& b, std::uint32_t rank, std::uint32_t live, double shared_factor = 0) {
    std::vector<double> out(std::size_t{b.tokens[rank]} * b.hidden);
    for (std::uint32_t t = 0; t < live; ++t) {
        const auto x = [&](std::uint32_t i) {
            return static_cast<double>(ps::load_element(b.rows[rank].data(), b.type, std::size_t{t} * b.hidden + i));
        };
        for (std::uint32_t i = 0; i < b.hidden; ++i) {
            double sum = shared_factor * x(i);
            for (std::size_t p = std::size_t{t} * b.top_k; p < (t + std::size_t{1}) * b.top_k; ++p) {
                if (b.ids[rank][p] >= 0) {
                    sum += b.weights[rank][p] * expert_at(static_cast<std::uint32_t>(b.ids[rank][p]), x, b.hidden, i);
                }
            }
            out[std::size_t{t} * b.hidden + i] = sum;
        }
    }
    return out;
}

/// The simple experts as a hook.
struct simple_experts {
    const ps::expert_placement* placement;
    std::uint32_t rank;

    void operator()(const ps::expert_rows& rows, ps::activations_out sums) const {
        std::vector<float> x(std::size_t{rows.rows} * rows.width);
        std::vector<float> partial(std::size_t{rows.rows} * rows.top_k * rows.width, std::nanf(""));
        ps::widen(rows, x.data());
        for (std::uint32_t e = 0; e < rows.experts; ++e) {
            const std::uint32_t global = placement->experts_of(rank)[e];
            for (std::uint32_t n = rows.offsets[e]; n < rows.offsets[e + 1]; ++n) {
                const std::size_t pair = static_cast<std::size_t>(rows.pairs[n]);
                const float* row = &x[pair / rows.top_k * rows.width];
                for (std::uint32_t i = 0; i < rows.width; ++i) {
                    partial[pair * rows.width + i] = static_cast<float>(expert_at(
                        global, [&](std::uint32_t c) { return double{row[c]}; }, rows.width, i));
                }
            }
        }
        ps::weigh(rows, partial.data(), sums);
    }
};

inline ps::routed_tokens tokens_of(const batch& b, std::uint32_t rank, const std::int32_t* live = nullptr) {
    return {{b.rows[rank].data(), b.type, b.tokens[rank], b.hidden}, b.ids[rank].data(), b.weights[rank].data(), live};
}

/// Largest difference over the largest wanted value.
inline double relative_error(const std::vector<float>& found, const std::vector<double>& wanted) {
    double most = 0, size = 1e-30;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        most = std::isnan(found[i]) ? INFINITY : std::max(most, std::fabs(found[i] - wanted[i]));
        size = std::max(size, std::fabs(wanted[i]));
    }
    return most / size;
}

/// Size of the difference over the size of what was wanted, both as root mean squares.
inline double relative_rms(const std::vector<float>& found, const std::vector<double>& wanted) {
    double difference = 0, size = 1e-30;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        difference += (found[i] - wanted[i]) * (found[i] - wanted[i]);
        size += wanted[i] * wanted[i];
    }
    return std::sqrt(difference / size);
}

/// Experts in runs of neighbours, as D01 wants them.
inline ps::expert_placement contiguous(std::uint32_t experts, std::uint32_t ranks) {
    std::vector<std::vector<std::uint32_t>> owners(experts);
    for (std::uint32_t r = 0; r < ranks; ++r) {
        const ps::index_range own = ps::share_of(experts, ranks, r);
        for (std::uint64_t e = own.first; e < own.end(); ++e) {
            owners[e] = {r};
        }
    }
    return {ranks, owners};
}

}  // namespace parallel_world

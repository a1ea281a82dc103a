#pragma once

#include <penstock/moe_layer.hpp>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

/// Hidden states of tokens that walk: each step keeps a part of the state before, so that experts are reused from step to step as in text.
namespace example {

namespace ps = penstock;

class token_walk {
public:
    token_walk(std::uint32_t tokens, std::uint32_t hidden, float kept) : state_(std::size_t{tokens} * hidden), kept_(kept) {
        for (float& v : state_) {
            v = normal_(random_);
        }
    }

    /// [tokens, hidden], components of deviation 1.
    [[nodiscard]] const std::vector<float>& next() {
        const float fresh = std::sqrt(1 - kept_ * kept_);
        for (float& v : state_) {
            v = kept_ * v + fresh * normal_(random_);
        }
        return state_;
    }

private:
    std::mt19937_64 random_{20261130};
    std::normal_distribution<float> normal_;
    std::vector<float> state_;
    float kept_;
};

/// Share of `now`'s experts that `before` had too; both sorted and without repeats.
inline double shared_part(const std::vector<std::int32_t>& before, const std::vector<std::int32_t>& now) {
    std::vector<std::int32_t> both;
    std::ranges::set_intersection(before, now, std::back_inserter(both));
    return now.empty() ? 0 : static_cast<double>(both.size()) / static_cast<double>(now.size());
}

inline std::vector<std::int32_t> distinct(std::vector<std::int32_t> ids) {
    std::ranges::sort(ids);
    ids.erase(std::ranges::unique(ids).begin(), ids.end());
    return ids;
}

/// How much of the state a walk must keep so that the first layer's router reuses the share `wanted` of its experts: by bisection.
/// @param router [experts, hidden] in host memory
inline float kept_for_reuse(const ps::moe_layer_model& layer, const ps::router_ref& router, std::uint32_t tokens, double wanted) {
    ps::executor::host host;
    const std::uint32_t k = layer.routing.top_k;
    const auto reuse_at = [&](float kept) {
        token_walk walk(tokens, layer.hidden, kept);
        std::vector<float> logits(std::size_t{tokens} * layer.routing.experts);
        std::vector<float> weights(std::size_t{tokens} * k);
        std::vector<std::int32_t> ids(std::size_t{tokens} * k);
        std::vector<std::int32_t> before;
        double sum = 0;
        constexpr int steps = 48;
        for (int s = 0; s <= steps; ++s) {
            host.logits(router, walk.next().data(), tokens, logits.data());
            host.route(layer.routing, router, logits.data(), tokens, nullptr, ids.data(), weights.data());
            std::vector<std::int32_t> now = distinct(ids);
            sum += s == 0 ? 0 : shared_part(before, now);
            before = std::move(now);
        }
        return sum / steps;
    };
    float low = 0;
    float high = 1;
    for (int i = 0; i < 8; ++i) {
        const float middle = (low + high) / 2;
        (reuse_at(middle) < wanted ? low : high) = middle;
    }
    return (low + high) / 2;
}

}  // namespace example

#pragma once

#include <penstock/model/record.hpp>

#include <cmath>

/// What lies between an expert's two matrices, in float32, for host and device.

namespace penstock::inline v0_1 {

/// The part of an `expert_layout` that `activate` needs.
struct activation_rule {
    activation kind = activation::swiglu;
    float alpha = 1.702f;
    float limit = 0.0f;
};

[[nodiscard]] PENSTOCK_HD inline activation_rule rule_of(const expert_layout& layout) noexcept {
    return {layout.act, layout.alpha, layout.limit};
}

/// act(gate, up) as `activation` defines it. NaN goes through.
[[nodiscard]] PENSTOCK_HD inline float activate(const activation_rule& rule, float gate, float up) noexcept {
    if (rule.kind != activation::swiglu) {
        gate = gate > rule.limit ? rule.limit : gate;
        up = up > rule.limit ? rule.limit : up < -rule.limit ? -rule.limit : up;
    }
    if (rule.kind == activation::gpt_oss) {
        return gate / (1.0f + ::expf(-rule.alpha * gate)) * (up + 1.0f);
    }
    return gate / (1.0f + ::expf(-gate)) * up;
}

}  // namespace penstock::inline v0_1

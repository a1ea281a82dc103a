#include <penstock/dispatch/cuda_experts.hpp>

namespace ps = penstock;

bool refuses_another_format() {
    const ps::executor::cuda<ps::format::bf16> run(nullptr);
    ps::expert_layout layout{};
    layout.kind = ps::weight_kind::mxfp4;
    const ps::expert_work work{};
    try {
        run.experts(layout, {&work, 1}, nullptr, 1, nullptr, nullptr, nullptr, nullptr);
    } catch (const ps::configuration_error&) {
        return true;
    }
    return false;
}

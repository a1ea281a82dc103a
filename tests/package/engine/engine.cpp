#include <penstock/penstock.hpp>

#include <cstdio>

namespace ps = penstock;

using kernels = ps::executor::cuda<ps::format::bf16>;

bool refuses_another_format();

int main() {
    static_assert(kernels::computes(ps::weight_kind::bf16) && !kernels::computes(ps::weight_kind::mxfp4));
    // No tokens: nothing is launched, which needs no GPU either; but the members must have been instantiated.
    const kernels run(nullptr);
    run.widen({}, nullptr);
    run.permute(nullptr, 0, 0, nullptr, nullptr, {});
    run.combine(nullptr, nullptr, nullptr, 1, nullptr, {});
    const bool right = refuses_another_format();
    std::printf("kernels of the engine's one .cu file are linked; another format is refused: %s\n", right ? "yes" : "no");
    return right ? 0 : 1;
}

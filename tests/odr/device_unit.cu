#include "everything.cuh"
#include "look.hpp"

facts first_device_unit() {
    // Both .cu files instantiate the kernels of the same executor. No tokens: nothing is launched, which needs no GPU.
    const penstock::executor::cuda<penstock::format::bf16> run(nullptr);
    run.widen({}, nullptr);
    run.combine(nullptr, nullptr, nullptr, 1, nullptr, {});
    try {
        run.experts({}, {}, nullptr, 1, nullptr, nullptr, nullptr, nullptr);
    } catch (const penstock::configuration_error&) {  // an expert without a shape
    }
    return look();
}

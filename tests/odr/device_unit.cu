#include "everything.cuh"
#include "look.hpp"

facts first_device_unit() {
    // Both .cu files instantiate the kernels of the same executor.
    const penstock::executor::cuda<penstock::format::bf16> run(nullptr);
    run.experts({}, {}, nullptr, 1, nullptr, nullptr, nullptr, nullptr);
    run.widen({}, nullptr);
    run.combine(nullptr, nullptr, nullptr, 1, nullptr, {});
    run.permute(nullptr, 0, 1, nullptr, nullptr, {});
    return look();
}

#include "gpu_work.hpp"

#include <penstock/cuda/event.hpp>
#include <penstock/cuda/launch.cuh>
#include <penstock/cuda/stream.hpp>

#include <doctest/doctest.h>

#include <optional>

namespace {

using namespace penstock;

__global__ void use_shared(int* out, int last) {
    extern __shared__ int space[];
    space[last] = 41;
    __syncthreads();
    *out = space[last] + 1;
}

std::optional<stream> stream_that_outlives_main;
std::optional<event> event_that_outlives_main;

}  // namespace

TEST_CASE("an event is ready when its stream's work is done, and not before") {
    const stream s;
    event e;
    CHECK(e.ready());
    e.synchronize();
    const stream other;
    tests::keep_busy(s.get(), 200);
    e.record(s.get());
    CHECK_FALSE(e.ready());
    e.make_wait(other.get());
    event behind(waiting::sleep);
    behind.record(other.get());
    CHECK_FALSE(behind.ready());
    behind.synchronize();
    CHECK(e.ready());
    s.synchronize();
}

TEST_CASE("a timed event measures on the device") {
    const stream s;
    timed_event start;
    timed_event stop;
    start.record(s.get());
    tests::keep_busy(s.get(), 20);
    stop.record(s.get());
    stop.synchronize();
    CHECK(stop.milliseconds_since(start) > 5);
    CHECK(stop.milliseconds_since(start) < 500);
}

TEST_CASE("launch opts in to shared memory, launches nothing for an empty grid, and refuses what the device does not grant") {
    int* out = nullptr;
    check(cudaMallocManaged(&out, sizeof(int)), "cudaMallocManaged");
    const stream s;
    for (const std::size_t size : {std::size_t{1} << 10, std::size_t{48} << 10, std::size_t{96} << 10}) {
        *out = 0;
        launch(use_shared, 1, 32, size, s.get(), out, static_cast<int>(size / sizeof(int)) - 1);
        s.synchronize();
        CHECK(*out == 42);
    }
    launch(use_shared, dim3(0), 32, 0, s.get(), out, 0);
    CHECK_THROWS_AS(launch(use_shared, 1, 32, std::size_t{1} << 20, s.get(), out, 0), configuration_error);
    CHECK_THROWS_AS(launch(use_shared, 1, 4096, 0, s.get(), out, 0), cuda_error);
    CHECK(cudaGetLastError() == cudaSuccess);
    check(cudaFree(out), "cudaFree");
}

TEST_CASE("the caller's device is unchanged, and handles of other devices work") {
    const int last = device_count() - 1;
    for (int current = 0; current <= last; ++current) {
        check(cudaSetDevice(current), "cudaSetDevice");
        for (int device = 0; device <= last; ++device) {
            const stream s(device);
            event e;
            e.record(s.get());
            e.synchronize();
            { const device_guard on(device); }
            int now = -1;
            check(cudaGetDevice(&now), "cudaGetDevice");
            CHECK(now == current);
        }
    }
    check(cudaSetDevice(0), "cudaSetDevice");
    CHECK_THROWS_AS(stream(last + 1), cuda_error);
    CHECK_THROWS_AS(require_device(last + 1, "test"), configuration_error);
    int now = -1;
    check(cudaGetDevice(&now), "cudaGetDevice");
    CHECK(now == 0);
    CHECK(numa_node(0) >= -1);
}

TEST_CASE("a stream knows whether it is being captured") {
    const stream s;
    CHECK_FALSE(is_capturing(s.get()));
    check(cudaStreamBeginCapture(s.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    CHECK(is_capturing(s.get()));
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(s.get(), &graph), "cudaStreamEndCapture");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

TEST_CASE("M10 objects that outlive main: a stream and an event") {
    stream_that_outlives_main.emplace();
    event_that_outlives_main.emplace();
    event_that_outlives_main->record(stream_that_outlives_main->get());
}

#pragma once

#include <penstock/cuda/event.hpp>
#include <penstock/error.hpp>

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

/// Calls that are timed as a CUDA graph.
class graph_of_calls {
public:
    /// `enqueue(call)` for each call in turn; the first once before, which brings the kernels to the device.
    template <class Enqueue>
    graph_of_calls(cudaStream_t stream, std::uint32_t calls, Enqueue&& enqueue) : stream_(stream), calls_(calls) {
        using penstock::check;
        enqueue(0);
        check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t ready = nullptr;
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        for (std::uint32_t call = 0; call < calls; ++call) {
            enqueue(call);
        }
        check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
        check(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
        ready_.reset(ready);
        check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }

    /// Microseconds of a call. With `after_another`, what is timed follows another replay, during which the host has the time to enqueue it:
    /// for calls of few microseconds.
    double microseconds(bool after_another = false) {
        using penstock::check;
        if (after_another) {
            check(cudaGraphLaunch(ready_.get(), stream_), "cudaGraphLaunch");
        }
        begin_.record(stream_);
        check(cudaGraphLaunch(ready_.get(), stream_), "cudaGraphLaunch");
        end_.record(stream_);
        end_.synchronize();
        return static_cast<double>(end_.milliseconds_since(begin_)) * 1000 / calls_;
    }

private:
    cudaStream_t stream_;
    std::uint32_t calls_;
    std::unique_ptr<CUgraphExec_st, decltype(&cudaGraphExecDestroy)> ready_{nullptr, &cudaGraphExecDestroy};
    penstock::timed_event begin_, end_;
};

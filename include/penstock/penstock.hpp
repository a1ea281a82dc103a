#pragma once

/// Everything that a .cpp file may include, without checkpoint/ (which needs nlohmann_json).

#include <penstock/buffer/arena.hpp>
#include <penstock/buffer/buffer.hpp>
#include <penstock/buffer/ring.hpp>
#include <penstock/config.hpp>
#include <penstock/cuda/device.hpp>
#include <penstock/cuda/event.hpp>
#include <penstock/cuda/stream.hpp>
#include <penstock/dispatch/cuda_experts.hpp>
#include <penstock/dispatch/host_experts.hpp>
#include <penstock/error.hpp>
#include <penstock/kv/block_pool.hpp>
#include <penstock/kv/block_stream.hpp>
#include <penstock/model/moe_model.hpp>
#include <penstock/model/selection.hpp>
#include <penstock/model/shard_plan.hpp>
#include <penstock/moe_layer.hpp>
#include <penstock/parallel/expert_parallel.hpp>
#include <penstock/parallel/loopback.hpp>
#include <penstock/parallel/rebalance.hpp>
#include <penstock/policy/chunking.hpp>
#include <penstock/policy/eviction.hpp>
#include <penstock/policy/memory.hpp>
#include <penstock/policy/prefetch.hpp>
#include <penstock/policy/scheduling.hpp>
#include <penstock/residency/expert_store.hpp>
#include <penstock/residency/simulate.hpp>
#include <penstock/stream/load_sharded.hpp>
#include <penstock/stream/weight_stream.hpp>
#include <penstock/units.hpp>
#include <penstock/version.hpp>

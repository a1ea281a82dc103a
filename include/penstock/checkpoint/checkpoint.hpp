#pragma once

/// Files to tensors and models. Needs nlohmann_json: link penstock::checkpoint.

#include <penstock/checkpoint/families.hpp>
#include <penstock/checkpoint/safetensors.hpp>
#include <penstock/checkpoint/safetensors_writer.hpp>
#include <penstock/checkpoint/sharded.hpp>

// All state of one device in host memory: what a checkpoint is written from, and what one is
// restored through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/tensor.h"

namespace muond {

struct StateCopy {
  struct Tensor {
    std::string name;  // "master", "momentum", "exp_avg", "exp_avg_sq"
    kernels::Dtype dtype = kernels::Dtype::kF32;
    std::byte* data = nullptr;  // aligned to 64
    std::int64_t bytes = 0;
  };
  // One shard, in the engine's order; tensors by name.
  struct Shard {
    int parameter = 0;
    std::int64_t first = 0, elements = 0;
    std::int64_t t = 0;
    std::vector<Tensor> tensors;
  };
  std::vector<Shard> shards;
  std::unique_ptr<std::byte[]> memory;
  std::int64_t bytes = 0;
  double seconds = 0;  // that the copying took, with no step applied meanwhile
};

// By device.
using StateCopies = std::vector<StateCopy>;

}  // namespace muond

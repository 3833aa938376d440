// Memory for the gradients of the step in flight, kept from step to step: a steady state allocates
// nothing and touches no fresh pages. What a step did not need is freed at its end.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/values.h"
#include "server/engine/buffer.h"

namespace muond {

class Staging {
 public:
  // `bytes_max`: what may be held at once; 0: what the machine has free.
  Staging(kernels::Backend& backend, std::int64_t bytes_max)
      : backend_(backend), bytes_max_(bytes_max) {}

  // Memory for a tensor, contents undefined. RESOURCE_EXHAUSTED when the limit is reached.
  absl::StatusOr<std::shared_ptr<Buffer>> Acquire(std::int64_t elements, Dtype dtype);
  // The step is done with it. Memory that a late stream still holds is freed by that stream
  // instead of being used again.
  void Release(std::shared_ptr<Buffer> memory);

  // The step is over: frees what it did not use. Call before its own memory is released.
  void Trim();

  std::int64_t bytes() const { return bytes_; }  // handed out and spare

 private:
  absl::Status CheckRoom(std::int64_t bytes);

  kernels::Backend& backend_;
  const std::int64_t bytes_max_;
  std::int64_t room_ = 0;  // of the machine's free memory, what was asked for last
  std::multimap<std::size_t, std::shared_ptr<Buffer>> spare_;  // by size
  std::int64_t bytes_ = 0;
};

}  // namespace muond

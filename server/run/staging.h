// Memory for the gradients of the step in flight, kept from step to step: a steady state allocates
// nothing and touches no fresh pages.
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
  explicit Staging(kernels::Backend& backend) : backend_(backend) {}

  // Memory for a tensor, contents undefined. RESOURCE_EXHAUSTED when there is none left.
  absl::StatusOr<std::shared_ptr<Buffer>> Acquire(std::int64_t elements, Dtype dtype);
  // The step is done with it. Memory that a late stream still holds is freed by that stream
  // instead of being used again.
  void Release(std::shared_ptr<Buffer> memory);

  std::int64_t bytes() const { return bytes_; }  // handed out and spare

 private:
  kernels::Backend& backend_;
  std::multimap<std::size_t, std::shared_ptr<Buffer>> spare_;  // by size
  std::int64_t bytes_ = 0;
};

}  // namespace muond

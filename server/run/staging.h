// Memory for the gradients of the step in flight, kept from step to step: a steady state allocates
// nothing and touches no fresh pages. What a step did not need is freed at its end. Within a step
// memory goes round: what was copied to a device serves the tensors that follow.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "absl/status/statusor.h"
#include "proto/values.h"
#include "server/engine/buffer.h"

namespace muond {

class Staging {
 public:
  // `bytes_max`: what may be held at once; 0: what the machine has free.
  explicit Staging(std::int64_t bytes_max) : bytes_max_(bytes_max) {}

  void set_bytes_max(std::int64_t bytes_max) { bytes_max_ = bytes_max; }

  // Staging memory of that backend for a tensor, contents undefined. RESOURCE_EXHAUSTED when the
  // limit is reached.
  absl::StatusOr<std::shared_ptr<StagingBuffer>> Acquire(kernels::Backend& backend,
                                                         std::int64_t elements, Dtype dtype,
                                                         StagingPlace place = StagingPlace::kHost);
  // The step is done with it. Memory that somebody still holds is not used again until they let go.
  void Release(std::shared_ptr<StagingBuffer> memory);

  // The step is over and has released its memory: frees what it did not use.
  void Trim();

  std::int64_t bytes() const { return bytes_; }  // handed out and spare

 private:
  absl::Status CheckRoom(std::int64_t bytes);

  std::int64_t bytes_max_;
  std::int64_t room_ = 0;  // of the machine's free memory, what was asked for last
  // Whose, where, how many bytes.
  using Kind = std::tuple<const kernels::Backend*, StagingPlace, std::size_t>;
  using ByKind = std::multimap<Kind, std::shared_ptr<StagingBuffer>>;
  static std::shared_ptr<StagingBuffer> Take(ByKind& from, const Kind& kind);
  ByKind released_;  // by this step
  ByKind spare_;     // by those before, and not used since
  std::int64_t bytes_ = 0;
};

}  // namespace muond

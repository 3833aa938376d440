// How large AdamW's updates are against its weights, on a sample of elements: the first ones of
// each tensor, equally many, copied before the update and subtracted after it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/engine.h"

namespace muond {

class AdamWSample {
 public:
  // Of the AdamW states with these indices. The arguments must outlive the object.
  AdamWSample(Engine& engine, const CommitRequest& request, const std::vector<int>& states);

  absl::Status Before();
  // Enters the ratios in the report.
  absl::Status After(CommitReport& report);

 private:
  struct Piece {
    const ShardState* state;
    float* copy;  // in the backend's memory: the weights before, then the update
    std::size_t elements;
  };
  absl::Status LayOut();

  Engine& engine_;
  const CommitRequest& request_;
  const std::vector<int>& states_;
  Buffer memory_;  // where the engine's scratch is too small
  char* iterates_ = nullptr;  // behind the copies; written, never read
  std::vector<Piece> pieces_;
  std::vector<kernels::StateScan> before_;
};

}  // namespace muond

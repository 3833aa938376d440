// The copy of a run's state that a checkpoint is written from.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "server/checkpoint/manifest.h"
#include "server/engine/state_copy.h"

namespace muond {

// What this daemon owns at one version, in host memory, and what is alike on all daemons then.
struct StateImage {
  std::shared_ptr<StateCopies> copies;
  checkpoint::Control control;
  double copy_seconds = 0;  // for which no step could be applied
  bool ready = false;
  absl::Status status;  // of the copy, once ready
};

}  // namespace muond

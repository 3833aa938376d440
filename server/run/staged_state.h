// State that a daemon holds beside its own until a Raise takes it over.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/checkpoint/manifest.h"
#include "server/engine/engine.h"
#include "server/engine/state_copy.h"

namespace muond {

// A step that a recovered daemon takes again.
struct ReplayStep {
  std::int64_t step = 0;
  double clip_coefficient = 1;
  HyperparametersByGroup muon, adamw;
  std::vector<ReduceRequest> gradients;
};

struct StagedState {
  std::string name;  // of the checkpoint, or kFromBuddy
  std::shared_ptr<StateCopies> copies;
  checkpoint::Control control;  // at the version that the run goes on from
  // From a buddy: the steps since the copy, and the version of the snapshot there.
  std::vector<ReplayStep> replay;
  std::int64_t held = -1;
};

}  // namespace muond

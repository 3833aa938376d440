// Raises a run's generation on all of its daemons: first all promise, then all raise
// (StepMachine::OnPrepare says why). Any daemon may run it, several at a time: a daemon keeps its
// highest promise, and whoever comes too late starts over above it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/cluster/peers.h"
#include "server/step/step_machine.h"

namespace muond {

struct RaiseOrder {
  std::int64_t generation = 0;
  std::vector<CastVote> settled;  // see SettledVotes
  bool reinitialize = false;      // forget all state and go on at resume_step with initial values
  std::int64_t resume_step = 0;
  std::string restore;  // with reinitialize: the staged checkpoint that takes the place of values
};

// A reinitialization from a checkpoint that all daemons have staged.
struct RestoreOrder {
  std::string name;
  std::int64_t step = 0;
};

// This daemon's own part, done as the others do theirs.
struct RaiseHooks {
  std::function<absl::StatusOr<StepMachine::Promise>(std::int64_t generation)> prepare;
  std::function<absl::Status(const RaiseOrder&)> raise;
};

// Blocks until all have raised it. UNAVAILABLE naming the daemons that did not answer by
// `deadline`: those that have promised wait for another try, and no step is applied meanwhile.
// FAILED_PRECONDITION when their states are of different lineages (CheckOneLineage), unless state
// is forgotten. `restore`: where to go on, else with initial values at the highest next step of
// all.
absl::Status RaiseGeneration(Peers& peers, const std::string& run, const std::string& plan_hash,
                             std::int64_t current, bool reinitialize, const RaiseHooks& own,
                             absl::Time deadline, const RestoreOrder& restore = {});

}  // namespace muond

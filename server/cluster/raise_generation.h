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
  // With `restore`: the lineage that its state is of, not a new one; 0: a new one.
  std::int64_t lineage = 0;
  bool recover = false;  // see RecoverGeneration
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
  // Of RecoverGeneration: this daemon's state of a version from its buddy, beside the empty one.
  std::function<absl::Status(std::int64_t version, std::int64_t lineage)> recover = nullptr;
};

// What a daemon names the state that it got from its buddy, in RaiseOrder::restore.
inline constexpr char kFromBuddy[] = "buddy";

// Blocks until all have raised it. UNAVAILABLE naming the daemons that did not answer by
// `deadline`: those that have promised wait for another try, and no step is applied meanwhile.
// FAILED_PRECONDITION when their states are of different lineages (CheckOneLineage), unless state
// is forgotten. `restore`: where to go on, else with initial values at the highest next step of
// all.
absl::Status RaiseGeneration(Peers& peers, const std::string& run, const std::string& plan_hash,
                             std::int64_t current, bool reinitialize, const RaiseHooks& own,
                             absl::Time deadline, const RestoreOrder& restore = {});

// Daemons that came back without their state get it from their buddies, at the version that the
// others have or are about to have, and all go on in a new generation; state keeps its lineage. The
// others raise first, so that no verdict is open any more. Blocks. FAILED_PRECONDITION when it is
// not to be had (no daemon has any state, a buddy has nothing); UNAVAILABLE to be tried again.
absl::Status RecoverGeneration(Peers& peers, const std::string& run, const std::string& plan_hash,
                               std::int64_t current, const RaiseHooks& own, absl::Time deadline);

}  // namespace muond

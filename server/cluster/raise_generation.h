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

// A reinitialization from a checkpoint that all daemons have staged.
struct RestoreOrder {
  std::string name;
  std::int64_t step = 0;
};

// What whoever asks for a new generation wants of it.
struct RaiseWish {
  std::int64_t current = 0;  // the generation to leave
  bool reinitialize = false;
  // Of reinitialize: state that was made anew in a generation above `current` stays, and the wish
  // is refused: of two that want it at a time one has it.
  bool unless_made_anew = false;
  std::string adopt;  // parameters that all daemons have been told of (AdditionName), or none
  RestoreOrder restore = {};
};

// What a daemon promises, and which parameters it has.
struct DaemonPromise {
  StepMachine::Promise steps;
  std::int64_t additions = 0;  // adopted in all
  std::string adopted;         // name of the newest
};

struct RaiseOrder {
  std::int64_t generation = 0;
  std::vector<CastVote> settled;  // see SettledVotes
  bool reinitialize = false;      // forget all state and go on at resume_step with initial values
  std::int64_t resume_step = 0;
  std::string restore;  // with reinitialize: the staged checkpoint that takes the place of values
  // Parameters that are the run's from now on. Where a coordinator died half way, those that some
  // daemon has adopted already: nobody falls back behind them.
  std::string adopt;
};

// This daemon's own part, done as the others do theirs.
struct RaiseHooks {
  std::function<absl::StatusOr<DaemonPromise>(std::int64_t generation)> prepare;
  std::function<absl::Status(const RaiseOrder&)> raise;
};

// Blocks until all have raised it. UNAVAILABLE naming the daemons that did not answer by
// `deadline`: those that have promised wait for another try, and no step is applied meanwhile.
// FAILED_PRECONDITION when their states are of different lineages (CheckOneLineage), unless state
// is forgotten, or when a daemon can't do what is wished. With reinitialize the run goes on where
// `wish.restore` says, else with initial values at the highest next step of all.
absl::Status RaiseGeneration(Peers& peers, const std::string& run, const std::string& plan_hash,
                             const RaiseWish& wish, const RaiseHooks& own, absl::Time deadline);

}  // namespace muond

// What a run knows, and what guards it: the fields of Run, whose methods are in run.h.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/mutex.h"
#include "proto/values.h"
#include "server/buddy/buddy_sender.h"
#include "server/buddy/held_state.h"
#include "server/cluster/timer.h"
#include "server/cluster/vote_exchange.h"
#include "server/engine/engines.h"
#include "server/run/generation_file.h"
#include "server/run/initial_values.h"
#include "server/run/pending_addition.h"
#include "server/run/registries.h"
#include "server/run/run_context.h"
#include "server/run/slice_table.h"
#include "server/run/snapshot.h"
#include "server/run/staged_state.h"
#include "server/run/staging.h"
#include "server/run/state_image.h"
#include "server/step/step_machine.h"

namespace muond {

using OutcomeCallback = std::function<void(const absl::Status&, const std::optional<StepOutcome>&)>;

class RunFields {
 protected:
  RunFields(Registry registry, const RunContext& context, std::string overlap);

  const RunContext context_;
  Registries registries_;
  std::unique_ptr<Engines> engines_ MUOND_PT_GUARDED_BY(mutex_);
  std::unique_ptr<RunMetrics> metrics_;
  std::unique_ptr<StepObserver> observer_;
  std::vector<std::string> group_names_ MUOND_GUARDED_BY(mutex_);
  const std::string overlap_;  // "on", or why not

  mutable Mutex mutex_;
  // From the moment that all ranks have joined.
  std::unique_ptr<StepMachine> machine_ MUOND_GUARDED_BY(mutex_);
  StepStart start_ MUOND_GUARDED_BY(mutex_);  // where it starts
  std::int64_t promised_ MUOND_GUARDED_BY(mutex_) = 0;  // before it: no vote below this generation
  const GenerationFile generation_file_;
  std::optional<GenerationRecord> stored_ MUOND_GUARDED_BY(mutex_);  // there
  Timer take_up_;  // goes off when a promise was not taken up
  absl::Duration take_up_pause_ MUOND_GUARDED_BY(mutex_) = absl::ZeroDuration();
  // Raised when all state is forgotten: what comes from before is stale.
  std::int64_t life_ MUOND_GUARDED_BY(mutex_) = 0;
  std::string lost_ MUOND_GUARDED_BY(mutex_);  // not empty: why the run needs a restore
  // Of the step that this daemon has voted on.
  std::shared_ptr<VoteExchange> vote_exchange_ MUOND_GUARDED_BY(mutex_);
  InitialValues initial_ MUOND_GUARDED_BY(mutex_);
  SliceTable initial_slices_ MUOND_GUARDED_BY(mutex_);
  SliceTable gradient_slices_ MUOND_GUARDED_BY(mutex_);
  // Slices of initial values on their way into the state, and who waits to know what became of one.
  std::map<SliceId, std::vector<std::function<void()>>> writing_ MUOND_GUARDED_BY(mutex_);
  // Parameters below: their values are the state's, none are taken.
  int values_from_ MUOND_GUARDED_BY(mutex_) = 0;
  bool running_ MUOND_GUARDED_BY(mutex_) = false;
  std::set<std::int64_t> left_ MUOND_GUARDED_BY(mutex_);
  absl::Status stopped_ MUOND_GUARDED_BY(mutex_);

  // The step in flight.
  Staging staging_ MUOND_GUARDED_BY(mutex_);
  // Memory null: reduced, and free already.
  std::map<Layer, GradientLayer> layers_ MUOND_GUARDED_BY(mutex_);
  // Those that have a whole slice: their dtype stands.
  std::set<Layer> settled_layers_ MUOND_GUARDED_BY(mutex_);
  std::optional<absl::Time> step_started_ MUOND_GUARDED_BY(mutex_);
  HyperparametersByGroup step_muon_ MUOND_GUARDED_BY(mutex_);
  HyperparametersByGroup step_adamw_ MUOND_GUARDED_BY(mutex_);
  // Of the first rank that gave any with its Finish.
  std::shared_ptr<ParameterTargets> targets_ MUOND_GUARDED_BY(mutex_);
  bool committing_ MUOND_GUARDED_BY(mutex_) = false;
  std::uint64_t next_waiter_ MUOND_GUARDED_BY(mutex_) = 1;
  std::map<std::uint64_t, OutcomeCallback> waiters_ MUOND_GUARDED_BY(mutex_);

  // Parameters to be added.
  std::unique_ptr<PendingAddition> addition_ MUOND_GUARDED_BY(mutex_);
  // Ordered, while a step of before was being committed.
  bool adopt_after_commit_ MUOND_GUARDED_BY(mutex_) = false;
  // The newest addition's name; empty: there was none.
  std::string adopted_ MUOND_GUARDED_BY(mutex_);
  // With their ranks.
  std::map<std::uint64_t, std::pair<std::int64_t, AdditionCallback>> adders_
      MUOND_GUARDED_BY(mutex_);

  // Checkpoints.
  // The state came from a checkpoint: no initial values are waited for.
  bool restored_ MUOND_GUARDED_BY(mutex_) = false;
  std::optional<StagedState> staged_ MUOND_GUARDED_BY(mutex_);
  std::shared_ptr<StateImage> image_ MUOND_GUARDED_BY(mutex_);  // the newest, until it is taken
  std::shared_ptr<StateCopies> spare_copies_ MUOND_GUARDED_BY(mutex_);  // memory for the next
  std::int64_t image_wanted_ MUOND_GUARDED_BY(mutex_) = -1;  // version that somebody waits for
  std::int64_t periodic_version_ MUOND_GUARDED_BY(mutex_) = -1;
  CondVar image_changed_;

  // Buddies; null where there are none.
  std::unique_ptr<HeldState> held_;  // of the daemon before this one
  // Memory of snapshots; shared while one is sent.
  std::shared_ptr<StateCopies> buddy_copies_ MUOND_GUARDED_BY(mutex_);
  std::int64_t buddy_snapshot_ MUOND_GUARDED_BY(mutex_) = -1;  // version of the last that was taken
  // That the buddy had when this state came from there.
  std::int64_t buddy_held_ MUOND_GUARDED_BY(mutex_) = -1;

  // Of the engine, as told to the metrics.
  std::int64_t workspace_bytes_ MUOND_GUARDED_BY(mutex_) = 0;
  // Totals and last values for Snapshot.
  RunTotals totals_ MUOND_GUARDED_BY(mutex_);
  // Destroyed first: its thread calls back.
  std::unique_ptr<BuddySender> buddy_;
};

}  // namespace muond

// Follows a run's steps for people and dashboards: fills the metrics of a commit's diagnostics,
// gathers the spans of time of the step in flight, and turns its outcome into an event and, every
// so many steps, into a line of the log. Decides nothing.
//
// Thread-safe; its own lock is taken under the run's.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "proto/mutex.h"
#include "server/engine/engines.h"
#include "server/metrics/daemon_metrics.h"
#include "server/run/step_events.h"

namespace muond {

struct ObserveOptions {
  std::string daemon;                    // this one's name, for events
  StepEvents* events = nullptr;          // null: nobody watches
  std::int64_t diagnostics_every = 100;  // sample each N-th step; 0: never
  std::int64_t summary_every = 100;      // a line in the log each N steps; 0: none
};

class StepObserver {
 public:
  // The arguments must outlive the object; what takes the place of `spec` likewise.
  StepObserver(const RunSpec& spec, const ObserveOptions& options, RunMetrics* run_metrics,
               DaemonMetrics* metrics);
  ~StepObserver();

  // Parameters were added.
  void OnParameters(const RunSpec& spec) { spec_ = &spec; }
  // Whether this step's commit is to be sampled.
  bool Samples(std::int64_t step) const;

  void OnBegin(absl::Time now);
  // A batch of reductions ended; results without `seconds` are other members of the batch.
  void OnReduced(const ReducedGradient& result);
  // All gradients are here and this daemon has voted; all have voted.
  void OnVote(absl::Time now);
  void OnVerdict(absl::Time now);
  void OnCommitted(const CommitReport& report);
  // The step has its outcome; `muon` and `adamw` are in force.
  void OnOutcome(const StepOutcome& outcome, RunMetrics::ScaleMove move, absl::Time now,
                 const HyperparametersByGroup& muon, const HyperparametersByGroup& adamw);
  // The step in flight was thrown away.
  void OnAbandoned();

 private:
  std::vector<NamedValue> Named(const RemarkableList& list) const;
  void Publish(const CommitDiagnostics& diagnostics);
  void Summarize(const StepEvent& event) MUOND_REQUIRES(mutex_);

  const RunSpec& spec() const { return *spec_.load(); }

  std::atomic<const RunSpec*> spec_;
  const ObserveOptions options_;
  RunMetrics* const run_metrics_;
  DaemonMetrics* const metrics_;

  Mutex mutex_;
  StepEvent event_ MUOND_GUARDED_BY(mutex_);  // of the step in flight
  absl::Time voted_ MUOND_GUARDED_BY(mutex_) = absl::InfinitePast();
  // Since the last line of the log.
  absl::Time summarized_ MUOND_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::int64_t applied_ MUOND_GUARDED_BY(mutex_) = 0;
  std::int64_t skipped_ MUOND_GUARDED_BY(mutex_) = 0;
  double worst_residual_ MUOND_GUARDED_BY(mutex_) = 0;  // of the last sampled step
};

}  // namespace muond

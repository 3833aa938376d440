// The series of one run, in the words of the run: made once when it opens, gone when it closes.
//
// A run with ten thousand parameters has as many series as one with ten: nothing here is per
// parameter, step or trainer. Names of offending parameters are in logs and DescribeParameters.
// Thread-safe. A gauge keeps its last value when told a non-finite one, so that a query never meets
// NaN; the counts of non-finite elements and tensors tell that story.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/mutex.h"
#include "proto/values.h"
#include "server/metrics/series.h"

namespace muond {

// More groups than this share the last slot, labelled "(other)": a run has a bounded number of
// series, whatever a client registers. Its sums are over those groups, and it has no learning rate.
inline constexpr int kMaxGroupSeries = 16;
inline constexpr char kOtherGroups[] = "(other)";

class RunMetrics {
 public:
  // In the order of the table's label `state`.
  enum class State : std::uint8_t {
    kOpening, kRunning, kCheckpointing, kDraining, kNeedsRestore, kFailed
  };

  // Which way the dynamic loss scale went with an outcome.
  enum class ScaleMove : std::uint8_t { kNone, kGrowth, kBackoff };

  struct Opening {
    std::string run = {};
    std::vector<std::string> groups = {};  // group indices below are positions here
    std::int64_t trainers_expected = 1;
    bool muon_expected = false;          // the run asked for Muon somewhere
    double loss_scale = 1.0;
    double loss_scale_min = 0;           // of a dynamic scale; 0: no floor, no series
    absl::Time opened = absl::UnixEpoch();
  };

  // Logical tensors of one group after routing, tied ones once.
  struct GroupParameters {
    std::int64_t muon = 0;
    std::int64_t adamw = 0;
    std::int64_t muon_elements = 0;
    std::int64_t adamw_elements = 0;
  };

  // Newton-Schulz of one group in one applied step.
  struct GroupCommit {
    std::int64_t calls = 0;        // matrices orthogonalized, zero inputs included
    std::int64_t zero_inputs = 0;
    std::int64_t fallbacks = 0;    // redone by the fp32 standard path
    // First attempts that were not `ok`. An engine that can't tell why it fell back says diverged.
    std::int64_t low_rank = 0;
    std::int64_t diverged = 0;
    std::int64_t nonfinite = 0;
    std::int64_t updates = 0;      // results that reached the weights
  };

  // What a commit measured in one group; none that is not finite.
  struct GroupMeasures {
    std::span<const double> cosines, update_ratios, residuals;
  };

  // Positions of the label `measure` of muond_worst_value.
  enum class Measure : std::uint8_t { kResidual, kUpdateRatio, kGradNorm };

  // State tensors with a non-finite element, at the last commit.
  struct NonfiniteTensors {
    std::int64_t momentum = 0;
    std::int64_t second_moment = 0;
    std::int64_t master_weight = 0;
  };

  // Frobenius norms over the state tensors of one group.
  struct GroupNorms {
    double momentum = 0;  // Muon's momenta and AdamW's first moments
    double weight = 0;    // master weights
  };

  // Made by DaemonMetrics::OpenRun. Every counter is there, at 0, from the first scrape on.
  RunMetrics(std::shared_ptr<MetricFamilies> families, Opening opening);

  // More groups, behind those that are there; whether any group of the run asks for Muon now. Comes
  // at no other call's time. Groups beyond the limit of series share a slot; one that has a slot of
  // its own keeps it.
  void AddGroups(const std::vector<std::string>& names, bool muon_expected);
  void SetState(State state);
  void SetTrainersConnected(std::int64_t ranks);
  // One entry per group of the opening, in its order.
  void SetParameters(std::span<const GroupParameters> groups);
  void SetLearningRate(int group, double learning_rate);

  // A step has begun. Repeating it for the step in flight keeps the first start.
  void OnStepBegin(absl::Time now);
  void SetWaitingShards(std::int64_t shards);
  // The step in flight was thrown away without an outcome (ranks disagreed, generation raised).
  void OnStepAbandoned();
  // The step has its outcome. Counts it under its cause, clears the step in flight; its duration is
  // the time since OnStepBegin (none is observed for a step that never began: a trainer's skip).
  void OnOutcome(const StepOutcome& outcome, ScaleMove move, absl::Time now);
  // The step could not be carried out and the run has failed.
  void OnStepFailed(absl::Time now);
  // What a commit did in one group; once per group and applied step.
  void OnGroupCommit(int group, const GroupCommit& commit);
  void ObserveMeasures(int group, const GroupMeasures& measures);
  // The largest values of a measure, descending. The ranks that have none keep what they had, and
  // none at all leaves the last step's.
  void SetWorst(Measure measure, std::span<const double> values);
  void SetStaleTensors(std::int64_t count);
  // This daemon's part in the run.
  void SetShardElements(std::int64_t elements);
  void AddBusySeconds(double seconds);
  // A request came again and was answered from memory.
  void OnDuplicateRequest();

  // Checkpoints. In the order of the label's values.
  enum class CheckpointResult : std::uint8_t { kSaved, kSaveFailed, kRestored, kRestoreFailed };
  void OnCheckpoint(CheckpointResult result);
  // One was saved: its step, bytes, and the time that it took from the copy of the state on.
  void OnCheckpointSaved(std::int64_t step, std::int64_t bytes, absl::Duration elapsed,
                         absl::Time now);
  void SetCheckpointInterval(absl::Duration interval);  // 0: none by time

  // Buddies. What a buddy took, and how long a step that was reduced waited for it.
  void OnBuddySent(std::int64_t bytes);
  void ObserveBuddyWait(absl::Duration elapsed);
  void OnBuddyRecovery(bool recovered);

  // Health of the state after a commit. One entry per group of the opening, in its order.
  void SetNorms(std::span<const GroupNorms> groups);
  void SetNonfiniteTensors(const NonfiniteTensors& counts);

 private:
  // The series that one group label has; several groups share the last slot when there are many.
  struct Slot {
    std::vector<prometheus::Gauge*> parameters, elements;  // muon, adamw
    prometheus::Gauge* learning_rate = nullptr;            // null: the slot of other groups
    prometheus::Gauge* momentum_norm = nullptr;
    prometheus::Gauge* weight_norm = nullptr;
    prometheus::Counter* ns_calls = nullptr;
    std::vector<prometheus::Counter*> ns_outcomes;  // ok, low_rank, diverged, nonfinite
    std::vector<prometheus::Counter*> ns_special;   // zero_input, fallback
    prometheus::Counter* muon_updates = nullptr;
    prometheus::Histogram* cosines = nullptr;
    prometheus::Histogram* update_ratios = nullptr;
    prometheus::Histogram* residuals = nullptr;
  };
  void AddRunSeries(const Opening& opening);
  Slot AddSlot(const std::string& run, const std::string& label, bool learning_rate);
  int SlotOf(int group) const;
  void ClearInflight() MUOND_REQUIRES(mutex_);

  // Keeps the families alive, and is destroyed after the set that refers to them.
  std::shared_ptr<MetricFamilies> families_;
  SeriesSet series_;
  const std::string run_;
  int groups_ = 0;
  std::vector<Slot> slots_;
  bool shared_ = false;  // the last slot is that of all other groups

  std::vector<prometheus::Gauge*> state_;
  prometheus::Gauge* trainers_connected_ = nullptr;
  prometheus::Gauge* muon_expected_ = nullptr;
  std::vector<prometheus::Counter*> steps_;  // by outcome label
  prometheus::Gauge* last_step_ = nullptr;
  prometheus::Gauge* last_step_timestamp_ = nullptr;
  prometheus::Gauge* inflight_ = nullptr;
  prometheus::Gauge* inflight_start_ = nullptr;
  prometheus::Gauge* waiting_shards_ = nullptr;
  prometheus::Histogram* step_duration_ = nullptr;
  prometheus::Gauge* consecutive_skips_ = nullptr;
  prometheus::Counter* duplicates_ = nullptr;
  std::vector<prometheus::Counter*> checkpoints_;  // by result
  prometheus::Histogram* checkpoint_duration_ = nullptr;
  prometheus::Gauge* checkpoint_size_ = nullptr;
  prometheus::Gauge* checkpoint_last_success_ = nullptr;
  prometheus::Gauge* checkpoint_last_step_ = nullptr;
  prometheus::Gauge* checkpoint_interval_ = nullptr;
  prometheus::Counter* buddy_sent_ = nullptr;
  prometheus::Histogram* buddy_wait_ = nullptr;
  std::vector<prometheus::Counter*> buddy_recoveries_;  // recovered, failed
  prometheus::Gauge* loss_scale_ = nullptr;
  std::vector<prometheus::Counter*> loss_scale_changes_;  // growth, backoff
  prometheus::Gauge* grad_norm_ = nullptr;
  prometheus::Counter* clipped_ = nullptr;
  std::vector<prometheus::Counter*> nonfinite_elements_;  // grad
  std::vector<prometheus::Gauge*> nonfinite_tensors_;
  std::vector<std::vector<prometheus::Gauge*>> worst_;  // by measure, then by rank
  prometheus::Gauge* stale_tensors_ = nullptr;
  prometheus::Gauge* shard_elements_ = nullptr;
  prometheus::Counter* busy_ = nullptr;

  Mutex mutex_;  // of gauges that change together, too
  absl::Time begun_ MUOND_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace muond

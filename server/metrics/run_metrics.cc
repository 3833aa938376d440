#include "server/metrics/run_metrics.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "proto/check.h"

namespace muond {
namespace {

using enum MetricId;

void Set(prometheus::Gauge* gauge, double value) {
  if (std::isfinite(value)) gauge->Set(value);
}

void Count(prometheus::Counter* counter, std::int64_t events) {
  if (events > 0) counter->Increment(static_cast<double>(events));
}

// One call for thousands of values: the histogram's lock is taken once.
void ObserveAll(prometheus::Histogram* histogram, MetricId id, std::span<const double> values) {
  if (values.empty()) return;
  const std::vector<double>& bounds = RowOf(id).buckets;
  std::vector<double> counts(bounds.size() + 1);
  double sum = 0;
  for (const double value : values) {
    ++counts[std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin()];
    sum += value;
  }
  histogram->ObserveMultiple(counts, sum);
}

double UnixSeconds(absl::Time time) { return absl::ToDoubleSeconds(time - absl::UnixEpoch()); }

// Positions of the label `outcome` of muond_steps_total.
enum StepOutcomeLabel : std::size_t {
  kApplied, kSkippedOverflow, kSkippedStateOverflow, kSkippedNormThreshold, kSkippedByTrainer,
  kFailed
};

StepOutcomeLabel LabelOf(const StepOutcome& outcome) {
  if (outcome.applied) return kApplied;
  switch (outcome.cause) {
    case SkipCause::kOverflow: return kSkippedOverflow;
    case SkipCause::kStateOverflow: return kSkippedStateOverflow;
    case SkipCause::kNormThreshold: return kSkippedNormThreshold;
    case SkipCause::kTrainer: return kSkippedByTrainer;
    case SkipCause::kNone: break;
  }
  MUOND_CHECK(false, "a step that was not applied has a cause");
}

}  // namespace

RunMetrics::RunMetrics(std::shared_ptr<MetricFamilies> families, Opening opening)
    : families_(std::move(families)), series_(families_.get()), run_(opening.run) {
  AddRunSeries(opening);
  AddGroups(opening.groups, opening.muon_expected);
  SetState(State::kOpening);
}

void RunMetrics::AddGroups(const std::vector<std::string>& names, bool muon_expected) {
  muon_expected_->Set(muon_expected ? 1 : 0);
  const int all = groups_ + static_cast<int>(names.size());
  for (const std::string& name : names) {
    const int group = groups_++;
    if (group > kMaxGroupSeries - 1 && shared_) continue;
    shared_ = all > kMaxGroupSeries && group >= kMaxGroupSeries - 1;
    slots_.push_back(AddSlot(run_, shared_ ? kOtherGroups : name, !shared_));
  }
}

void RunMetrics::AddRunSeries(const Opening& opening) {
  const LabelValues run = {opening.run};
  series_.AddGauge(kRunActive, run)->Set(1);
  state_ = series_.AddGauges(kRunState, run);
  trainers_connected_ = series_.AddGauge(kTrainersConnected, run);
  Set(series_.AddGauge(kTrainersExpected, run), static_cast<double>(opening.trainers_expected));
  muon_expected_ = series_.AddGauge(kMuonExpected, run);

  steps_ = series_.AddCounters(kSteps, run);
  last_step_ = series_.AddGauge(kLastStep, run);
  last_step_->Set(-1);
  last_step_timestamp_ = series_.AddGauge(kLastStepTimestamp, run);
  Set(last_step_timestamp_, UnixSeconds(opening.opened));
  inflight_ = series_.AddGauge(kStepInflight, run);
  inflight_start_ = series_.AddGauge(kStepInflightStartTimestamp, run);
  waiting_shards_ = series_.AddGauge(kStepWaitingShards, run);
  step_duration_ = series_.AddHistogram(kStepDuration, run);
  consecutive_skips_ = series_.AddGauge(kConsecutiveSkips, run);
  checkpoints_ = series_.AddCounters(kCheckpoints, run);
  checkpoint_duration_ = series_.AddHistogram(kCheckpointDuration, run);
  checkpoint_size_ = series_.AddGauge(kCheckpointSize, run);
  checkpoint_last_success_ = series_.AddGauge(kCheckpointLastSuccess, run);
  checkpoint_last_step_ = series_.AddGauge(kCheckpointLastStep, run);
  checkpoint_last_step_->Set(-1);
  checkpoint_interval_ = series_.AddGauge(kCheckpointInterval, run);
  buddy_sent_ = series_.AddCounter(kBuddySent, run);
  buddy_wait_ = series_.AddHistogram(kBuddyWait, run);
  buddy_recoveries_ = series_.AddCounters(kBuddyRecoveries, run);
  duplicates_ = series_.AddCounter(kDuplicateRequests, run);

  loss_scale_ = series_.AddGauge(kLossScale, run);
  Set(loss_scale_, opening.loss_scale);
  if (opening.loss_scale_min > 0) {
    Set(series_.AddGauge(kLossScaleMin, run), opening.loss_scale_min);
  }
  loss_scale_changes_ = series_.AddCounters(kLossScaleChanges, run);
  grad_norm_ = series_.AddGauge(kGradNorm, run);
  clipped_ = series_.AddCounter(kGradClippedSteps, run);
  nonfinite_elements_ = series_.AddCounters(kNonfiniteElements, run);
  nonfinite_tensors_ = series_.AddGauges(kNonfiniteTensors, run);
  for (const std::string_view measure : RowOf(kWorstValue).labels[1].values) {
    worst_.push_back(series_.AddGauges(kWorstValue, {opening.run, std::string(measure)}));
  }
  stale_tensors_ = series_.AddGauge(kMomentumStale, run);
  shard_elements_ = series_.AddGauge(kShardElements, run);
  busy_ = series_.AddCounter(kShardBusy, run);
}

RunMetrics::Slot RunMetrics::AddSlot(const std::string& run, const std::string& label,
                                     bool learning_rate) {
  const LabelValues labels = {run, label};
  Slot slot;
  slot.parameters = series_.AddGauges(kParameters, labels);
  slot.elements = series_.AddGauges(kParameterElements, labels);
  if (learning_rate) slot.learning_rate = series_.AddGauge(kLearningRate, labels);
  slot.momentum_norm = series_.AddGauge(kMomentumNorm, labels);
  slot.weight_norm = series_.AddGauge(kWeightNorm, labels);
  slot.ns_calls = series_.AddCounter(kNsCalls, labels);
  slot.ns_outcomes = series_.AddCounters(kNsOutcomes, labels);
  slot.ns_special = series_.AddCounters(kNsSpecial, labels);
  slot.muon_updates = series_.AddCounter(kMuonUpdates, labels);
  slot.cosines = series_.AddHistogram(kMomentumGradCosine, labels);
  slot.update_ratios = series_.AddHistogram(kUpdateRmsRatio, labels);
  slot.residuals = series_.AddHistogram(kNsResidual, labels);
  return slot;
}

int RunMetrics::SlotOf(int group) const {
  MUOND_CHECK(group >= 0 && group < groups_, "no such group");
  return std::min(group, static_cast<int>(slots_.size()) - 1);
}

void RunMetrics::SetState(State state) {
  MutexLock lock(mutex_);
  for (std::size_t i = 0; i < state_.size(); ++i) {
    state_[i]->Set(i == static_cast<std::size_t>(state) ? 1 : 0);
  }
}

void RunMetrics::SetTrainersConnected(std::int64_t ranks) {
  trainers_connected_->Set(static_cast<double>(ranks));
}

void RunMetrics::SetParameters(std::span<const GroupParameters> groups) {
  MUOND_CHECK(static_cast<int>(groups.size()) == groups_, "one entry for each group");
  std::vector<GroupParameters> sums(slots_.size());
  for (int group = 0; group < groups_; ++group) {
    GroupParameters& sum = sums[SlotOf(group)];
    sum.muon += groups[group].muon;
    sum.adamw += groups[group].adamw;
    sum.muon_elements += groups[group].muon_elements;
    sum.adamw_elements += groups[group].adamw_elements;
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].parameters[0]->Set(static_cast<double>(sums[i].muon));
    slots_[i].parameters[1]->Set(static_cast<double>(sums[i].adamw));
    slots_[i].elements[0]->Set(static_cast<double>(sums[i].muon_elements));
    slots_[i].elements[1]->Set(static_cast<double>(sums[i].adamw_elements));
  }
}

void RunMetrics::SetLearningRate(int group, double learning_rate) {
  prometheus::Gauge* gauge = slots_[SlotOf(group)].learning_rate;
  if (gauge != nullptr) Set(gauge, learning_rate);
}

void RunMetrics::OnStepBegin(absl::Time now) {
  MutexLock lock(mutex_);
  if (begun_ != absl::InfinitePast()) return;
  begun_ = now;
  Set(inflight_start_, UnixSeconds(now));
  inflight_->Set(1);
}

void RunMetrics::SetWaitingShards(std::int64_t shards) {
  waiting_shards_->Set(static_cast<double>(shards));
}

void RunMetrics::ClearInflight() {
  inflight_->Set(0);
  inflight_start_->Set(0);
  waiting_shards_->Set(0);
  begun_ = absl::InfinitePast();
}

void RunMetrics::OnStepAbandoned() {
  MutexLock lock(mutex_);
  ClearInflight();
}

void RunMetrics::OnOutcome(const StepOutcome& outcome, ScaleMove move, absl::Time now) {
  MutexLock lock(mutex_);
  steps_[LabelOf(outcome)]->Increment();
  last_step_->Set(static_cast<double>(outcome.step));
  Set(last_step_timestamp_, UnixSeconds(now));
  consecutive_skips_->Set(static_cast<double>(outcome.consecutive_skips));
  Set(loss_scale_, outcome.next_loss_scale);
  if (move != ScaleMove::kNone) {
    loss_scale_changes_[move == ScaleMove::kGrowth ? 0 : 1]->Increment();
  }
  // An outcome reports the norm 0 where the gradient was not finite or was never seen.
  const bool has_norm =
      outcome.cause != SkipCause::kOverflow && outcome.cause != SkipCause::kTrainer;
  if (has_norm) Set(grad_norm_, outcome.grad_norm);
  if (outcome.applied && outcome.clip_coefficient < 1) clipped_->Increment();
  Count(nonfinite_elements_[0], outcome.nonfinite_elements);
  if (begun_ != absl::InfinitePast()) {
    step_duration_->Observe(std::max(0.0, absl::ToDoubleSeconds(now - begun_)));
  }
  ClearInflight();
}

void RunMetrics::OnStepFailed(absl::Time now) {
  MutexLock lock(mutex_);
  steps_[kFailed]->Increment();
  Set(last_step_timestamp_, UnixSeconds(now));
  ClearInflight();
}

void RunMetrics::OnGroupCommit(int group, const GroupCommit& commit) {
  const Slot& slot = slots_[SlotOf(group)];
  const std::int64_t bad = commit.low_rank + commit.diverged + commit.nonfinite;
  MUOND_CHECK(bad <= commit.calls, "more bad outcomes than calls");
  Count(slot.ns_calls, commit.calls);
  Count(slot.ns_outcomes[0], commit.calls - bad);
  Count(slot.ns_outcomes[1], commit.low_rank);
  Count(slot.ns_outcomes[2], commit.diverged);
  Count(slot.ns_outcomes[3], commit.nonfinite);
  Count(slot.ns_special[0], commit.zero_inputs);
  Count(slot.ns_special[1], commit.fallbacks);
  Count(slot.muon_updates, commit.updates);
}

void RunMetrics::ObserveMeasures(int group, const GroupMeasures& measures) {
  const Slot& slot = slots_[SlotOf(group)];
  ObserveAll(slot.cosines, kMomentumGradCosine, measures.cosines);
  ObserveAll(slot.update_ratios, kUpdateRmsRatio, measures.update_ratios);
  ObserveAll(slot.residuals, kNsResidual, measures.residuals);
}

void RunMetrics::SetWorst(Measure measure, std::span<const double> values) {
  const auto& gauges = worst_[static_cast<std::size_t>(measure)];
  for (std::size_t i = 0; i < std::min(values.size(), gauges.size()); ++i) {
    Set(gauges[i], values[i]);
  }
}

void RunMetrics::SetStaleTensors(std::int64_t count) {
  stale_tensors_->Set(static_cast<double>(count));
}

void RunMetrics::SetShardElements(std::int64_t elements) {
  shard_elements_->Set(static_cast<double>(elements));
}

void RunMetrics::AddBusySeconds(double seconds) {
  if (seconds > 0) busy_->Increment(seconds);
}

void RunMetrics::OnDuplicateRequest() { duplicates_->Increment(); }

void RunMetrics::OnCheckpoint(CheckpointResult result) {
  checkpoints_[static_cast<std::size_t>(result)]->Increment();
}

void RunMetrics::OnCheckpointSaved(std::int64_t step, std::int64_t bytes, absl::Duration elapsed,
                                   absl::Time now) {
  OnCheckpoint(CheckpointResult::kSaved);
  checkpoint_duration_->Observe(absl::ToDoubleSeconds(elapsed));
  Set(checkpoint_size_, static_cast<double>(bytes));
  Set(checkpoint_last_success_, UnixSeconds(now));
  Set(checkpoint_last_step_, static_cast<double>(step));
}

void RunMetrics::OnBuddySent(std::int64_t bytes) {
  if (bytes > 0) buddy_sent_->Increment(static_cast<double>(bytes));
}

void RunMetrics::ObserveBuddyWait(absl::Duration elapsed) {
  buddy_wait_->Observe(std::max(0.0, absl::ToDoubleSeconds(elapsed)));
}

void RunMetrics::OnBuddyRecovery(bool recovered) {
  buddy_recoveries_[recovered ? 0 : 1]->Increment();
}

void RunMetrics::SetCheckpointInterval(absl::Duration interval) {
  Set(checkpoint_interval_, absl::ToDoubleSeconds(interval));
}

void RunMetrics::SetNorms(std::span<const GroupNorms> groups) {
  MUOND_CHECK(static_cast<int>(groups.size()) == groups_, "one entry for each group");
  std::vector<GroupNorms> sums(slots_.size());
  for (int group = 0; group < groups_; ++group) {
    GroupNorms& sum = sums[SlotOf(group)];
    sum.momentum = std::hypot(sum.momentum, groups[group].momentum);
    sum.weight = std::hypot(sum.weight, groups[group].weight);
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Set(slots_[i].momentum_norm, sums[i].momentum);
    Set(slots_[i].weight_norm, sums[i].weight);
  }
}

void RunMetrics::SetNonfiniteTensors(const NonfiniteTensors& counts) {
  nonfinite_tensors_[0]->Set(static_cast<double>(counts.momentum));
  nonfinite_tensors_[1]->Set(static_cast<double>(counts.second_moment));
  nonfinite_tensors_[2]->Set(static_cast<double>(counts.master_weight));
}

}  // namespace muond

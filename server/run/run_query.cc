// Reading parameters, and what a run tells about itself.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "proto/steady_time.h"
#include "server/engine/digest.h"
#include "server/run/run.h"

namespace muond {

// A run that failed may have applied a step in part: what it holds is no version's.
absl::Status Run::CheckTrusted(std::int64_t version) const {
  if (!machine_->failed()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "run \"%s\": pull of version %d: the run has failed, its parameters are not to be trusted: "
      "%s",
      name(), version, machine_->failure()));
}

absl::StatusOr<std::vector<PullSlice>> Run::CheckPull(std::int64_t rank, std::int64_t generation,
                                                      std::int64_t version,
                                                      const RankSlices& slices, bool master) const {
  MutexLock lock(mutex_);
  MUOND_RETURN_IF_ERROR(CheckOpen(generation));
  if (!lost_.empty()) return NeedsRestore();
  if (!running_) return NotRunning(rank);
  MUOND_RETURN_IF_ERROR(CheckTrusted(version));
  MUOND_RETURN_IF_ERROR(CheckJoined(rank));
  if (version != machine_->version()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("run \"%s\": pull of version %d: the parameters are at version %d", name(),
                        version, machine_->version()));
  }
  std::vector<PullSlice> result;
  auto add = [&](int parameter, const Box& box, std::int64_t slice) {
    const ParameterSpec& spec = this->spec().parameters[parameter];
    for (const ElementRange& range :
         RangesInShards(box, *spec.shape, registry().ShardsHere(parameter))) {
      result.push_back({.parameter = routing().parameters[parameter].state,
                        .box = box,
                        .range = range,
                        .dtype = master ? Dtype::kF32 : spec.dtype,
                        .slice = slice,
                        .name = spec.name,
                        .covers = box.Elements() == routing().parameters[parameter].elements});
    }
  };
  if (slices.empty()) {
    for (std::size_t i = 0; i < spec().parameters.size(); ++i) {
      const std::vector<Box>& own = registry().SlicesOf(static_cast<int>(i), rank);
      for (std::size_t s = 0; s < own.size(); ++s) add(static_cast<int>(i), own[s], s);
    }
    return result;
  }
  for (const auto& [name, boxes] : slices) {
    const int parameter = registry().Find(name);
    if (parameter < 0) {
      return absl::NotFoundError(absl::StrFormat(
          "run \"%s\": pull: parameter \"%s\" is not registered", this->name(), name));
    }
    for (std::size_t s = 0; s < boxes.size(); ++s) {
      if (absl::Status valid = ValidateBox(boxes[s], *spec().parameters[parameter].shape);
          !valid.ok()) {
        return absl::InvalidArgumentError(
            absl::StrFormat("parameter \"%s\": pull: %s", name, valid.message()));
      }
      add(parameter, boxes[s], s);
    }
  }
  return result;
}

void Run::Read(const PullSlice& slice, std::int64_t version, std::int64_t first, std::int64_t count,
               void* out, StatusCallback done) {
  absl::Status refused;
  {
    // A read that is posted here is carried out before any commit that is posted later, on every
    // device: what is checked now stays true while the elements are read.
    MutexLock lock(mutex_);
    refused = CheckReadable(version);
    if (refused.ok()) {
      auto check = [self = shared_from_this(), version] {
        MutexLock lock(self->mutex_);
        return self->stopped_.ok() ? self->CheckTrusted(version) : self->stopped_;
      };
      return engines_->Read(slice.parameter, slice.box, {first, count}, slice.dtype, out,
                            std::move(check), std::move(done));
    }
  }
  done(refused);
}

// The lock is held.
absl::Status Run::CheckReadable(std::int64_t version) const {
  MUOND_RETURN_IF_ERROR(stopped_);
  MUOND_RETURN_IF_ERROR(CheckTrusted(version));
  if (!committing_ && machine_->version() == version) return absl::OkStatus();
  return absl::AbortedError(absl::StrFormat(
      "run \"%s\": pull of version %d: version %d has replaced it", name(), version,
      machine_->version() + (committing_ ? 1 : 0)));
}

void Run::ReadAll(const std::vector<PullSlice>& slices, const std::vector<void*>& outs,
                  std::int64_t version, StatusCallback done) {
  std::vector<Engine::ReadJob> jobs;
  for (std::size_t i = 0; i < slices.size(); ++i) {
    jobs.push_back({slices[i].parameter, slices[i].box, slices[i].range, slices[i].dtype, outs[i]});
  }
  absl::Status refused;
  {
    MutexLock lock(mutex_);  // as in Read
    refused = CheckReadable(version);
    if (refused.ok()) {
      auto check = [self = shared_from_this(), version] {
        MutexLock lock(self->mutex_);
        return self->stopped_.ok() ? self->CheckTrusted(version) : self->stopped_;
      };
      return engines_->ReadAll(std::move(jobs), std::move(check), std::move(done));
    }
  }
  done(refused);
}

RunState Run::StateLocked() const {
  if (machine_ != nullptr && machine_->failed()) return RunState::kFailed;
  if (!stopped_.ok()) return RunState::kDraining;
  if (!lost_.empty()) return RunState::kNeedsRestore;
  return running_ || restored_ ? RunState::kRunning : RunState::kOpening;
}

RunPosition Run::PositionLocked() const {
  RunPosition position;
  position.state = StateLocked();
  position.generation = start_.generation;
  position.next_step = start_.next_step;
  position.lineage = start_.lineage;
  position.promised = promised_;
  position.loss_scale = LossScaleLocked();
  if (!lost_.empty()) {
    position.resume_step =
        std::max(start_.next_step, machine_ == nullptr ? 0 : machine_->next_step());
  }
  if (machine_ == nullptr) {
    if (start_.memory) position.last_outcome = start_.memory->last_outcome;
    return position;
  }
  position.generation = machine_->generation();
  position.next_step = machine_->next_step();
  position.promised = machine_->promised();
  position.last_outcome = machine_->last_outcome();
  return position;
}

RunPosition Run::Position() const {
  MutexLock lock(mutex_);
  return PositionLocked();
}

double Run::LossScaleLocked() const {
  if (machine_ != nullptr) return machine_->scaler().scale();
  return start_.memory ? start_.memory->scaler.scale : LossScaler(spec().loss_scale).scale();
}

RunSnapshot Run::Snapshot() const {
  MutexLock lock(mutex_);
  RunSnapshot snapshot;
  snapshot.name = name();
  snapshot.position = PositionLocked();
  snapshot.world_size = spec().world_size;
  snapshot.ranks_registered = registry().joined_ranks();
  for (std::size_t i = 0; i < routing().parameters.size(); ++i) {
    const RoutedParameter& routed = routing().parameters[i];
    if (routed.state == static_cast<int>(i)) snapshot.elements += routed.elements;
  }
  snapshot.totals = totals_;
  snapshot.state_bytes = engines_->state_bytes();
  snapshot.staging_bytes = staging_.bytes();
  snapshot.muon_parameters = routing().muon_parameters;
  snapshot.adamw_parameters = routing().adamw_parameters;
  snapshot.muon_matrices = routing().muon_matrices;
  snapshot.daemons = context_.peers->daemons();
  snapshot.daemon = context_.peers->self();
  snapshot.plan_hash = registry().plan().hash;
  snapshot.why_restore = lost_;
  snapshot.overlap = overlap_;
  if (machine_ == nullptr) return snapshot;
  snapshot.missing_votes = machine_->MissingVotes();
  if (machine_->last_outcome()) snapshot.grad_norm = machine_->last_outcome()->grad_norm;
  snapshot.step_in_flight = machine_->step_in_flight();
  if (step_started_) {
    snapshot.step_in_flight_seconds = absl::ToDoubleSeconds(SteadyNow() - *step_started_);
  }
  snapshot.waiting_ranks = machine_->WaitingRanks();
  snapshot.waiting_slices = machine_->WaitingSlices();
  snapshot.failure = machine_->failure();
  return snapshot;
}

void Run::Describe(std::vector<std::string> names,
                   std::function<void(absl::StatusOr<std::vector<ParameterSnapshot>>)> done) {
  std::vector<int> wanted;
  for (const std::string& name : names) {
    const int parameter = registry().Find(name);
    if (parameter < 0) {
      return done(absl::NotFoundError(
          absl::StrFormat("run \"%s\": parameter \"%s\" is not registered", this->name(), name)));
    }
    wanted.push_back(parameter);
  }
  if (names.empty()) {
    wanted.resize(spec().parameters.size());
    std::iota(wanted.begin(), wanted.end(), 0);
  }
  std::vector<int> states;
  for (const int parameter : wanted) states.push_back(routing().parameters[parameter].state);
  MutexLock lock(mutex_);
  engines_->Facts(states, [self = shared_from_this(), wanted,
                           done](const std::vector<ParameterFacts>& facts) {
    std::vector<ParameterSnapshot> result;
    {
      MutexLock lock(self->mutex_);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        result.push_back(self->SnapshotOf(wanted[i], facts[i]));
      }
    }
    done(std::move(result));
  });
}

// The lock is held.
ParameterSnapshot Run::SnapshotOf(int parameter, const ParameterFacts& facts) const {
  const RoutedParameter& routed = routing().parameters[parameter];
  ParameterSnapshot snapshot{.spec = spec().parameters[parameter], .routed = routed};
  if (routed.state != parameter) snapshot.tied_to = spec().parameters[routed.state].name;
  snapshot.t = facts.t;
  snapshot.momentum_norm = std::sqrt(facts.momentum_sum_squares);
  snapshot.weight_norm = std::sqrt(facts.weight_sum_squares);
  snapshot.nonfinite_elements = facts.nonfinite_elements;
  const std::string& name = spec().parameters[routed.state].group;
  const bool muon = routed.algorithm == Algorithm::kMuon;
  if (machine_ != nullptr) {
    const HyperparametersByGroup& values = muon ? machine_->muon() : machine_->adamw();
    if (const auto found = values.find(name); found != values.end()) {
      snapshot.hyperparameters = found->second;
      return snapshot;
    }
  }
  for (const GroupSpec& group : spec().groups) {
    if (group.name == name) snapshot.hyperparameters = muon ? group.muon : group.adamw;
  }
  return snapshot;
}

// The lock is held.
void Run::PublishHealth(const CommitReport& report, const StateHealth& health) {
  metrics_->SetNonfiniteTensors({.momentum = health.nonfinite_momentum,
                                 .second_moment = health.nonfinite_second_moment,
                                 .master_weight = health.nonfinite_weight});
  totals_.momentum_nonfinite = health.nonfinite_momentum;
  totals_.state_nonfinite =
      health.nonfinite_momentum + health.nonfinite_second_moment + health.nonfinite_weight;
  double muon_sum = 0;
  std::vector<RunMetrics::GroupNorms> norms(group_names_.size());
  for (std::size_t i = 0; i < group_names_.size(); ++i) {
    if (const auto found = health.groups.find(group_names_[i]); found != health.groups.end()) {
      muon_sum += found->second.muon_sum_squares;
      norms[i] = {.momentum = std::sqrt(found->second.momentum_sum_squares),
                  .weight = std::sqrt(found->second.weight_sum_squares)};
    }
    // A commit that failed orthogonalized nothing that counts: the run's state tells of it.
    const auto found = report.groups.find(group_names_[i]);
    if (found != report.groups.end() && report.failure.empty()) {
      const CommitReport::Group& facts = found->second;
      metrics_->OnGroupCommit(static_cast<int>(i), {.calls = facts.ns_calls,
                                                    .zero_inputs = facts.ns_zero,
                                                    .fallbacks = facts.ns_fallback,
                                                    .low_rank = facts.ns_low_rank,
                                                    .diverged = facts.ns_fallback,
                                                    .updates = facts.updates});
    }
  }
  metrics_->SetNorms(norms);
  totals_.momentum_norm = std::sqrt(muon_sum);
  observer_->OnCommitted(report);
}

void Run::PublishProgress() {
  if (machine_ != nullptr) metrics_->SetWaitingShards(machine_->WaitingSlices());
}

}  // namespace muond

// Steps: what trainers say, and carrying out what the step machine answers.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "proto/check.h"
#include "proto/steady_time.h"
#include "server/run/run.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

void Overlay(const HyperparametersByGroup& changes, HyperparametersByGroup& values) {
  for (const auto& [group, value] : changes) values[group] = value;
}

RunMetrics::ScaleMove MoveOf(ScaleChange change) {
  switch (change) {
    case ScaleChange::kGrowth:
      return RunMetrics::ScaleMove::kGrowth;
    case ScaleChange::kBackoff:
      return RunMetrics::ScaleMove::kBackoff;
    case ScaleChange::kNone:
      break;
  }
  return RunMetrics::ScaleMove::kNone;
}

}  // namespace

absl::Status Run::NotRunning(std::int64_t rank) const {
  // Of a daemon that has just come back: this rank must register, instead of waiting for itself.
  MUOND_RETURN_IF_ERROR(CheckJoined(rank));
  if (machine_ == nullptr) {
    return absl::UnavailableError(
        absl::StrFormat("run \"%s\": opening: waiting for ranks [%s] to register", name(),
                        absl::StrJoin(registry().missing_ranks(), ", ")));
  }
  if (adopt_after_commit_) {
    return absl::UnavailableError(
        absl::StrFormat("run \"%s\": parameters are being added: the step before is being "
                        "committed",
                        name()));
  }
  if (initial_.MissingFrom(rank)) {
    return absl::FailedPreconditionError(
        absl::StrFormat("run \"%s\": rank %d has not sent all of its initial values: "
                        "initialize \"%s\" first",
                        name(), rank, absl::StrJoin(initial_.MissingNames(8), "\", \"")));
  }
  return absl::UnavailableError(
      absl::StrFormat("run \"%s\": opening: waiting for initial values of \"%s\" from other ranks",
                      name(), absl::StrJoin(initial_.MissingNames(8), "\", \"")));
}

absl::Status Run::Begin(std::int64_t rank, std::int64_t generation, const StepBegin& begin) {
  After after;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    if (!stopped_.ok()) return stopped_;
    if (!lost_.empty()) return NeedsRestore();
    if (!running_) return NotRunning(rank);
    const std::int64_t step = machine_->next_step();
    Effects effects;
    status = machine_->OnBegin(rank, generation, begin, effects);
    Carry(effects, after);
    if (status.ok() && begin.step == step) {
      if (!step_started_) step_started_ = SteadyNow();
      metrics_->OnStepBegin(*step_started_);
      observer_->OnBegin(*step_started_);
      step_muon_ = machine_->muon();
      step_adamw_ = machine_->adamw();
      Overlay(begin.muon, step_muon_);
      Overlay(begin.adamw, step_adamw_);
      // Bounds on the new state need them while gradients are reduced, before the verdict.
      engines_->SetHyperparameters(step_muon_, step_adamw_);
      PublishProgress();
    }
  }
  CallAll(after);
  return status;
}

Layer Run::LayerOf(const SliceId& id) const {
  const bool replicated = spec().parameters[id.parameter].replicated;
  return {id.micro_batch, replicated ? id.rank : -1, id.parameter};
}

absl::StatusOr<std::shared_ptr<StagingBuffer>> Run::LayerMemory(const Layer& layer, Dtype dtype,
                                                                StagingPlace place) {
  const auto found = layers_.find(layer);
  if (found != layers_.end()) {
    if (found->second.dtype == dtype) return found->second.memory;
    if (settled_layers_.count(layer) > 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "parameter \"%s\": gradient slices of one step differ in dtype: %s and %s",
          spec().parameters[layer.parameter].name,
          std::string(kernels::DtypeName(found->second.dtype)),
          std::string(kernels::DtypeName(dtype))));
    }
    // Only a stream that broke off, or one that is still under way and will be refused, had it so.
  }
  const int state = routing().parameters[layer.parameter].state;
  if (engines_->DeviceFor(state) < 0) place = StagingPlace::kHost;
  const std::int64_t held = staging_.bytes();
  auto acquired = staging_.Acquire(engines_->StagingBackend(state), engines_->PackedElements(state),
                                   dtype, place);
  if (!acquired.ok()) {
    return absl::Status(
        acquired.status().code(),
        absl::StrFormat("parameter \"%s\": %s", spec().parameters[layer.parameter].name,
                        acquired.status().message()));
  }
  std::shared_ptr<StagingBuffer> memory = *std::move(acquired);
  context_.metrics->AddMemory(MemoryKind::kStaging, staging_.bytes() - held);
  if (found != layers_.end()) staging_.Release(std::move(found->second.memory));
  layers_[layer] = {memory, dtype};
  return memory;
}

absl::StatusOr<OpenSlice> Run::OpenGradient(const SliceAddress& address, std::int64_t generation,
                                            std::int64_t step, Dtype dtype, StagingPlace place) {
  MutexLock lock(mutex_);
  if (!stopped_.ok()) return stopped_;
  if (!lost_.empty()) return NeedsRestore();
  if (!running_) return NotRunning(address.rank);
  MUOND_ASSIGN_OR_RETURN(const SliceId id, Resolve(address));
  MUOND_ASSIGN_OR_RETURN(const StepMachine::Admission admission,
                         machine_->Admit(id, generation, step));
  OpenSlice slice{.id = id, .generation = generation, .step = step, .attempt = machine_->attempt()};
  const Box& box = registry().SlicesOf(id.parameter, id.rank)[id.slice];
  SliceTarget target{.shape = *spec().parameters[id.parameter].shape};
  // What is not here does not come, neither to be written nor to be compared.
  if (registry().ElementsHere(id.parameter) < routing().parameters[id.parameter].elements) {
    target.shards = registry().ShardsHere(id.parameter);
  }
  if (admission == StepMachine::Admission::kWrite) {
    MUOND_ASSIGN_OR_RETURN(slice.memory, LayerMemory(LayerOf(id), dtype, place));
    target.keepalive = slice.memory;
    target.base = static_cast<std::byte*>(slice.memory->data());
    if (slice.memory->place() == StagingPlace::kBackend) {
      target.device =
          engines_->MemoryOf(engines_->DeviceFor(routing().parameters[id.parameter].state));
    }
  }
  slice.receiver = std::make_shared<SliceReceiver>(
      SliceObject(id, absl::StrFormat("push for step %d", step)), box, dtype, std::move(target));
  // A slice that is complete is only digested: no receiver may write it again.
  if (admission == StepMachine::Admission::kWrite) gradient_slices_.Open(id, slice.receiver);
  return slice;
}

// The lock is held. What was written went to the layers of its own attempt; another attempt has
// others (they are numbered anew when state is forgotten, in a higher generation), and so has a
// stream that came with another dtype. A layer without memory is complete: this slice is a
// repetition then. What was only compared is nowhere: it must be there still.
bool Run::StillPlaced(const OpenSlice& slice, const Layer& layer) const {
  if (slice.memory == nullptr) {
    const auto admission = machine_->Admit(slice.id, slice.generation, slice.step);
    return !admission.ok() || *admission == StepMachine::Admission::kVerify;
  }
  if (slice.generation != machine_->generation() || slice.attempt != machine_->attempt()) {
    return false;
  }
  const std::shared_ptr<StagingBuffer>& memory = layers_.at(layer).memory;
  return memory == nullptr || memory == slice.memory;
}

absl::StatusOr<SliceArrival> Run::CloseGradient(const OpenSlice& slice) {
  return CloseGradients({&slice, 1})[0];
}

std::vector<absl::StatusOr<SliceArrival>> Run::CloseGradients(std::span<const OpenSlice> slices) {
  After after;
  std::vector<absl::StatusOr<SliceArrival>> arrivals;
  {
    // Under one lock: what is reduced waits for it, and is then reduced in one go.
    MutexLock lock(mutex_);
    for (const OpenSlice& slice : slices) {
      arrivals.push_back(CloseLocked(slice, after));
      if (!arrivals.back().ok()) break;
    }
    PublishProgress();
  }
  CallAll(after);
  return arrivals;
}

absl::StatusOr<SliceArrival> Run::CloseLocked(const OpenSlice& slice, After& after) {
  MUOND_RETURN_IF_ERROR(slice.receiver->CheckComplete());
  MUOND_RETURN_IF_ERROR(stopped_);
  const Layer layer = LayerOf(slice.id);
  if (!StillPlaced(slice, layer)) {
    return absl::AbortedError(
        absl::StrFormat("%s: the step ended or started over meanwhile",
                        SliceObject(slice.id, absl::StrFormat("push for step %d", slice.step))));
  }
  Effects effects;
  auto arrival = machine_->OnSlice(slice.id, slice.generation, slice.step,
                                   slice.receiver->digest(), effects);
  // The first time it may have come by another path, which digests otherwise.
  const std::optional<std::uint64_t> other = slice.receiver->other_digest();
  if (absl::IsAlreadyExists(arrival.status()) && other.has_value()) {
    auto known = machine_->OnSlice(slice.id, slice.generation, slice.step, *other, effects);
    if (known.ok()) arrival = known;
  }
  gradient_slices_.Drop(slice.id, slice.receiver.get());
  if (arrival.ok() && *arrival == StepMachine::Arrival::kAccepted) settled_layers_.insert(layer);
  Carry(effects, after);
  if (!arrival.ok()) return arrival.status();
  if (*arrival != StepMachine::Arrival::kDuplicate) return SliceArrival::kAccepted;
  metrics_->OnDuplicateRequest();
  return SliceArrival::kDuplicate;
}

void Run::Abandon(const OpenSlice& slice) {
  MutexLock lock(mutex_);
  (slice.step < 0 ? initial_slices_ : gradient_slices_).Drop(slice.id, slice.receiver.get());
}

std::uint64_t Run::Finish(std::int64_t rank, std::int64_t generation, std::int64_t step,
                          const std::vector<std::string>& absent, OutcomeCallback done,
                          std::shared_ptr<ParameterTargets> targets) {
  return Wait(rank, std::move(done),
              [&](std::uint64_t waiter, Effects& effects) MUOND_REQUIRES(mutex_) {
                if (IsRepeat(step)) metrics_->OnDuplicateRequest();
                if (step == machine_->next_step() && generation == machine_->generation() &&
                    targets_ == nullptr) {
                  targets_ = std::move(targets);
                }
                machine_->OnFinish(rank, generation, step, absent, waiter, effects);
              });
}

std::uint64_t Run::Skip(std::int64_t rank, std::int64_t generation, std::int64_t step,
                        SkipCause cause, double loss_scale, OutcomeCallback done) {
  return Wait(rank, std::move(done),
              [&](std::uint64_t waiter, Effects& effects) MUOND_REQUIRES(mutex_) {
                if (IsRepeat(step)) metrics_->OnDuplicateRequest();
                machine_->OnSkip(rank, generation, step, cause, loss_scale, waiter, effects);
              });
}

bool Run::IsRepeat(std::int64_t step) const {
  const auto& last = machine_->last_outcome();
  return last && last->step == step;
}

std::uint64_t Run::Wait(std::int64_t rank, OutcomeCallback done,
                        const std::function<void(std::uint64_t, Effects&)>& event) {
  After after;
  std::uint64_t waiter = 0;
  {
    MutexLock lock(mutex_);
    waiter = next_waiter_++;
    const absl::Status refused = !stopped_.ok()     ? stopped_
                                 : !lost_.empty()   ? NeedsRestore()
                                 : running_         ? absl::OkStatus()
                                                    : NotRunning(rank);
    if (!refused.ok()) {
      after.push_back([done, refused] { done(refused, std::nullopt); });
    } else {
      waiters_[waiter] = std::move(done);
      Effects effects;
      event(waiter, effects);
      Carry(effects, after);
      PublishProgress();
    }
  }
  CallAll(after);
  return waiter;
}

void Run::Deadline(std::uint64_t waiter) {
  After after;
  {
    MutexLock lock(mutex_);
    if (machine_ == nullptr || waiters_.count(waiter) == 0) return;
    Effects effects;
    machine_->OnDeadline(waiter, effects);
    Carry(effects, after);
  }
  CallAll(after);
}

void Run::WaiterGone(std::uint64_t waiter) {
  MutexLock lock(mutex_);
  if (machine_ != nullptr) machine_->OnWaiterGone(waiter);
  waiters_.erase(waiter);
}

// ---- Effects ----------------------------------------------------------------------------------

void Run::Carry(Effects& effects, After& after) {
  bool discarded = false, over = false;
  for (Effect& effect : effects) {
    if (const auto* reduce = std::get_if<ReduceEffect>(&effect)) {
      CarryReduce(*reduce);
    } else if (const auto* commit = std::get_if<CommitEffect>(&effect)) {
      CarryCommit(*commit);
    } else if (const auto* vote = std::get_if<VoteEffect>(&effect)) {
      CarryVote(*vote, after);
    } else if (const auto* hold = std::get_if<HoldEffect>(&effect)) {
      buddy_->Seal(AttemptKey(hold->attempt), hold->states);
    } else if (std::holds_alternative<DiscardEffect>(effect)) {
      discarded = true;
      EndAttempt();
      engines_->Discard();
    } else if (const auto* outcome = std::get_if<OutcomeEffect>(&effect)) {
      over = true;
      CarryOutcome(*outcome);
      EndAttempt();
    } else if (auto* reply = std::get_if<ReplyEffect>(&effect)) {
      const auto found = waiters_.find(reply->waiter);
      if (found == waiters_.end()) continue;
      after.push_back([done = std::move(found->second), reply = std::move(*reply)] {
        done(reply.status, reply.outcome);
      });
      waiters_.erase(found);
    }
  }
  if (discarded && !over) {
    metrics_->OnStepAbandoned();
    observer_->OnAbandoned();
  }
  effects.clear();
}

// The step was consumed or its attempt thrown away: its layers are free, its streams may not write.
void Run::EndAttempt() {
  EndVotes();
  if (buddy_ != nullptr) buddy_->EndAttempt();
  gradient_slices_.Clear(
      stopped_.ok() ? absl::AbortedError("the step ended or started over meanwhile") : stopped_);
  for (auto& [layer, gradient] : layers_) {
    if (gradient.memory != nullptr) staging_.Release(std::move(gradient.memory));
  }
  if (!layers_.empty()) {
    const std::int64_t held = staging_.bytes();
    staging_.Trim();
    context_.metrics->AddMemory(MemoryKind::kStaging, staging_.bytes() - held);
  }
  layers_.clear();
  settled_layers_.clear();
  targets_ = nullptr;
  step_started_.reset();
}

void Run::CarryOutcome(const OutcomeEffect& effect) {
  const StepOutcome& outcome = effect.outcome;
  RecordStep(outcome);
  OnVersion();
  if (outcome.applied) {
    ++totals_.steps_applied;
  } else {
    ++totals_.steps_skipped[std::string(SkipCauseName(outcome.cause))];
    spdlog::info("run \"{}\": step {} skipped: {}{}{}, next loss scale {}", name(), outcome.step,
                 std::string(SkipCauseName(outcome.cause)), outcome.offenders.empty() ? "" : " in ",
                 absl::StrJoin(outcome.offenders, ", "), outcome.next_loss_scale);
  }
  const absl::Time now = absl::Now();
  metrics_->OnOutcome(outcome, MoveOf(effect.scale_change), now);
  observer_->OnOutcome(outcome, MoveOf(effect.scale_change), now, machine_->muon(),
                       machine_->adamw());
  for (std::size_t i = 0; i < group_names_.size(); ++i) {
    const bool adamw = spec().groups[i].algorithm == Algorithm::kAdamW;
    const auto& values = adamw ? machine_->adamw() : machine_->muon();
    metrics_->SetLearningRate(static_cast<int>(i), values.at(group_names_[i]).lr);
  }
}

}  // namespace muond

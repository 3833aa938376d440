// What follows from the events of a step: reductions, the verdict, the commit, the outcome.
#include "server/step/step_machine.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond {

StepMachine::StepMachine(StepLayout layout, const RunSpec& spec, StepStart start)
    : index_(std::make_shared<const LayoutIndex>(std::move(layout))),
      rules_{spec.max_grad_norm, spec.grad_norm_skip_threshold},
      reduce_ranks_(spec.reduce_ranks),
      reduce_micro_batches_(spec.reduce_micro_batches),
      scaler_(spec.loss_scale),
      generation_(start.generation),
      next_step_(start.next_step),
      lineage_(start.lineage),
      attempt_(index_, 0) {
  for (const GroupSpec& group : spec.groups) {
    muon_[group.name] = group.muon;
    adamw_[group.name] = group.adamw;
  }
  if (!start.memory) return;
  scaler_.Restore(start.memory->scaler);
  // A group that has gone or come since keeps what the run says of it.
  for (auto& [name, value] : muon_) {
    if (const auto found = start.memory->muon.find(name); found != start.memory->muon.end()) {
      value = found->second;
    }
  }
  for (auto& [name, value] : adamw_) {
    if (const auto found = start.memory->adamw.find(name); found != start.memory->adamw.end()) {
      value = found->second;
    }
  }
  applied_steps_ = start.memory->applied_steps;
  skipped_steps_ = start.memory->skipped_steps;
  consecutive_skips_ = start.memory->consecutive_skips;
  last_outcome_ = start.memory->last_outcome;
}

StepMemory StepMachine::memory() const {
  return {.scaler = scaler_.state(),
          .muon = muon_,
          .adamw = adamw_,
          .applied_steps = applied_steps_,
          .skipped_steps = skipped_steps_,
          .consecutive_skips = consecutive_skips_,
          .last_outcome = last_outcome_};
}

void StepMachine::OnLayout(StepLayout layout, const RunSpec& spec) {
  MUOND_CHECK(attempt_.empty() && phase_ == Phase::kCollecting, "parameters come between steps");
  MUOND_CHECK(layout.world_size == index_->world_size() && layout.self == index_->self() &&
                  layout.daemons == index_->layout().daemons,
              "ranks and daemons stay");
  MUOND_CHECK(std::ssize(layout.parameters) >= index_->parameters(), "parameters stay");
  for (int p = 0; p < index_->parameters(); ++p) {
    MUOND_CHECK(layout.parameters[p].name == index_->parameter(p).name, "parameters stay");
  }
  index_ = std::make_shared<const LayoutIndex>(std::move(layout));
  for (const GroupSpec& group : spec.groups) {
    muon_.emplace(group.name, group.muon);
    adamw_.emplace(group.name, group.adamw);
  }
  NextAttempt();
}

void StepMachine::Advance(Effects& effects) {
  if (phase_ == Phase::kCollecting) {
    if (attempt_.AllSkipped()) return Cast(SkipVote(), effects);
    if (!attempt_.AllFinished()) return;
    if (const absl::Status agreed = attempt_.CheckAbsent(); !agreed.ok()) {
      ReplyAll(agreed, effects);
      attempt_.WithdrawFinishes();
      return;
    }
    if (attempt_.MissingSlices() > 0) return;
    phase_ = Phase::kReducing;
    for (int p = 0; p < index_->parameters(); ++p) RequestReduction(p, effects);
  }
  if (phase_ == Phase::kReducing && reductions_open_ == 0) Cast(OwnVote(), effects);
}

// Does nothing for what is not a state, has no layers, or was asked for before.
void StepMachine::RequestReduction(int state, Effects& effects) {
  if (reductions_.contains(state)) return;
  std::vector<Layer> layers = attempt_.Layers(state);
  if (layers.empty()) return;
  double divisor = attempt_.begin()->loss_scale;
  if (index_->parameter(state).replicated && reduce_ranks_ == Reduction::kMean) {
    divisor *= static_cast<double>(index_->world_size());
  }
  if (reduce_micro_batches_ == Reduction::kMean) {
    divisor *= static_cast<double>(attempt_.begin()->micro_batches);
  }
  reductions_.emplace(state, std::nullopt);
  ++reductions_open_;
  effects.push_back(ReduceEffect{attempt_.number(), state, std::move(layers), divisor});
}

void StepMachine::OnReduced(std::int64_t attempt, int state, const GradientFacts& facts,
                            Effects& effects) {
  if (attempt != attempt_.number()) return;
  const auto found = reductions_.find(state);
  MUOND_CHECK(found != reductions_.end() && !found->second, "an answer needs a question, once");
  if (facts.nonfinite == 0) {
    for (const double sum : facts.block_sums) {
      if (std::isfinite(sum) && sum >= 0) continue;
      return Fail(
          absl::StrFormat(
              "parameter \"%s\": reduce for step %d: sum of squares %g of a finite gradient",
              index_->parameter(state).name, next_step_, sum),
          effects);
    }
  }
  found->second = facts;
  --reductions_open_;
  Advance(effects);
}

Vote StepMachine::EmptyVote() const {
  Vote vote;
  vote.generation = generation_;
  vote.step = next_step_;
  vote.terms = Terms();
  return vote;
}

Vote StepMachine::OwnVote() const {
  Vote vote = EmptyVote();
  for (const auto& [state, facts] : reductions_) {
    if (facts->nonfinite > 0) {
      // The norm of such a step is not reported, and its sums need not be numbers.
      vote.nonfinite += facts->nonfinite;
      if (vote.offenders.size() < kMaxNames) {
        vote.offenders.push_back(index_->parameter(state).name);
      }
      continue;
    }
    for (const double sum : facts->block_sums) vote.sum_squares.Add(sum);
    if (facts->state_overflow) ++vote.state_overflows;
  }
  return vote;
}

Vote StepMachine::SkipVote() const {
  Vote vote = EmptyVote();
  vote.trainer_skip = attempt_.skipped().begin()->second.cause;
  return vote;
}

void StepMachine::Commit(const Verdict& verdict, Effects& effects) {
  MUOND_CHECK(verdict.apply && !verdict_, "nothing is committed but by a verdict to apply");
  MUOND_CHECK(last_committed_ < next_step_, "a step is committed once");
  last_committed_ = next_step_;
  verdict_ = verdict;
  phase_ = Phase::kCommitting;
  CommitEffect commit;
  commit.step = next_step_;
  commit.clip_coefficient = verdict.clip_coefficient;
  for (int p = 0; p < index_->parameters(); ++p) {
    if (index_->parameter(p).state == p && !reductions_.contains(p)) commit.absent.insert(p);
  }
  commit.muon = attempt_.begin()->muon;
  commit.adamw = attempt_.begin()->adamw;
  effects.push_back(std::move(commit));
}

void StepMachine::OnCommitted(const CommitFacts& facts, Effects& effects) {
  if (failed()) return;  // the engine told of the failure first
  MUOND_CHECK(phase_ == Phase::kCommitting, "an answer needs a question");
  if (!facts.failure.empty()) return Fail(facts.failure, effects);
  Consume(*verdict_, attempt_.begin()->loss_scale, facts, effects);
}

// Ends the step: accounts for it, keeps its outcome, tells everybody.
void StepMachine::Consume(const Verdict& verdict, double told, const CommitFacts& facts,
                          Effects& effects) {
  MUOND_CHECK(verdict.apply == (last_committed_ == next_step_), "applied if and only if committed");
  const bool by_verdict = attempt_.skipped().empty();
  if (by_verdict) {
    muon_ = attempt_.begin()->muon;
    adamw_ = attempt_.begin()->adamw;
  }
  const ScaleChange change = scaler_.OnStep(verdict.apply, verdict.cause, told);
  last_status_ = verdict.cause == SkipCause::kOverflow ? scaler_.AtMinimum() : absl::OkStatus();
  applied_steps_ += verdict.apply ? 1 : 0;
  skipped_steps_ += verdict.apply ? 0 : 1;
  consecutive_skips_ = verdict.apply ? 0 : consecutive_skips_ + 1;
  last_outcome_ = StepOutcome{
      .step = next_step_,
      .applied = verdict.apply,
      .cause = verdict.cause,
      .loss_scale = told,
      .next_loss_scale = scaler_.scale(),
      .grad_norm = verdict.grad_norm,
      .clip_coefficient = verdict.clip_coefficient,
      .applied_steps = applied_steps_,
      .skipped_steps = skipped_steps_,
      .consecutive_skips = consecutive_skips_,
      .newton_schulz_calls = facts.newton_schulz_calls,
      .newton_schulz_fallbacks = facts.newton_schulz_fallbacks,
      .zero_inputs = facts.zero_inputs,
      .nonfinite_elements = verdict.nonfinite,
      .version = next_step_ + 1,
      .offenders = InRegistrationOrder(verdict.offenders),
  };
  last_digests_ = attempt_.TakeDigests();
  last_votes_ = std::move(votes_);
  votes_ = std::move(early_votes_);
  early_votes_.clear();
  rejected_.clear();
  if (!verdict.apply) effects.push_back(DiscardEffect{next_step_});
  effects.push_back(OutcomeEffect{*last_outcome_, change});
  for (const auto& [waiter, rank] : waiters_) ReplyLast(waiter, effects);
  waiters_.clear();
  ++next_step_;
  NextAttempt();
}

// Offenders are states, so that their names are known; at most kMaxNames of them.
std::vector<std::string> StepMachine::InRegistrationOrder(
    const std::vector<std::string>& names) const {
  std::vector<std::string> ordered = names;
  std::sort(ordered.begin(), ordered.end(), [&](const std::string& a, const std::string& b) {
    return index_->Find(a) < index_->Find(b);
  });
  if (ordered.size() > kMaxNames) ordered.resize(kMaxNames);
  return ordered;
}

void StepMachine::Discard(Effects& effects) {
  if (!attempt_.empty()) effects.push_back(DiscardEffect{next_step_});
  NextAttempt();
}

void StepMachine::NextAttempt() {
  attempt_ = Attempt(index_, attempt_.number() + 1);
  phase_ = Phase::kCollecting;
  reductions_.clear();
  reductions_open_ = 0;
  verdict_.reset();
}

void StepMachine::Fail(const std::string& reason, Effects& effects) {
  failure_ = reason;
  ReplyAll(
      absl::InternalError(absl::StrFormat("step %d: the run has failed: %s", next_step_, reason)),
      effects);
  Discard(effects);
}

void StepMachine::OnEngineFailure(const std::string& reason, Effects& effects) {
  if (!failed()) Fail(reason.empty() ? "engine failure" : reason, effects);
}

void StepMachine::OnStop(const absl::Status& status, Effects& effects) {
  MUOND_CHECK(!status.ok(), "a stop has a reason");
  stopped_ = status;
  if (phase_ == Phase::kCommitting) return;
  ReplyAll(status, effects);
  // A vote stands: the others may apply the step by it, so that it can't be thrown away here.
  if (phase_ == Phase::kVoting) return;
  Discard(effects);
}

std::vector<std::int64_t> StepMachine::WaitingRanks() const {
  return step_in_flight() ? attempt_.MissingRanks() : std::vector<std::int64_t>{};
}

}  // namespace muond

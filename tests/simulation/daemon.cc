#include "tests/simulation/daemon.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace muond::simulation {

Daemon::Daemon(int id, World& world, Checker& checker, Bug bug)
    : id_(id), world_(world), checker_(checker), bug_(bug) {
  Restart();
  StartLineage(1, 0);
}

// A timer of this life, which waits while the daemon hangs.
void Daemon::Later(Time delay, std::function<void()> action) {
  world_.After(delay, [this, life = life_, action = std::move(action)] {
    if (life != life_) return;
    if (const Time until = world_.paused_until(id_); until > world_.now()) {
      return Later(until - world_.now(), action);
    }
    action();
  });
}

void Daemon::Crash() {
  ++life_;
  ++epoch_;
  up_ = false;
  machine_.reset();
  engine_.reset();
  jobs_.clear();
  engine_busy_ = commit_open_ = applied_ = false;
  waiters_.clear();
  telling_.reset();
  raise_calls_.clear();
  lineage_ = 0;
  grown_ = grow_after_commit_ = false;
}

StepLayout Daemon::Layout() const {
  const Scenario& scenario = world_.scenario();
  const bool all = grown_ || scenario.grows_at == 0;
  return scenario.model.LayoutOf(id_, all ? scenario.model.parameters.size() : scenario.late);
}

void Daemon::Grow() {
  world_.Log(absl::StrFormat("daemon %d grows before step %d", id_, machine_->next_step()));
  ++checker_.coverage.grown;
  if (grow_after_commit_) ++checker_.coverage.grown_after_commit;
  grown_ = true;
  grow_after_commit_ = false;
  if (bug_ == Bug::kGrowthForgets) {
    const StepStart start{.generation = machine_->generation(),
                          .next_step = machine_->next_step(),
                          .lineage = lineage_,
                          .memory = machine_->memory()};
    machine_ = std::make_unique<StepMachine>(Layout(), world_.scenario().spec, start);
    return;
  }
  machine_->OnLayout(Layout(), world_.scenario().spec);
  Check();
}

void Daemon::Restart() {
  up_ = true;
  raiser_ = std::make_unique<Raiser>(
      id_, world_, bug_, disk_.proposed,
      [this](Time delay, std::function<void()> action) { Later(delay, std::move(action)); });
}

void Daemon::StartLineage(std::int64_t lineage, std::int64_t step) {
  // Whoever waits for the old state's steps is told.
  if (machine_ != nullptr) {
    Feed([&](Effects& effects) {
      machine_->OnStop(absl::AbortedError("the run is re-initialized"), effects);
    });
  }
  ++epoch_;
  lineage_ = lineage;
  jobs_.clear();
  engine_busy_ = commit_open_ = applied_ = false;
  for (const auto& [waiter, caller] : waiters_) {
    world_.Send({id_, caller.trainer, caller.call,
                 Answer{.status = absl::AbortedError("the run is re-initialized"),
                        .position = Where(),
                        .outcome = {},
                        .votes = {}}});
  }
  waiters_.clear();
  telling_.reset();
  machine_ =
      std::make_unique<StepMachine>(Layout(), world_.scenario().spec,
                                    StepStart{
                                        .generation = lineage,
                                        .next_step = step,
                                        .lineage = lineage,
                                    });
  engine_ = std::make_unique<ToyEngine>(world_.scenario(), id_, lineage);
  checker_.OnLineage(id_, lineage, step);
  Check();
}

Position Daemon::Where() const {
  Position position;
  position.usable = usable();
  position.committing = commit_open_;
  position.grown = grown_;
  position.lineage = lineage_;
  position.generation = disk_.generation;
  position.promised = disk_.promised;
  if (machine_ != nullptr) {
    position.next_step = machine_->next_step();
    position.loss_scale = machine_->scaler().scale();
  }
  return position;
}

void Daemon::Reply(const Message& call, Answer answer) {
  answer.position = Where();
  world_.Send({id_, call.from, call.call, std::move(answer)});
}

void Daemon::ReplyStatus(const Message& call, const absl::Status& status) {
  Answer answer;
  answer.status = status;
  Reply(call, std::move(answer));
}

void Daemon::Feed(const std::function<void(Effects&)>& event) {
  const std::int64_t generation = machine_->generation();
  Effects effects;
  event(effects);
  Carry(effects, generation);
  Check();
}

void Daemon::Carry(const Effects& effects, std::int64_t generation) {
  for (const Effect& effect : effects) {
    if (const auto* reduce = std::get_if<ReduceEffect>(&effect)) {
      jobs_.emplace_back(*reduce);
    } else if (const auto* commit = std::get_if<CommitEffect>(&effect)) {
      checker_.OnCommit(id_, lineage_, generation, *commit);
      if (generation != machine_->generation()) ++checker_.coverage.settled;
      commit_open_ = true;
      jobs_.emplace_back(*commit);
    } else if (const auto* discard = std::get_if<DiscardEffect>(&effect)) {
      Discarded(effects, *discard, generation);
    } else if (const auto* reply = std::get_if<ReplyEffect>(&effect)) {
      Answered(*reply);
    } else if (const auto* outcome = std::get_if<OutcomeEffect>(&effect)) {
      Consumed(*outcome, generation);
    } else if (const auto* told = std::get_if<VoteEffect>(&effect)) {
      checker_.OnVote(id_, lineage_, told->vote);
      world_.Log(absl::StrFormat("daemon %d votes %s", id_, ToString(told->vote)));
      telling_ = Telling{told->vote.generation, told->vote.step, 10'000,
                         std::vector<Time>(world_.scenario().model.daemons, world_.now())};
      Later(0, [this] { Tell(); });
      if (bug_ == Bug::kEarlyApply) engine_->Touch();
      if (bug_ != Bug::kLocalVerdict) continue;
      std::vector<CastVote> forged;
      for (int d = 0; d < world_.scenario().model.daemons; ++d) forged.push_back({d, told->vote});
      Later(0, [this, forged] { Hear(forged); });
    }
  }
  RunNextJob();
}

// A discard is one of a step that is consumed, as skipped, or of one that is thrown away.
void Daemon::Discarded(const Effects& effects, const DiscardEffect& effect,
                       std::int64_t generation) {
  const bool consumed = std::any_of(effects.begin(), effects.end(), [&](const Effect& other) {
    const auto* outcome = std::get_if<OutcomeEffect>(&other);
    return outcome != nullptr && outcome->outcome.step == effect.step;
  });
  engine_->Discard();
  if (consumed || machine_->failed()) return;
  world_.Log(absl::StrFormat("daemon %d discards step %d", id_, effect.step));
  checker_.OnDiscard(id_, lineage_, generation, effect.step);
}

void Daemon::Consumed(const OutcomeEffect& effect, std::int64_t generation) {
  const StepOutcome& outcome = effect.outcome;
  world_.Log(
      absl::StrFormat("daemon %d: step %d is %s, norm %g, next scale %g", id_, outcome.step,
                      outcome.applied ? "applied" : std::string(SkipCauseName(outcome.cause)),
                      outcome.grad_norm, outcome.next_loss_scale));
  if (!outcome.applied && generation != machine_->generation()) ++checker_.coverage.settled;
  checker_.OnOutcome(id_, lineage_, generation, outcome);
  engine_->Discard();
  commit_open_ = applied_ = false;
  if (bug_ == Bug::kSkipTouchesState && !outcome.applied) engine_->Touch();
}

void Daemon::Answered(const ReplyEffect& effect) {
  const auto waiter = waiters_.find(effect.waiter);
  if (waiter == waiters_.end()) {
    return checker_.Violation(
        absl::StrFormat("daemon %d answers waiter %d, which does not wait", id_, effect.waiter));
  }
  Answer answer;
  answer.status = effect.status;
  answer.outcome = effect.outcome;
  answer.position = Where();
  if (effect.outcome) checker_.OnTold(lineage_, *effect.outcome);
  if (absl::IsDeadlineExceeded(effect.status)) ++checker_.coverage.deadlines;
  if (absl::IsUnavailable(effect.status)) ++checker_.coverage.unreachable;
  world_.Send({id_, waiter->second.trainer, waiter->second.call, std::move(answer)});
  waiters_.erase(waiter);
}

// What must hold between any two events.
void Daemon::Check() {
  if (!usable()) return;
  checker_.OnState(id_, lineage_, machine_->version() + (applied_ ? 1 : 0), *engine_);
  if (!waiters_.empty() && !machine_->step_in_flight()) {
    checker_.Violation(absl::StrFormat("daemon %d: somebody waits for a step that is over", id_));
  }
}

}  // namespace muond::simulation

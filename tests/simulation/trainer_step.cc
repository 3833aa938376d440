// One step, as a simulated trainer takes it on every daemon.
#include <utility>

#include "absl/strings/str_format.h"
#include "tests/simulation/trainer.h"

namespace muond::simulation {
namespace {

constexpr Time kCallTimeout = 100'000;
constexpr Time kFinishTimeout = 700'000;
constexpr int kTimeoutsBorne = 12;
constexpr int kRefusalsBorne = 3;

}  // namespace

// Makes the gradients of step_, which no daemon has seen.
void Trainer::Compute() {
  NextRound(Phase::kComputing);
  Later(world_.random().Between(0, 20'000), [this, round = round_] {
    if (round == round_) StartStep(std::vector<std::int64_t>(daemons_, step_));
  });
}

void Trainer::StartStep(const std::vector<std::int64_t>& next_steps) {
  NextRound(Phase::kStepping);
  timeouts_ = 0;
  checker_.OnUse(rank_, generation_, step_, content_);
  for (int daemon = 0; daemon < daemons_; ++daemon) {
    links_[daemon] = Link{};
    links_[daemon].done = next_steps[daemon] > step_;
  }
  for (int daemon = 0; daemon < daemons_; ++daemon) {
    if (!links_[daemon].done) StartLink(daemon);
  }
}

void Trainer::StartLink(int daemon) {
  const int refusals = links_[daemon].refusals;
  links_[daemon] = Link{};
  links_[daemon].refusals = refusals;
  const Body truth = Truth(daemon);
  const bool skips = std::holds_alternative<SkipCall>(truth);
  links_[daemon].finishing = skips;
  Body body = MaybeLie(daemon, truth);
  Send(daemon, std::move(body), skips ? kFinishTimeout : kCallTimeout);
}

// What begins the step on a daemon, or skips it.
Body Trainer::Truth(int daemon) const {
  const Scenario& scenario = world_.scenario();
  const StepBegin begin = scenario.BeginOf(lineage_, step_, loss_scale_);
  if (const auto cause = scenario.SkipOf(lineage_, step_)) {
    return SkipCall{rank_, generation_, step_, *cause, begin.loss_scale};
  }
  return BeginCall{rank_, generation_, begin};
}

// Once in a step and generation, one daemon may be told something else than the others.
Body Trainer::MaybeLie(int daemon, Body body) {
  const double chance = world_.healed() ? 0 : world_.scenario().faults.lie;
  // One daemon believes what all ranks say: somebody must tell the truth.
  if (daemons_ == 1 && rank_ == 0) return body;
  if (!world_.random().Chance(chance) || !lied_.emplace(generation_, step_).second) return body;
  ++checker_.coverage.disagreements;
  if (auto* begin = std::get_if<BeginCall>(&body)) {
    if (world_.random().Chance(0.3)) {
      return SkipCall{rank_, generation_, step_, SkipCause::kTrainer, begin->begin.loss_scale};
    }
    begin->begin.muon["g"].lr = 0.5;
    begin->begin.micro_batches += world_.random().Below(2);
  } else if (auto* finish = std::get_if<FinishCall>(&body)) {
    finish->absent.clear();
  } else {
    return BeginCall{rank_, generation_, world_.scenario().BeginOf(lineage_, step_, loss_scale_)};
  }
  return body;
}

void Trainer::PushAll(int daemon) {
  const Scenario& scenario = world_.scenario();
  const std::int64_t micro_batches = scenario.BeginOf(lineage_, step_, loss_scale_).micro_batches;
  std::vector<SliceId> slices;
  for (int p = 0; p < static_cast<int>(scenario.model.parameters.size()); ++p) {
    const ModelParameter& parameter = scenario.model.parameters[p];
    if (parameter.slices.empty() || scenario.Absent(p, rank_, step_, content_)) continue;
    for (std::size_t slice = 0; slice < parameter.slices[rank_].size(); ++slice) {
      if (!scenario.model.Reaches(p, parameter.slices[rank_][slice], daemon)) continue;
      for (std::int64_t micro = 0; micro < micro_batches; ++micro) {
        slices.push_back({p, rank_, static_cast<std::int64_t>(slice), micro});
      }
    }
  }
  world_.random().Shuffle(slices);
  links_[daemon].unpushed = {slices.begin(), slices.end()};
  for (const SliceId& id : slices) {
    Send(daemon, PushCall{id, generation_, step_, content_}, kCallTimeout);
  }
  // A Finish may ride ahead of the pushes.
  if (slices.empty() || world_.random().Chance(0.2)) Finish(daemon);
}

void Trainer::Finish(int daemon) {
  links_[daemon].finishing = true;
  const std::uint64_t number =
      Send(daemon,
           MaybeLie(daemon, FinishCall{rank_, generation_, step_,
                                       world_.scenario().AbsentOf(rank_, step_, content_, grown_)}),
           kFinishTimeout);
  if (world_.healed() || !world_.random().Chance(world_.scenario().faults.cancel)) return;
  Later(world_.random().Between(1'000, 50'000), [this, daemon, number, round = round_] {
    const auto found = open_.find(number);
    if (round != round_ || found == open_.end()) return;
    open_.erase(found);
    world_.Send({world_.trainer(rank_), daemon, ++calls_, CancelCall{number}});
    Finish(daemon);
  });
}

void Trainer::OnStepAnswer(const Call& call, const Answer& answer) {
  switch (answer.status.code()) {
    case absl::StatusCode::kOk:
      return OnAccepted(call, answer);
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return Later(world_.random().Between(5'000, 40'000), [this, call] {
        if (call.round == round_) Repeat(call);
      });
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kInternal:  // the run has failed
      return Join();
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kInvalidArgument:
      return OnRefused(call, answer);
    default:
      checker_.Violation(absl::StrFormat("rank %d is refused by daemon %d: %s", rank_, call.daemon,
                                         answer.status.ToString()));
  }
}

void Trainer::OnAccepted(const Call& call, const Answer& answer) {
  Link& link = links_[call.daemon];
  if (std::holds_alternative<BeginCall>(call.body)) {
    if (link.begun) return;
    link.begun = true;
    // Only after a lie: the truth is another kind of call.
    const Body truth = Truth(call.daemon);
    if (std::holds_alternative<SkipCall>(truth)) {
      link.finishing = true;
      Send(call.daemon, truth, kFinishTimeout);
      return;
    }
    return PushAll(call.daemon);
  }
  if (const auto* push = std::get_if<PushCall>(&call.body)) {
    link.unpushed.erase(push->id);
    if (link.unpushed.empty() && !link.finishing) Finish(call.daemon);
    return;
  }
  if (answer.outcome->step != step_) {
    return checker_.Violation(absl::StrFormat("rank %d is told the outcome of step %d for step %d",
                                              rank_, answer.outcome->step, step_));
  }
  EndLink(call.daemon, *answer.outcome);
}

// The daemon's position tells what is wrong.
void Trainer::OnRefused(const Call& call, const Answer& answer) {
  const Position& at = answer.position;
  const bool elsewhere =
      !at.usable || at.lineage != lineage_ || at.generation != generation_ || at.next_step != step_;
  if (elsewhere) {
    const bool behind = at.usable && at.lineage == lineage_ && at.generation == generation_ &&
                        at.next_step + 1 == step_ && world_.scenario().eager;
    if (!behind) return Join();
    // It has voted and will hear the other votes.
    return Later(world_.random().Between(1'000, 20'000), [this, call] {
      if (call.round == round_) Repeat(call);
    });
  }
  if (absl::IsInvalidArgument(answer.status) && world_.scenario().faults.lie == 0) {
    checker_.Violation(absl::StrFormat("rank %d, of ranks that agree, is refused by daemon %d: %s",
                                       rank_, call.daemon, answer.status.ToString()));
  }
  // Ranks disagreed: begin again; or daemons were told different things: not in this generation.
  Link& link = links_[call.daemon];
  if (++link.refusals > kRefusalsBorne) return AskForGeneration(false);
  std::erase_if(open_, [&](const auto& open) { return open.second.daemon == call.daemon; });
  Later(world_.random().Between(1'000, 20'000),
        [this, daemon = call.daemon, refusals = link.refusals, round = round_] {
          if (round == round_ && links_[daemon].refusals == refusals) StartLink(daemon);
        });
}

// Its answer did not come, or was that it should be repeated.
void Trainer::Repeat(const Call& call) {
  if (phase_ != Phase::kStepping || links_[call.daemon].done) return;
  if (++timeouts_ > kTimeoutsBorne * daemons_) return AskForGeneration(false);
  if (std::holds_alternative<FinishCall>(call.body)) return Finish(call.daemon);
  const bool skips = std::holds_alternative<SkipCall>(call.body);
  Send(call.daemon, call.body, skips ? kFinishTimeout : kCallTimeout);
}

// Acknowledged by one daemon; by all of them, the gradients may be forgotten.
void Trainer::EndLink(int daemon, const StepOutcome& outcome) {
  links_[daemon].done = true;
  for (const Link& link : links_) {
    if (!link.done && !world_.scenario().eager) return;
  }
  ++step_;
  loss_scale_ = outcome.next_loss_scale;
  content_ = {lineage_, 0};
  // Joining tells what there is to do after the last step, and has the run grow.
  done() || (!grown_ && world_.scenario().MustGrow(step_)) ? Join() : Compute();
}

}  // namespace muond::simulation

#include "tests/simulation/trainer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"

namespace muond::simulation {
namespace {

constexpr Time kJoinTimeout = 150'000;
constexpr Time kRaiseTimeout = 2'000'000;
constexpr int kMismatchesBorne = 3;

}  // namespace

Trainer::Trainer(std::int64_t rank, World& world, Checker& checker, Bug bug)
    : rank_(rank),
      world_(world),
      checker_(checker),
      bug_(bug),
      daemons_(world.scenario().model.daemons),
      joined_(daemons_),
      links_(daemons_) {
  Join();
}

void Trainer::Later(Time delay, std::function<void()> action) {
  world_.After(delay, [this, life = life_, action = std::move(action)] {
    if (life != life_) return;
    const Time until = world_.paused_until(world_.trainer(rank_));
    if (until > world_.now()) return Later(until - world_.now(), action);
    action();
  });
}

// Sends a call that belongs to the present round.
std::uint64_t Trainer::Send(int daemon, Body body, Time timeout) {
  const std::uint64_t number = ++calls_;
  world_.Send({world_.trainer(rank_), daemon, number, body});
  open_.emplace(number, Call{daemon, std::move(body), round_});
  Later(timeout, [this, number] { OnTimeout(number); });
  return number;
}

void Trainer::OnTimeout(std::uint64_t number) {
  const auto found = open_.find(number);
  if (found == open_.end()) return;
  const Call call = std::move(found->second);
  open_.erase(found);
  if (call.round != round_) return;
  if (phase_ == Phase::kJoining) return JoinAgain();
  if (phase_ == Phase::kRaising) return Join();
  if (phase_ == Phase::kStepping) Repeat(call);
}

// What is still on its way belongs to the past.
void Trainer::NextRound(Phase phase) {
  phase_ = phase;
  ++round_;
  open_.clear();
}

void Trainer::Crash() {
  ++life_;
  up_ = false;
  open_.clear();
  ++round_;
  if (phase_ != Phase::kDone && world_.random().Chance(world_.scenario().faults.loses_gradients)) {
    lost_ = true;
    lost_in_.reset();
  }
}

void Trainer::Join() {
  up_ = true;
  NextRound(Phase::kJoining);
  joined_.assign(daemons_, std::nullopt);
  for (int daemon = 0; daemon < daemons_; ++daemon) Send(daemon, JoinCall{}, kJoinTimeout);
}

void Trainer::JoinAgain() {
  NextRound(Phase::kJoining);
  Later(world_.random().Between(10'000, 60'000), [this, round = round_] {
    if (round == round_) Join();
  });
}

void Trainer::Receive(const Message& message) {
  const auto found = open_.find(message.call);
  if (found == open_.end()) return;
  const Call call = std::move(found->second);
  open_.erase(found);
  if (call.round != round_) return;
  const Answer& answer = std::get<Answer>(message.body);
  switch (phase_) {
    case Phase::kJoining:
      if (!answer.status.ok()) return JoinAgain();
      joined_[message.from] = answer.position;
      if (std::count(joined_.begin(), joined_.end(), std::nullopt) == 0) OnJoined();
      return;
    case Phase::kRaising:
      return Join();
    case Phase::kStepping:
      return OnStepAnswer(call, answer);
    case Phase::kComputing:
    case Phase::kDone:
      return;
  }
}

// Every daemon has said where it is.
void Trainer::OnJoined() {
  const Position& first = *joined_[0];
  bool usable = true;
  bool alike = true;
  bool committing = false;
  std::int64_t lowest = first.next_step;
  std::int64_t highest = first.next_step;
  for (const auto& position : joined_) {
    const bool alike_state = position->lineage == first.lineage || bug_ == Bug::kMixedLineages ||
                             bug_ == Bug::kSharedNumbers;
    usable = usable && position->usable && alike_state;
    alike = alike && position->generation == first.generation && position->grown == first.grown;
    committing = committing || position->committing;
    lowest = std::min(lowest, position->next_step);
    highest = std::max(highest, position->next_step);
  }
  // Who has lost gradients can't help those who are behind: a step that one daemon has consumed, or
  // that is being committed, must first be over everywhere.
  const bool over = !lost_ || (!committing && lowest == highest);
  if (!usable || !alike || !over) {
    // Perhaps it passes, or somebody else sees to it. A daemon that has promised does not go on by
    // itself when whoever asked for the promise has given up.
    if (++mismatches_ <= kMismatchesBorne) return JoinAgain();
    for (const auto& position : joined_) generation_ = std::max(generation_, position->generation);
    return AskForGeneration(!usable);
  }
  mismatches_ = 0;
  TakePlace(lowest, first);
}

void Trainer::TakePlace(std::int64_t lowest, const Position& at) {
  generation_ = at.generation;
  grown_ = at.grown;
  // What one daemon has consumed the others will: an eager rank is ahead of them.
  if (at.lineage == lineage_ && lowest < step_ - (world_.scenario().eager ? 1 : 0)) {
    checker_.Violation(absl::StrFormat("rank %d finished step %d, a daemon is back at step %d",
                                       rank_, step_ - 1, lowest));
  }
  const bool elsewhere = at.lineage != lineage_ || lowest > step_;
  if (elsewhere) {
    // The step that gradients were lost of is over, one way or another.
    lineage_ = at.lineage;
    step_ = lowest;
    lost_ = false;
    content_ = {lineage_, 0};
  }
  // The scale of a daemon that is further on is another step's.
  for (const auto& position : joined_) {
    if (position->next_step == step_) loss_scale_ = position->loss_scale;
  }
  if (step_ >= world_.scenario().steps) {
    NextRound(Phase::kDone);
    // Others may still need this rank, if the run goes back.
    return Later(300'000, [this, round = round_] {
      if (round == round_) Join();
    });
  }
  if (lost_) {
    if (!lost_in_) lost_in_ = generation_;
    if (generation_ <= *lost_in_) return AskForGeneration(false);
    lost_ = false;
    ++content_.number;
    ++checker_.coverage.new_gradients;
  }
  if (!grown_ && world_.scenario().MustGrow(step_)) return AskForGeneration(false);
  std::vector<std::int64_t> next_steps;
  for (const auto& position : joined_) next_steps.push_back(position->next_step);
  if (!elsewhere) return StartStep(next_steps);
  Compute();
}

void Trainer::AskForGeneration(bool reinitialize) {
  NextRound(Phase::kRaising);
  mismatches_ = 0;
  const bool any = world_.scenario().any_daemon_raises;
  const int daemon = any ? static_cast<int>(world_.random().Below(daemons_)) : 0;
  const bool grow = world_.scenario().MustGrow(step_);
  Send(daemon, NewGenerationCall{generation_, reinitialize, step_, grow}, kRaiseTimeout);
}

}  // namespace muond::simulation

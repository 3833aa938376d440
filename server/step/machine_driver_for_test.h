// Drives a StepMachine from a list of calls and plays the engine: carries out every effect, keeps
// what was done, and checks the machine's promises (each waiter answered once, nothing committed
// twice, nothing committed for a skipped step).
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/step/step_machine.h"

namespace muond {

// How googletest shows an outcome that is not the expected one.
inline void PrintTo(const StepOutcome& outcome, std::ostream* out) {
  *out << "step " << outcome.step << " applied " << outcome.applied << " cause \""
       << SkipCauseName(outcome.cause) << "\" scale " << outcome.loss_scale << " -> "
       << outcome.next_loss_scale << " norm " << outcome.grad_norm << " clip "
       << outcome.clip_coefficient << " counts " << outcome.applied_steps << "/"
       << outcome.skipped_steps << "/" << outcome.consecutive_skips << " Newton-Schulz "
       << outcome.newton_schulz_calls << "/" << outcome.newton_schulz_fallbacks << "/"
       << outcome.zero_inputs << " nonfinite " << outcome.nonfinite_elements << " version "
       << outcome.version;
}

inline StepLayout::Parameter Sliced(const std::string& name, int index,
                                    std::vector<std::int64_t> slices) {
  return {name, false, index, std::move(slices)};
}
inline StepLayout::Parameter Replicated(const std::string& name, int index,
                                        std::vector<std::int64_t> slices) {
  return {name, true, index, std::move(slices)};
}

// One sliced parameter "w", one slice on each rank.
inline StepLayout OneParameter(std::int64_t world_size) {
  return {world_size, {Sliced("w", 0, std::vector<std::int64_t>(world_size, 1))}};
}

inline RunSpec Spec() {
  RunSpec spec;
  spec.groups.emplace_back().name = "g";
  return spec;
}

inline RunSpec DynamicSpec(LossScalePolicy policy) {
  RunSpec spec = Spec();
  spec.loss_scale.mode = LossScaleMode::kDynamic;
  spec.loss_scale.policy = policy;
  return spec;
}

inline GradientFacts Finite(std::vector<double> block_sums) {
  GradientFacts facts;
  facts.block_sums = std::move(block_sums);
  return facts;
}
// The sums of a gradient that is not finite mean nothing.
inline GradientFacts Overflowed(std::int64_t elements = 1) {
  GradientFacts facts = Finite({std::numeric_limits<double>::quiet_NaN()});
  facts.nonfinite = elements;
  return facts;
}

class MachineDriver {
 public:
  explicit MachineDriver(StepLayout layout, const RunSpec& spec = Spec())
      : layout(layout), machine(std::move(layout), spec) {}

  // -- What the engine will say; by state, otherwise a finite gradient of norm 5.
  std::map<int, GradientFacts> facts;
  CommitFacts commit_facts;
  // Off: answers wait for Reduce() and Commit().
  bool answers = true;

  // -- Calls. The step and generation are the machine's unless given.
  absl::Status Begin(std::int64_t rank, const StepBegin& begin) {
    Effects effects;
    absl::Status status = machine.OnBegin(rank, generation, begin, effects);
    Carry(effects);
    return status;
  }
  absl::Status Begin(std::int64_t rank) { return Begin(rank, NextBegin()); }
  absl::Status BeginAt(std::int64_t step, std::int64_t rank) {
    StepBegin begin = NextBegin();
    begin.step = step;
    return Begin(rank, begin);
  }
  StepBegin NextBegin() const {
    return {.step = machine.next_step(),
            .loss_scale = machine.scaler().scale(),
            .micro_batches = micro_batches,
            .muon = {},
            .adamw = {}};
  }
  void BeginAll() {
    for (std::int64_t rank = 0; rank < layout.world_size; ++rank) {
      const absl::Status status = Begin(rank);
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  absl::StatusOr<StepMachine::Admission> Admit(const SliceId& id) const {
    return machine.Admit(id, generation, machine.next_step());
  }
  absl::StatusOr<StepMachine::Arrival> Push(const SliceId& id, std::uint64_t digest = 7) {
    return PushAt(machine.next_step(), id, digest);
  }
  absl::StatusOr<StepMachine::Arrival> PushAt(std::int64_t step, const SliceId& id,
                                              std::uint64_t digest = 7) {
    Effects effects;
    auto arrival = machine.OnSlice(id, generation, step, digest, effects);
    Carry(effects);
    return arrival;
  }
  // All slices of the rank that reach this daemon.
  void PushAll(std::int64_t rank) {
    for (const SliceId& id : SlicesOf(rank)) {
      const auto arrival = Push(id);
      ASSERT_TRUE(arrival.ok()) << arrival.status();
    }
  }
  std::vector<SliceId> SlicesOf(std::int64_t rank) const {
    std::vector<SliceId> ids;
    const LayoutIndex index(layout);
    for (int p = 0; p < index.parameters(); ++p) {
      for (std::int64_t k = 0; k < index.Slices(p, rank); ++k) {
        for (std::int64_t micro = 0; micro < micro_batches; ++micro) {
          ids.push_back({p, rank, index.Number(p, rank, k), micro});
        }
      }
    }
    return ids;
  }

  // Both return the waiter.
  std::uint64_t Finish(std::int64_t rank, const std::vector<std::string>& absent = {}) {
    return FinishAt(machine.next_step(), rank, absent);
  }
  std::uint64_t FinishAt(std::int64_t step, std::int64_t rank,
                         const std::vector<std::string>& absent = {}) {
    Effects effects;
    const std::uint64_t waiter = ++waiters_;
    machine.OnFinish(rank, generation, step, absent, waiter, effects);
    Carry(effects);
    return waiter;
  }
  std::uint64_t Skip(std::int64_t rank, SkipCause cause = SkipCause::kOverflow,
                     double loss_scale = 0) {
    return SkipAt(machine.next_step(), rank, cause, loss_scale);
  }
  std::uint64_t SkipAt(std::int64_t step, std::int64_t rank, SkipCause cause = SkipCause::kOverflow,
                       double loss_scale = 0) {
    Effects effects;
    const std::uint64_t waiter = ++waiters_;
    machine.OnSkip(rank, generation, step, cause, loss_scale, waiter, effects);
    Carry(effects);
    return waiter;
  }
  void Deadline(std::uint64_t waiter) {
    Effects effects;
    machine.OnDeadline(waiter, effects);
    Carry(effects);
  }
  void Raise(std::int64_t to, const std::vector<CastVote>& settled = {}) {
    Effects effects;
    machine.OnGeneration(to, settled, effects);
    Carry(effects);
    generation = machine.generation();
  }
  void Grow(const StepLayout& to, const RunSpec& spec = Spec()) {
    layout = to;
    machine.OnLayout(to, spec);
  }
  absl::Status Vote(const CastVote& cast) {
    Effects effects;
    absl::Status status = machine.OnVote(cast, effects);
    Carry(effects);
    return status;
  }
  void Held(std::int64_t attempt) {
    Effects effects;
    machine.OnHeld(attempt, effects);
    Carry(effects);
  }
  void Unreachable(int daemon, const std::string& why) {
    Effects effects;
    machine.OnUnreachable(daemon, why, effects);
    Carry(effects);
  }
  void Stop(const absl::Status& status) {
    Effects effects;
    machine.OnStop(status, effects);
    Carry(effects);
  }
  void EngineFailure(const std::string& reason) {
    Effects effects;
    machine.OnEngineFailure(reason, effects);
    Carry(effects);
  }

  // A whole step; returns rank 0's outcome.
  StepOutcome Step(const std::vector<std::string>& absent = {}) {
    BeginAll();
    for (std::int64_t rank = 0; rank < layout.world_size; ++rank) {
      for (const SliceId& id : SlicesOf(rank)) {
        if (std::find(absent.begin(), absent.end(), layout.parameters[id.parameter].name) ==
            absent.end()) {
          EXPECT_TRUE(Push(id).ok());
        }
      }
    }
    const std::int64_t step = machine.next_step();
    std::vector<std::uint64_t> waiters;
    for (std::int64_t rank = 0; rank < layout.world_size; ++rank) {
      waiters.push_back(FinishAt(step, rank, absent));
    }
    for (const std::uint64_t waiter : waiters) EXPECT_EQ(Outcome(waiter), Outcome(waiters[0]));
    return Outcome(waiters[0]);
  }

  // -- The engine, when `answers` is off: one question each, oldest first.
  void Reduce() {
    ASSERT_FALSE(open_reductions.empty());
    const ReduceEffect question = open_reductions.front();
    open_reductions.pop_front();
    Answer(question);
  }
  void Commit() {
    ASSERT_TRUE(commit_open);
    commit_open = false;
    Effects effects;
    machine.OnCommitted(commit_facts, effects);
    Carry(effects);
  }

  // -- What happened.
  // Of the newest reduction of the state; none: there was none.
  std::vector<Layer> LayersOf(int state) const {
    for (auto reduce = reduces.rbegin(); reduce != reduces.rend(); ++reduce) {
      if (reduce->state == state) return reduce->layers;
    }
    return {};
  }
  bool Replied(std::uint64_t waiter) const { return replies.contains(waiter); }
  absl::Status Status(std::uint64_t waiter) const {
    if (!Replied(waiter)) return absl::UnknownError("no reply");
    return replies.at(waiter).status;
  }
  absl::StatusCode Code(std::uint64_t waiter) const { return Status(waiter).code(); }
  std::string Message(std::uint64_t waiter) const { return std::string(Status(waiter).message()); }
  StepOutcome Outcome(std::uint64_t waiter) const {
    if (!Replied(waiter) || !replies.at(waiter).outcome) {
      ADD_FAILURE() << "no outcome for waiter " << waiter << ": " << Status(waiter);
      return {};
    }
    return *replies.at(waiter).outcome;
  }

  StepLayout layout;
  StepMachine machine;
  std::int64_t generation = 1;
  std::int64_t micro_batches = 1;
  std::map<std::uint64_t, ReplyEffect> replies;
  std::vector<ReduceEffect> reduces;
  std::vector<CommitEffect> commits;
  std::vector<OutcomeEffect> outcomes;
  std::vector<muond::Vote> votes;  // told to the other daemons
  std::vector<HoldEffect> holds;
  int discards = 0;
  std::deque<ReduceEffect> open_reductions;
  bool commit_open = false;

 private:
  void Answer(const ReduceEffect& question) {
    const auto found = facts.find(question.state);
    Effects effects;
    machine.OnReduced(question.attempt, question.state,
                      found != facts.end() ? found->second : Finite({9, 16}), effects);
    Carry(effects);
  }

  void Carry(Effects& effects) {
    for (const Effect& effect : effects) {
      std::visit([&](const auto& e) { On(e); }, effect);
    }
    if (!answers) return;
    while (!open_reductions.empty()) Reduce();
    if (commit_open) Commit();
  }
  void On(const ReduceEffect& effect) {
    reduces.push_back(effect);
    open_reductions.push_back(effect);
  }
  void On(const CommitEffect& effect) {
    for (const CommitEffect& earlier : commits) ASSERT_LT(earlier.step, effect.step);
    ASSERT_TRUE(open_reductions.empty()) << "committed before all gradients were judged";
    commits.push_back(effect);
    commit_open = true;
  }
  void On(const DiscardEffect&) { ++discards; }
  void On(const VoteEffect& effect) { votes.push_back(effect.vote); }
  void On(const HoldEffect& effect) { holds.push_back(effect); }
  void On(const ReplyEffect& effect) {
    ASSERT_EQ(effect.status.ok(), effect.outcome.has_value());
    ASSERT_TRUE(replies.emplace(effect.waiter, effect).second) << "a waiter is answered once";
  }
  void On(const OutcomeEffect& effect) {
    const bool committed = !commits.empty() && commits.back().step == effect.outcome.step;
    ASSERT_EQ(committed, effect.outcome.applied);
    outcomes.push_back(effect);
  }

  std::uint64_t waiters_ = 0;
};

}  // namespace muond

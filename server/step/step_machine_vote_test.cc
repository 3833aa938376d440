// Votes: how the machines of several daemons come to one verdict, and what they tell meanwhile.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/step/daemons_for_test.h"

namespace muond {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Code = absl::StatusCode;

// ---- The verdict ------------------------------------------------------------------------------

TEST(StepMachineVote, TheVerdictWaitsForEveryDaemon) {
  Daemons d(OneEach(3, 2));
  const auto waiters = d.FinishAll();
  EXPECT_TRUE(d.Tell(1, 0).ok());
  EXPECT_TRUE(d[0].commits.empty());
  EXPECT_FALSE(d[0].Replied(waiters[0][0]));
  EXPECT_TRUE(d.Tell(2, 0).ok());
  EXPECT_EQ(d[0].commits.size(), 1u);
  EXPECT_TRUE(d[0].Outcome(waiters[0][0]).applied);
  EXPECT_TRUE(d[1].commits.empty()) << "it knows its own vote only";
  d.TellAll();
  for (int daemon = 1; daemon < 3; ++daemon) {
    EXPECT_EQ(d[daemon].Outcome(waiters[daemon][0]), d[0].Outcome(waiters[0][0]));
  }
}

TEST(StepMachineVote, ADaemonWithoutOthersTellsNoVote) {
  MachineDriver d(OneParameter(1));
  EXPECT_TRUE(d.Step().applied);
  EXPECT_TRUE(d.votes.empty());
}

TEST(StepMachineVote, OneIsToldOncePerStep) {
  Daemons d(OneEach(2, 1));
  d.FinishAll();
  d[0].Finish(0);
  EXPECT_EQ(d[0].votes.size(), 1u);
  EXPECT_EQ(d[0].votes[0].step, 0);
  EXPECT_EQ(d[0].votes[0].generation, 1);
}

TEST(StepMachineVote, VotesMayComeBeforeTheGradientsAndInAnyOrder) {
  std::vector<int> order = {0, 1, 2};
  std::optional<StepOutcome> first;
  do {
    Daemons d(OneEach(3, 1));
    for (int daemon = 0; daemon < 3; ++daemon) d[daemon].facts[daemon] = Finite({1.0 + daemon});
    d.Finish(1);
    d.Finish(2);
    // Daemon 0 has its own vote when it stands in this place of the order.
    std::vector<std::uint64_t> waiters;
    for (const int from : order) {
      if (from == 0) {
        waiters = d.Finish(0);
      } else {
        EXPECT_TRUE(d.Tell(from, 0).ok());
      }
    }
    const StepOutcome outcome = d[0].Outcome(waiters[0]);
    if (!first) first = outcome;
    EXPECT_EQ(outcome, *first);
    EXPECT_EQ(outcome.grad_norm, std::sqrt(1.0 + 2.0 + 3.0));
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(StepMachineVote, TheOutcomeIsThatOfOneDaemonWithEverything) {
  RunSpec spec = DynamicSpec(LossScalePolicy::kTorch);
  spec.max_grad_norm = 0.25;
  StepLayout whole{2, {Sliced("a", 0, {1, 2}), Replicated("b", 1, {1, 1}), Sliced("c", 2, {0, 1})}};
  MachineDriver alone(whole, spec);
  Daemons d(Spread(whole, 3, {2, 0, 2}), spec);  // daemon 1 owns nothing
  const std::vector<std::vector<GradientFacts>> steps = {
      {Finite({0.1, 0.7}), Finite({1e-20}), Finite({1e20, 3})},
      {Overflowed(2), Finite({1}), Overflowed(3)},
      {Finite({0}), Finite({0}), Finite({0})}};
  for (const std::vector<GradientFacts>& facts : steps) {
    for (int p = 0; p < 3; ++p) alone.facts[p] = facts[p];
    for (int daemon = 0; daemon < 3; ++daemon) d[daemon].facts = alone.facts;
    const StepOutcome expected = alone.Step();
    const auto waiters = d.FinishAll();
    d.TellAll();
    for (int daemon = 0; daemon < 3; ++daemon) {
      EXPECT_EQ(d[daemon].Outcome(waiters[daemon][1]), expected);
    }
  }
  EXPECT_THAT(alone.outcomes[1].outcome.offenders, ElementsAre("a", "c"));
}

TEST(StepMachineVote, AnOverflowOnOneDaemonSkipsTheStepOnAll) {
  Daemons d(OneEach(2, 1), DynamicSpec(LossScalePolicy::kTorch));
  d[1].facts[1] = Overflowed(3);
  const auto waiters = d.FinishAll();
  d.TellAll();
  const StepOutcome outcome = d[0].Outcome(waiters[0][0]);
  EXPECT_EQ(outcome.cause, SkipCause::kOverflow);
  EXPECT_EQ(outcome.nonfinite_elements, 3);
  EXPECT_EQ(outcome.next_loss_scale, 32768);
  EXPECT_THAT(outcome.offenders, ElementsAre("p1"));
  EXPECT_TRUE(d[0].commits.empty());
  EXPECT_EQ(d[0].discards, 1);
}

TEST(StepMachineVote, AStateThatWouldOverflowOnOneDaemonSkipsTheStepOnAll) {
  Daemons d(OneEach(2, 1));
  d[0].facts[0] = Finite({1});
  d[0].facts[0].state_overflow = true;
  const auto waiters = d.FinishAll();
  d.TellAll();
  EXPECT_EQ(d[1].Outcome(waiters[1][0]).cause, SkipCause::kStateOverflow);
}

TEST(StepMachineVote, DeepSpeed8432_OverflowLeavesTheNextStepAloneOnEveryDaemon) {
  Daemons d(OneEach(2, 1));
  d[0].facts[0] = Overflowed();
  d.FinishAll();
  d.TellAll();
  d[0].facts.clear();
  const auto waiters = d.FinishAll();
  d.TellAll();
  EXPECT_TRUE(d[0].Outcome(waiters[0][0]).applied);
  EXPECT_TRUE(d[1].Outcome(waiters[1][0]).applied);
}

// ---- Which votes count ------------------------------------------------------------------------

TEST(StepMachineVote, AVoteStands) {
  Daemons d(OneEach(2, 1));
  d[1].facts[1] = Finite({4});
  d.Finish(1);
  EXPECT_TRUE(d.Tell(1, 0).ok());
  CastVote other = d.NewestVote(1);
  other.vote.nonfinite = 1;
  const absl::Status status = d[0].Vote(other);
  EXPECT_EQ(status.code(), Code::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr("vote of daemon 1"));
  EXPECT_TRUE(d.Tell(1, 0).ok()) << "the same once more";
  d[0].facts[0] = Finite({5});
  EXPECT_EQ(d[0].Outcome(d.Finish(0)[0]).grad_norm, 3);
}

TEST(StepMachineVote, VotesForTheNextStepWaitForIt) {
  Daemons d(OneEach(2, 1));
  const auto first = d.FinishAll();
  EXPECT_TRUE(d.Tell(1, 0).ok());  // daemon 0 consumes the step, daemon 1 does not yet
  const auto second = d.Finish(0);
  EXPECT_TRUE(d.Tell(0, 1).ok()) << "for a step that daemon 1 is not at";
  EXPECT_FALSE(d[1].Replied(first[1][0]));
  for (const CastVote& cast : d[0].machine.VotesOf(0)) EXPECT_TRUE(d[1].Vote(cast).ok());
  EXPECT_TRUE(d[1].Outcome(first[1][0]).applied);
  const auto last = d.Finish(1);
  EXPECT_EQ(d[1].Outcome(last[0]).step, 1) << "daemon 0's vote was there";
  EXPECT_TRUE(d.Tell(1, 0).ok());
  EXPECT_EQ(d[0].Outcome(second[0]), d[1].Outcome(last[0]));
}

TEST(StepMachineVote, OfOtherPositionsAreRefusedOrIgnored) {
  Daemons d(OneEach(2, 1));
  d.FinishAll();
  d.TellAll();
  CastVote cast = d.NewestVote(1);
  EXPECT_TRUE(d[0].Vote(cast).ok()) << "needed before";
  cast.vote.step = 3;
  EXPECT_EQ(d[0].Vote(cast).code(), Code::kOutOfRange);
  cast.vote.step = 1;
  cast.vote.generation = 2;
  EXPECT_EQ(d[0].Vote(cast).code(), Code::kAborted);
  cast.vote.generation = 0;
  const absl::Status lower = d[0].Vote(cast);
  EXPECT_EQ(lower.code(), Code::kFailedPrecondition);
  EXPECT_THAT(std::string(lower.message()), HasSubstr("expected step 1 of generation 1"));
  cast.vote.generation = 1;
  for (const int daemon : {-1, 2}) {
    cast.daemon = daemon;
    EXPECT_EQ(d[0].Vote(cast).code(), Code::kInvalidArgument);
  }
  // None of them counted.
  const auto waiters = d.Finish(0);
  EXPECT_FALSE(d[0].Replied(waiters[0]));
}

TEST(StepMachineVote, NobodyVotesInADaemonsPlace) {
  Daemons d(OneEach(2, 1));
  d.Finish(1);
  CastVote forged = d.NewestVote(1);
  forged.daemon = 0;
  EXPECT_EQ(d[0].Vote(forged).code(), Code::kInvalidArgument);
  d.Finish(0);
  d.TellAll();  // its own vote comes back to it: fine
  EXPECT_EQ(d[0].machine.next_step(), 1);
}

TEST(StepMachineVote, VotesOfAreThoseOfTheStepInFlightOrTheLast) {
  Daemons d(OneEach(2, 1));
  EXPECT_THAT(d[0].machine.VotesOf(0), IsEmpty());
  d.FinishAll();
  EXPECT_THAT(d[0].machine.VotesOf(0), ElementsAre(d.NewestVote(0)));
  d.TellAll();
  EXPECT_THAT(d[0].machine.VotesOf(0), ElementsAre(d.NewestVote(0), d.NewestVote(1)));
  EXPECT_THAT(d[0].machine.VotesOf(1), IsEmpty());
  d.Finish(0);
  EXPECT_THAT(d[0].machine.VotesOf(1), ElementsAre(d.NewestVote(0)));
  EXPECT_EQ(d[0].machine.VotesOf(0).size(), 2u);
  d.TellAll();
  d.Finish(1);
  d.TellAll();
  EXPECT_THAT(d[0].machine.VotesOf(0), IsEmpty()) << "nobody can be that far behind";
}

// ---- Who waits --------------------------------------------------------------------------------

TEST(StepMachineVote, ADeadlineNamesTheDaemonsThatHaveNotVoted) {
  Daemons d(OneEach(4, 1));
  const auto waiters = d.Finish(0);
  d.Finish(2);
  EXPECT_TRUE(d.Tell(2, 0).ok());
  d[0].Deadline(waiters[0]);
  EXPECT_EQ(d[0].Code(waiters[0]), Code::kDeadlineExceeded);
  EXPECT_THAT(d[0].Message(waiters[0]), HasSubstr("missing: votes of daemons [d1, d3];"));
}

TEST(StepMachineVote, ADeadlineNamesWhatThisDaemonMissesFirst) {
  Daemons d(OneEach(2, 2));
  d[0].BeginAll();
  d[0].PushAll(0);
  const std::uint64_t waiter = d[0].Finish(0);
  d[0].Deadline(waiter);
  EXPECT_THAT(d[0].Message(waiter),
              HasSubstr("ranks [1]; parameter \"p0\": slices [0] of rank 1 in micro-batch 0"));
  EXPECT_THAT(d[0].Message(waiter), Not(HasSubstr("daemon")));
}

TEST(StepMachineVote, WhoWaitsForAnUnreachableDaemonIsTold) {
  Daemons d(OneEach(3, 2));
  const auto waiters = d.FinishAll();
  EXPECT_TRUE(d.Tell(1, 0).ok());
  d[0].Unreachable(1, "connection refused");
  EXPECT_FALSE(d[0].Replied(waiters[0][0])) << "daemon 1 has voted: nobody waits for it";
  d[0].Unreachable(2, "connection refused");
  for (const std::uint64_t waiter : waiters[0]) {
    EXPECT_EQ(d[0].Code(waiter), Code::kUnavailable);
    EXPECT_THAT(d[0].Message(waiter), HasSubstr("daemon [d2]"));
    EXPECT_THAT(d[0].Message(waiter), HasSubstr("connection refused"));
  }
  EXPECT_EQ(d[0].discards, 0);
  const std::uint64_t again = d[0].Finish(1);
  EXPECT_FALSE(d[0].Replied(again)) << "it waits again";
  EXPECT_TRUE(d.Tell(2, 0).ok());
  EXPECT_TRUE(d[0].Outcome(again).applied);
}

TEST(StepMachineVote, AnUnreachableDaemonDoesNotMindWhoWaitsForRanks) {
  Daemons d(OneEach(2, 2));
  d[0].BeginAll();
  d[0].PushAll(0);
  const std::uint64_t waiter = d[0].Finish(0);
  d[0].Unreachable(1, "connection refused");
  EXPECT_FALSE(d[0].Replied(waiter));
}

TEST(StepMachineVote, RepeatsOfFinishWaitAlongAndGetTheSameAnswer) {
  Daemons d(OneEach(2, 1));
  const auto waiters = d.FinishAll();
  const std::uint64_t again = d[0].Finish(0);
  const std::uint64_t otherwise = d[0].Finish(0, {"p1"});
  EXPECT_EQ(d[0].Code(otherwise), Code::kInvalidArgument) << "another list than its vote's";
  d.TellAll();
  const std::uint64_t late = d[0].FinishAt(0, 0);
  for (const std::uint64_t waiter : {again, late}) {
    EXPECT_EQ(d[0].Outcome(waiter), d[0].Outcome(waiters[0][0]));
  }
  EXPECT_EQ(d[0].commits.size(), 1u);
}

TEST(StepMachineVote, AWordThatComesAfterTheVoteDoesNotUndoIt) {
  Daemons d(OneEach(2, 1));
  const auto waiters = d.FinishAll();
  StepBegin begin = d[0].NextBegin();
  begin.muon["g"].lr = 0.5;
  EXPECT_EQ(d[0].Begin(0, begin).code(), Code::kInvalidArgument);
  EXPECT_EQ(d[0].Code(d[0].Skip(0)), Code::kFailedPrecondition);
  EXPECT_EQ(d[0].discards, 0);
  d.TellAll();
  EXPECT_TRUE(d[0].Outcome(waiters[0][0]).applied);
}

TEST(StepMachineVote, AStopAfterTheVoteLeavesTheStepToItsVerdict) {
  Daemons d(OneEach(2, 1));
  const auto waiters = d.FinishAll();
  EXPECT_TRUE(d.Tell(0, 1).ok());  // daemon 1 applies the step
  d[0].Stop(absl::UnavailableError("draining"));
  EXPECT_EQ(d[0].Code(waiters[0][0]), Code::kUnavailable);
  EXPECT_TRUE(d[0].machine.step_in_flight());
  EXPECT_EQ(d[0].discards, 0);
  EXPECT_TRUE(d.Tell(1, 0).ok());
  EXPECT_EQ(d[0].commits.size(), 1u);
  EXPECT_EQ(d[0].machine.next_step(), 1);
  EXPECT_EQ(d[0].Begin(0).code(), Code::kUnavailable) << "there are no further steps";
}

TEST(StepMachineVote, AStopBeforeTheVoteDiscardsTheStep) {
  Daemons d(OneEach(2, 1));
  d[0].BeginAll();
  d[0].PushAll(0);
  d[0].Stop(absl::UnavailableError("draining"));
  EXPECT_EQ(d[0].discards, 1);
  EXPECT_FALSE(d[0].machine.step_in_flight());
}

TEST(StepMachineVote, AFailedDaemonDecidesNothing) {
  Daemons d(OneEach(2, 1));
  const auto waiters = d.FinishAll();
  d[0].EngineFailure("out of memory");
  EXPECT_EQ(d[0].Code(waiters[0][0]), Code::kInternal);
  EXPECT_TRUE(d.Tell(1, 0).ok());
  EXPECT_TRUE(d[0].commits.empty());
  EXPECT_EQ(d[0].machine.next_step(), 0);
}

// ---- A copy at the buddy before the vote -------------------------------------------------------

std::vector<StepLayout> WithBuddies(std::vector<StepLayout> layouts) {
  for (StepLayout& layout : layouts) {
    layout.buddy = (layout.self + 1) % static_cast<int>(layouts.size());
  }
  return layouts;
}

void Held(MachineDriver& driver) {
  ASSERT_FALSE(driver.holds.empty());
  driver.Held(driver.holds.back().attempt);
}

TEST(StepMachineHold, NoVoteIsCastBeforeTheBuddyHoldsTheGradients) {
  Daemons d(WithBuddies(OneEach(2, 1)));
  d.FinishAll();
  for (int daemon = 0; daemon < 2; ++daemon) {
    EXPECT_TRUE(d[daemon].votes.empty());
    EXPECT_THAT(d[daemon].holds.back().states, ElementsAre(daemon));
    Held(d[daemon]);
  }
  d.TellAll();
  EXPECT_EQ(d[0].commits.size(), 1u);
  Held(d[0]);  // again, and too late
  EXPECT_EQ(d[0].votes.size(), 1u);
}

TEST(StepMachineHold, AnOverflowIsToldAtOnce) {
  Daemons d(WithBuddies(OneEach(2, 1)));
  d[0].facts[0] = {.nonfinite = 1, .block_sums = {}};
  d.FinishAll();
  EXPECT_TRUE(d[0].holds.empty());
  EXPECT_EQ(d[0].votes.size(), 1u);
}

TEST(StepMachineHold, WhoWaitsIsToldOfABuddyOutOfReach) {
  Daemons d(WithBuddies(OneEach(3, 1)));
  const auto waiters = d.FinishAll();
  d[0].Unreachable(2, "gone");
  EXPECT_FALSE(d[0].Replied(waiters[0][0])) << "it is not the buddy";
  d[0].Unreachable(1, "gone");
  EXPECT_EQ(d[0].Code(waiters[0][0]), Code::kUnavailable);
  EXPECT_THAT(d[0].Message(waiters[0][0]), HasSubstr("daemon [d1]"));
}

TEST(StepMachineHold, APromiseOrAnotherAttemptMakesACopyUseless) {
  Daemons d(WithBuddies(OneEach(2, 1)));
  d.FinishAll();
  const std::int64_t first = d[0].holds.back().attempt;
  d.PrepareAll(2);
  Held(d[0]);
  EXPECT_TRUE(d[0].votes.empty());
  d[0].Raise(2);
  d[0].generation = 2;
  d.Finish(0);
  d[0].Held(first);
  EXPECT_TRUE(d[0].votes.empty()) << "of an attempt that was thrown away";
  Held(d[0]);
  EXPECT_EQ(d[0].votes.size(), 1u);
}

}  // namespace
}  // namespace muond

// Finish: waiting, repeats, deadlines, and what ends a step from outside.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/step/machine_driver_for_test.h"

namespace muond {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Code = absl::StatusCode;

TEST(StepMachineFinish, WaitsForAllRanks) {
  MachineDriver d(OneParameter(2));
  d.BeginAll();
  d.PushAll(0);
  d.PushAll(1);
  const std::uint64_t first = d.Finish(0);
  EXPECT_FALSE(d.Replied(first));
  const std::uint64_t second = d.Finish(1);
  EXPECT_TRUE(d.Outcome(first).applied);
  EXPECT_EQ(d.Outcome(first), d.Outcome(second));
  EXPECT_EQ(d.Outcome(first).version, 1);
  EXPECT_EQ(d.machine.next_step(), 1);
}

TEST(StepMachineFinish, NeedsABegin) {
  MachineDriver d(OneParameter(1));
  EXPECT_EQ(d.Code(d.Finish(0)), Code::kFailedPrecondition);
}

TEST(StepMachineFinish, UnknownRankOrAbsentNameIsNotFound) {
  MachineDriver d(OneParameter(1));
  d.BeginAll();
  EXPECT_EQ(d.Code(d.Finish(1)), Code::kNotFound);
  const std::uint64_t waiter = d.Finish(0, {"w_typo"});
  EXPECT_EQ(d.Code(waiter), Code::kNotFound);
  EXPECT_THAT(d.Message(waiter), HasSubstr("\"w_typo\""));
  EXPECT_TRUE(d.Step().applied);
}

TEST(StepMachineFinish, Grpc18761_ARepeatGetsTheIdenticalOutcomeAndAppliesNothingTwice) {
  MachineDriver d(OneParameter(1));
  const StepOutcome outcome = d.Step();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(d.Outcome(d.FinishAt(0, 0)), outcome);
  EXPECT_EQ(d.commits.size(), 1u);
  EXPECT_EQ(d.outcomes.size(), 1u);
}

TEST(StepMachineFinish, ARepeatWhileOthersAreMissingWaitsAlong) {
  MachineDriver d(OneParameter(2));
  d.BeginAll();
  d.PushAll(0);
  d.PushAll(1);
  const std::uint64_t lost = d.Finish(0);
  const std::uint64_t retry = d.Finish(0);
  EXPECT_FALSE(d.Replied(lost) || d.Replied(retry));
  d.Finish(1);
  EXPECT_EQ(d.Outcome(lost), d.Outcome(retry));
}

TEST(StepMachineFinish, ARepeatDuringTheCommitWaitsForIt) {
  MachineDriver d(OneParameter(1));
  d.answers = false;
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t first = d.Finish(0);
  d.Reduce();
  ASSERT_TRUE(d.commit_open);
  const std::uint64_t repeat = d.Finish(0);
  EXPECT_FALSE(d.Replied(repeat));
  d.Commit();
  EXPECT_EQ(d.Outcome(first), d.Outcome(repeat));
  EXPECT_EQ(d.commits.size(), 1u);
}

TEST(StepMachineFinish, OlderStepsAndGenerationsAreFailedPreconditions) {
  MachineDriver d(OneParameter(1));
  d.Step();
  d.Step();
  const std::uint64_t old = d.FinishAt(0, 0);
  EXPECT_EQ(d.Code(old), Code::kFailedPrecondition);
  EXPECT_THAT(d.Message(old), HasSubstr("expected step 2 of generation 1"));
  EXPECT_EQ(d.Code(d.FinishAt(3, 0)), Code::kFailedPrecondition);
  d.Raise(4);
  d.generation = 1;
  EXPECT_EQ(d.Code(d.FinishAt(1, 0)), Code::kFailedPrecondition);
  d.generation = 4;
  EXPECT_TRUE(d.Outcome(d.FinishAt(1, 0)).applied) << "the last outcome outlives a raise";
}

// ---- Deadlines --------------------------------------------------------------------------------

TEST(StepMachineDeadline, TensorFlow5022_NamesMissingRanksAndALatePushCompletesTheStep) {
  MachineDriver d(OneParameter(4));
  d.BeginAll();
  std::vector<std::uint64_t> waiters;
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    d.PushAll(rank);
    waiters.push_back(d.Finish(rank));
  }
  d.Deadline(waiters[0]);
  EXPECT_EQ(d.Code(waiters[0]), Code::kDeadlineExceeded);
  EXPECT_THAT(d.Message(waiters[0]), HasSubstr("missing: ranks [3]; parameter \"w\": slices [0] of "
                                               "rank 3 in micro-batch 0"));
  EXPECT_TRUE(d.commits.empty());
  d.PushAll(3);
  d.Finish(3);
  EXPECT_TRUE(d.Outcome(waiters[1]).applied);
  EXPECT_EQ(d.Outcome(d.FinishAt(0, 0)), d.Outcome(waiters[1])) << "the Finish had stayed";
}

TEST(StepMachineDeadline, TensorFlow5022_UnlessTheGenerationWasRaised) {
  MachineDriver d(OneParameter(2));
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0);
  d.Raise(2);
  EXPECT_EQ(d.Code(waiter), Code::kAborted);
  d.generation = 1;
  EXPECT_EQ(d.Push({0, 1, 0, 0}).status().code(), Code::kAborted);
  EXPECT_TRUE(d.commits.empty());
}

TEST(StepMachineDeadline, NamesMissingSlicesWhenAllHaveFinished) {
  MachineDriver d({1, {Sliced("w", 0, {12}), Sliced("v", 1, {2})}});
  d.micro_batches = 2;
  d.BeginAll();
  ASSERT_TRUE(d.Push({1, 0, 0, 0}).ok());
  const std::uint64_t waiter = d.Finish(0);
  d.Deadline(waiter);
  EXPECT_THAT(d.Message(waiter),
              HasSubstr("missing: parameter \"w\": slices [0, 1, 2, 3, 4, 5, 6, 7] of rank 0 in "
                        "micro-batch 0 and 16 more; parameter \"v\": slices [1] of rank 0 in "
                        "micro-batch 0 and 2 more"));
}

TEST(StepMachineDeadline, NamesAtMostEightParameters) {
  StepLayout layout;
  for (int i = 0; i < 20; ++i) {
    layout.parameters.push_back(Sliced("p" + std::to_string(i), i, {1}));
  }
  MachineDriver d(layout);
  d.BeginAll();
  const std::uint64_t waiter = d.Finish(0);
  d.Deadline(waiter);
  EXPECT_THAT(d.Message(waiter), HasSubstr("\"p7\""));
  EXPECT_THAT(d.Message(waiter), Not(HasSubstr("\"p8\"")));
  EXPECT_THAT(d.Message(waiter), HasSubstr("12 more parameters"));
}

TEST(StepMachineDeadline, DuringTheCommitSaysSo) {
  MachineDriver d(OneParameter(1));
  d.answers = false;
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0);
  d.Reduce();
  d.Deadline(waiter);
  EXPECT_THAT(d.Message(waiter), HasSubstr("the end of the commit"));
  d.Commit();
  EXPECT_TRUE(d.Outcome(d.FinishAt(0, 0)).applied);
}

TEST(StepMachineDeadline, AnsweredOrUnknownWaitersAreLeftAlone) {
  MachineDriver d(OneParameter(1));
  d.Step();
  d.Deadline(1);
  d.Deadline(99);
  EXPECT_EQ(d.replies.size(), 1u);
}

TEST(StepMachineDeadline, AWaiterThatWentAwayLeavesItsFinish) {
  MachineDriver d(OneParameter(2));
  d.BeginAll();
  d.PushAll(0);
  d.PushAll(1);
  const std::uint64_t gone = d.Finish(0);
  d.machine.OnWaiterGone(gone);
  EXPECT_TRUE(d.Outcome(d.Finish(1)).applied);
  EXPECT_FALSE(d.Replied(gone));
}

// ---- Ends from outside ------------------------------------------------------------------------

TEST(StepMachineGeneration, RaisedDuringTheCommitWaitersStillGetTheOutcome) {
  MachineDriver d(OneParameter(1));
  d.answers = false;
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0);
  d.Reduce();
  d.Raise(2);
  EXPECT_FALSE(d.Replied(waiter));
  EXPECT_TRUE(d.Begin(0).ok()) << "a rank that rejoins meanwhile";
  const std::uint64_t rejoined = d.Finish(0);
  d.Commit();
  EXPECT_TRUE(d.Outcome(waiter).applied);
  EXPECT_EQ(d.Outcome(rejoined), d.Outcome(waiter));
  EXPECT_EQ(d.commits.size(), 1u);
}

TEST(StepMachineGeneration, NeverFalls) {
  MachineDriver d(OneParameter(1));
  d.Raise(3);
  d.Raise(2);
  EXPECT_EQ(d.machine.generation(), 3);
}

TEST(StepMachineGeneration, AnswersForADiscardedAttemptAreIgnored) {
  MachineDriver d(OneParameter(1));
  d.answers = false;
  d.facts[0].nonfinite = 1;
  d.BeginAll();
  d.PushAll(0);
  d.Raise(2);
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0);
  ASSERT_EQ(d.open_reductions.size(), 2u);
  d.Reduce();  // of the first attempt
  EXPECT_FALSE(d.Replied(waiter));
  d.facts[0].nonfinite = 0;
  d.Reduce();
  d.Commit();
  EXPECT_TRUE(d.Outcome(waiter).applied);
}

TEST(StepMachineStop, WaitersAndLaterCallsGetTheStatus) {
  MachineDriver d(OneParameter(2));
  d.Step();
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0);
  const absl::Status draining = absl::UnavailableError("draining");
  d.Stop(draining);
  EXPECT_EQ(d.Status(waiter), draining);
  EXPECT_EQ(d.Begin(0), draining);
  EXPECT_EQ(d.Admit({0, 1, 0, 0}).status(), draining);
  EXPECT_EQ(d.Status(d.Finish(1)), draining);
  EXPECT_EQ(d.Status(d.Skip(1)), draining);
  EXPECT_TRUE(d.Outcome(d.FinishAt(0, 0)).applied) << "what happened is told all the same";
}

TEST(StepMachineStop, ACommitUnderWayIsFinished) {
  MachineDriver d(OneParameter(1));
  d.answers = false;
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0);
  d.Reduce();
  d.Stop(absl::UnavailableError("draining"));
  const std::uint64_t repeat = d.Finish(0);
  d.Commit();
  EXPECT_TRUE(d.Outcome(waiter).applied);
  EXPECT_TRUE(d.Outcome(repeat).applied);
  EXPECT_EQ(d.Begin(0).code(), Code::kUnavailable);
}

TEST(StepMachineFailure, WaitersGetInternalLaterCallsFailedPrecondition) {
  MachineDriver d(OneParameter(2));
  d.Step();
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0);
  d.EngineFailure("device lost");
  EXPECT_EQ(d.Code(waiter), Code::kInternal);
  EXPECT_THAT(d.Message(waiter), HasSubstr("device lost"));
  EXPECT_TRUE(d.machine.failed());
  EXPECT_EQ(d.Begin(0).code(), Code::kFailedPrecondition);
  EXPECT_EQ(d.Code(d.Finish(0)), Code::kFailedPrecondition);
  EXPECT_TRUE(d.Outcome(d.FinishAt(0, 1)).applied);
}

TEST(StepMachineFailure, Dion76_AFailedCommitConsumesNothingAndIsNeverRepeated) {
  MachineDriver d(OneParameter(1));
  d.commit_facts.failure = "Newton-Schulz of \"w\" is not finite on any path";
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0);
  EXPECT_EQ(d.Code(waiter), Code::kInternal);
  EXPECT_EQ(d.machine.next_step(), 0);
  EXPECT_FALSE(d.machine.last_outcome().has_value());
  EXPECT_EQ(d.Code(d.Finish(0)), Code::kFailedPrecondition);
  EXPECT_EQ(d.commits.size(), 1u);
  EXPECT_TRUE(d.outcomes.empty());
}

TEST(StepMachineFailure, ASumThatIsNoNumberFailsTheRunInsteadOfTheProcess) {
  MachineDriver d(OneParameter(1));
  d.facts[0].block_sums = {-1};
  d.BeginAll();
  d.PushAll(0);
  EXPECT_THAT(d.machine.failure(), HasSubstr("parameter \"w\""));
  EXPECT_EQ(d.Code(d.Finish(0)), Code::kFailedPrecondition);
}

}  // namespace
}  // namespace muond

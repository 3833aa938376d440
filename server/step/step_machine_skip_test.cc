// Skip: steps that the trainers discard on their own word.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/step/machine_driver_for_test.h"

namespace muond {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

TEST(StepMachineSkip, NeedsNoBeginAndConsumesTheStep) {
  MachineDriver d(OneParameter(2));
  const std::uint64_t first = d.Skip(0, SkipCause::kTrainer);
  EXPECT_FALSE(d.Replied(first));
  EXPECT_TRUE(d.machine.step_in_flight());
  EXPECT_THAT(d.machine.WaitingRanks(), ElementsAre(1));
  const std::uint64_t second = d.Skip(1, SkipCause::kTrainer);
  const StepOutcome outcome = d.Outcome(first);
  EXPECT_FALSE(outcome.applied);
  EXPECT_EQ(outcome.cause, SkipCause::kTrainer);
  EXPECT_EQ(outcome.version, 1);
  EXPECT_EQ(outcome.skipped_steps, 1);
  EXPECT_EQ(d.Outcome(second), outcome);
  EXPECT_TRUE(d.commits.empty());
}

TEST(StepMachineSkip, RepeatsAreIdempotent) {
  MachineDriver d(OneParameter(2));
  const std::uint64_t waiting = d.Skip(0);
  const std::uint64_t again = d.Skip(0);
  d.Skip(1);
  EXPECT_EQ(d.Outcome(waiting), d.Outcome(again));
  EXPECT_EQ(d.Outcome(d.SkipAt(0, 0)), d.Outcome(waiting));
  EXPECT_EQ(d.machine.next_step(), 1);
}

TEST(StepMachineSkip, OverflowMovesADynamicScaleTrainerDoesNot) {
  MachineDriver d(OneParameter(1), DynamicSpec(LossScalePolicy::kTorch));
  d.Skip(0, SkipCause::kTrainer);
  EXPECT_EQ(d.machine.scaler().scale(), 65536);
  const StepOutcome outcome = d.Outcome(d.Skip(0, SkipCause::kOverflow));
  EXPECT_EQ(outcome.loss_scale, 65536);
  EXPECT_EQ(outcome.next_loss_scale, 32768);
  EXPECT_EQ(d.outcomes.back().scale_change, ScaleChange::kBackoff);
}

TEST(StepMachineSkip, ExternalScaleIsTheOneNamed) {
  RunSpec spec = Spec();
  spec.loss_scale.mode = LossScaleMode::kExternal;
  MachineDriver d(OneParameter(2), spec);
  d.Skip(0, SkipCause::kOverflow);  // leaves the scale to the others
  const StepOutcome outcome = d.Outcome(d.Skip(1, SkipCause::kOverflow, 512));
  EXPECT_EQ(outcome.loss_scale, 512);
  EXPECT_EQ(outcome.next_loss_scale, 512);
}

TEST(StepMachineSkip, DiscardsWhatWasPushedAndItsReductions) {
  MachineDriver d(OneParameter(1));
  d.answers = false;
  d.BeginAll();
  d.PushAll(0);
  ASSERT_EQ(d.open_reductions.size(), 1u);
  EXPECT_FALSE(d.Outcome(d.Skip(0)).applied);
  EXPECT_EQ(d.discards, 1);
  d.Reduce();  // late
  EXPECT_EQ(d.machine.next_step(), 1);
  d.answers = true;
  EXPECT_TRUE(d.Step().applied);
}

TEST(StepMachineSkip, SomeFinishedSomeSkippedIsInvalidToAll) {
  MachineDriver d(OneParameter(3));
  d.BeginAll();
  d.PushAll(0);
  d.PushAll(1);
  const std::uint64_t finished = d.Finish(0);
  const std::uint64_t skipped = d.Skip(2);
  for (const std::uint64_t waiter : {finished, skipped}) {
    EXPECT_EQ(d.Code(waiter), Code::kInvalidArgument);
    EXPECT_THAT(d.Message(waiter), HasSubstr("ranks [0] finished, ranks [2] skipped"));
  }
  EXPECT_EQ(d.Status(d.Finish(1)), d.Status(finished));
  EXPECT_TRUE(d.Step().applied);
}

TEST(StepMachineSkip, FinishAfterAnothersSkipIsInvalidToAll) {
  MachineDriver d(OneParameter(2));
  ASSERT_TRUE(d.Begin(1).ok());
  const std::uint64_t skipped = d.Skip(0);
  const std::uint64_t finished = d.Finish(1);
  EXPECT_EQ(d.Code(skipped), Code::kInvalidArgument);
  EXPECT_EQ(d.Status(finished), d.Status(skipped));
  EXPECT_THAT(d.Message(finished), HasSubstr("ranks [1] finished, ranks [0] skipped"));
  EXPECT_TRUE(d.Step().applied);
}

TEST(StepMachineSkip, RanksThatDisagreeOnTheCauseAreToldBoth) {
  MachineDriver d(OneParameter(2));
  const std::uint64_t first = d.Skip(0, SkipCause::kOverflow);
  const std::uint64_t second = d.Skip(1, SkipCause::kTrainer);
  EXPECT_EQ(d.Code(first), Code::kInvalidArgument);
  EXPECT_EQ(d.Status(first), d.Status(second));
  EXPECT_THAT(d.Message(first), HasSubstr("ranks [0] said cause overflow"));
  EXPECT_EQ(d.machine.next_step(), 0);
}

TEST(StepMachineSkip, RanksThatDisagreeOnTheScaleAreToldBoth) {
  RunSpec spec = Spec();
  spec.loss_scale.mode = LossScaleMode::kExternal;
  MachineDriver d(OneParameter(2), spec);
  const std::uint64_t first = d.Skip(0, SkipCause::kOverflow, 512);
  const std::uint64_t second = d.Skip(1, SkipCause::kOverflow, 256);
  EXPECT_EQ(d.Code(first), Code::kInvalidArgument);
  EXPECT_EQ(d.Status(first), d.Status(second));
  EXPECT_THAT(d.Message(first), HasSubstr("512"));
  EXPECT_THAT(d.Message(first), HasSubstr("256"));
}

TEST(StepMachineSkip, ABeginWithAnotherScaleThanASkipDisagrees) {
  RunSpec spec = Spec();
  spec.loss_scale.mode = LossScaleMode::kExternal;
  MachineDriver d(OneParameter(2), spec);
  const std::uint64_t skipped = d.Skip(0, SkipCause::kOverflow, 512);
  StepBegin begin = d.NextBegin();
  begin.loss_scale = 256;
  const absl::Status status = d.Begin(1, begin);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(d.Status(skipped), status);
}

TEST(StepMachineSkip, AfterASkipTheRankCanNeitherBeginNorPushNorFinish) {
  MachineDriver d(OneParameter(2));
  ASSERT_TRUE(d.Begin(0).ok());
  d.Skip(0);
  EXPECT_EQ(d.Begin(0).code(), Code::kFailedPrecondition);
  EXPECT_EQ(d.Admit({0, 0, 0, 0}).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(d.Push({0, 0, 0, 0}).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(d.Code(d.Finish(0)), Code::kFailedPrecondition);
  EXPECT_EQ(d.Skip(1), 3u);
  EXPECT_EQ(d.machine.next_step(), 1) << "the skip stands";
}

TEST(StepMachineSkip, AfterAFinishTheRankCanNotSkip) {
  MachineDriver d(OneParameter(2));
  d.BeginAll();
  d.Finish(0);
  EXPECT_EQ(d.Code(d.Skip(0)), Code::kFailedPrecondition);
  EXPECT_EQ(d.discards, 0);
}

TEST(StepMachineSkip, OnlyOverflowAndTrainerAreATrainersCauses) {
  MachineDriver d(OneParameter(1));
  for (const SkipCause cause :
       {SkipCause::kNone, SkipCause::kStateOverflow, SkipCause::kNormThreshold}) {
    EXPECT_EQ(d.Code(d.Skip(0, cause)), Code::kInvalidArgument);
  }
  EXPECT_EQ(d.machine.next_step(), 0);
}

TEST(StepMachineSkip, AScaleThatIsNotTheRunsIsInvalid) {
  MachineDriver d(OneParameter(1), DynamicSpec(LossScalePolicy::kTorch));
  EXPECT_EQ(d.Code(d.Skip(0, SkipCause::kOverflow, 1024)), Code::kInvalidArgument);
  EXPECT_EQ(d.Code(d.Skip(0, SkipCause::kOverflow, -1)), Code::kInvalidArgument);
}

TEST(StepMachineSkip, DeadlineNamesTheRanksThatHaveNotSkipped) {
  MachineDriver d(OneParameter(3));
  const std::uint64_t waiter = d.Skip(1);
  d.Deadline(waiter);
  EXPECT_EQ(d.Code(waiter), Code::kDeadlineExceeded);
  EXPECT_THAT(d.Message(waiter), HasSubstr("skip by rank 1"));
  EXPECT_THAT(d.Message(waiter), HasSubstr("missing: ranks [0, 2];"));
  d.Skip(0);
  d.Skip(2);
  EXPECT_EQ(d.machine.next_step(), 1);
}

TEST(StepMachineSkip, LeavesHyperparametersOfTheStepUnused) {
  MachineDriver d(OneParameter(1));
  StepBegin begin = d.NextBegin();
  begin.muon["g"].lr = 0.125;
  ASSERT_TRUE(d.Begin(0, begin).ok());
  d.Skip(0, SkipCause::kTrainer);
  EXPECT_EQ(d.machine.muon().at("g").lr, Hyperparameters{}.lr);
}

}  // namespace
}  // namespace muond

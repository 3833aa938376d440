// Begin, pushes and the codes of protocol.md's table that they answer with.
#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/step/machine_driver_for_test.h"

namespace muond {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

TEST(StepMachineBegin, IdenticalRepeatIsFine) {
  MachineDriver d(OneParameter(2));
  EXPECT_TRUE(d.Begin(0).ok());
  EXPECT_TRUE(d.Begin(0).ok());
  EXPECT_TRUE(d.Begin(1).ok());
  EXPECT_EQ(d.discards, 0);
}

TEST(StepMachineBegin, UnknownRankIsNotFound) {
  MachineDriver d(OneParameter(2));
  EXPECT_EQ(d.Begin(2).code(), Code::kNotFound);
  EXPECT_EQ(d.Begin(-1).code(), Code::kNotFound);
  EXPECT_FALSE(d.machine.step_in_flight());
}

TEST(StepMachineBegin, StepAheadNamesStepAndGeneration) {
  MachineDriver d(OneParameter(1));
  const absl::Status status = d.BeginAt(1, 0);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_THAT(Text(status), HasSubstr("expected step 0 of generation 1"));
}

TEST(StepMachineBegin, LastStepIsOkOlderOnesAreNot) {
  MachineDriver d(OneParameter(1));
  d.Step();
  d.Step();
  EXPECT_TRUE(d.BeginAt(1, 0).ok());
  EXPECT_EQ(d.machine.last_outcome()->step, 1);
  EXPECT_EQ(d.BeginAt(0, 0).code(), Code::kFailedPrecondition);
  EXPECT_FALSE(d.machine.step_in_flight());
}

TEST(StepMachineBegin, BeforeTheFirstStepNoStepIsTheLast) {
  MachineDriver d(OneParameter(1));
  EXPECT_EQ(d.BeginAt(-1, 0).code(), Code::kFailedPrecondition);
}

TEST(StepMachineBegin, OtherGenerationsAreRefused) {
  MachineDriver d(OneParameter(1));
  d.Raise(5);
  for (const std::int64_t generation : {4, 6}) {
    d.generation = generation;
    const absl::Status status = d.Begin(0);
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_THAT(Text(status), HasSubstr("of generation 5"));
  }
}

TEST(StepMachineBegin, BadValuesAreToldToThatRankAlone) {
  MachineDriver d(OneParameter(2), DynamicSpec(LossScalePolicy::kTorch));
  ASSERT_TRUE(d.Begin(0).ok());
  StepBegin begin = d.NextBegin();
  begin.loss_scale = 32768;
  EXPECT_EQ(d.Begin(1, begin).code(), Code::kInvalidArgument);
  begin = d.NextBegin();
  begin.micro_batches = 0;
  EXPECT_EQ(d.Begin(1, begin).code(), Code::kInvalidArgument);
  begin.micro_batches = kMaxMicroBatches + 1;
  EXPECT_EQ(d.Begin(1, begin).code(), Code::kInvalidArgument);
  begin = d.NextBegin();
  begin.muon["g"].lr = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(d.Begin(1, begin).code(), Code::kInvalidArgument);
  begin = d.NextBegin();
  begin.adamw["nobody"];
  EXPECT_EQ(d.Begin(1, begin).code(), Code::kNotFound);
  EXPECT_EQ(d.discards, 0);
  EXPECT_TRUE(d.Push({0, 0, 0, 0}).ok()) << "rank 0 is not concerned";
}

TEST(StepMachineBegin, DisagreementNamesRanksAndValuesToAll) {
  MachineDriver d(OneParameter(3));
  StepBegin begin = d.NextBegin();
  begin.muon["g"].lr = 0.25;
  ASSERT_TRUE(d.Begin(0, begin).ok());
  ASSERT_TRUE(d.Begin(1, begin).ok());
  const std::uint64_t waiter = d.Finish(0);
  begin.muon["g"].lr = 0.1;
  const absl::Status status = d.Begin(2, begin);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(Text(status), HasSubstr("muon lr of group \"g\""));
  EXPECT_THAT(Text(status), HasSubstr("ranks [0, 1] sent 0.25, rank 2 sent 0.1"));
  EXPECT_EQ(d.Status(waiter), status) << "who waits is told at once";
  EXPECT_EQ(d.Admit({0, 1, 0, 0}).status(), status) << "the others at their next call";
  EXPECT_EQ(d.Status(d.Finish(1)), status);
  EXPECT_EQ(d.Code(d.Finish(1)), Code::kFailedPrecondition) << "told once, then plainly not begun";
  EXPECT_EQ(d.discards, 1);
}

TEST(StepMachineBegin, AfterADisagreementEverybodyBeginsAgain) {
  MachineDriver d(OneParameter(2));
  StepBegin two = d.NextBegin();
  two.micro_batches = 2;
  ASSERT_TRUE(d.Begin(0, two).ok());
  ASSERT_TRUE(d.Push({0, 0, 0, 1}).ok());
  EXPECT_EQ(d.Begin(1).code(), Code::kInvalidArgument);
  EXPECT_TRUE(d.Step().applied);
  EXPECT_EQ(d.reduces.size(), 1u);
  EXPECT_EQ(d.reduces[0].layers.size(), 1u) << "nothing of the first attempt is left";
}

TEST(StepMachineBegin, ARankThatChangesItsWordStartsTheStepOver) {
  MachineDriver d(OneParameter(1));
  StepBegin begin = d.NextBegin();
  ASSERT_TRUE(d.Begin(0, begin).ok());
  begin.adamw["g"].beta2 = 0.95;
  EXPECT_EQ(d.Begin(0, begin).code(), Code::kInvalidArgument);
  EXPECT_TRUE(d.Begin(0, begin).ok());
}

TEST(StepMachineBegin, AMissingGroupComparesAsItsLastValues) {
  RunSpec spec = Spec();
  spec.groups[0].muon.lr = 0.5;
  MachineDriver d(OneParameter(2), spec);
  StepBegin begin = d.NextBegin();
  begin.muon["g"] = spec.groups[0].muon;
  ASSERT_TRUE(d.Begin(0, begin).ok());
  EXPECT_TRUE(d.Begin(1).ok()) << "says the same by saying nothing";
}

TEST(StepMachineBegin, HyperparametersStayInForce) {
  MachineDriver d(OneParameter(1));
  StepBegin begin = d.NextBegin();
  begin.muon["g"].lr = 0.125;
  ASSERT_TRUE(d.Begin(0, begin).ok());
  d.PushAll(0);
  d.Finish(0);
  EXPECT_EQ(d.commits.at(0).muon.at("g").lr, 0.125);
  d.Step();
  EXPECT_EQ(d.commits.at(1).muon.at("g").lr, 0.125);
  EXPECT_EQ(d.machine.muon().at("g").lr, 0.125);
}

TEST(StepMachineBegin, ADiscardedAttemptLeavesHyperparametersAlone) {
  MachineDriver d(OneParameter(1));
  StepBegin begin = d.NextBegin();
  begin.muon["g"].lr = 0.125;
  ASSERT_TRUE(d.Begin(0, begin).ok());
  d.Raise(2);
  d.Step();
  EXPECT_EQ(d.commits.at(0).muon.at("g").lr, Hyperparameters{}.lr);
}

TEST(StepMachineBegin, NeuronSP2_AWrongStepIsToldAtOnceTheOthersWaitUntilTheirDeadline) {
  MachineDriver d(OneParameter(2));
  for (int i = 0; i < 6; ++i) d.Step();
  ASSERT_TRUE(d.Begin(0).ok());
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0);
  const absl::Status status = d.BeginAt(4, 1);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_THAT(Text(status), HasSubstr("expected step 6"));
  EXPECT_FALSE(d.Replied(waiter));
  d.Deadline(waiter);
  EXPECT_EQ(d.Code(waiter), Code::kDeadlineExceeded);
  EXPECT_THAT(d.Message(waiter), HasSubstr("missing: ranks [1]"));
  EXPECT_EQ(d.commits.size(), 6u);
}

// ---- Pushes -----------------------------------------------------------------------------------

TEST(StepMachinePush, NeedsABegin) {
  MachineDriver d(OneParameter(2));
  EXPECT_EQ(d.Admit({0, 0, 0, 0}).status().code(), Code::kFailedPrecondition);
  ASSERT_TRUE(d.Begin(1).ok());
  EXPECT_EQ(d.Admit({0, 0, 0, 0}).status().code(), Code::kFailedPrecondition);
  EXPECT_TRUE(d.Admit({0, 1, 0, 0}).ok());
}

TEST(StepMachinePush, BytePS105_UnknownNamesAreNotFoundAtOnce) {
  MachineDriver d(OneParameter(2));
  d.BeginAll();
  for (const SliceId id : {SliceId{1, 0, 0, 0}, SliceId{-1, 0, 0, 0}, SliceId{0, 2, 0, 0},
                           SliceId{0, -1, 0, 0}, SliceId{0, 0, 1, 0}, SliceId{0, 0, -1, 0}}) {
    EXPECT_EQ(d.Admit(id).status().code(), Code::kNotFound);
    EXPECT_EQ(d.Push(id).status().code(), Code::kNotFound);
  }
}

TEST(StepMachinePush, MicroBatchMustBeOneOfThoseBegun) {
  MachineDriver d(OneParameter(1));
  d.BeginAll();
  EXPECT_EQ(d.Admit({0, 0, 0, 1}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(d.Admit({0, 0, 0, -1}).status().code(), Code::kInvalidArgument);
}

TEST(StepMachinePush, SameAgainIsADuplicateOtherBytesAConflict) {
  MachineDriver d(OneParameter(2));
  d.BeginAll();
  EXPECT_EQ(d.Admit({0, 0, 0, 0}).value(), StepMachine::Admission::kWrite);
  EXPECT_EQ(d.Push({0, 0, 0, 0}, 11).value(), StepMachine::Arrival::kAccepted);
  EXPECT_EQ(d.Admit({0, 0, 0, 0}).value(), StepMachine::Admission::kVerify);
  EXPECT_EQ(d.Push({0, 0, 0, 0}, 11).value(), StepMachine::Arrival::kDuplicate);
  const absl::Status conflict = d.Push({0, 0, 0, 0}, 12).status();
  EXPECT_EQ(conflict.code(), Code::kAlreadyExists);
  EXPECT_THAT(Text(conflict), HasSubstr("parameter \"w\": push for step 0: slice 0 of rank 0"));
  EXPECT_EQ(d.machine.WaitingSlices(), 1);
}

TEST(StepMachinePush, RepeatsOfTheLastStepAreJudgedByItsDigests) {
  MachineDriver d(OneParameter(1));
  d.Step();
  EXPECT_EQ(d.machine.Admit({0, 0, 0, 0}, 1, 0).value(), StepMachine::Admission::kVerify);
  EXPECT_EQ(d.PushAt(0, {0, 0, 0, 0}, 7).value(), StepMachine::Arrival::kDuplicate);
  EXPECT_EQ(d.PushAt(0, {0, 0, 0, 0}, 8).status().code(), Code::kAlreadyExists);
  d.Step();
  EXPECT_EQ(d.machine.Admit({0, 0, 0, 0}, 1, 0).status().code(), Code::kFailedPrecondition);
}

TEST(StepMachinePush, WrongStepOrGenerationIsAFailedPrecondition) {
  MachineDriver d(OneParameter(1));
  d.BeginAll();
  EXPECT_EQ(d.machine.Admit({0, 0, 0, 0}, 1, 1).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(d.machine.Admit({0, 0, 0, 0}, 2, 0).status().code(), Code::kFailedPrecondition);
}

TEST(StepMachinePush, AStepThatEndedMeanwhileAborts) {
  MachineDriver d(OneParameter(2));
  d.BeginAll();
  const std::int64_t attempt = d.machine.attempt();
  ASSERT_TRUE(d.Admit({0, 0, 0, 0}).ok());
  d.Raise(2);
  EXPECT_NE(d.machine.attempt(), attempt);
  d.generation = 1;
  EXPECT_EQ(d.Push({0, 0, 0, 0}).status().code(), Code::kAborted);
  d.generation = 2;
  EXPECT_EQ(d.Push({0, 0, 0, 0}).status().code(), Code::kAborted) << "not begun in this attempt";
}

TEST(StepMachinePush, ASliceOfALowerGenerationAbortsAlsoOnceTheRankHasBegunAgain) {
  MachineDriver d(OneParameter(2));
  d.BeginAll();
  d.Raise(2);
  d.BeginAll();
  d.generation = 1;
  EXPECT_EQ(d.Push({0, 0, 0, 0}).status().code(), Code::kAborted);
  EXPECT_EQ(d.machine.WaitingSlices(), 2);
}

TEST(StepMachinePush, FinishMayRideAheadOfPushes) {
  MachineDriver d(OneParameter(1));
  d.BeginAll();
  const std::uint64_t waiter = d.Finish(0);
  EXPECT_FALSE(d.Replied(waiter));
  EXPECT_EQ(d.Admit({0, 0, 0, 0}).value(), StepMachine::Admission::kWrite);
  EXPECT_TRUE(d.Push({0, 0, 0, 0}).ok());
  EXPECT_TRUE(d.Outcome(waiter).applied);
}

TEST(StepMachinePush, WhatWasNamedAbsentIsRefused) {
  MachineDriver d(OneParameter(2));
  d.BeginAll();
  d.Finish(0, {"w"});
  EXPECT_EQ(d.Admit({0, 0, 0, 0}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(d.Push({0, 0, 0, 0}).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(d.Admit({0, 1, 0, 0}).ok());
}

TEST(StepMachineViews, TellWhoAndWhatIsWaitedFor) {
  MachineDriver d(OneParameter(3));
  d.micro_batches = 2;
  EXPECT_FALSE(d.machine.step_in_flight());
  EXPECT_THAT(d.machine.WaitingRanks(), ElementsAre());
  EXPECT_EQ(d.machine.WaitingSlices(), 0);
  ASSERT_TRUE(d.Begin(1).ok());
  EXPECT_TRUE(d.machine.step_in_flight());
  EXPECT_THAT(d.machine.WaitingRanks(), ElementsAre(0, 1, 2));
  EXPECT_EQ(d.machine.WaitingSlices(), 6);
  d.PushAll(1);
  d.Finish(1);
  EXPECT_THAT(d.machine.WaitingRanks(), ElementsAre(0, 2));
  EXPECT_EQ(d.machine.WaitingSlices(), 4);
}

}  // namespace
}  // namespace muond

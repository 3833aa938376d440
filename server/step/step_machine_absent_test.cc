// Parameters without a gradient: who may name them absent, and what a step then does.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/step/machine_driver_for_test.h"

namespace muond {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// A sliced parameter on two ranks and a replicated one.
StepLayout Mixed() { return {2, {Sliced("s", 0, {1, 1}), Replicated("r", 1, {1, 1})}}; }

TEST(StepMachineAbsent, KellerJordan37_AbsentOnOneRankOfASlicedParameterFailsByName) {
  MachineDriver d(OneParameter(2));
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t sender = d.Finish(0);
  const std::uint64_t other = d.Finish(1, {"w"});
  for (const std::uint64_t waiter : {sender, other}) {
    EXPECT_EQ(d.Code(waiter), Code::kFailedPrecondition);
    EXPECT_THAT(d.Message(waiter), HasSubstr("parameter \"w\""));
    EXPECT_THAT(d.Message(waiter), HasSubstr("absent on ranks [1] but not on ranks [0]"));
  }
  // Slices are kept: the ranks agree and finish again.
  d.PushAll(1);
  d.Finish(0);
  EXPECT_TRUE(d.Outcome(d.Finish(1)).applied);
}

TEST(StepMachineAbsent, ASlicedParameterAbsentEverywhereIsUntouched) {
  MachineDriver d(Mixed());
  EXPECT_TRUE(d.Step({"s"}).applied);
  EXPECT_THAT(d.commits.at(0).absent, ElementsAre(0));
  ASSERT_EQ(d.reduces.size(), 1u);
  EXPECT_EQ(d.reduces[0].state, 1);
}

TEST(StepMachineAbsent, RanksWithoutSlicesNeedNotNameIt) {
  MachineDriver d({3, {Sliced("w", 0, {1, 0, 1})}});
  d.BeginAll();
  d.Finish(0, {"w"});
  d.Finish(1);
  EXPECT_TRUE(d.Outcome(d.Finish(2, {"w"})).applied);
  EXPECT_THAT(d.commits.at(0).absent, ElementsAre(0));
}

TEST(StepMachineAbsent, NamingWhatTheRankDoesNotHoldSaysNothing) {
  MachineDriver d({2, {Sliced("w", 0, {1, 0})}});
  d.BeginAll();
  d.PushAll(0);
  d.Finish(0);
  EXPECT_TRUE(d.Outcome(d.Finish(1, {"w"})).applied);
  EXPECT_TRUE(d.commits.at(0).absent.empty());
}

TEST(StepMachineAbsent, AReplicatedParameterIsPresentIfAnyRankSends) {
  RunSpec spec = Spec();
  spec.world_size = 3;
  MachineDriver d({3, {Replicated("r", 0, {1, 1, 1})}}, spec);
  d.BeginAll();
  ASSERT_TRUE(d.Push({0, 1, 0, 0}).ok());
  d.Finish(0, {"r"});
  d.Finish(1);
  EXPECT_TRUE(d.Outcome(d.Finish(2, {"r"})).applied);
  ASSERT_EQ(d.reduces.size(), 1u);
  EXPECT_THAT(d.reduces[0].layers, ElementsAre(Layer{0, 1, 0}));
  EXPECT_EQ(d.reduces[0].divisor, 3.0) << "a mean divides by the declared world";
}

TEST(StepMachineAbsent, EverythingAbsentAppliesAndTouchesNothing) {
  MachineDriver d(Mixed());
  const StepOutcome outcome = d.Step({"s", "r"});
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(outcome.grad_norm, 0.0);
  EXPECT_EQ(outcome.applied_steps, 1);
  EXPECT_TRUE(d.reduces.empty());
  EXPECT_THAT(d.commits.at(0).absent, ElementsAre(0, 1));
}

TEST(StepMachineAbsent, PushedAndNamedAbsentIsInvalid) {
  MachineDriver d(OneParameter(1));
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0, {"w"});
  EXPECT_EQ(d.Code(waiter), Code::kInvalidArgument);
  EXPECT_THAT(d.Message(waiter), HasSubstr("parameter \"w\""));
  EXPECT_TRUE(d.Outcome(d.Finish(0)).applied);
}

TEST(StepMachineAbsent, ARepeatMayCorrectTheListWhileTheStepIsOpen) {
  MachineDriver d(OneParameter(1));
  d.BeginAll();
  const std::uint64_t first = d.Finish(0);
  EXPECT_FALSE(d.Replied(first)) << "slices are missing";
  const std::uint64_t corrected = d.Finish(0, {"w"});
  EXPECT_TRUE(d.Outcome(corrected).applied);
  EXPECT_EQ(d.Outcome(first), d.Outcome(corrected));
}

TEST(StepMachineAbsent, AnotherListAfterTheStepIsDecidedIsInvalid) {
  MachineDriver d({1, {Sliced("w", 0, {1}), Sliced("v", 1, {1})}});
  d.answers = false;
  d.BeginAll();
  ASSERT_TRUE(d.Push({0, 0, 0, 0}).ok());
  d.Finish(0, {"v"});
  EXPECT_EQ(d.Code(d.Finish(0)), Code::kInvalidArgument);
}

}  // namespace
}  // namespace muond

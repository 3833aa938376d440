// Parameters that come between two steps: everything else goes on as if they had always been there.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/step/daemons_for_test.h"

namespace muond {
namespace {

using Code = absl::StatusCode;
using ::testing::HasSubstr;

// OneEach, and one parameter more, of daemon 0.
std::vector<StepLayout> Grown(int daemons) {
  StepLayout whole{1, {}};
  std::vector<int> owner;
  for (int d = 0; d < daemons; ++d) {
    whole.parameters.push_back(Sliced("p" + std::to_string(d), d, {1}));
    owner.push_back(d);
  }
  whole.parameters.push_back(Sliced("new", daemons, {1}));
  owner.push_back(0);
  return Spread(whole, daemons, owner);
}

TEST(Layout, TheNextStepWaitsForTheNew) {
  MachineDriver d(OneParameter(1));
  const StepOutcome before = d.Step();
  d.Raise(2);
  StepLayout grown = OneParameter(1);
  grown.parameters.push_back(Sliced("new", 1, {2}));
  d.Grow(grown);
  EXPECT_EQ(d.machine.next_step(), 1);
  EXPECT_EQ(d.machine.last_outcome(), before);
  d.BeginAll();
  ASSERT_TRUE(d.Push({0, 0, 0, 0}).ok());
  const std::uint64_t waiter = d.Finish(0);
  EXPECT_FALSE(d.Replied(waiter));
  EXPECT_EQ(d.machine.WaitingSlices(), 2);
  ASSERT_TRUE(d.Push({1, 0, 0, 0}).ok());
  ASSERT_TRUE(d.Push({1, 0, 1, 0}).ok());
  EXPECT_EQ(d.Outcome(waiter).applied_steps, 2);
  EXPECT_TRUE(d.commits.back().absent.empty());
}

TEST(Layout, HyperparametersInForceStayAndANewGroupHasItsOwn) {
  MachineDriver d(OneParameter(1));
  StepBegin begin = d.NextBegin();
  begin.muon["g"].lr = 0.75;
  ASSERT_TRUE(d.Begin(0, begin).ok());
  d.PushAll(0);
  d.Finish(0);
  d.Raise(2);
  RunSpec spec = Spec();
  spec.groups.emplace_back().name = "later";
  spec.groups.back().muon.lr = 0.25;
  StepLayout grown = OneParameter(1);
  grown.parameters.push_back(Sliced("new", 1, {1}));
  d.Grow(grown, spec);
  EXPECT_EQ(d.machine.muon().at("g").lr, 0.75);
  EXPECT_EQ(d.machine.muon().at("later").lr, 0.25);
  StepBegin named = d.NextBegin();
  named.muon["later"].lr = 0.5;
  EXPECT_TRUE(d.Begin(0, named).ok());
}

// A repeat of what was consumed before gets its answer, under the new generation too.
TEST(Layout, TheLastOutcomeIsStillTold) {
  MachineDriver d(OneParameter(1));
  const StepOutcome before = d.Step();
  d.Raise(2);
  StepLayout grown = OneParameter(1);
  grown.parameters.push_back(Sliced("new", 1, {1}));
  d.Grow(grown);
  EXPECT_EQ(d.Outcome(d.FinishAt(0, 0)), before);
  EXPECT_EQ(*d.PushAt(0, {0, 0, 0, 0}), StepMachine::Arrival::kDuplicate);
  EXPECT_EQ(d.PushAt(0, {1, 0, 0, 0}).status().code(), Code::kAborted);
}

// Daemon 0 has applied the step and taken the parameters on when the coordinator dies; daemon 1 has
// only promised. What daemon 0 knows must still be enough to complete the step there.
TEST(Layout, AStepThatOneDaemonHasAppliedIsCompletedOnTheOthers) {
  Daemons d(OneEach(2, 1));
  d.FinishAll();
  ASSERT_TRUE(d.Tell(1, 0).ok());
  ASSERT_EQ(d[0].commits.size(), 1u);
  ASSERT_TRUE(d[1].commits.empty());
  d.PrepareAll(2);
  d[0].Raise(2);
  d[0].Grow(Grown(2)[0]);
  const auto settled = SettledVotes(2, d.PrepareAll(3));
  EXPECT_EQ(settled.size(), 2u);
  for (int daemon = 0; daemon < 2; ++daemon) d[daemon].Raise(3, settled);
  d[1].Grow(Grown(2)[1]);
  EXPECT_EQ(d[1].commits.size(), 1u);
  EXPECT_EQ(d[0].machine.last_outcome(), d[1].machine.last_outcome());
  const auto waiters = d.FinishAll();
  d.TellAll();
  EXPECT_EQ(d[0].Outcome(waiters[0][0]).applied_steps, 2);
  EXPECT_EQ(d[1].Outcome(waiters[1][0]).applied_steps, 2);
}

TEST(LayoutDeathTest, ParametersComeBetweenSteps) {
  MachineDriver d(OneParameter(1));
  d.BeginAll();
  StepLayout grown = OneParameter(1);
  grown.parameters.push_back(Sliced("new", 1, {1}));
  EXPECT_DEATH(d.Grow(grown), "parameters come between steps");
  d.Raise(2);
  grown.parameters.erase(grown.parameters.begin());
  EXPECT_DEATH(d.Grow(grown), "stay|states name|holds");
}

}  // namespace
}  // namespace muond

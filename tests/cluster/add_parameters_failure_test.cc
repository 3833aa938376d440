// Parameters that are added while things go wrong: ranks that disagree, are late or restart, a
// coordinator that dies half way, a step that is being committed.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "tests/cluster/half_coordinator.h"
#include "tests/cluster/steps_of.h"
#include "tests/support/cluster_fixture.h"
#include "tests/support/raw_trainer.h"

namespace muond::cluster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

RunSpec Spec(std::int64_t world_size = 2) {
  return SpecOf({Matrix("a", 16, 8), Matrix("b", 16, 8), Vector("v", 9)}, world_size);
}
ParameterAddition Late() {
  return {.groups = {}, .parameters = {Matrix("new", 8, 8), Vector("w", 4)}, .slices = {}};
}
ServiceOptions Impatient() { return {.threads = 1, .peer_patience = absl::Milliseconds(300)}; }
// All that a rank holds of them when it holds everything.
ParameterAddition AllOfLate() {
  ParameterAddition addition = Late();
  RunSpec alone = Spec(1);
  alone.parameters = addition.parameters;
  addition.slices = CutOf(alone, {}, 0);
  return addition;
}

class AddingFails : public ::testing::TestWithParam<int> {
 protected:
  AddingFails()
      : cluster_(GetParam(), Impatient()),
        run_(cluster_.channel(0), Spec(), {.cut = {Cut::kFlat}, .step_timeout = absl::Seconds(5)}) {
    EXPECT_TRUE(run_.Step(NoiseFor(run_.spec(), 0)).applied);
  }
  // As if nobody had asked for anything; and then it goes well.
  void ExpectUntouched(const std::string& digest) {
    EXPECT_EQ(run_.TensorDigest(), digest);
    EXPECT_TRUE(run_.Step(NoiseFor(run_.spec(), 1)).applied);
    run_.Add(Late());
    const StepOutcome outcome = run_.Step(NoiseFor(run_.spec(), 2));
    EXPECT_TRUE(outcome.applied);
    EXPECT_EQ(outcome.step, 2);
    EXPECT_EQ(outcome.newton_schulz_calls, 3);
  }
  Cluster cluster_;
  TestRun run_;
};
INSTANTIATE_TEST_SUITE_P(OfDaemons, AddingFails, ::testing::Values(1, 3));

TEST_P(AddingFails, RanksThatDisagreeAreAllTold) {
  const std::string digest = run_.TensorDigest();
  ParameterAddition other = Late();
  other.parameters[1].shape = Dims{5};
  absl::Status first, second;
  std::thread waiting([&] { first = run_.session(0).AddParameters(Late()); });
  second = run_.session(1).AddParameters(other);
  waiting.join();
  for (const absl::Status& told : {first, second}) {
    EXPECT_TRUE(absl::IsInvalidArgument(told)) << told;
    EXPECT_THAT(told.ToString(), AllOf(HasSubstr("and rank"), HasSubstr("disagree"),
                                       HasSubstr("parameter \"w\": shape")));
  }
  ExpectUntouched(digest);
}

TEST_P(AddingFails, AGapBetweenTheRanksIsNamedToAll) {
  const std::string digest = run_.TensorDigest();
  absl::Status told[2];
  std::thread waiting([&] { told[0] = run_.session(0).AddParameters(Late()); });
  told[1] = run_.session(1).AddParameters(Late());  // neither holds anything of them
  waiting.join();
  for (const absl::Status& each : told) {
    EXPECT_TRUE(absl::IsInvalidArgument(each)) << each;
    EXPECT_THAT(each.ToString(), HasSubstr("parameter \"new\""));
  }
  ExpectUntouched(digest);
}

TEST_P(AddingFails, ARankThatStaysAwayIsNamedAtTheDeadlineAndMayComeLater) {
  const std::int64_t generation = run_.session(0).generation();
  const auto brief = Must(client::Session::Open(
      run_.spec(), 0, run_.slices(0),
      {.channel = cluster_.channel(0), .step_timeout = absl::Seconds(1), .transport = "grpc"}));
  const absl::Status told = brief->AddParameters(AllOfLate());
  EXPECT_TRUE(absl::IsDeadlineExceeded(told)) << told;
  EXPECT_THAT(told.ToString(), HasSubstr("ranks [1]"));
  EXPECT_EQ(run_.Status().position().generation(), generation);
  absl::Status later[2];
  std::thread again([&] { later[0] = brief->AddParameters(AllOfLate()); });
  later[1] = run_.session(1).AddParameters(Late());
  again.join();
  EXPECT_TRUE(later[0].ok()) << later[0];
  EXPECT_TRUE(later[1].ok()) << later[1];
  EXPECT_GT(run_.Status().position().generation(), generation);
}

TEST_P(AddingFails, WhatRegisterWouldRefuseChangesNothing) {
  const std::string digest = run_.TensorDigest();
  // Muon silently inactive: the flattened shard of a matrix.
  ParameterAddition flat{.groups = {}, .parameters = {Matrix("new", 8, 8)}, .slices = {}};
  flat.parameters[0].shape = Dims{64};
  for (const absl::Status& told : run_.TryAdd(flat)) EXPECT_FALSE(told.ok());
  for (const absl::Status& told :
       run_.TryAdd({.groups = {}, .parameters = {Vector("v", 9)}, .slices = {}})) {
    EXPECT_TRUE(absl::IsAlreadyExists(told)) << told;
  }
  ExpectUntouched(digest);
}

// Repeated calls, and a trainer that starts again from its program's beginning.
TEST_P(AddingFails, ARepetitionAddsNothing) {
  run_.Add(Late());
  ASSERT_TRUE(run_.Step(NoiseFor(run_.spec(), 1)).applied);
  const std::int64_t generation = run_.session(0).generation();
  const std::string digest = run_.TensorDigest();
  RunSpec alone = Spec(2);
  alone.parameters = Late().parameters;
  ParameterAddition again = Late();
  again.slices = CutOf(alone, {Cut::kFlat}, 0);
  EXPECT_TRUE(run_.session(0).AddParameters(again).ok());
  const auto restarted = Must(client::Session::Open(Spec(), 0, CutOf(Spec(), {Cut::kFlat}, 0),
                                                    {.channel = cluster_.channel(0)}));
  EXPECT_EQ(restarted->next_step(), 2);
  EXPECT_EQ(restarted->routing().parameters_size(), 3);
  const absl::Status told = restarted->AddParameters(again);
  EXPECT_TRUE(told.ok()) << told;
  EXPECT_EQ(restarted->routing().parameters_size(), 5);
  EXPECT_EQ(restarted->generation(), generation);
  again.parameters[0].shape = Dims{8, 9};
  const auto third = Must(client::Session::Open(Spec(), 0, CutOf(Spec(), {Cut::kFlat}, 0),
                                                {.channel = cluster_.channel(0)}));
  const absl::Status other = third->AddParameters(again);
  EXPECT_TRUE(absl::IsInvalidArgument(other)) << other;
  EXPECT_EQ(run_.TensorDigest(), digest);
  EXPECT_TRUE(run_.Step(NoiseFor(run_.spec(), 2)).applied);
}

// The verdict of the last step of before has fallen: it is applied, and only to what was there.
TEST(AddingDuringACommit, WaitsForItsEnd) {
  ServiceOptions options = Impatient();
  options.fault_points = "delay_commit:0:1";
  Cluster cluster(2, options);
  TestRun run(cluster.channel(0), Spec(1));
  std::thread stepping([&] { run.TryStep({.gradients = {{NoiseFor(run.spec(), 0)}}}); });
  const auto other = Must(client::Session::Open(
      run.spec(), 0, run.slices(0), {.channel = cluster.channel(1), .transport = "grpc"}));
  HalfCoordinator first(run, 0), second(run, 1);
  Eventually("the verdict falls", [&] { return second.KnowsAllVotes(0, 0); });
  Eventually("the verdict falls", [&] { return first.KnowsAllVotes(1, 0); });
  const absl::Status added = other->AddParameters(AllOfLate());
  ASSERT_TRUE(added.ok()) << added;
  stepping.join();
  ASSERT_EQ(other->next_step(), 1) << "the step was applied before";
  EXPECT_EQ(run.Status().steps_applied(), 1);
  EXPECT_EQ(StepsOf(cluster, "a"), 1);
  EXPECT_EQ(StepsOf(cluster, "new"), 0);
}

// ---- A coordinator that dies ------------------------------------------------------------------

class HalfAdopted : public ::testing::Test {
 protected:
  // Every daemon has been told by the one rank; nobody has raised the generation.
  HalfAdopted()
      : cluster_(3, Impatient()),
        run_(cluster_.channel(0), Spec(1), {.call_timeout = absl::Seconds(10)}) {
    EXPECT_TRUE(run_.Step(NoiseFor(run_.spec(), 0)).applied);
    for (int daemon = 0; daemon < 3; ++daemon) {
      const auto stub = v1::Optimizer::NewStub(cluster_.channel(daemon));
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
      v1::AddParametersReply reply;
      Must(FromGrpc(stub->AddParameters(&context, Request(), &reply)));
      EXPECT_TRUE(name_.empty() || name_ == reply.addition()) << "equal on all daemons";
      EXPECT_FALSE(reply.adopted());
      name_ = reply.addition();
    }
  }
  v1::AddParametersRequest Request() {
    v1::AddParametersRequest request;
    request.mutable_id()->set_run("run");
    request.mutable_id()->set_generation(1);
    request.set_first(3);
    const v1::Run whole = ToProto(Extended(Spec(1), {}, Late().parameters));
    for (int p = 3; p < 5; ++p) *request.add_parameters() = whole.parameters(p);
    SlicesToProto(AllOfLate().slices, request.mutable_slices());
    return request;
  }
  // Until all daemons stand in one generation, with as many parameters.
  void ExpectAll(std::int64_t adamw) {
    for (int daemon = 0; daemon < 3; ++daemon) {
      client::Admin admin(cluster_.channel(daemon), absl::Seconds(5));
      Eventually("the daemons stand alike", [&] {
        const v1::RunStatus status = Must(admin.Status("run")).runs(0);
        return status.adamw_parameters() == adamw && status.position().generation() >= 60 &&
               status.position().promised() <= status.position().generation();
      });
    }
  }
  Cluster cluster_;
  TestRun run_;
  std::string name_;
};

// Daemons that have promised only, and one that has changed over: all follow it, by themselves.
TEST_F(HalfAdopted, TheOthersFollow) {
  HalfCoordinator dead(run_, 0), other(run_, 1);
  Must(dead.Prepare(1, 60, false, name_));
  Must(dead.Prepare(2, 60, false, name_));
  Must(other.Prepare(0, 60, false, name_));
  Must(dead.Adopt(1, 60, name_));
  ExpectAll(2);
  const absl::Status joined = run_.session().AddParameters(AllOfLate());
  ASSERT_TRUE(joined.ok()) << joined;
  EXPECT_EQ(run_.session().routing().parameters_size(), 5);
  const Floats values(64, 0.5f);
  std::vector<client::SliceSource> sources = {
      {.parameter = "new", .data = values.data(), .elements = 64},
      {.parameter = "w", .data = values.data(), .elements = 4}};
  EXPECT_TRUE(Must(run_.session().Initialize(sources)));
  EXPECT_EQ(StepsOf(cluster_, "a"), 1);
  EXPECT_EQ(StepsOf(cluster_, "new"), 0);
}

// It died before anybody had: they are not added, and may be at the next try.
TEST_F(HalfAdopted, PromisesAloneAddNothing) {
  HalfCoordinator dead(run_, 0);
  Must(dead.Prepare(1, 60, false, name_));
  Must(dead.Prepare(2, 60, false, name_));
  ExpectAll(1);
  ASSERT_TRUE(run_.session().Rejoin().ok());
  EXPECT_TRUE(run_.Step(NoiseFor(run_.spec(), 1)).applied);
  run_.Add(Late());
  EXPECT_TRUE(run_.Step(NoiseFor(run_.spec(), 2)).applied);
  EXPECT_EQ(StepsOf(cluster_, "new"), 1);
}

// Of one that was told of other parameters, or of none, nothing is taken.
TEST_F(HalfAdopted, AnAdditionThatADaemonDoesNotKnowIsRefused) {
  HalfCoordinator dead(run_, 0);
  const absl::Status other = dead.Prepare(1, 60, false, std::string(32, '0'));
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(other.ToString(), HasSubstr("told this daemon of others"));
  EXPECT_TRUE(run_.Step(NoiseFor(run_.spec(), 1)).applied);
}

// The plan of a run that grew is that of the run that is opened anew with all its additions.
TEST(AddedParameters, ADaemonThatComesBackPlansAsTheOthers) {
  Cluster cluster(3, Impatient());
  TestRun run(cluster.channel(0), Spec(1), {.call_timeout = absl::Seconds(5)});
  ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 0)).applied);
  run.Add(Late());
  ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 1)).applied);
  const Tensors weights = run.Weights();
  cluster.Stop(1);
  cluster.Start(1);
  // A trainer that restarts with it, and knows the parameters of before only: the daemon makes no
  // run that is not the others'.
  const absl::Status early = client::Session::Open(Spec(1), 0, CutOf(Spec(1), {}, 0),
                                                   {.channel = cluster.channel(1)})
                                 .status();
  EXPECT_TRUE(absl::IsFailedPrecondition(early)) << early;
  EXPECT_THAT(early.ToString(), HasSubstr("before parameters were added: register with these"));
  ASSERT_TRUE(run.session().Rejoin().ok());
  EXPECT_EQ(run.session().state(), v1::RUN_STATE_NEEDS_RESTORE);
  run.Reinitialize(weights);
  EXPECT_EQ(run.Weights(), weights);
  EXPECT_TRUE(run.Step(NoiseFor(run.spec(), 2)).applied);
  // And it grows on, though only two of the three remember the first time.
  run.Add({.groups = {}, .parameters = {Vector("z", 3)}, .slices = {}});
  EXPECT_TRUE(run.Step(NoiseFor(run.spec(), 3)).applied);
}

}  // namespace
}  // namespace muond::cluster

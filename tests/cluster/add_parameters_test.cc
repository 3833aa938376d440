// Parameters that are added to an open run, at a step border: what was there goes on to the bit,
// the new has state and a t of its own, and all daemons and ranks change over together.
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/exposition_for_test.h"
#include "tests/cluster/checkpoint_story.h"
#include "tests/cluster/steps_of.h"
#include "tests/support/cluster_fixture.h"
#include "tests/support/raw_trainer.h"

namespace muond::cluster {
namespace {

using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<ParameterSpec> First() {
  return {Matrix("a", 16, 8), Matrix("b", 8, 24), Vector("v", 9), Vector("embed", 600'000)};
}
// Registered behind the first, between them by name; one large enough to be cut.
std::vector<ParameterSpec> Second() {
  return {Matrix("aa", 24, 16), Vector("c", 5), Vector("table", 700'000)};
}
ParameterAddition Addition() { return {.groups = {}, .parameters = Second(), .slices = {}}; }

class AddParameters : public ::testing::TestWithParam<int> {
 protected:
  AddParameters()
      : cluster_(GetParam()),
        run_(cluster_.channel(0), SpecOf(First(), 2), {.cut = {Cut::kFlat}}) {}
  Tensors Gradients(int step) { return NoiseFor(run_.spec(), 100 + step); }
  Cluster cluster_;
  TestRun run_;
};
INSTANTIATE_TEST_SUITE_P(OfDaemons, AddParameters, ::testing::Values(1, 3));

TEST_P(AddParameters, PyTorch46750_WhatWasThereStaysAndTheNewHasStateOfItsOwn) {
  for (int step = 0; step < 2; ++step) ASSERT_TRUE(run_.Step(Gradients(step)).applied);
  const auto before = run_.Digest(true).parameters();
  std::map<std::string, std::string> owners;
  for (const auto& routed : run_.session().routing().parameters()) {
    owners[routed.name()] = routed.owner();
  }
  const std::int64_t generation = run_.session().generation();
  run_.Add(Addition());
  EXPECT_GT(run_.session().generation(), generation);
  EXPECT_EQ(run_.session().next_step(), 2);
  auto after = run_.Digest(true).parameters();
  for (const auto& [name, digest] : before) EXPECT_EQ(after[name], digest) << name;
  EXPECT_EQ(after.size(), 7U);

  // The routing report has them, and what it said before is true still.
  ASSERT_EQ(run_.session().routing().parameters_size(), 7);
  for (const auto& routed : run_.session().routing().parameters()) {
    const auto was = owners.find(routed.name());
    if (was != owners.end()) {
      EXPECT_EQ(routed.owner(), was->second) << routed.name();
    }
  }
  EXPECT_EQ(run_.session().routing().parameters(4).algorithm(), v1::ALGORITHM_MUON);
  EXPECT_EQ(run_.session().routing().muon_matrices(), 3);

  const StepOutcome outcome = run_.Step(Gradients(2));
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(outcome.step, 2);
  EXPECT_EQ(outcome.applied_steps, 3);
  EXPECT_EQ(outcome.newton_schulz_calls, 3) << "Muon is on for the new one, too";
  for (const ParameterSpec& spec : First()) EXPECT_EQ(StepsOf(cluster_, spec.name), 3);
  for (const ParameterSpec& spec : Second()) EXPECT_EQ(StepsOf(cluster_, spec.name), 1);
}

TEST_P(AddParameters, ThePlanMayGrowSeveralTimesAndBeforeTheFirstStep) {
  run_.Add(Addition());
  ASSERT_TRUE(run_.Step(Gradients(0)).applied);
  GroupSpec slow = GroupSpec{.name = "slow", .algorithm = Algorithm::kMuon};
  slow.muon.lr = 0.25;
  ParameterSpec head = Matrix("head", 12, 12);
  head.group = "slow";
  run_.Add({.groups = {slow}, .parameters = {head}, .slices = {}});
  run_.Add({.groups = {}, .parameters = {Vector("z", 3)}, .slices = {}});
  EXPECT_THAT(run_.session().registered().additions(), ::testing::ElementsAre(4, 7, 8));
  EXPECT_EQ(run_.Step(Gradients(1)).newton_schulz_calls, 4);
  EXPECT_EQ(run_.Describe("head").hyperparameters().lr(), 0.25);
  // A new group's hyperparameters change like any other's.
  StepInput input{.gradients = {{Gradients(2)}}};
  input.begin.muon["slow"] = {.lr = 0.5};
  ASSERT_TRUE(run_.Step(input).applied);
  EXPECT_EQ(run_.Describe("head").hyperparameters().lr(), 0.5);
  double here = 0;
  for (int daemon = 0; daemon < GetParam(); ++daemon) {
    const auto samples = ParseExposition(cluster_.service(daemon).Metrics());
    EXPECT_EQ(samples.at("muond_parameters{algorithm=\"muon\",group=\"slow\",run=\"run\"}"), 1);
    EXPECT_EQ(samples.at("muond_parameters{algorithm=\"adamw\",group=\"adamw\",run=\"run\"}"), 5);
    EXPECT_EQ(samples.at("muond_learning_rate{group=\"slow\",run=\"run\"}"), 0.5);
    here += samples.at("muond_memory_bytes{kind=\"master\",location=\"host\"}");
  }
  EXPECT_EQ(here, 4 * (16 * 8 + 8 * 24 + 9 + 600'000 + 24 * 16 + 5 + 700'000 + 144 + 3));
}

// Late messages of before the border: their generation is over.
TEST_P(AddParameters, APushOfBeforeIsRefused) {
  const std::int64_t generation = run_.session().generation();
  run_.Add(Addition());
  RawTrainer late(cluster_.service(0), "run", 0, generation);
  const absl::Status begun = late.Begin(0);
  EXPECT_TRUE(absl::IsFailedPrecondition(begun)) << begun;
  EXPECT_TRUE(run_.Step(Gradients(0)).applied);
}

TEST_P(AddParameters, AStepInFlightStartsOver) {
  ASSERT_TRUE(run_.Step(Gradients(0)).applied);
  ASSERT_TRUE(run_.session(0).Begin({.step = 1, .loss_scale = 1}).ok());
  run_.Add(Addition());
  EXPECT_FALSE(run_.Status().step_in_flight());
  const StepOutcome outcome = run_.Step(Gradients(1));
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(outcome.step, 1);
}

TEST_P(AddParameters, ValuesOfTheNewAreWaitedForAndThoseOfTheOldRefused) {
  ASSERT_TRUE(run_.Step(Gradients(0)).applied);
  for (const absl::Status& told : run_.TryAdd(Addition())) ASSERT_TRUE(told.ok()) << told;
  const absl::Status begun = run_.session(0).Begin({.step = 1, .loss_scale = 1});
  EXPECT_TRUE(absl::IsFailedPrecondition(begun)) << begun;
  EXPECT_THAT(begun.ToString(), HasSubstr("has not sent all of its initial values"));
  const Floats zeros(600'000, 0.0f);
  const std::int64_t half = run_.slices(0).at("embed")[0].Elements();
  const auto refused = run_.session(0).Initialize(std::vector<client::SliceSource>{
      {.parameter = "embed", .data = zeros.data(), .elements = half}});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_THAT(refused.status().ToString(), HasSubstr("\"embed\" are refused: it was there before"));
}

// ---- Independence -----------------------------------------------------------------------------

// The tensor digest of ten steps, some skipped, "c" and its like added before the fifth.
std::string Story(int daemons) {
  Cluster cluster(daemons);
  TestRun run(cluster.channel(daemons - 1), SpecOf(First(), 2), {.cut = {Cut::kFlat, 2}});
  for (int step = 0; step < 10; ++step) {
    if (step == 4) run.Add(Addition());
    Tensors gradients = NoiseFor(run.spec(), step);
    if (step % 4 == 3) gradients["b"][7] = kInf;
    EXPECT_EQ(run.Step(gradients).applied, step % 4 != 3);
  }
  return run.TensorDigest();
}

TEST(AddedParameters, TheResultIsTheSameForAnyNumberOfDaemons) {
  const std::string one = Story(1);
  for (const int daemons : {2, 3, 5}) EXPECT_EQ(Story(daemons), one) << daemons;
}

// A parameter that is absent keeps every byte: to come late is to have been absent until then.
TEST(AddedParameters, PyTorch46750_ComingLateIsHavingBeenAbsent) {
  std::vector<ParameterSpec> all = First();
  for (const ParameterSpec& spec : Second()) all.push_back(spec);
  Cluster cluster(2);
  TestRun whole(cluster.channel(0), SpecOf(all, 2), {.cut = {Cut::kFlat}});
  RunSpec first = SpecOf(First(), 2);
  first.name = "grows";
  TestRun grows(cluster.channel(0), first, {.cut = {Cut::kFlat}});
  for (int step = 0; step < 5; ++step) {
    Tensors gradients = NoiseFor(whole.spec(), step);
    if (step < 2) {
      for (const ParameterSpec& spec : Second()) gradients.erase(spec.name);
    }
    if (step == 2) grows.Add(Addition(), NoiseFor(whole.spec(), 1));
    ASSERT_TRUE(whole.Step(gradients).applied);
    ASSERT_TRUE(grows.Step(gradients).applied);
  }
  EXPECT_EQ(grows.TensorDigest(), whole.TensorDigest());
}

// ---- Checkpoints ------------------------------------------------------------------------------

TEST(AddedParameters, ACheckpointHasThemAndIsRestoredOnOtherNumbersOfDaemons) {
  const CheckpointDirectory directory;
  std::string wanted;
  RunSpec grown;
  {
    Cluster cluster(2, WithCheckpoints(directory));
    TestRun run(cluster.channel(0), SpecOf(First()));
    ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 0)).applied);
    Must(run.admin().SaveCheckpoint("run"));
    run.Add(Addition());
    ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 1)).applied);
    Must(run.admin().SaveCheckpoint("run"));
    grown = run.spec();
    ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 2)).applied);
    wanted = run.TensorDigest();
    // That of before has other parameters: nothing changes.
    const auto restored = run.admin().RestoreCheckpoint("run", "ckpt-1");
    EXPECT_FALSE(restored.ok());
    EXPECT_EQ(run.TensorDigest(), wanted);
  }
  Cluster cluster(3, WithCheckpoints(directory));
  TestRun run(cluster.channel(0), grown, {.resume = true});
  // A service that ends saves once more.
  EXPECT_GE(run.session().next_step(), 2);
  for (std::int64_t step = run.session().next_step(); step < 3; ++step) {
    ASSERT_TRUE(run.Step(NoiseFor(run.spec(), step)).applied);
  }
  EXPECT_EQ(run.TensorDigest(), wanted);
}

}  // namespace
}  // namespace muond::cluster

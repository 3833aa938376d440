// Hyperparameters are the caller's, per group and per step, and either half of a run may be empty.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

using ::testing::FloatNear;
using ::testing::Pointwise;

const Floats kIdentity = {1, 0, 0, 1};
const Floats kOnes(4, 1), kZeros(4, 0);

ParameterSpec In(ParameterSpec parameter, const std::string& group) {
  parameter.group = group;
  return parameter;
}

TEST(Groups, DeepSpeed8440_EachGroupKeepsItsOwnValues) {
  const auto service = StartService();
  RunSpec spec = SpecOf({In(Matrix("a", 2, 2), "decayed"), In(Matrix("b", 2, 2), "free")});
  GroupOf(spec, "decayed").muon = {.lr = 1e-3, .weight_decay = .1};
  GroupOf(spec, "free").muon = {.lr = 1e-4, .weight_decay = 0};
  TestRun run(*service, spec, {.initial = {{"a", kOnes}, {"b", kOnes}}});
  run.Step({{"a", kZeros}, {"b", kZeros}});
  const Tensors weights = run.Weights();
  EXPECT_EQ(weights.at("a"), Floats(4, 1 - 1e-4f));
  EXPECT_EQ(weights.at("b"), kOnes);
  EXPECT_EQ(run.Describe("a").hyperparameters().weight_decay(), .1);
  EXPECT_EQ(run.Describe("a").hyperparameters().lr(), 1e-3);
  EXPECT_EQ(run.Describe("b").hyperparameters().weight_decay(), 0);
  EXPECT_EQ(run.Describe("b").hyperparameters().lr(), 1e-4);
}

TEST(Groups, DeepSpeed7713_EachHalfFollowsItsOwnSchedule) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2), Vector("p", 4)});
  GroupOf(spec, "muon").muon = {.lr = .02, .weight_decay = 0};
  GroupOf(spec, "adamw").adamw = {.lr = 1e-5, .weight_decay = 0};
  TestRun run(*service, spec, {.initial = {{"w", kZeros}, {"p", kZeros}}});
  StepInput input{.gradients = {{{{"w", kIdentity}, {"p", kOnes}}}}};
  input.begin.muon["muon"] = {.lr = .01, .weight_decay = 0};
  input.begin.adamw["adamw"] = {.lr = 5e-6, .weight_decay = 0};
  run.Step(input);
  const Tensors weights = run.Weights();
  const float moved = -.0110811f;
  EXPECT_THAT(weights.at("w"), Pointwise(FloatNear(1e-7f), Floats{moved, 0, 0, moved}));
  EXPECT_THAT(weights.at("p"), Pointwise(FloatNear(1e-11f), Floats(4, -5e-6f)));
  EXPECT_EQ(run.Describe("w").hyperparameters().lr(), .01);
  EXPECT_EQ(run.Describe("p").hyperparameters().lr(), 5e-6);
  // A step that says nothing keeps them.
  run.Step({{"w", kIdentity}, {"p", kOnes}});
  EXPECT_THAT(run.Weights().at("w"),
              Pointwise(FloatNear(1e-7f), Floats{2 * moved, 0, 0, 2 * moved}));
  EXPECT_THAT(run.Weights().at("p"), Pointwise(FloatNear(1e-11f), Floats(4, -1e-5f)));
}

TEST(Groups, Keras21856_EachHalfHasItsOwnDecay) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2), Vector("p", 4)});
  GroupOf(spec, "adamw").adamw.weight_decay = .001;
  TestRun run(*service, spec, {.initial = {{"w", kOnes}, {"p", kOnes}}});
  run.Step({{"w", kZeros}, {"p", kZeros}});
  EXPECT_EQ(run.Weights().at("w"), Floats(4, .99f));
  EXPECT_EQ(run.Weights().at("p"), Floats(4, .9999f));
}

// lr x decay is 1: a decay that does nothing can't hide in a tolerance.
TEST(Groups, Tinygrad17709_DecayIsVisible) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2), Vector("p", 4)});
  GroupOf(spec, "muon").muon.weight_decay = 10;
  GroupOf(spec, "adamw").adamw.weight_decay = 10;
  TestRun run(*service, spec, {.initial = {{"w", kOnes}, {"p", kOnes}}});
  run.Step({{"w", kZeros}, {"p", kZeros}});
  EXPECT_EQ(run.Weights().at("w"), kZeros);
  EXPECT_EQ(run.Weights().at("p"), kZeros);
}

TEST(Groups, IndependentDecayLeavesTheLearningRateOut) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2)});
  GroupOf(spec, "muon").weight_decay_form = WeightDecayForm::kIndependent;
  TestRun run(*service, spec, {.initial = {{"w", kOnes}}});
  run.Step({{"w", kZeros}});
  EXPECT_EQ(run.Weights().at("w"), Floats(4, .9f));
}

TEST(Groups, EmergingOptimizersZeroNorm_AZeroGradientOnZeroMomentumOnlyDecays) {
  const auto service = StartService();
  TestRun run(*service, SpecOf({Matrix("w", 2, 2)}), {.initial = {{"w", kOnes}}});
  const StepOutcome outcome = run.Step({{"w", kZeros}});
  EXPECT_EQ(outcome.zero_inputs, 1);
  EXPECT_EQ(outcome.newton_schulz_calls, 1) << "a zero input is a call";
  EXPECT_EQ(run.Weights().at("w"), Floats(4, .99f));
}

TEST(Groups, DeepSpeed7869_EitherHalfMayBeEmpty) {
  const auto service = StartService();
  for (const bool muon : {true, false}) {
    RunSpec spec = SpecOf({muon ? Matrix("x", 2, 2) : Vector("x", 4)});
    spec.name = muon ? "muon" : "adamw";
    TestRun run(*service, spec, {.initial = {{"x", kOnes}}});
    const StepOutcome outcome = run.Step({{"x", kIdentity}});
    EXPECT_TRUE(outcome.applied);
    EXPECT_EQ(outcome.newton_schulz_calls, muon ? 1 : 0);
    EXPECT_NE(run.Weights().at("x"), kOnes);
  }
}

TEST(Groups, ARankWithoutSlicesTakesPartInEveryStep) {
  const auto service = StartService();
  TestRun run(*service, SpecOf({Matrix("w", 2, 2)}, 2), {.initial = {{"w", kIdentity}}});
  ASSERT_TRUE(run.slices(1).empty());
  EXPECT_TRUE(run.Step({{"w", {3, 0, 0, 4}}}).applied);
  EXPECT_THAT(run.Weights().at("w"),
              Pointwise(FloatNear(1e-6f), Floats{.9177124f, 0, 0, .8780796f}));
}

}  // namespace
}  // namespace muond::cluster

// The golden numbers of docs/semantics.md, through the whole service, on every backend.
#include <cmath>
#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

using ::testing::FloatNear;
using ::testing::Pointwise;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kTolerance = 1e-6f;

const Floats kIdentity = {1, 0, 0, 1};

Floats Diagonal(float a, float b) { return {a, 0, 0, b}; }

class GoldenService : public ::testing::TestWithParam<const char*> {
 protected:
  GoldenService() : service_(StartService({.backend = GetParam(), .threads = 1})) {}

  // W = I, lr = weight decay = 0.1.
  TestRun Open(RunSpec spec) {
    Tensors initial;
    for (const ParameterSpec& parameter : spec.parameters) initial[parameter.name] = kIdentity;
    return TestRun(*service_, std::move(spec), {.initial = initial});
  }
  TestRun Open() { return Open(SpecOf({Matrix("w", 2, 2)})); }

  std::unique_ptr<Service> service_;
};
INSTANTIATE_TEST_SUITE_P(Backends, GoldenService, ::testing::Values("cpu", "reference"));

struct Momentum {
  bool nesterov, sum_form;
};

// One direction can't tell the forms of momentum apart, two can.
TEST_P(GoldenService, TwoDirectionsFollowEachFormOfMomentum) {
  const Floats nesterov[] = {Diagonal(.9177124f, .8780796f), Diagonal(.8088734f, .7635475f),
                             Diagonal(.7138857f, .6478689f)};
  const Floats plain[] = {Diagonal(.9177124f, .8780796f), Diagonal(.8216361f, .7612557f),
                          Diagonal(.7265205f, .6456000f)};
  const Floats gradients[] = {Diagonal(3, 4), Diagonal(1, 1), Diagonal(0, 0)};
  const double momentum[] = {std::hypot(.15, .2), std::hypot(.1925, .24),
                             std::hypot(.182875, .228)};
  for (const Momentum form : {Momentum{true, false}, {true, true}, {false, false}, {false, true}}) {
    RunSpec spec = SpecOf({Matrix("w", 2, 2)});
    spec.name =
        std::string(form.nesterov ? "nesterov" : "plain") + (form.sum_form ? "-sum" : "-ema");
    SCOPED_TRACE(spec.name);
    GroupOf(spec, "muon").nesterov = form.nesterov;
    GroupOf(spec, "muon").momentum_sum_form = form.sum_form;
    TestRun run = Open(spec);
    for (int step = 0; step < 3; ++step) {
      const StepOutcome outcome = run.Step({{"w", gradients[step]}});
      EXPECT_TRUE(outcome.applied);
      EXPECT_EQ(outcome.newton_schulz_calls, 1);
      EXPECT_THAT(run.Weights().at("w"),
                  Pointwise(FloatNear(kTolerance), form.nesterov ? nesterov[step] : plain[step]));
      EXPECT_NEAR(run.Status().momentum_norm(), momentum[step] * (form.sum_form ? 20 : 1), 1e-5);
    }
  }
}

TEST_P(GoldenService, DeepSpeed8432_OverflowLeavesNextStepAlone) {
  TestRun run = Open();
  const std::string before = run.TensorDigest();
  const StepOutcome skipped = run.Step({{"w", {kInf, 0, 0, 1}}});
  EXPECT_FALSE(skipped.applied);
  EXPECT_EQ(skipped.cause, SkipCause::kOverflow);
  EXPECT_EQ(run.TensorDigest(), before);
  EXPECT_TRUE(run.Step({{"w", Diagonal(3, 4)}}).applied);
  EXPECT_THAT(run.Weights().at("w"),
              Pointwise(FloatNear(kTolerance), Diagonal(.9177124f, .8780796f)));
  EXPECT_NEAR(run.Describe("w").momentum_norm(), .25, 1e-6);
  EXPECT_EQ(run.Describe("w").t(), 1);
}

// Protecting the momentum alone would hand its finite old value to a step that must not be taken.
TEST_P(GoldenService, DeepSpeed8435_PlainMomentumIsNotAppliedByASkippedStep) {
  RunSpec spec = SpecOf({Matrix("w", 2, 2)});
  GroupOf(spec, "muon").nesterov = false;
  TestRun run = Open(spec);
  run.Step({{"w", Diagonal(3, 4)}});
  const std::string before = run.TensorDigest();
  const StepOutcome skipped = run.Step({{"w", {kNan, 0, 0, 1}}});
  EXPECT_EQ(skipped.cause, SkipCause::kOverflow);
  EXPECT_EQ(skipped.newton_schulz_calls, 0);
  EXPECT_EQ(run.TensorDigest(), before);
}

TEST_P(GoldenService, AdamWCountsAppliedStepsOnly) {
  TestRun run(*service_, SpecOf({Vector("p", 1)}), {.initial = {{"p", {1}}}});
  EXPECT_FALSE(run.Step({{"p", {-kInf}}}).applied);
  EXPECT_EQ(run.Weights().at("p"), Floats{1});
  run.Step({{"p", {2}}});
  EXPECT_NEAR(run.Weights().at("p")[0], .8990000005, 1e-7);
  EXPECT_FALSE(run.Step({{"p", {kNan}}}).applied);
  run.Step({{"p", {2}}});
  EXPECT_NEAR(run.Weights().at("p")[0], .798101001, 1e-7);
  EXPECT_EQ(run.Describe("p").t(), 2);
}

// Newton-Schulz does not see the loss scale, and powers of two change no bit.
TEST_P(GoldenService, DeepSpeedNightly20260930_LossScaleChangesNoBit) {
  std::string expected;
  for (const double scale : {1.0, 1024.0, 65536.0}) {
    RunSpec spec = SpecOf({Matrix("w", 2, 2), Matrix("v", 2, 2), Vector("p", 4)});
    spec.name = "scale-" + std::to_string(static_cast<int>(scale));
    spec.loss_scale = {.mode = LossScaleMode::kStatic, .initial = scale};
    TestRun run = Open(spec);
    for (const Floats& gradient : {Diagonal(3, 4), Diagonal(1, -2)}) {
      const StepOutcome outcome =
          run.Step({{"w", gradient}, {"v", {.1f, .7f, -.3f, .2f}}, {"p", {1, 2, 3, 4}}});
      EXPECT_EQ(outcome.loss_scale, scale);
    }
    if (expected.empty()) expected = run.TensorDigest();
    EXPECT_EQ(run.TensorDigest(), expected) << scale;
  }
}

// Orthogonalizing each micro-batch would give M = diag(.29, .2).
TEST_P(GoldenService, DeepSpeed8443_MicroBatchesAreOneStep) {
  RunSpec spec = SpecOf({Matrix("w", 2, 2)});
  spec.reduce_micro_batches = Reduction::kMean;
  TestRun run = Open(spec);
  const StepOutcome outcome =
      run.Step(StepInput{.gradients = {{{{"w", Diagonal(4, 0)}}, {{"w", Diagonal(2, 4)}}}}});
  EXPECT_EQ(outcome.newton_schulz_calls, 1);
  EXPECT_NEAR(outcome.grad_norm, std::hypot(3, 2), 1e-6);
  EXPECT_NEAR(run.Describe("w").momentum_norm(), std::hypot(.15, .1), 1e-6);
  EXPECT_THAT(run.Weights().at("w"),
              Pointwise(FloatNear(kTolerance), Diagonal(.99f - .111709f, .99f - .0682084f)));
}

TEST_P(GoldenService, MicroBatchesAreSummedUnlessAMeanIsDeclared) {
  TestRun run = Open();
  run.Step(StepInput{.gradients = {{{{"w", Diagonal(1, 4)}}, {{"w", Diagonal(2, 0)}}}}});
  EXPECT_THAT(run.Weights().at("w"),
              Pointwise(FloatNear(kTolerance), Diagonal(.9177124f, .8780796f)));
  const std::string before = run.TensorDigest();
  const StepOutcome skipped = run.Step(StepInput{
      .gradients = {{{{"w", Diagonal(1, 1)}}, {{"w", Diagonal(kNan, 1)}}, {{"w", kIdentity}}}}});
  EXPECT_EQ(skipped.cause, SkipCause::kOverflow);
  EXPECT_EQ(run.TensorDigest(), before);
}

// A parameter without a gradient is left alone; a zero gradient is a gradient.
TEST_P(GoldenService, KellerJordan37_AbsentIsNotZero) {
  TestRun run = Open(SpecOf({Matrix("a", 2, 2), Matrix("b", 2, 2)}));
  run.Step({{"a", Diagonal(3, 4)}, {"b", Diagonal(3, 4)}});
  const Floats before = run.Weights().at("a");
  const v1::DigestReply digests = run.Digest(true);
  const StepOutcome outcome = run.Step({{"b", Diagonal(0, 0)}});
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(outcome.newton_schulz_calls, 1) << "of the present matrix";
  EXPECT_EQ(run.Weights().at("a"), before);
  EXPECT_EQ(run.Digest(true).parameters().at("a"), digests.parameters().at("a"));
  EXPECT_EQ(run.Describe("a").t(), 1);
  EXPECT_EQ(run.Describe("b").t(), 2);
  EXPECT_THAT(run.Weights().at("b"),
              Pointwise(FloatNear(kTolerance),
                        Diagonal(.99f * .9177124f - .0722876f, .99f * .8780796f - .1119204f)));
}

TEST_P(GoldenService, NewtonSchulzOfTheSpecificationsMatrices) {
  struct Case {
    std::int64_t rows, cols;
    Floats gradient, o;
  };
  const Case cases[] = {
      {2, 2, {1, 0, 0, 1}, {1.1081112f, 0, 0, 1.1081112f}},
      {2, 2, {1, 2, 2, 4}, {.1392873f, .2785746f, .2785746f, .5571491f}},
      {2,
       3,
       {1, 2, 3, 4, 5, 6},
       {-.5682901f, .0577419f, .6837740f, .5633547f, .4056128f, .2478710f}},
      {3,
       2,
       {1, 4, 2, 5, 3, 6},
       {-.5682901f, .5633547f, .0577419f, .4056128f, .6837740f, .2478710f}},
      {2, 2, {1e-10f, 0, 0, 1e-10f}, {1.1081112f, 0, 0, 1.1081112f}},
      {2, 2, {70000, 0, 0, 70000}, {1.1081112f, 0, 0, 1.1081112f}},
  };
  RunSpec spec = SpecOf({});
  Tensors initial, gradients;
  for (const Case& one : cases) {
    const std::string name = "w" + std::to_string(spec.parameters.size());
    spec.parameters.push_back(Matrix(name, one.rows, one.cols));
    initial[name] = Floats(one.gradient.size(), 0);
    gradients[name] = one.gradient;
  }
  spec.groups = SpecOf({Matrix("w", 1, 1)}).groups;
  GroupOf(spec, "muon").muon = {.lr = 1, .weight_decay = 0};
  GroupOf(spec, "muon").shape_factor = ShapeFactor::kNone;
  TestRun run(*service_, spec, {.initial = initial});
  EXPECT_EQ(run.Step(gradients).newton_schulz_calls, 6);
  const Tensors weights = run.Weights();
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    Floats expected;
    for (const float value : cases[i].o) expected.push_back(-value);
    EXPECT_THAT(weights.at("w" + std::to_string(i)), Pointwise(FloatNear(2e-5f), expected)) << i;
  }
}

}  // namespace
}  // namespace muond::cluster

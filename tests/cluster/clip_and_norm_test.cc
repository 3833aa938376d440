// Gradient norms, clipping, the norm threshold, and the loss scale that each step is told.
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/exposition_for_test.h"
#include "tests/support/raw_trainer.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

using ::testing::FloatNear;
using ::testing::Pointwise;

constexpr float kInf = std::numeric_limits<float>::infinity();
const Floats kIdentity = {1, 0, 0, 1};

Floats Diagonal(float a, float b) { return {a, 0, 0, b}; }

// Two steps, the second in another direction, of a matrix beside a vector with a huge gradient.
Tensors TwoSteps(Service& service, const std::string& name, double max_norm, ClipPolicy policy,
                 Tensors* first = nullptr) {
  RunSpec spec = SpecOf({Matrix("w", 2, 2), Vector("p", 1)});
  spec.name = name;
  spec.max_grad_norm = max_norm;
  spec.clip_policy = policy;
  TestRun run(service, spec, {.initial = {{"w", kIdentity}, {"p", {1}}}});
  const StepOutcome outcome = run.Step({{"w", Diagonal(3, 4)}, {"p", {5e7f}}});
  EXPECT_NEAR(outcome.grad_norm, 5e7, 1);
  EXPECT_NEAR(outcome.clip_coefficient, max_norm == 0 ? 1 : 2e-8, 1e-15);
  EXPECT_NEAR(run.Describe("p").momentum_norm(), max_norm == 0 ? 5e6 : .1, max_norm == 0 ? 1 : 1e-6)
      << "AdamW's gradient is clipped under both policies";
  if (first != nullptr) *first = run.Weights();
  run.Step({{"w", Diagonal(1, 1)}, {"p", {0}}});
  return run.Weights();
}

TEST(ClipAndNorm, Megatron5394_ClippingLeavesMuonAlone) {
  const auto service = StartService();
  const Tensors free = TwoSteps(*service, "free", 0, ClipPolicy::kAdamWOnly);
  const Tensors clipped = TwoSteps(*service, "clipped", 1, ClipPolicy::kAdamWOnly);
  EXPECT_EQ(clipped.at("w"), free.at("w"));
}

TEST(ClipAndNorm, Megatron5394_ClippingAllShowsFromTheSecondStepOn) {
  const auto service = StartService();
  Tensors free_first, clipped_first;
  const Tensors free = TwoSteps(*service, "free", 0, ClipPolicy::kAll, &free_first);
  const Tensors clipped = TwoSteps(*service, "clipped", 1, ClipPolicy::kAll, &clipped_first);
  EXPECT_THAT(clipped_first.at("w"), Pointwise(FloatNear(1e-6f), free_first.at("w")));
  EXPECT_GT(std::abs(clipped.at("w")[0] - free.at("w")[0]), 1e-3);
}

TEST(ClipAndNorm, DeepSpeed8439_TheOrthogonalizedUpdateIsNeverClipped) {
  const auto service = StartService();
  for (const ClipPolicy policy : {ClipPolicy::kAdamWOnly, ClipPolicy::kAll}) {
    RunSpec spec = SpecOf({Matrix("a", 2, 2), Matrix("b", 2, 2)});
    spec.name = policy == ClipPolicy::kAll ? "all" : "adamw-only";
    spec.max_grad_norm = 1;
    spec.clip_policy = policy;
    GroupOf(spec, "muon").muon.weight_decay = 0;
    TestRun run(*service, spec, {.initial = {{"a", Diagonal(0, 0)}, {"b", Diagonal(0, 0)}}});
    const StepOutcome outcome = run.Step({{"a", kIdentity}, {"b", kIdentity}});
    EXPECT_NEAR(outcome.grad_norm, 2, 1e-9);
    EXPECT_NEAR(outcome.clip_coefficient, .5, 1e-6);
    EXPECT_THAT(run.Weights().at("a"), Pointwise(FloatNear(1e-6f), Diagonal(-.110811f, -.110811f)));
  }
}

// The sum of squares is beyond fp32: max_norm / inf would zero every gradient.
TEST(ClipAndNorm, Pytorch46849_AHugeFiniteNormClipsAndDoesNotZero) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Vector("p", 4)});
  spec.max_grad_norm = 1;
  TestRun run(*service, spec, {.initial = {{"p", Floats(4, 1)}}});
  const StepOutcome outcome = run.Step({{"p", Floats(4, 2e19f)}});
  EXPECT_TRUE(outcome.applied);
  EXPECT_NEAR(outcome.grad_norm / 4e19, 1, 1e-6);
  EXPECT_NEAR(outcome.clip_coefficient * 4e19, 1, 1e-6);
  EXPECT_NEAR(run.Describe("p").momentum_norm(), .1, 1e-6);
  EXPECT_THAT(run.Weights().at("p"), Pointwise(FloatNear(1e-5f), Floats(4, .899f)));
  const StepOutcome skipped = run.Step({{"p", {1, kInf, 1, 1}}});
  EXPECT_EQ(skipped.cause, SkipCause::kOverflow);
  EXPECT_EQ(skipped.nonfinite_elements, 1);
  EXPECT_EQ(skipped.grad_norm, 0);
}

TEST(ClipAndNorm, Paddle32038_ZeroNormDividesNothing) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2), Vector("p", 4)});
  spec.max_grad_norm = 1;
  spec.clip_policy = ClipPolicy::kAll;
  TestRun run(*service, spec);
  const StepOutcome outcome = run.Step({{"w", Floats(4, 0)}, {"p", Floats(4, 0)}});
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(outcome.grad_norm, 0);
  EXPECT_EQ(outcome.clip_coefficient, 1);
  for (const auto& [name, values] : run.Weights()) {
    for (const float value : values) EXPECT_TRUE(std::isfinite(value)) << name;
  }
}

TEST(ClipAndNorm, Megatron3460_AHugeNormSkipsAndIsNoOverflow) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2), Vector("p", 4)});
  spec.grad_norm_skip_threshold = 10;
  spec.loss_scale = {.mode = LossScaleMode::kDynamic, .initial = 16, .window = 2};
  TestRun run(*service, spec);
  const Floats zero(4, 0);
  EXPECT_TRUE(run.Step({{"w", Diagonal(6, 8)}, {"p", zero}}).applied) << "10 is not above 10";
  const std::string before = run.TensorDigest();
  const StepOutcome skipped = run.Step({{"w", Diagonal(30, 40)}, {"p", zero}});
  EXPECT_EQ(skipped.cause, SkipCause::kNormThreshold);
  EXPECT_NEAR(skipped.grad_norm, 50, 1e-9);
  EXPECT_EQ(skipped.next_loss_scale, 16);
  EXPECT_EQ(run.TensorDigest(), before);
  EXPECT_EQ(run.Step({{"w", Diagonal(1, 1)}, {"p", zero}}).next_loss_scale, 32)
      << "the second good step in a row grows the scale: a threshold skip does not count";
  EXPECT_EQ(run.Status().steps_skipped().at("norm_threshold"), 1);
}

TEST(ClipAndNorm, DeepSpeed2695_TheNormIsUnscaledByItsOwnScale) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2)});
  spec.loss_scale = {.mode = LossScaleMode::kDynamic, .initial = 4, .window = 1};
  TestRun run(*service, spec);
  const StepOutcome outcome = run.Step({{"w", Diagonal(.6f, .8f)}});
  EXPECT_EQ(outcome.loss_scale, 4);
  EXPECT_EQ(outcome.next_loss_scale, 8);
  EXPECT_NEAR(outcome.grad_norm, 1, 1e-7);
  EXPECT_NEAR(ParseExposition(service->Metrics()).at("muond_grad_norm{run=\"run\"}"), 1, 1e-7);
}

TEST(ClipAndNorm, DeepSpeed8588_TheReportedNormIsUnscaled) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2)});
  spec.loss_scale = {.mode = LossScaleMode::kStatic, .initial = 128};
  TestRun run(*service, spec);
  EXPECT_NEAR(run.Step({{"w", Diagonal(.6f, .8f)}}).grad_norm, 1, 1e-7);
  EXPECT_NEAR(run.Status().grad_norm(), 1, 1e-7);
  EXPECT_NEAR(ParseExposition(service->Metrics()).at("muond_grad_norm{run=\"run\"}"), 1, 1e-7);
}

TEST(ClipAndNorm, DeepSpeed4986_ThereIsOneDefaultScale) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2)});
  spec.loss_scale = {.mode = LossScaleMode::kDynamic};
  TestRun run(*service, spec);
  EXPECT_EQ(run.session().loss_scale(), 65536);
  EXPECT_EQ(run.Status().loss_scale(), 65536);
  EXPECT_EQ(ParseExposition(service->Metrics()).at("muond_loss_scale{run=\"run\"}"), 65536);
}

// A trainer that leaves the scale out means 1, and is told that the run's is another.
TEST(ClipAndNorm, GradientsOfAnotherScaleAreRefused) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2)});
  spec.loss_scale = {.mode = LossScaleMode::kDynamic};
  TestRun run(*service, spec);
  for (const double told : {0.0, 32768.0}) {
    const absl::Status status = RawTrainer(*service, "run").Begin(0, told);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("the run's is 65536"));
  }
  EXPECT_TRUE(run.Step({{"w", kIdentity}}).applied);
}

TEST(ClipAndNorm, TheScaleFollowsEachPolicyThroughOverflows) {
  const auto service = StartService();
  const int overflows[] = {1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1};
  const struct {
    const char* name;
    LossScalePolicy policy;
    std::vector<double> scales;
  } cases[] = {
      {"deepspeed",
       LossScalePolicy::kDeepSpeed,
       {65536, 32768, 16384, 16384, 16384, 32768, 32768, 32768, 32768, 32768, 65536, 65536, 32768}},
      {"megatron",
       LossScalePolicy::kMegatron,
       {65536, 32768, 16384, 16384, 32768, 32768, 65536, 65536, 65536, 131072, 131072, 131072,
        65536}},
      {"torch",
       LossScalePolicy::kTorch,
       {32768, 16384, 8192, 8192, 16384, 16384, 32768, 16384, 16384, 32768, 32768, 16384, 8192}},
  };
  for (const auto& one : cases) {
    RunSpec spec = SpecOf({Matrix("w", 2, 2)});
    spec.name = one.name;
    spec.loss_scale = {.mode = LossScaleMode::kDynamic, .policy = one.policy, .window = 2};
    TestRun run(*service, spec);
    std::vector<double> scales;
    for (const int overflow : overflows) {
      const StepOutcome outcome = run.Step({{"w", Diagonal(overflow != 0 ? kInf : 1, 1)}});
      EXPECT_EQ(outcome.applied, overflow == 0);
      scales.push_back(outcome.next_loss_scale);
    }
    EXPECT_EQ(scales, one.scales) << one.name;
  }
}

// At the floor a run either goes on skipping, or says so after N overflows; its state stands.
TEST(ClipAndNorm, GptNeox291_OverflowsAtTheMinimumEndInAClearError) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2)});
  spec.loss_scale = {.mode = LossScaleMode::kDynamic,
                     .policy = LossScalePolicy::kDeepSpeed,
                     .initial = 4,
                     .hysteresis = 1,
                     .minimum = 1};
  for (const bool stay : {true, false}) {
    spec.name = stay ? "stay" : "error";
    spec.loss_scale.error_after = stay ? 0 : 3;
    TestRun run(*service, spec);
    const std::string before = run.TensorDigest();
    const Tensors bad = {{"w", Diagonal(kInf, 1)}};
    for (int i = 0; i < 4; ++i) run.Step(bad);
    EXPECT_EQ(run.session().loss_scale(), 1);
    const auto fifth = run.TryStep({.gradients = {{bad}}})[0];
    EXPECT_EQ(fifth.ok(), stay);
    if (!stay) {
      EXPECT_EQ(fifth.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(fifth.status().message()),
                  ::testing::HasSubstr("3 overflows in a row at the minimum 1"));
    }
    EXPECT_EQ(run.TensorDigest(), before);
    EXPECT_EQ(run.Status().position().next_step(), 5);
  }
}

}  // namespace
}  // namespace muond::cluster

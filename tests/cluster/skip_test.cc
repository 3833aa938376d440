// A skipped step leaves the tensor digest as it was, wherever and whatever the bad value is.
#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/exposition_for_test.h"
#include "tests/support/raw_trainer.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- One bad value, everywhere ----------------------------------------------------------------

enum class Place : std::uint8_t { kFirst, kMiddle, kLast };

// Nesterov, poisoned parameter, bad value, chunk of the parameter, wire dtype.
using Poison = std::tuple<bool, const char*, float, Place, Dtype>;

class OneBadValue : public ::testing::TestWithParam<Poison> {};

std::string NameOf(const ::testing::TestParamInfo<Poison>& info) {
  const auto& [nesterov, parameter, value, place, dtype] = info.param;
  const char* places[] = {"First", "Middle", "Last"};
  return std::string(nesterov ? "Nesterov" : "Plain") + "_" + parameter + "_" +
         (std::isnan(value) ? "Nan"
          : value > 0       ? "Inf"
                            : "MinusInf") +
         "_" + places[static_cast<int>(place)] + "Chunk_" + std::string(kernels::DtypeName(dtype));
}

// Several chunks a tensor: 1024 bytes is the smallest chunk that the client sends.
RunSpec ManyParameters(bool nesterov, Dtype dtype) {
  RunSpec spec = SpecOf({Vector("norm", 700), Matrix("wq", 32, 40), Matrix("wk", 40, 24),
                         Vector("bias", 2000), Matrix("wo", 24, 48)});
  for (ParameterSpec& parameter : spec.parameters) parameter.dtype = dtype;
  GroupOf(spec, "muon").nesterov = nesterov;
  return spec;
}

TEST_P(OneBadValue, LeavesEveryByteAsItWas) {
  const auto& [nesterov, poisoned, value, place, dtype] = GetParam();
  const auto service = StartService();
  const RunSpec spec = ManyParameters(nesterov, dtype);
  TestRun run(*service, spec, {.chunk_bytes = 1024});
  ASSERT_TRUE(run.Step(NoiseFor(spec, 10)).applied) << "so that there is momentum to lose";
  const v1::DigestReply before = run.Digest(true);
  const Tensors weights = run.Weights();

  const Tensors good = NoiseFor(spec, 20);
  Tensors bad = good;
  Floats& tensor = bad.at(poisoned);
  tensor[place == Place::kFirst    ? 0
         : place == Place::kMiddle ? tensor.size() / 2
                                   : tensor.size() - 1] = value;
  const StepOutcome outcome = run.Step(bad);
  EXPECT_FALSE(outcome.applied);
  EXPECT_EQ(outcome.cause, SkipCause::kOverflow);
  EXPECT_EQ(outcome.nonfinite_elements, 1);
  EXPECT_EQ(outcome.offenders, std::vector<std::string>{poisoned});
  EXPECT_EQ(outcome.newton_schulz_calls, 0);
  EXPECT_EQ(outcome.applied_steps, 1);
  EXPECT_EQ(outcome.version, 2) << "a skip consumes a step";

  const v1::DigestReply after = run.Digest(true);
  EXPECT_EQ(after.tensor_digest(), before.tensor_digest());
  for (const auto& [name, digest] : before.parameters()) {
    EXPECT_EQ(after.parameters().at(name), digest) << name;
  }
  EXPECT_NE(after.control_digest(), before.control_digest());
  EXPECT_EQ(run.Weights(), weights);

  // The same step without the bad value moves everything: the digest sees what it must not have.
  EXPECT_TRUE(run.Step(good).applied);
  const v1::DigestReply moved = run.Digest(true);
  EXPECT_NE(moved.tensor_digest(), before.tensor_digest());
  for (const auto& [name, digest] : before.parameters()) {
    EXPECT_NE(moved.parameters().at(name), digest) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, OneBadValue,
    ::testing::Combine(::testing::Bool(), ::testing::Values("wk", "bias", "norm", "wo"),
                       ::testing::Values(kInf, -kInf, kNan),
                       ::testing::Values(Place::kFirst, Place::kMiddle, Place::kLast),
                       ::testing::Values(Dtype::kF32)),
    NameOf);
INSTANTIATE_TEST_SUITE_P(Narrow, OneBadValue,
                         ::testing::Combine(::testing::Values(false),
                                            ::testing::Values("wq", "bias"),
                                            ::testing::Values(kInf, kNan),
                                            ::testing::Values(Place::kMiddle),
                                            ::testing::Values(Dtype::kBF16, Dtype::kF16)),
                         NameOf);

// ---- A run that skipped is a run that was never sent the step ----------------------------------

TEST(Skip, LeavesNoTraceInLaterSteps) {
  const auto service = StartService();
  RunSpec spec = ManyParameters(true, Dtype::kF32);
  TestRun skipping(*service, spec);
  spec.name = "straight";
  TestRun straight(*service, spec);
  Tensors bad = NoiseFor(spec, 99);
  bad.at("wq")[17] = kNan;
  for (std::uint64_t step = 0; step < 6; ++step) {
    if (step % 2 == 1) {
      EXPECT_FALSE(skipping.Step(bad).applied);
    }
    EXPECT_TRUE(skipping.Step(NoiseFor(spec, step)).applied);
    EXPECT_TRUE(straight.Step(NoiseFor(spec, step)).applied);
    EXPECT_EQ(skipping.TensorDigest(), straight.TensorDigest()) << step;
  }
  EXPECT_EQ(skipping.Describe("bias").t(), 6);
  EXPECT_EQ(skipping.Status().steps_applied(), 6);
  EXPECT_EQ(skipping.Status().steps_skipped().at("overflow"), 3);
}

// Finite values can poison state as well: momentum of the sum form grows twentyfold.
TEST(Skip, StateThatWouldOverflowSkipsAndKeepsTheScale) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2), Vector("p", 2)});
  GroupOf(spec, "muon").momentum_sum_form = true;
  GroupOf(spec, "muon").nesterov = false;
  spec.loss_scale = {.mode = LossScaleMode::kDynamic, .initial = 1, .window = 2};
  TestRun run(*service, spec);
  const Tensors huge = {{"w", {2e38f, 0, 0, 2e38f}}, {"p", {1, 1}}};
  ASSERT_TRUE(run.Step(huge).applied);
  const std::string before = run.TensorDigest();
  const StepOutcome skipped = run.Step(huge);
  EXPECT_EQ(skipped.cause, SkipCause::kStateOverflow);
  EXPECT_EQ(skipped.nonfinite_elements, 0);
  EXPECT_EQ(skipped.next_loss_scale, 1) << "a lower scale can't help";
  EXPECT_EQ(run.TensorDigest(), before);
  EXPECT_EQ(run.Step({{"w", {1, 0, 0, 1}}, {"p", {1, 1}}}).next_loss_scale, 2)
      << "the growth counter stood still";
}

TEST(Skip, AGradientWhoseSquareIsBeyondFp32IsStateOverflow) {
  const auto service = StartService();
  TestRun run(*service, SpecOf({Vector("p", 2), Matrix("w", 2, 2)}));
  const std::string before = run.TensorDigest();
  const StepOutcome skipped = run.Step({{"p", {1, 3e38f}}, {"w", {1, 0, 0, 1}}});
  EXPECT_EQ(skipped.cause, SkipCause::kStateOverflow);
  EXPECT_EQ(run.TensorDigest(), before) << "of the other half, too";
}

// ---- The trainer's own word --------------------------------------------------------------------

TEST(Skip, ATrainersScalerCanDiscardAStep) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2), Vector("p", 2)});
  spec.loss_scale.mode = LossScaleMode::kExternal;
  TestRun run(*service, spec);
  const v1::DigestReply before = run.Digest();
  const StepOutcome skipped = Must(run.session().Skip(SkipCause::kOverflow, 4096));
  EXPECT_FALSE(skipped.applied);
  EXPECT_EQ(skipped.cause, SkipCause::kOverflow);
  EXPECT_EQ(skipped.loss_scale, 4096);
  EXPECT_EQ(skipped.version, 1);
  EXPECT_EQ(run.TensorDigest(), before.tensor_digest());
  EXPECT_NE(run.Digest().control_digest(), before.control_digest());
  EXPECT_EQ(run.Status().steps_skipped().at("overflow"), 1);
  // Said again, it is the same skip.
  RawTrainer again(*service, "run");
  const v1::StepOutcome repeat = Must(again.Skip(0, v1::SKIP_CAUSE_OVERFLOW, 4096));
  EXPECT_EQ(repeat.version(), 1);
  EXPECT_EQ(run.Status().position().next_step(), 1);
  StepInput next{.gradients = {{{{"w", {1, 0, 0, 1}}, {"p", {1, 1}}}}}};
  next.begin.loss_scale = 2048;
  EXPECT_TRUE(run.Step(next).applied);
}

TEST(Skip, HalfAStepThatIsSkippedWasNeverSent) {
  const auto service = StartService();
  TestRun run(*service, SpecOf({Matrix("w", 2, 2), Vector("p", 2)}));
  const std::string before = run.TensorDigest();
  RawTrainer trainer(*service, "run");
  Must(trainer.Begin(0));
  Must(trainer.Push(0, {ChunkOf("p", 0, 0, Bytes({5, 6}))}));
  EXPECT_EQ(Must(trainer.Skip(0, v1::SKIP_CAUSE_TRAINER)).cause(), v1::SKIP_CAUSE_TRAINER);
  EXPECT_EQ(run.TensorDigest(), before);
  Must(run.session().Rejoin());
  EXPECT_TRUE(run.Step({{"w", {1, 0, 0, 1}}, {"p", {1, 1}}}).applied);
}

TEST(Skip, Accelerate4242_TheSkipIsToldTruthfully) {
  const auto service = StartService();
  TestRun run(*service, SpecOf({Matrix("w", 2, 2)}));
  const auto series = [&](const std::string& name) {
    return ParseExposition(service->Metrics()).at(name);
  };
  run.Step({{"w", {1, 0, 0, 1}}});
  const StepOutcome skipped = run.Step({{"w", {kInf, 0, kNan, 1}}});
  EXPECT_FALSE(skipped.applied);
  EXPECT_EQ(skipped.applied_steps, 1);
  EXPECT_EQ(skipped.skipped_steps, 1);
  EXPECT_EQ(skipped.consecutive_skips, 1);
  EXPECT_EQ(skipped.nonfinite_elements, 2);
  EXPECT_EQ(series("muond_consecutive_skips{run=\"run\"}"), 1);
  EXPECT_EQ(run.Step({{"w", {kInf, 0, 0, 1}}}).consecutive_skips, 2);
  EXPECT_EQ(run.Step({{"w", {1, 0, 0, 1}}}).consecutive_skips, 0);
  EXPECT_EQ(series("muond_consecutive_skips{run=\"run\"}"), 0);
  EXPECT_EQ(run.Status().newton_schulz_calls(), 2) << "matrices x applied steps";
}

}  // namespace
}  // namespace muond::cluster

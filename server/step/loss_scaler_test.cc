#include "server/step/loss_scaler.h"

#include <cfloat>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

LossScaleSpec Dynamic(LossScalePolicy policy) {
  LossScaleSpec spec;
  spec.mode = LossScaleMode::kDynamic;
  spec.policy = policy;
  return spec;
}

ScaleChange Good(LossScaler& scaler) {
  return scaler.OnStep(true, SkipCause::kNone, scaler.scale());
}
ScaleChange Overflow(LossScaler& scaler) {
  return scaler.OnStep(false, SkipCause::kOverflow, scaler.scale());
}

std::vector<double> ScalesAfter(LossScaler& scaler, const std::vector<int>& overflows) {
  std::vector<double> scales;
  for (const int overflow : overflows) {
    overflow != 0 ? Overflow(scaler) : Good(scaler);
    scales.push_back(scaler.scale());
  }
  return scales;
}

// semantics.md, section 6: initial 65536, window 2, hysteresis 2.
const std::vector<int> kGoldenFlags = {1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1};

TEST(LossScaler, GoldenSequenceDeepSpeed) {
  LossScaleSpec spec = Dynamic(LossScalePolicy::kDeepSpeed);
  spec.window = 2;
  LossScaler scaler(spec);
  EXPECT_THAT(ScalesAfter(scaler, kGoldenFlags),
              ElementsAre(65536, 32768, 16384, 16384, 16384, 32768, 32768, 32768, 32768, 32768,
                          65536, 65536, 32768));
}

TEST(LossScaler, GoldenSequenceMegatron) {
  LossScaleSpec spec = Dynamic(LossScalePolicy::kMegatron);
  spec.window = 2;
  LossScaler scaler(spec);
  EXPECT_THAT(ScalesAfter(scaler, kGoldenFlags),
              ElementsAre(65536, 32768, 16384, 16384, 32768, 32768, 65536, 65536, 65536, 131072,
                          131072, 131072, 65536));
}

TEST(LossScaler, GoldenSequenceTorch) {
  LossScaleSpec spec = Dynamic(LossScalePolicy::kTorch);
  spec.window = 2;
  LossScaler scaler(spec);
  EXPECT_THAT(ScalesAfter(scaler, kGoldenFlags),
              ElementsAre(32768, 16384, 8192, 8192, 16384, 16384, 32768, 16384, 16384, 32768, 32768,
                          16384, 8192));
}

TEST(LossScaler, DeepSpeedGrowsFirstAfterWindowPlusOneGoodSteps) {
  LossScaleSpec spec = Dynamic(LossScalePolicy::kDeepSpeed);
  spec.window = 5;
  LossScaler scaler(spec);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(Good(scaler), ScaleChange::kNone) << i;
  EXPECT_EQ(Good(scaler), ScaleChange::kGrowth);
  // And then every window.
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Good(scaler), ScaleChange::kNone) << i;
  EXPECT_EQ(Good(scaler), ScaleChange::kGrowth);
  EXPECT_EQ(scaler.scale(), 4 * 65536);
}

TEST(LossScaler, MegatronAndTorchGrowAfterExactlyWindowGoodSteps) {
  for (const auto policy : {LossScalePolicy::kMegatron, LossScalePolicy::kTorch}) {
    LossScaleSpec spec = Dynamic(policy);
    spec.window = 5;
    LossScaler scaler(spec);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(Good(scaler), ScaleChange::kNone) << i;
    EXPECT_EQ(Good(scaler), ScaleChange::kGrowth);
  }
}

TEST(LossScaler, DefaultWindowsAndHysteresis) {
  const LossScaleSpec torch = LossScaler(Dynamic(LossScalePolicy::kTorch)).spec();
  EXPECT_EQ(torch.window, 2000);
  EXPECT_EQ(torch.hysteresis, 1);
  EXPECT_EQ(torch.minimum, 0);
  for (const auto policy : {LossScalePolicy::kMegatron, LossScalePolicy::kDeepSpeed}) {
    const LossScaleSpec spec = LossScaler(Dynamic(policy)).spec();
    EXPECT_EQ(spec.window, 1000);
    EXPECT_EQ(spec.hysteresis, 2);
    EXPECT_EQ(spec.minimum, 1);
  }
}

TEST(LossScaler, DeepSpeed4986_OneDefaultStart) {
  LossScaleSpec spec = Dynamic(LossScalePolicy::kDeepSpeed);
  EXPECT_EQ(LossScaler(spec).scale(), 65536);
  spec.initial = 0;  // left out
  EXPECT_EQ(LossScaler(spec).scale(), 65536);
}

TEST(LossScaler, PyTorch115710_HysteresisThenBackoff) {
  LossScaler scaler(Dynamic(LossScalePolicy::kMegatron));
  EXPECT_EQ(Overflow(scaler), ScaleChange::kNone);
  EXPECT_EQ(scaler.scale(), 65536);
  EXPECT_EQ(scaler.state().hysteresis_left, 1);
  EXPECT_EQ(Overflow(scaler), ScaleChange::kBackoff);
  EXPECT_EQ(scaler.scale(), 32768);
}

TEST(LossScaler, Transformers34053_RestoredStateGoesOnWhereItWas) {
  LossScaleSpec spec = Dynamic(LossScalePolicy::kMegatron);
  spec.initial = 256;
  spec.window = 10;
  LossScaler before(spec);
  for (int i = 0; i < 7; ++i) Good(before);
  LossScaler after(Dynamic(LossScalePolicy::kMegatron));
  after = LossScaler(spec);
  after.Restore(before.state());
  EXPECT_THAT(ScalesAfter(after, {0, 0, 0}), ElementsAre(256, 256, 512));
}

LossScaleSpec Floored() {
  LossScaleSpec spec = Dynamic(LossScalePolicy::kMegatron);
  spec.initial = 4;
  spec.hysteresis = 1;
  spec.minimum = 1;
  return spec;
}

TEST(LossScaler, GptNeox291_ErrorOnTheThirdCallMadeAtTheFloor) {
  LossScaleSpec spec = Floored();
  spec.error_after = 3;
  LossScaler scaler(spec);
  for (int i = 0; i < 4; ++i) {
    Overflow(scaler);
    EXPECT_TRUE(scaler.AtMinimum().ok()) << i;
  }
  Overflow(scaler);
  EXPECT_EQ(scaler.AtMinimum().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(scaler.AtMinimum().message()), HasSubstr("3 overflows"));
  EXPECT_EQ(scaler.scale(), 1);
}

TEST(LossScaler, GptNeox291_StayAtTheFloorForEver) {
  LossScaler scaler(Floored());
  EXPECT_THAT(ScalesAfter(scaler, {1, 1, 1, 1, 1}), ElementsAre(2, 1, 1, 1, 1));
  EXPECT_TRUE(scaler.AtMinimum().ok());
}

TEST(LossScaler, AGoodStepForgetsOverflowsAtTheMinimum) {
  LossScaleSpec spec = Floored();
  spec.error_after = 2;
  LossScaler scaler(spec);
  for (int i = 0; i < 3; ++i) Overflow(scaler);
  Good(scaler);
  Overflow(scaler);
  EXPECT_TRUE(scaler.AtMinimum().ok());
  Overflow(scaler);
  EXPECT_FALSE(scaler.AtMinimum().ok());
}

TEST(LossScaler, BackoffStopsAtTheMinimumEvenFromTheSide) {
  LossScaleSpec spec = Floored();
  spec.initial = 1.5;
  LossScaler scaler(spec);
  EXPECT_THAT(ScalesAfter(scaler, {1, 1}), ElementsAre(1, 1));
}

TEST(LossScaler, LVSM19_OtherSkipsLeaveTheWholeStateAlone) {
  LossScaler scaler(Dynamic(LossScalePolicy::kTorch));
  Good(scaler);
  const LossScalerState before = scaler.state();
  for (const SkipCause cause :
       {SkipCause::kStateOverflow, SkipCause::kNormThreshold, SkipCause::kTrainer}) {
    EXPECT_EQ(scaler.OnStep(false, cause, scaler.scale()), ScaleChange::kNone);
    EXPECT_EQ(scaler.state(), before);
  }
}

TEST(LossScaler, ScaleStaysANormalFloat) {
  LossScaleSpec spec = Dynamic(LossScalePolicy::kTorch);
  spec.window = 1;
  LossScaler scaler(spec);
  for (int i = 0; i < 200; ++i) Good(scaler);
  EXPECT_EQ(scaler.scale(), 0x1p127);
  EXPECT_EQ(Good(scaler), ScaleChange::kNone);
  for (int i = 0; i < 400; ++i) Overflow(scaler);
  EXPECT_EQ(scaler.scale(), static_cast<double>(FLT_MIN));
  EXPECT_EQ(Overflow(scaler), ScaleChange::kNone);
}

TEST(LossScaler, ModesNoneAndStaticNeverMove) {
  LossScaleSpec spec;
  spec.initial = 128;
  for (const auto& [mode, scale] :
       {std::pair(LossScaleMode::kNone, 1.0), std::pair(LossScaleMode::kStatic, 128.0)}) {
    spec.mode = mode;
    LossScaler scaler(spec);
    for (int i = 0; i < 3; ++i) Overflow(scaler);
    for (int i = 0; i < 3000; ++i) Good(scaler);
    EXPECT_EQ(scaler.scale(), scale);
    EXPECT_TRUE(scaler.AtMinimum().ok());
    EXPECT_EQ(scaler.minimum(), 0);
  }
}

TEST(LossScaler, ExternalKeepsWhatItIsTold) {
  LossScaleSpec spec;
  spec.mode = LossScaleMode::kExternal;
  LossScaler scaler(spec);
  EXPECT_TRUE(scaler.CheckTold(3.5).ok());
  EXPECT_EQ(scaler.OnStep(false, SkipCause::kOverflow, 3.5), ScaleChange::kNone);
  EXPECT_EQ(scaler.scale(), 3.5);
  EXPECT_TRUE(scaler.CheckTold(7).ok());
}

TEST(LossScaler, ToldScaleMustBeTheRuns) {
  LossScaler scaler(Dynamic(LossScalePolicy::kTorch));
  EXPECT_TRUE(scaler.CheckTold(65536).ok());
  const absl::Status status = scaler.CheckTold(32768);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("65536"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("32768"));
}

TEST(LossScaler, ToldScaleMustBeFiniteAndPositiveInEveryMode) {
  for (const auto mode : {LossScaleMode::kNone, LossScaleMode::kStatic, LossScaleMode::kDynamic,
                          LossScaleMode::kExternal}) {
    LossScaleSpec spec;
    spec.mode = mode;
    for (const double told : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
      EXPECT_FALSE(LossScaler(spec).CheckTold(told).ok()) << told;
    }
  }
}

TEST(ValidateLossScale, DefaultsAreFine) {
  EXPECT_TRUE(ValidateLossScale({}).ok());
  for (const auto policy :
       {LossScalePolicy::kTorch, LossScalePolicy::kDeepSpeed, LossScalePolicy::kMegatron}) {
    EXPECT_TRUE(ValidateLossScale(Dynamic(policy)).ok());
  }
}

TEST(ValidateLossScale, NamesTheFieldAndTheValue) {
  const auto refuse = [](const char* field, auto change) {
    LossScaleSpec spec = Dynamic(LossScalePolicy::kTorch);
    change(spec);
    const absl::Status status = ValidateLossScale(spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
  };
  const double nan = std::nan("");
  refuse("\"initial\"", [](auto& s) { s.initial = -1; });
  refuse("\"initial\"", [&](auto& s) { s.initial = nan; });
  refuse("\"initial\"", [](auto& s) { s.initial = 1e39; });
  refuse("\"initial\"", [](auto& s) { s.minimum = s.initial + 1; });
  refuse("\"growth_factor\"", [](auto& s) { s.growth_factor = 1; });
  refuse("\"growth_factor\"", [&](auto& s) { s.growth_factor = nan; });
  refuse("\"backoff_factor\"", [](auto& s) { s.backoff_factor = 1; });
  refuse("\"backoff_factor\"", [](auto& s) { s.backoff_factor = -0.5; });
  refuse("\"window\"", [](auto& s) { s.window = -1; });
  refuse("\"hysteresis\"", [](auto& s) { s.hysteresis = -2; });
  refuse("\"minimum\"", [](auto& s) { s.minimum = -1; });
  refuse("\"error_after\"", [](auto& s) { s.error_after = -1; });
}

}  // namespace
}  // namespace muond

#include "server/engine/state_bounds.h"

#include <cfloat>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace muond {
namespace {

kernels::MomentumRule Rule(kernels::MomentumForm form, double beta, bool nesterov) {
  return {.form = form, .beta = beta, .nesterov = nesterov};
}

TEST(StateBounds, OrdinaryNumbersFit) {
  const StateMaxima now{.weight = 3, .momentum = 0.2, .exp_avg_sq = 1e-3};
  EXPECT_FALSE(
      MuonStateCouldOverflow(now, 65504, Rule(kernels::MomentumForm::kEma, .95, true), .999, .1));
  EXPECT_FALSE(AdamWStateCouldOverflow(now, 65504, {.lr = 1e-3}));
}

// Every element is finite and so is the fp32 gradient, but the square in v is not.
TEST(StateBounds, ASquareBeyondFp32IsSeen) {
  EXPECT_TRUE(AdamWStateCouldOverflow({}, 1e21, {}));
  EXPECT_FALSE(AdamWStateCouldOverflow({}, 1e20, {}));
}

TEST(StateBounds, Pytorch46849_GradientsOf2e19AreNoReasonToSkip) {
  EXPECT_FALSE(AdamWStateCouldOverflow({}, 2e19, {}));
  EXPECT_FALSE(
      MuonStateCouldOverflow({}, 2e19, Rule(kernels::MomentumForm::kEma, .95, true), 1, .1));
}

TEST(StateBounds, TheSumFormOverflowsWhereTheEmaFormDoesNot) {
  const StateMaxima now{.momentum = 2e38};
  EXPECT_TRUE(
      MuonStateCouldOverflow(now, 2e38, Rule(kernels::MomentumForm::kSum, .95, false), 1, .1));
  EXPECT_FALSE(MuonStateCouldOverflow({.momentum = 1e38}, 1e38,
                                      Rule(kernels::MomentumForm::kEma, .95, true), 1, .1));
}

// The largest of bf16 is below that of fp32, and rounding may go up.
TEST(StateBounds, AMomentumThatRoundsToInfinityIsSeen) {
  kernels::MomentumRule rule = Rule(kernels::MomentumForm::kSum, 0, false);
  EXPECT_FALSE(MuonStateCouldOverflow({}, 3.4e38, rule, 1, .1));
  rule.m_dtype = kernels::Dtype::kBF16;
  EXPECT_TRUE(MuonStateCouldOverflow({}, 3.4e38, rule, 1, .1));
  EXPECT_FALSE(MuonStateCouldOverflow({}, 3.38e38, rule, 1, .1));
  EXPECT_GE(MuonInputBound({}, 1 + 0x1p-8 + 0x1p-20, rule), 1 + 0x1p-7) << "what 1.0039 becomes";
}

TEST(StateBounds, AWeightThatLeavesFp32IsSeen) {
  const StateMaxima now{.weight = 3e38};
  EXPECT_TRUE(
      MuonStateCouldOverflow(now, 1, Rule(kernels::MomentumForm::kEma, .95, true), -1.2, .1));
  EXPECT_TRUE(MuonStateCouldOverflow({}, 1, Rule(kernels::MomentumForm::kEma, .95, true), 1, 4e38));
  EXPECT_TRUE(AdamWStateCouldOverflow(now, 1, {.lr = 1e-3, .decay = -1.2}));
}

// The claim that matters: what the bounds let pass, the kernels carry out without a non-finite
// number.
class BoundsAreSound : public ::testing::TestWithParam<bool> {};

TEST_P(BoundsAreSound, WhatPassesStaysFinite) {
  const auto backend =
      GetParam() ? kernels::MakeCpuBackend({.threads = 1}) : kernels::MakeReferenceBackend();
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> exponent(0, 38.53), sign(-1, 1), unit(0, 0.999);
  int passed = 0, refused = 0;
  for (int round = 0; round < 4000; ++round) {
    auto draw = [&] {
      const double value = std::copysign(std::pow(10, exponent(random)), sign(random));
      return static_cast<float>(std::clamp(value, -double{FLT_MAX}, double{FLT_MAX}));
    };
    float g = draw(), w = draw(), m = draw(), v = std::abs(draw()), u = 0;
    const kernels::GradientView gradient{.data = &g, .elements = 1};
    const StateMaxima now{std::abs(w), std::abs(m), v};
    const auto rule = Rule(round % 2 ? kernels::MomentumForm::kSum : kernels::MomentumForm::kEma,
                           unit(random), round % 4 < 2);
    if (!MuonStateCouldOverflow(now, std::abs(g), rule, 1, 0)) {
      ++passed;
      float muon_m = m;
      const kernels::MomentumJob job{.gradient = gradient, .rule = rule, .m = &muon_m, .u = &u};
      kernels::StateScan scan;
      ASSERT_FALSE(backend->Momentum({&job, 1}, {&scan, 1}));
      ASSERT_LE(std::abs(u), MuonInputBound(now, std::abs(g), rule) * (1 + 1e-6));
      ASSERT_TRUE(std::isfinite(muon_m) && std::isfinite(u)) << "g " << g << " m " << m;
    } else {
      ++refused;
    }
    const kernels::AdamWRule adamw{
        .lr = unit(random), .beta1 = unit(random), .beta2 = unit(random), .t = 1 + round % 9};
    if (!AdamWStateCouldOverflow(now, std::abs(g), adamw)) {
      ++passed;
      const kernels::AdamWJob job{.gradient = gradient, .rule = adamw, .state = {&w, &m, &v}};
      kernels::AdamWScan scan;
      ASSERT_FALSE(backend->AdamW({&job, 1}, {&scan, 1}));
      ASSERT_TRUE(std::isfinite(w) && std::isfinite(m) && std::isfinite(v)) << "g " << g;
    } else {
      ++refused;
    }
  }
  EXPECT_GT(passed, 500);
  EXPECT_GT(refused, 500);
}

INSTANTIATE_TEST_SUITE_P(Backends, BoundsAreSound, ::testing::Bool());

}  // namespace
}  // namespace muond

// What the cpu backend decides by itself.
#include <gtest/gtest.h>

#include "kernels/cpu/newton_schulz.h"
#include "tests/conformance/kernels_driver.h"

namespace muond::kernels {
namespace {

using enum NewtonSchulzMethod;

cpu::Plan PlanOf(Products products, const char* set, NewtonSchulzMethod method, std::int64_t m,
                 std::int64_t n) {
  return cpu::ChoosePlan(testing::RuleOf(set, method), m, n, products);
}

TEST(ChoosePlan, TakesGramWhereItPaysAndIsSafe) {
  const auto gram = [](const char* set, NewtonSchulzMethod method, std::int64_t m, std::int64_t n) {
    const cpu::Plan plan = PlanOf(Products::kF32, set, method, m, n);
    EXPECT_FALSE(plan.bf16);
    EXPECT_EQ(plan, PlanOf(Products::kOpenBlas, set, method, m, n));
    return plan.gram;
  };
  EXPECT_TRUE(gram("simple", kAuto, 768, 3072));
  EXPECT_FALSE(gram("simple", kAuto, 768, 768));
  EXPECT_FALSE(gram("simple", kAuto, 12, 40));
  EXPECT_FALSE(gram("simple", kStandard, 768, 3072));
  EXPECT_TRUE(gram("simple", kGram, 2, 3));
  EXPECT_FALSE(gram("simple", kGram, 3, 3));
  EXPECT_FALSE(gram("polar_express_101", kGram, 768, 3072));
  EXPECT_FALSE(gram("deepseek_v4", kAuto, 768, 3072));
}

TEST(ChoosePlan, TakesBF16WhereTheMatrixIsLargeEnough) {
  const cpu::Plan fp32, bf16{.bf16 = true}, paired{.bf16 = true, .gram = true};
  EXPECT_EQ(PlanOf(Products::kAuto, "simple", kAuto, 255, 255), fp32);
  EXPECT_EQ(PlanOf(Products::kAuto, "simple", kAuto, 256, 256), bf16);
  EXPECT_EQ(PlanOf(Products::kAuto, "simple", kAuto, 768, 3072), paired);
  EXPECT_EQ(PlanOf(Products::kAuto, "simple", kStandard, 768, 3072), bf16);
  EXPECT_EQ(PlanOf(Products::kAuto, "deepseek_v4", kAuto, 768, 3072), bf16);
  EXPECT_EQ(PlanOf(Products::kBF16, "simple", kAuto, 256, 320), paired);
  EXPECT_EQ(PlanOf(Products::kBF16, "simple", kAuto, 255, 320), fp32);
  EXPECT_EQ(cpu::ChoosePlan({}, 768, 3072, Products::kBF16), fp32) << "no step, no product";
}

}  // namespace
}  // namespace muond::kernels

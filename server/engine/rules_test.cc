#include "server/engine/rules.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond {
namespace {

using ::testing::HasSubstr;

GroupSpec Group(const std::string& coefficients, std::int64_t steps) {
  GroupSpec group{.name = "hidden"};
  group.coefficients = coefficients;
  group.ns_steps = steps;
  return group;
}

std::string ErrorOf(const GroupSpec& group) {
  const auto rule = NewtonSchulzRuleOf(group);
  EXPECT_EQ(rule.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(rule.status().message());
}

TEST(NewtonSchulzRule, DefaultIsFiveSimpleSteps) {
  const auto rule = NewtonSchulzRuleOf(Group("simple", 0));
  ASSERT_TRUE(rule.ok());
  ASSERT_EQ(rule->steps.size(), 5u);
  EXPECT_EQ(rule->steps[4].a, 3.4445);
  EXPECT_EQ(rule->norm_floor, 0);
}

TEST(NewtonSchulzRule, EmergingOptimizersCycleRule_OtherLengthsAreRefused) {
  EXPECT_EQ(
      ErrorOf(Group("quintic_yj", 6)),
      "group \"hidden\": ns_steps: coefficient set \"quintic_yj\" is a schedule of 5 steps, got 6");
  EXPECT_THAT(ErrorOf(Group("cubic5", 4)), HasSubstr("schedule of 5 steps, got 4"));
  EXPECT_TRUE(NewtonSchulzRuleOf(Group("deepseek_v4", 10)).ok());
  EXPECT_TRUE(NewtonSchulzRuleOf(Group("quintic_yj", 5)).ok());
}

TEST(NewtonSchulzRule, AnUnknownSetIsRefusedWithTheKnownOnes) {
  EXPECT_THAT(
      ErrorOf(Group("polar_express", 0)),
      ::testing::AllOf(HasSubstr("polar_express_dion"), HasSubstr("got \"polar_express\"")));
}

TEST(NewtonSchulzRule, CustomStepsComeInThreesAndAreFinite) {
  GroupSpec group = Group("custom", 0);
  EXPECT_THAT(ErrorOf(group), HasSubstr("got 0 numbers"));
  group.custom_steps = {3, -3, 1, 2};
  EXPECT_THAT(ErrorOf(group), HasSubstr("got 4 numbers"));
  group.custom_steps = {3, -3, std::numeric_limits<double>::infinity()};
  EXPECT_THAT(ErrorOf(group), HasSubstr("step 0 is not finite"));
  group.custom_steps = {2, -1.5, 0.5, 2, -1.5, 0.5};
  const auto rule = NewtonSchulzRuleOf(group);
  ASSERT_TRUE(rule.ok());
  EXPECT_EQ(rule->steps.size(), 2u);
  EXPECT_EQ(rule->method, kernels::NewtonSchulzMethod::kStandard);
}

TEST(NewtonSchulzRule, CustomStepsThatOrthogonalizeNothingAreRefused) {
  GroupSpec group = Group("custom", 0);
  for (const std::vector<double>& steps : {std::vector<double>{5, 0, 0},
                                           {1e30, 0, 0},
                                           {1, 1e20, 1e20},
                                           {8, -22, 15, 8, -22, 15, 3, 3, 3}}) {
    group.custom_steps = steps;
    EXPECT_THAT(ErrorOf(group), HasSubstr("custom_steps: carry the singular value"));
  }
  group.custom_steps = {3, 0, 0};  // a gain of three: what is plausible follows from the list
  ASSERT_TRUE(NewtonSchulzRuleOf(group).ok());
  EXPECT_GE(NewtonSchulzRuleOf(group)->residual_max, 8);
}

TEST(NewtonSchulzRule, UnsafeSetsNeverTakeTheGramForm) {
  GroupSpec group = Group("polar_express_101", 0);
  ASSERT_TRUE(NewtonSchulzRuleOf(group).ok());
  EXPECT_EQ(NewtonSchulzRuleOf(group)->method, kernels::NewtonSchulzMethod::kStandard);
  group.ns_method = "gram";
  EXPECT_THAT(ErrorOf(group), HasSubstr("stable in Gram form"));
  group.ns_method = "fast";
  EXPECT_THAT(ErrorOf(group), HasSubstr("got \"fast\""));
}

TEST(NewtonSchulzRule, FloorsAndFactorsMustBeNumbers) {
  GroupSpec group = Group("simple", 0);
  group.norm_floor = -1e-7;
  EXPECT_THAT(ErrorOf(group), HasSubstr("norm_floor"));
  group.norm_floor = 0;
  group.extra_factor = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(ErrorOf(group), HasSubstr("extra_factor"));
}

TEST(DecayFactor, IsDecoupledUnlessAskedOtherwise) {
  GroupSpec group;
  const Hyperparameters now{.lr = 0.1, .weight_decay = 0.5};
  EXPECT_DOUBLE_EQ(DecayFactor(group, now), 0.95);
  group.weight_decay_form = WeightDecayForm::kIndependent;
  EXPECT_DOUBLE_EQ(DecayFactor(group, now), 0.5);
}

}  // namespace
}  // namespace muond

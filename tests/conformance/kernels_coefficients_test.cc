// The named coefficient sets: their numbers, and that their limits follow from them.
#include "kernels/coefficients.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace muond::kernels {
namespace {

TEST(Coefficients, EverySetOfTheSpecificationIsThere) {
  const std::pair<const char*, std::size_t> expected[] = {{"simple", 5},
                                                          {"quintic_yj", 5},
                                                          {"polar_express_105", 5},
                                                          {"polar_express_dion", 5},
                                                          {"polar_express_101", 5},
                                                          {"polar_express_101_8", 8},
                                                          {"polar_express_dion4", 4},
                                                          {"polar_express_dion3", 3},
                                                          {"cubic5", 5},
                                                          {"deepseek_v4", 10}};
  ASSERT_EQ(CoefficientSets().size(), std::size(expected));
  for (const auto& [name, steps] : expected) {
    const CoefficientSet* set = FindCoefficientSet(name);
    ASSERT_NE(set, nullptr) << name;
    EXPECT_EQ(set->name, name);
    EXPECT_EQ(set->steps.size(), steps) << name;
    EXPECT_FALSE(set->source.empty()) << name;
  }
  EXPECT_EQ(FindCoefficientSet("polar_express"), nullptr) << "the name must say which one";
  EXPECT_EQ(FindCoefficientSet(""), nullptr);
}

TEST(Coefficients, ValueAtOneAfterAllSteps) {
  const std::tuple<const char*, double, double> expected[] = {{"simple", 0.69644, 5e-6},
                                                              {"quintic_yj", 0.97835, 5e-6},
                                                              {"polar_express_dion", 0.85913, 5e-6},
                                                              {"polar_express_105", 1.01904, 5e-6},
                                                              {"polar_express_101", 1.0273, 5e-5},
                                                              {"cubic5", 0.77411, 5e-6},
                                                              {"polar_express_101_8", 1, 1e-5},
                                                              {"deepseek_v4", 1, 1e-4}};
  for (const auto& [name, value, tolerance] : expected) {
    EXPECT_NEAR(EvaluateSteps(FindCoefficientSet(name)->steps, 1), value, tolerance) << name;
  }
}

TEST(Coefficients, OutputRangesOfTheSpecification) {
  const std::tuple<const char*, double, double> expected[] = {{"polar_express_105", 0.846, 1.124},
                                                              {"polar_express_dion", 0.859, 1.141},
                                                              {"cubic5", 0.774, 1.30}};
  for (const auto& [name, low, high] : expected) {
    double smallest = 10, largest = 0;
    for (int i = 1000; i <= 100000; ++i) {
      const double value = EvaluateSteps(FindCoefficientSet(name)->steps, i * 1e-5);
      smallest = std::min(smallest, value);
      largest = std::max(largest, value);
    }
    EXPECT_NEAR(smallest, low, 1e-3) << name;
    EXPECT_NEAR(largest, high, 1e-3) << name;
  }
}

// The two short sets of polar_express_dion are its steps, not numbers of their own.
TEST(Coefficients, ShortDionSetsLeaveStepsOut) {
  const auto& full = FindCoefficientSet("polar_express_dion")->steps;
  const auto& four = FindCoefficientSet("polar_express_dion4")->steps;
  const auto& three = FindCoefficientSet("polar_express_dion3")->steps;
  for (const auto& [step, place] : {std::pair{four[0], 0},
                                    {four[1], 1},
                                    {four[2], 2},
                                    {four[3], 4},
                                    {three[0], 0},
                                    {three[1], 2},
                                    {three[2], 4}}) {
    EXPECT_EQ(step.a, full[static_cast<std::size_t>(place)].a);
    EXPECT_EQ(step.b, full[static_cast<std::size_t>(place)].b);
    EXPECT_EQ(step.c, full[static_cast<std::size_t>(place)].c);
  }
}

TEST(Coefficients, NoSpectrumReachesResidualMax) {
  for (const CoefficientSet& set : CoefficientSets()) {
    double worst = 0;
    for (int i = 0; i <= 1000000; ++i) {
      const double value = EvaluateSteps(set.steps, i * 1e-6);
      worst = std::max(worst, std::fabs(value * value - 1));
    }
    EXPECT_LE(1.04 * worst, set.residual_max) << set.name;
    EXPECT_GE(1.10 * worst, set.residual_max) << set.name << ": a limit that catches nothing";
    EXPECT_LE(set.low_rank_residual, set.residual_max) << set.name;
    EXPECT_GE(set.low_rank_residual, 0.5) << set.name << ": a quarter missing gives 0.5 at least";
  }
}

TEST(Coefficients, GramSafetyBelongsToTheExactList) {
  for (const CoefficientSet& set : CoefficientSets()) {
    EXPECT_EQ(IsGramSafe(set.steps), set.gram_safe) << set.name;
  }
  EXPECT_TRUE(FindCoefficientSet("polar_express_105")->gram_safe);
  EXPECT_FALSE(FindCoefficientSet("polar_express_101")->gram_safe);
  EXPECT_FALSE(FindCoefficientSet("polar_express_101_8")->gram_safe);
  auto custom = FindCoefficientSet("simple")->steps;
  custom[4].a += 1e-9;
  EXPECT_FALSE(IsGramSafe(custom));
  EXPECT_FALSE(IsGramSafe({}));
}

TEST(Coefficients, PlausibleNormRefusesWhatIsNotANumber) {
  EXPECT_TRUE(IsPlausibleNorm(8, 4, 1.05));
  EXPECT_FALSE(IsPlausibleNorm(8.3, 4, 1.05));
  EXPECT_FALSE(IsPlausibleNorm(std::nan(""), 4, 1.05));
  EXPECT_FALSE(IsPlausibleNorm(std::numeric_limits<double>::infinity(), 4, 1.05));
}

}  // namespace
}  // namespace muond::kernels

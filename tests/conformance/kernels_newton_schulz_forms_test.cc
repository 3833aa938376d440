// Every coefficient set in every form, against fp64: the Gram form is the standard form.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/coefficients.h"
#include "tests/conformance/kernels_driver.h"

namespace muond::kernels {
namespace {

using testing::BackendCases;
using testing::BackendTest;
using testing::CaseName;
using testing::Gaussian;
using testing::IterateBuffer;
using testing::LowRank;
using testing::Orthogonalize;
using testing::Orthogonalized;

NewtonSchulzRule RuleOf(const CoefficientSet& set, NewtonSchulzMethod method) {
  return testing::RuleOf(std::string(set.name).c_str(), method);
}

class NewtonSchulzForms : public BackendTest {
 protected:
  // |O - O_fp64| / |O_fp64|.
  double ErrorOf(const std::vector<float>& u, std::int64_t rows, std::int64_t cols,
                 const NewtonSchulzRule& rule) {
    const Orthogonalized expected = Orthogonalize(*reference_, u, rows, cols, rule);
    const Orthogonalized found = Orthogonalize(*backend_, u, rows, cols, rule);
    EXPECT_FALSE(expected.result.failed);
    EXPECT_FALSE(found.result.fallback || found.result.failed);
    return testing::Distance(found.o, expected.o) / testing::Norm(expected.o);
  }

  // What may be wrong in all when U has `rank` of `low` directions. In 16 bits U has noise in the
  // others, some 4.5e-5 of |U| in each of them, which grows by the slope of p at 0: 2e-2 of a
  // direction for `simple`. O's shortest directions have length .68.
  double InNullDirections(double allowed, double slope, int low, int rank) const {
    if (GetParam().floor == 0) return allowed;
    const double each = std::max(allowed, 4.5e-5 * slope);
    return each * std::sqrt(static_cast<double>(low - rank) / rank) / 0.68;
  }

  std::unique_ptr<Backend> reference_ = MakeReferenceBackend();
};
MUOND_FOR_EVERY_BACKEND(NewtonSchulzForms);

constexpr std::pair<std::int64_t, std::int64_t> kShapes[] = {{64, 64},  {64, 96}, {96, 64},
                                                             {20, 300}, {1, 40},  {4, 8}};

TEST_P(NewtonSchulzForms, StandardFormOfEverySetAgreesWithFp64) {
  for (const CoefficientSet& set : CoefficientSets()) {
    const NewtonSchulzRule rule = RuleOf(set, NewtonSchulzMethod::kStandard);
    for (const auto& [rows, cols] : kShapes) {
      const auto u = Gaussian(static_cast<std::size_t>(rows * cols), 21);
      EXPECT_LE(ErrorOf(u, rows, cols, rule), Within(2e-5))
          << set.name << " " << rows << "x" << cols;
    }
  }
}

TEST_P(NewtonSchulzForms, GramEqualsStandardForEverySafeSet) {
  for (const CoefficientSet& set : CoefficientSets()) {
    if (!set.gram_safe) continue;
    const NewtonSchulzRule rule = RuleOf(set, NewtonSchulzMethod::kGram);
    for (const auto& [rows, cols] : kShapes) {
      for (unsigned seed = 0; seed < 5; ++seed) {
        const auto u = Gaussian(static_cast<std::size_t>(rows * cols), seed);
        EXPECT_LE(ErrorOf(u, rows, cols, rule), Within(3e-4))
            << set.name << " " << rows << "x" << cols;
      }
    }
  }
}

// Larger than one output tile of either product, in both directions.
TEST_P(NewtonSchulzForms, MatricesOfSeveralTilesAgreeWithFp64) {
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{260, 530}, {560, 300}}) {
    const auto u = Gaussian(static_cast<std::size_t>(rows * cols), 71);
    EXPECT_LE(ErrorOf(u, rows, cols, testing::RuleOf("simple", NewtonSchulzMethod::kStandard)),
              Within(2e-5));
    EXPECT_LE(ErrorOf(u, rows, cols, testing::RuleOf("simple", NewtonSchulzMethod::kGram)),
              Within(3e-4));
  }
  NewtonSchulzRule short_rule = testing::RuleOf("simple");
  short_rule.steps.resize(1);  // one step shows a wrong tile, and fp64 loops are slow
  EXPECT_LE(ErrorOf(Gaussian(520 * 521, 72), 520, 521, short_rule), Within(2e-5));
}

TEST_P(NewtonSchulzForms, RankDeficientInputsInEveryForm) {
  for (const CoefficientSet& set : CoefficientSets()) {
    for (const auto method : {NewtonSchulzMethod::kStandard, NewtonSchulzMethod::kGram}) {
      const NewtonSchulzRule rule = RuleOf(set, method);
      // fp32 rounding in the null directions grows by the slope of p at 0: 485 for `simple`, 79000
      // for `deepseek_v4`.
      const double slope = EvaluateSteps(set.steps, 1e-12) / 1e-12;
      // A 16-bit U has noise in its null directions before anything is multiplied: a steep set
      // makes directions of it.
      if (GetParam().floor > 0 && slope > 1000) continue;
      const double allowed = Within(std::max(1e-3, 1.2e-7 * slope));
      EXPECT_LE(ErrorOf(LowRank(32, 80, 5, 31), 32, 80, rule),
                InNullDirections(allowed, slope, 32, 5))
          << set.name;
      EXPECT_LE(ErrorOf(LowRank(80, 32, 1, 32), 80, 32, rule),
                InNullDirections(allowed, slope, 32, 1))
          << set.name;
    }
  }
}

TEST_P(NewtonSchulzForms, DaoAiLabGram_B082_RankOneRowsKeepTheirRatio) {
  for (const auto method : {NewtonSchulzMethod::kStandard, NewtonSchulzMethod::kGram}) {
    const std::vector<float> o =
        Orthogonalize(*backend_, {1, 2, 3, 2, 4, 6}, 2, 3, testing::RuleOf("simple", method)).o;
    const double expected[] = {.08324, .16648, .24972, .16648, .33296, .49944};
    for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(o[i], expected[i], Within(2e-4)) << i;
  }
}

TEST_P(NewtonSchulzForms, DeepSpeed7939_ExpertsThroughTheGramForm) {
  const std::vector<float> u = Gaussian(30, 41);
  const IterateBuffer input(*backend_, u), standard(*backend_, 30), gram(*backend_, 30);
  for (const auto& [method, output] : {std::pair{NewtonSchulzMethod::kStandard, &standard},
                                       std::pair{NewtonSchulzMethod::kGram, &gram}}) {
    std::vector<MatrixJob> jobs;
    for (std::size_t expert = 0; expert < 2; ++expert) {
      jobs.push_back({.u = input.get(15 * expert),
                      .o = output->get(15 * expert),
                      .rows = 3,
                      .cols = 5,
                      .u_scale = input.scale()});
    }
    NewtonSchulzResult results[2];
    testing::Check(
        backend_->NewtonSchulz(jobs, testing::RuleOf("polar_express_105", method), results));
  }
  EXPECT_LE(testing::Distance(gram.Read(), standard.Read()), Within(1e-4) * std::sqrt(6));
}

// Not merely close: an unsafe set asked for in Gram form runs the standard form itself.
TEST_P(NewtonSchulzForms, UnsafeSetsAndSquareMatricesRunTheStandardForm) {
  const std::vector<float> u = Gaussian(40 * 90, 51);
  for (const CoefficientSet& set : CoefficientSets()) {
    const std::vector<float> standard =
        Orthogonalize(*backend_, u, 40, 90, RuleOf(set, NewtonSchulzMethod::kStandard)).o;
    const std::vector<float> gram =
        Orthogonalize(*backend_, u, 40, 90, RuleOf(set, NewtonSchulzMethod::kGram)).o;
    if (!set.gram_safe) {
      EXPECT_TRUE(testing::SameBits(standard, gram)) << set.name;
    }
    if (set.gram_safe && GetParam().name == std::string_view("cpu")) {
      EXPECT_FALSE(testing::SameBits(standard, gram)) << set.name << ": the Gram form never ran";
    }
  }
  const std::vector<float> square = Gaussian(40 * 40, 52);
  EXPECT_TRUE(testing::SameBits(
      Orthogonalize(*backend_, square, 40, 40, testing::RuleOf("simple", NewtonSchulzMethod::kGram))
          .o,
      Orthogonalize(*backend_, square, 40, 40,
                    testing::RuleOf("simple", NewtonSchulzMethod::kStandard))
          .o));
}

TEST_P(NewtonSchulzForms, CustomListsOfAnyLength) {
  NewtonSchulzRule rule = testing::RuleOf("simple");
  const std::vector<float> u = Gaussian(10 * 30, 61);
  rule.steps.clear();
  rule.residual_max = 1e9;
  for (int steps = 1; steps <= 7; ++steps) {
    rule.steps.push_back({1.5 + 0.1 * steps, -0.5, 0});
    for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{10, 30}, {30, 10}}) {
      EXPECT_LE(ErrorOf(u, rows, cols, rule), Within(2e-5)) << steps;
    }
  }
}

}  // namespace
}  // namespace muond::kernels

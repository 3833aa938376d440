// Newton-Schulz on every backend: the golden numbers, shapes, scales and degenerate inputs.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/conformance/kernels_driver.h"

namespace muond::kernels {
namespace {

using testing::BackendCases;
using testing::BackendTest;
using testing::CaseName;
using testing::Check;
using testing::Gaussian;
using testing::IterateBuffer;
using testing::Orthogonalize;
using testing::Orthogonalized;
using testing::RuleOf;
using testing::SimpleRule;
using testing::Transposed;

class NewtonSchulz : public BackendTest {
 protected:
  void ExpectO(const std::vector<float>& u, std::int64_t rows, std::int64_t cols,
               const std::vector<double>& expected, double tolerance) {
    const Orthogonalized found = Orthogonalize(*backend_, u, rows, cols);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(found.o[i], expected[i], Within(tolerance)) << "element " << i;
    }
    EXPECT_NEAR(found.result.output_norm, testing::Norm(found.o), Within(1e-6));
    EXPECT_FALSE(found.result.zero_input || found.result.fallback || found.result.failed);
  }
  // Null directions are as good as fp32's rounding times the slope of p at 0, 485.
  double null_tolerance() const { return Within(tolerance() < 1e-6 ? 1e-6 : 1e-3); }
};
MUOND_FOR_EVERY_BACKEND(NewtonSchulz);

TEST_P(NewtonSchulz, GoldenNumbers) {
  ExpectO({1, 0, 0, 1}, 2, 2, {1.1081112, 0, 0, 1.1081112}, 1e-6);
  ExpectO({3, 0, 0, 4}, 2, 2, {0.7228761, 0, 0, 1.1192039}, 1e-6);
  ExpectO({1, 2, 3, 4, 5, 6}, 2, 3, {-.5682901, .0577419, .6837740, .5633547, .4056128, .2478710},
          20 * tolerance());
}

TEST_P(NewtonSchulz, TransposeGivesExactlyTheTranspose) {
  const std::tuple<std::int64_t, std::int64_t> shapes[] = {{2, 3}, {1, 9}, {40, 129}, {127, 128}};
  for (const auto& [rows, cols] : shapes) {
    const std::vector<float> u = Gaussian(static_cast<std::size_t>(rows * cols), 5);
    const std::vector<float> wide = Orthogonalize(*backend_, u, rows, cols).o;
    const std::vector<float> tall =
        Orthogonalize(*backend_, Transposed(u, rows, cols), cols, rows).o;
    EXPECT_TRUE(testing::SameBits(tall, Transposed(wide, rows, cols))) << rows << " x " << cols;
  }
}

TEST_P(NewtonSchulz, EmergingOptimizersTp_WholeMatrixNotItsHalves) {
  const std::vector<float> o = Orthogonalize(*backend_, {3, 0, 0, 4, 1, 0, 0, 1}, 4, 2).o;
  const double expected[] = {.7189925, 1.0745257, .2396642, .2686314};
  for (std::size_t row = 0; row < 4; ++row) {
    EXPECT_NEAR(std::hypot(o[2 * row], o[2 * row + 1]), expected[row], Within(2e-6)) << row;
  }
}

TEST_P(NewtonSchulz, DeepSpeed8533_LargeFiniteGradientIsNotZeroed) {
  ExpectO({70000, 0, 0, 70000}, 2, 2, {1.1081112, 0, 0, 1.1081112}, 1e-6);
  ExpectO({3e38f, 0, 0, 3e38f}, 2, 2, {1.1081112, 0, 0, 1.1081112}, 1e-6);
}

TEST_P(NewtonSchulz, EmergingOptimizers229_TinyNormIsScaleFree) {
  ExpectO({1e-10f, 0, 0, 1e-10f}, 2, 2, {1.1081112, 0, 0, 1.1081112}, 1e-6);
  ExpectO({1e-38f, 0, 0, 1e-38f}, 2, 2, {1.1081112, 0, 0, 1.1081112}, 1e-6);
  const float smallest = std::numeric_limits<float>::denorm_min();
  ExpectO({smallest, 0, 0, smallest}, 2, 2, {1.1081112, 0, 0, 1.1081112}, 1e-6);
}

TEST_P(NewtonSchulz, NormFloorIsTorchsClamp) {
  NewtonSchulzRule rule = SimpleRule();
  rule.norm_floor = 1e-7;
  const Orthogonalized clamped = Orthogonalize(*backend_, {1e-10f, 0, 0, 1e-10f}, 2, 2, rule);
  EXPECT_NEAR(clamped.o[0], 0.470544, Within(2e-6));
  // Above the floor it changes no bit.
  const std::vector<float> u = Gaussian(12, 3);
  EXPECT_TRUE(testing::SameBits(Orthogonalize(*backend_, u, 3, 4, rule).o,
                                Orthogonalize(*backend_, u, 3, 4).o));
}

// Far below the floor the iterate is tiny whatever the magnitude of U: 16 bits must not lose it.
TEST_P(NewtonSchulz, NormFloorsFarAboveTheNormLoseNothing) {
  const std::unique_ptr<Backend> reference = MakeReferenceBackend();
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{40, 40}, {24, 300}}) {
    const std::vector<float> u = Gaussian(static_cast<std::size_t>(rows * cols), 8);
    for (const char* set : {"simple", "polar_express_105", "deepseek_v4"}) {
      for (const double magnitude : {1e-38, 1e-30, 1e-10, 1.0, 1e37}) {
        std::vector<float> scaled = u;
        for (float& value : scaled) value = static_cast<float>(value * magnitude);
        for (const double ratio : {1.5, 1e2, 1e4, 1e7, 1e12}) {
          NewtonSchulzRule rule = RuleOf(set);
          rule.norm_floor = testing::Norm(scaled) * ratio;
          const auto expected = Orthogonalize(*reference, scaled, rows, cols, rule);
          const auto found = Orthogonalize(*backend_, scaled, rows, cols, rule);
          EXPECT_LE(testing::Distance(found.o, expected.o),
                    Within(2e-5) * testing::Norm(expected.o))
              << set << ", " << rows << " x " << cols << " of " << magnitude << ", floor " << ratio
              << " times the norm";
          EXPECT_FALSE(found.result.fallback || found.result.failed);
          EXPECT_NEAR(found.result.output_norm / expected.result.output_norm, 1, 1e-2);
        }
      }
    }
  }
  // One element has all of the norm and grows beyond fp16.
  NewtonSchulzRule rule = RuleOf("deepseek_v4");
  rule.norm_floor = 1;
  std::vector<float> lone(16 * 40);
  lone[7] = 1e-9f;
  const auto found = Orthogonalize(*backend_, lone, 16, 40, rule);
  const auto expected = Orthogonalize(*reference, lone, 16, 40, rule);
  EXPECT_FALSE(found.result.fallback);
  EXPECT_NEAR(found.o[7] / expected.o[7], 1, Within(2e-5));
}

// Small integers, so that even subnormal multiples are the same matrix exactly.
TEST_P(NewtonSchulz, PowersOfTwoChangeNoBit) {
  std::vector<float> u;
  for (int i = 0; i < 15; ++i) u.push_back(static_cast<float>((i * 7) % 15 - 7));
  const std::vector<float> expected = Orthogonalize(*backend_, u, 3, 5).o;
  for (const int exponent : {-149, -140, -126, -64, -1, 1, 64, 125}) {
    std::vector<float> scaled = u;
    for (float& value : scaled) value = std::ldexp(value, exponent);
    EXPECT_TRUE(testing::SameBits(Orthogonalize(*backend_, scaled, 3, 5).o, expected))
        << "2^" << exponent;
  }
}

TEST_P(NewtonSchulz, EveryScaleFrom1e38DownTo1e38ths) {
  const std::vector<float> u = Gaussian(24 * 17, 6);
  const std::vector<float> expected = Orthogonalize(*backend_, u, 24, 17).o;
  for (int exponent = -36; exponent <= 37; ++exponent) {
    std::vector<float> scaled = u;
    for (float& value : scaled) value = static_cast<float>(value * std::pow(10.0, exponent));
    const std::vector<float> o = Orthogonalize(*backend_, scaled, 24, 17).o;
    EXPECT_LE(testing::Distance(o, expected), Within(2e-5) * testing::Norm(expected))
        << "1e" << exponent;
  }
}

TEST_P(NewtonSchulz, ZeroGivesZero) {
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{2, 2}, {3, 1}, {7, 130}}) {
    NewtonSchulzRule rule = SimpleRule();
    for (const double floor : {0.0, 1e-7}) {
      rule.norm_floor = floor;
      const auto count = static_cast<std::size_t>(rows * cols);
      const Orthogonalized found =
          Orthogonalize(*backend_, std::vector<float>(count), rows, cols, rule);
      EXPECT_EQ(found.o, std::vector<float>(count));
      EXPECT_TRUE(found.result.zero_input);
      EXPECT_FALSE(found.result.fallback || found.result.failed);
      EXPECT_EQ(found.result.output_norm, 0);
    }
  }
}

TEST_P(NewtonSchulz, B084_NullDirectionsStayNull) {
  ExpectO({1, 2, 2, 4}, 2, 2, {.1392873, .2785746, .2785746, .5571491}, null_tolerance());
  const std::vector<float> o = Orthogonalize(*backend_, {1, 2, 2, 4}, 2, 2).o;
  EXPECT_NEAR(2 * o[0] - o[2], 0, null_tolerance());
  EXPECT_NEAR(2 * o[1] - o[3], 0, null_tolerance());
  // All rows equal, a single row, a single column, one negative element: p(1) times the direction.
  const double p1 = 0.696437;
  ExpectO({1, 1, 1, 1, 1, 1}, 2, 3, std::vector<double>(6, p1 / std::sqrt(6.0)), null_tolerance());
  ExpectO({3, -4}, 1, 2, {.6 * p1, -.8 * p1}, 1e-6);
  ExpectO({3, -4}, 2, 1, {.6 * p1, -.8 * p1}, 1e-6);
  ExpectO({-5}, 1, 1, {-p1}, 1e-6);
}

TEST_P(NewtonSchulz, IllConditionedInputKeepsItsSmallValues) {
  ExpectO({1, 0, 0, 1e-4f}, 2, 2, {0.6964366, 0, 0, 0.0485}, 5e-5);
  ExpectO({1, 0, 0, 0, 1e-3f, 0}, 2, 3, {0.6964366, 0, 0, 0, 0.4705, 0}, 5e-5);
}

TEST_P(NewtonSchulz, Torchtitan1584_ExpertsAreMatricesOfTheirOwn) {
  const IterateBuffer u(*backend_, {3, 0, 0, 4, 1, 0, 0, 1}), o(*backend_, 8);
  const MatrixJob jobs[] = {
      {.u = u.get(), .o = o.get(), .rows = 2, .cols = 2, .u_scale = u.scale()},
      {.u = u.get(4), .o = o.get(4), .rows = 2, .cols = 2, .u_scale = u.scale()}};
  NewtonSchulzResult results[2];
  Check(backend_->NewtonSchulz(jobs, SimpleRule(), results));
  const std::vector<float> found = o.Read();
  EXPECT_NEAR(found[0], 0.7228761, Within(1e-6));
  EXPECT_NEAR(found[3], 1.1192039, Within(1e-6));
  EXPECT_NEAR(found[4], 1.1081112, Within(1e-6));
  EXPECT_NEAR(found[7], 1.1081112, Within(1e-6));
}

TEST_P(NewtonSchulz, EmptyMatrixInTheMiddleOfABatch) {
  const IterateBuffer u(*backend_, {3, 0, 0, 4}), o(*backend_, 8);
  const MatrixJob jobs[] = {
      {.u = u.get(), .o = o.get(), .rows = 2, .cols = 2, .u_scale = u.scale()},
      {.u = nullptr, .o = nullptr, .rows = 0, .cols = 7},
      {.u = u.get(), .o = o.get(4), .rows = 2, .cols = 2, .u_scale = u.scale()}};
  NewtonSchulzResult results[3];
  Check(backend_->NewtonSchulz(jobs, SimpleRule(), results));
  EXPECT_TRUE(results[1].zero_input);
  EXPECT_NEAR(o.Read()[3], 1.1192039, Within(1e-6));
  EXPECT_NEAR(o.Read()[7], 1.1192039, Within(1e-6));
  Check(backend_->NewtonSchulz({}, SimpleRule(), {}));
}

// A U that is not finite is no verdict here but a broken promise: loudly failed.
TEST_P(NewtonSchulz, NonFiniteInputIsReportedAsFailed) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const Orthogonalized found = Orthogonalize(*backend_, {1, 2, bad, 4, 5, 6}, 2, 3);
    EXPECT_TRUE(found.result.failed);
  }
}

TEST_P(NewtonSchulz, AwkwardShapesAgreeWithTheReference) {
  const std::unique_ptr<Backend> reference = MakeReferenceBackend();
  const std::int64_t sides[] = {1, 3, 127, 128, 129};
  for (const std::int64_t rows : sides) {
    for (const std::int64_t cols : sides) {
      const std::vector<float> u = Gaussian(static_cast<std::size_t>(rows * cols), 11);
      const Orthogonalized expected = Orthogonalize(*reference, u, rows, cols);
      const Orthogonalized found = Orthogonalize(*backend_, u, rows, cols);
      EXPECT_LE(testing::Distance(found.o, expected.o), Within(2e-5) * testing::Norm(expected.o))
          << rows << " x " << cols;
      EXPECT_FALSE(found.result.fallback || found.result.failed);
      EXPECT_NEAR(found.result.output_norm, expected.result.output_norm,
                  Within(1e-4) * std::max(1.0, expected.result.output_norm));
    }
  }
}

TEST_P(NewtonSchulz, MisalignedPointersGiveTheSameBits) {
  const std::vector<float> u = Gaussian(33 * 20, 12);
  const std::vector<float> expected = Orthogonalize(*backend_, u, 33, 20).o;
  for (const std::size_t shift : {1, 2, 3, 7}) {
    const IterateBuffer input(*backend_, u, shift), output(*backend_, u.size(), shift + 1);
    const MatrixJob job{
        .u = input.get(), .o = output.get(), .rows = 33, .cols = 20, .u_scale = input.scale()};
    NewtonSchulzResult result;
    Check(backend_->NewtonSchulz({&job, 1}, SimpleRule(), {&result, 1}));
    EXPECT_TRUE(testing::SameBits(output.Read(), expected)) << shift;
  }
}

}  // namespace
}  // namespace muond::kernels

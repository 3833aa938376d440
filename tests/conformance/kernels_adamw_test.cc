// AdamW on every backend: formula, bias correction, extremes, shapes and dtypes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/conformance/kernels_driver.h"

namespace muond::kernels {
namespace {

using testing::BackendCases;
using testing::BackendTest;
using testing::Buffer;
using testing::Bytes;
using testing::CaseName;
using testing::Check;
using testing::Gaussian;

// One parameter's weights and moments.
struct State {
  explicit State(Backend& backend, const std::vector<float>& weights, std::size_t shift = 0)
      : w(backend, weights, shift),
        m(backend, weights.size(), shift),
        v(backend, weights.size(), shift) {}
  AdamWState pointers() const { return {w.get(), m.get(), v.get()}; }

  Buffer w, m, v;
};

class AdamW : public BackendTest {
 protected:
  AdamWScan Step(const State& state, const std::vector<float>& gradient, const AdamWRule& rule,
                 float unscale = 1) {
    const Buffer data(*backend_, gradient);
    return testing::AdamWOne(*backend_,
                             {.gradient = {data.get(), Dtype::kF32, gradient.size(), unscale},
                              .rule = rule,
                              .state = state.pointers()});
  }
};
MUOND_FOR_EVERY_BACKEND(AdamW);

AdamWRule GoldenRule(std::int64_t t) { return {.lr = 0.1, .decay = 1 - 0.1 * 0.01, .t = t}; }

TEST_P(AdamW, OlmoCore309_BiasCorrectionFollowsTheAppliedStep) {
  State state(*backend_, {1});
  Step(state, {2}, GoldenRule(1));
  EXPECT_NEAR(state.w.Read()[0], 0.8990000005, 6e-8);
  Step(state, {2}, GoldenRule(2));
  EXPECT_NEAR(state.w.Read()[0], 0.798101001, 6e-8);
  // An overflow in between is a step that was never applied: the same t again.
  State skipped(*backend_, {1});
  Step(skipped, {2}, GoldenRule(1));
  EXPECT_NEAR(skipped.w.Read()[0], 0.8990000005, 6e-8);
}

TEST_P(AdamW, MatchesTheFormulaOnAwkwardSizes) {
  for (const std::size_t size : {std::size_t{1}, std::size_t{3}, std::size_t{127}, std::size_t{129},
                                 std::size_t{513}, kBlockElements + 1}) {
    const State state(*backend_, Gaussian(size, 1), size % 4);
    const std::vector<float> start = state.w.Read();
    std::vector<double> w(start.begin(), start.end()), m(size), v(size);
    for (std::int64_t t = 1; t <= 3; ++t) {
      const AdamWRule rule{.lr = 0.01, .beta2 = 0.95, .decay = 0.99, .t = t, .gradient_scale = 0.5};
      const std::vector<float> gradient = Gaussian(size, static_cast<unsigned>(10 + t));
      Step(state, gradient, rule, 0.25f);
      for (std::size_t i = 0; i < size; ++i) {
        const double g = 0.5 * 0.25 * gradient[i];
        m[i] = 0.9 * m[i] + 0.1 * g;
        v[i] = 0.95 * v[i] + 0.05 * g * g;
        const double m_hat = m[i] / (1 - std::pow(0.9, t));
        const double v_hat = v[i] / (1 - std::pow(0.95, t));
        w[i] = 0.99 * w[i] - 0.01 * m_hat / (std::sqrt(v_hat) + 1e-8);
      }
    }
    EXPECT_LE(testing::Distance(state.w.Read(), w), 2e-7 * testing::Norm(start)) << size;
    EXPECT_LE(testing::Distance(state.m.Read(), m), 2e-7 * testing::Norm(state.m.Read())) << size;
    EXPECT_LE(testing::Distance(state.v.Read(), v), 2e-7 * testing::Norm(state.v.Read())) << size;
  }
}

TEST_P(AdamW, ScanDescribesTheNewState) {
  const std::size_t size = kBlockElements + 77;
  const State state(*backend_, Gaussian(size, 3));
  const AdamWScan scan = Step(state, Gaussian(size, 4), GoldenRule(1));
  const std::pair<const StateScan*, const Buffer*> pairs[] = {
      {&scan.weight, &state.w}, {&scan.exp_avg, &state.m}, {&scan.exp_avg_sq, &state.v}};
  for (const auto& [found, buffer] : pairs) {
    EXPECT_TRUE(testing::SameScan(*found, testing::ScanStateOne(*backend_, buffer->get(), size)));
    EXPECT_EQ(found->nonfinite, 0u);
  }
}

// 3e19 squared is beyond fp32; a thousandth of it is not.
TEST_P(AdamW, SquareOfALargeFiniteGradientDoesNotOverflowByItself) {
  const State state(*backend_, {1});
  const AdamWScan scan = Step(state, {3e19f}, {.t = 1});
  EXPECT_EQ(scan.exp_avg_sq.nonfinite, 0u);
  EXPECT_NEAR(state.v.Read()[0] / 9e35, 1, 1e-6);
  EXPECT_NEAR(state.w.Read()[0], 1 - 1e-3, 1e-6);
  // One that does poison v is counted, for the verdict's sake.
  const State poisoned(*backend_, {1});
  EXPECT_EQ(Step(poisoned, {3e38f}, {.t = 1}).exp_avg_sq.nonfinite, 1u);
}

TEST_P(AdamW, LossScaleOfAPowerOfTwoChangesNoBit) {
  const std::vector<float> weights = Gaussian(300, 5);
  const std::vector<float> gradient = Gaussian(300, 6);
  const State plain(*backend_, weights), scaled(*backend_, weights);
  std::vector<float> large = gradient;
  for (float& value : large) value *= 65536;
  Step(plain, gradient, GoldenRule(1));
  Step(scaled, large, GoldenRule(1), 1.0f / 65536);
  EXPECT_TRUE(testing::SameBits(plain.w.Read(), scaled.w.Read()));
  EXPECT_TRUE(testing::SameBits(plain.m.Read(), scaled.m.Read()));
  EXPECT_TRUE(testing::SameBits(plain.v.Read(), scaled.v.Read()));
}

// Every dtype of the gradient with every dtype of the parameter; state is fp32 in all of them.
TEST_P(AdamW, DeepMd5130_EveryGradientAndParameterDtypeWorks) {
  const std::vector<float> exact{0.5f, -1.25f, 3};  // the same number in every dtype
  const State expected(*backend_, {1, 2, 3});
  Step(expected, exact, GoldenRule(1));
  for (const Dtype gradient_dtype : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
    const Buffer f32(*backend_, exact);
    unsigned char values[12];
    Check(backend_->Round(values, gradient_dtype, f32.get(), 3));
    const Bytes gradient(*backend_, values, sizeof(values));
    const State state(*backend_, {1, 2, 3});
    testing::AdamWOne(*backend_, {.gradient = {gradient.get(), gradient_dtype, 3, 1},
                                  .rule = GoldenRule(1),
                                  .state = state.pointers()});
    EXPECT_TRUE(testing::SameBits(state.w.Read(), expected.w.Read()));
    for (const Dtype parameter_dtype : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
      unsigned char pulled[12];
      Check(backend_->Round(pulled, parameter_dtype, state.w.get(), 3));
      const Buffer back(*backend_, 3);
      const testing::Staged staged(*backend_, pulled, sizeof(pulled));
      Check(backend_->Accumulate(back.get(), staged.get(), parameter_dtype, 3, true));
      EXPECT_NEAR(back.Read()[2], expected.w.Read()[2], 3 * 0x1p-8);
    }
  }
}

TEST_P(AdamW, SixteenBitGradientOfSeveralBlocks) {
  const std::size_t size = 2 * kBlockElements + 99;
  for (const Dtype dtype : {Dtype::kBF16, Dtype::kF16}) {
    const Buffer source(*backend_, Gaussian(size, 7));
    std::vector<std::uint16_t> bits(size);
    Check(backend_->Round(bits.data(), dtype, source.get(), size));
    const Bytes gradient(*backend_, bits.data(), 2 * size);
    const testing::Staged staged(*backend_, bits.data(), 2 * size);
    const Buffer values(*backend_, size);
    Check(backend_->Accumulate(values.get(), staged.get(), dtype, size, true));
    const State narrow(*backend_, Gaussian(size, 8)), wide(*backend_, Gaussian(size, 8));
    testing::AdamWOne(*backend_, {.gradient = {gradient.get(), dtype, size, 0.5f},
                                  .rule = GoldenRule(1),
                                  .state = narrow.pointers()});
    Step(wide, values.Read(), GoldenRule(1), 0.5f);
    EXPECT_TRUE(testing::SameBits(narrow.w.Read(), wide.w.Read()));
    EXPECT_TRUE(testing::SameBits(narrow.v.Read(), wide.v.Read()));
  }
}

TEST_P(AdamW, Pytorch173901_LargeStepNumbersAreExact) {
  const State state(*backend_, {1});
  Step(state, {2}, {.lr = 0.1, .t = (std::int64_t{1} << 40) + 1});
  // No bias correction is left: m = .2, v = .004.
  EXPECT_NEAR(state.w.Read()[0], 1 - 0.1 * 0.2 / std::sqrt(0.004), 1e-6);
}

TEST_P(AdamW, EmptyTensorIsANoOp) {
  EXPECT_EQ(testing::AdamWOne(*backend_, {}).weight.sum_squares, 0);
}

}  // namespace
}  // namespace muond::kernels

// Muon steps on every backend: momentum, decay and the trajectories worked out by hand.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/conformance/kernels_driver.h"

namespace muond::kernels {
namespace {

using testing::BackendCases;
using testing::BackendTest;
using testing::Buffer;
using testing::CaseName;
using testing::Check;
using testing::Gaussian;
using testing::IterateBuffer;
using testing::MuonParameter;
using testing::MuonSettings;
using testing::Staged;

const std::vector<float> kIdentity{1, 0, 0, 1};
const std::vector<float> kDiagonal34{3, 0, 0, 4};
const std::vector<float> kZero(4);

class Muon : public BackendTest {
 protected:
  void ExpectDiagonal(const std::vector<float>& x, double first, double second, double tolerance) {
    EXPECT_NEAR(x[0], first, tolerance);
    EXPECT_NEAR(x[3], second, tolerance);
    EXPECT_NEAR(x[1], 0, tolerance);
    EXPECT_NEAR(x[2], 0, tolerance);
  }
  // Of a weight after steps of lr 0.1: an O is off by `floor` at most.
  double WithinStep(double fp32) const { return std::max(fp32, 0.1 * GetParam().floor); }
};
MUOND_FOR_EVERY_BACKEND(Muon);

// Two different directions and a zero: one step could not tell any of the forms apart.
TEST_P(Muon, ThreeStepsOfEveryMomentumForm) {
  for (const MomentumForm form : {MomentumForm::kEma, MomentumForm::kSum}) {
    for (const bool nesterov : {true, false}) {
      const MuonSettings settings{.momentum = {.form = form, .nesterov = nesterov}};
      MuonParameter w(*backend_, 2, 2, kIdentity);
      const double m_scale = form == MomentumForm::kSum ? 20 : 1;
      w.Step(kDiagonal34, settings);
      ExpectDiagonal(w.w(), 0.9177124, 0.8780796, WithinStep(1e-6));
      ExpectDiagonal(w.m(), 0.15 * m_scale, 0.2 * m_scale, 1e-6 * m_scale);
      w.Step(kIdentity, settings);
      ExpectDiagonal(w.w(), nesterov ? 0.8088734 : 0.8216361, nesterov ? 0.7635475 : 0.7612557,
                     WithinStep(1e-6));
      ExpectDiagonal(w.m(), 0.1925 * m_scale, 0.24 * m_scale, 1e-6 * m_scale);
      w.Step(kZero, settings);
      ExpectDiagonal(w.w(), nesterov ? 0.7138857 : 0.7265205, nesterov ? 0.6478689 : 0.6456000,
                     WithinStep(1e-6));
      ExpectDiagonal(w.m(), 0.182875 * m_scale, 0.228 * m_scale, 1e-6 * m_scale);
      EXPECT_FALSE(w.result().zero_input) << "the old momentum is still orthogonalized";
    }
  }
}

TEST_P(Muon, DeepSpeed8432_LossScaleDoesNotReachTheUpdate) {
  std::vector<float> reference;
  for (const float scale : {1.0f, 1024.0f, 65536.0f}) {
    MuonParameter w(*backend_, 2, 2, kIdentity);
    w.Step({3 * scale, 0, 0, 4 * scale}, {.unscale = 1 / scale});
    w.Step({scale, 0, 0, scale}, {.unscale = 1 / scale});
    ExpectDiagonal(w.w(), 0.8088734, 0.7635475, WithinStep(1e-6));
    if (reference.empty()) reference = w.w();
    EXPECT_TRUE(testing::SameBits(w.w(), reference)) << "loss scale " << scale;
  }
}

TEST_P(Muon, Tinygrad17709_DecayHasAVisibleSize) {
  MuonParameter w(*backend_, 2, 2, {1, 1, 1, 1});
  w.Step(kZero, {.lr = 0.1, .weight_decay = 10});
  EXPECT_EQ(w.w(), kZero);
}

TEST_P(Muon, EmergingOptimizers_B013_ZeroMatrixDecaysAndHasNoNan) {
  MuonParameter w(*backend_, 2, 2, {1, 2, 3, 4});
  w.Step(kZero, {});
  EXPECT_EQ(w.w(), (std::vector<float>{.99f, 1.98f, 2.97f, 3.96f}));
  EXPECT_TRUE(w.result().zero_input);
  EXPECT_FALSE(w.result().failed);
  EXPECT_EQ(w.o(), kZero);
  EXPECT_EQ(w.weight_scan().nonfinite, 0u);
}

TEST_P(Muon, Moonlight40_DecayUsesTheBaseLearningRate) {
  MuonParameter w(*backend_, 4, 1, {1, 1, 1, 1});  // factor 2 by its shape
  w.Step({0, 0, 0, 0}, {});
  EXPECT_EQ(w.w(), (std::vector<float>(4, .99f)));
  w.Step({1, 0, 0, 0}, {});
  EXPECT_NEAR(w.w()[0], 0.99 * 0.99 - 0.1 * 2 * 0.696437, WithinStep(1e-6));
}

TEST_P(Muon, DeepSpeed7807_ReducesBeforeItOrthogonalizes) {
  const float ranks[][4] = {{2, 0, 0, 0}, {0, 0, 0, 2}};
  const Buffer sum(*backend_, 4);
  for (int rank = 0; rank < 2; ++rank) {
    const Staged staged(*backend_, ranks[rank], sizeof(ranks[rank]));
    Check(backend_->Accumulate(sum.get(), staged.get(), Dtype::kF32, 4, rank == 0));
  }
  MuonParameter w(*backend_, 2, 2, kIdentity);
  w.Step(sum.Read(), {.unscale = 0.5f});
  ExpectDiagonal(w.o(), 1.10811, 1.10811, Within(1e-5));
}

TEST_P(Muon, DeepSpeed8443_MicroBatchesAreOneStep) {
  const float micro[][4] = {{4, 0, 0, 0}, {2, 0, 0, 4}};
  const Buffer sum(*backend_, 4);
  for (int i = 0; i < 2; ++i) {
    const Staged staged(*backend_, micro[i], sizeof(micro[i]));
    Check(backend_->Accumulate(sum.get(), staged.get(), Dtype::kF32, 4, i == 0));
  }
  MuonParameter w(*backend_, 2, 2, kIdentity);
  w.Step(sum.Read(), {.unscale = 0.5f});
  ExpectDiagonal(w.m(), 0.15, 0.1, 1e-7);
  ExpectDiagonal(w.o(), 1.11709, 0.682084, Within(1e-5));
}

// M and U are different memory: Newton-Schulz normalises a copy.
TEST_P(Muon, Pytorch194664_MomentumIsNotNormalisedInPlace) {
  MuonParameter w(*backend_, 8, 5, std::vector<float>(40));
  w.Step(std::vector<float>(40, 1), {.lr = 0, .momentum = {.beta = 0.9, .nesterov = false}});
  EXPECT_EQ(w.m(), std::vector<float>(40, 0.1f));
}

TEST_P(Muon, ClipUnderPolicyAllShowsFromTheSecondStepOn) {
  MuonParameter plain(*backend_, 2, 2, kIdentity), clipped(*backend_, 2, 2, kIdentity);
  const MuonSettings clip{.momentum = {.gradient_scale = 0.125}};
  plain.Step(kDiagonal34, {});
  clipped.Step(kDiagonal34, clip);
  EXPECT_TRUE(testing::SameBits(plain.w(), clipped.w())) << "Newton-Schulz is scale-free";
  ExpectDiagonal(clipped.m(), 0.15 / 8, 0.2 / 8, 1e-7);
  plain.Step(kIdentity, {});
  clipped.Step(kIdentity, {});
  EXPECT_GT(testing::Distance(plain.w(), clipped.w()), 1e-3);
}

TEST_P(Muon, MomentumReadsAndWritesOnlyWhatItMay) {
  const std::size_t size = kBlockElements + 131;
  const std::vector<float> gradient = Gaussian(size, 1);
  const std::vector<float> start = Gaussian(size, 2);
  for (const std::size_t shift : {0, 1}) {
    const Buffer g(*backend_, gradient, shift), m(*backend_, start, shift);
    const IterateBuffer early(*backend_, size), late(*backend_, size, shift);
    MomentumJob job{.gradient = {g.get(), Dtype::kF32, size, 0.5f},
                    .m = m.get(),
                    .write_m = false,
                    .u = early.get()};
    StateScan scan{.nonfinite = 5};
    Check(backend_->Momentum({&job, 1}, {&scan, 1}));
    EXPECT_TRUE(testing::SameBits(m.Read(), start)) << "M is only read before the verdict";
    EXPECT_EQ(scan.nonfinite, 5u) << "nothing was written";
    job.write_m = true;
    job.u = late.get();
    Check(backend_->Momentum({&job, 1}, {&scan, 1}));
    EXPECT_TRUE(testing::SameBits(early.Read(), late.Read())) << "U is the same before and after";
    EXPECT_TRUE(testing::SameScan(scan, testing::ScanStateOne(*backend_, m.get(), size)));
    EXPECT_EQ(scan.nonfinite, 0u);
    std::vector<double> m_expected(size), u_expected(size);
    for (std::size_t i = 0; i < size; ++i) {
      m_expected[i] = start[i] + 0.05 * (0.5 * gradient[i] - start[i]);
      u_expected[i] = 0.05 * 0.5 * gradient[i] + 0.95 * m_expected[i];
    }
    EXPECT_LE(testing::Distance(m.Read(), m_expected), 6e-8 * testing::Norm(start));
    const double u_error = backend_->iterate_dtype() == Dtype::kF32 ? 1.2e-7 : 0x1p-11;
    EXPECT_LE(testing::Distance(late.Read(), u_expected), u_error * testing::Norm(start));
  }
}

// Opposite signs near the end of fp32's range: the difference overflows fp32, the result does not.
TEST_P(Muon, EmaOfHugeFiniteValuesIsFinite) {
  const Buffer g(*backend_, {3e38f, -3e38f}), m(*backend_, {-3e38f, 3e38f});
  const IterateBuffer u(*backend_, 2);
  const double scale = IterateScale(backend_->iterate_dtype(), 3e38);
  const StateScan scan = testing::MomentumOne(
      *backend_,
      {.gradient = {g.get(), Dtype::kF32, 2, 1}, .m = m.get(), .u = u.get(), .u_scale = scale});
  EXPECT_EQ(scan.nonfinite, 0u);
  EXPECT_NEAR(m.Read()[0] / -2.7e38, 1, 1e-6);
  EXPECT_NEAR(u.Read()[0] / scale / -2.415e38, 1, 1e-3);
}

TEST_P(Muon, PytorchAo1124_Fp32MasterKeepsSmallUpdates) {
  const Buffer w(*backend_, {1});
  const IterateBuffer o(*backend_, 1);
  const Buffer one(*backend_, {1});
  Check(backend_->StoreIterate(o.get(), one.get(), 1, 1));
  for (int i = 0; i < 100; ++i) {
    testing::ApplyOne(*backend_, {.w = w.get(), .o = o.get(), .elements = 1, .step = 1e-4});
  }
  EXPECT_NEAR(w.Read()[0], 0.99, 3e-6);
  std::uint16_t pulled;
  Check(backend_->Round(&pulled, Dtype::kBF16, w.get(), 1));
  EXPECT_EQ(BF16ToFloat(pulled), 0.98828125f);
}

TEST_P(Muon, ApplyMatchesTheFormulaAndDescribesTheResult) {
  for (const std::size_t size : {std::size_t{1}, std::size_t{127}, kBlockElements + 1}) {
    const std::vector<float> start = Gaussian(size, 1), update = Gaussian(size, 2);
    const Buffer w(*backend_, start, 1);
    // As Newton-Schulz leaves an O: without a scale, on the iterate dtype's grid.
    const Buffer source(*backend_, update);
    const IterateBuffer o(*backend_, size, 3);
    Check(backend_->StoreIterate(o.get(), source.get(), size, 1));
    const std::vector<float> stored = o.Read();
    const StateScan scan = testing::ApplyOne(
        *backend_, {.w = w.get(), .o = o.get(), .elements = size, .decay = 0.9, .step = 0.3});
    const std::vector<float> result = w.Read();
    for (std::size_t i = 0; i < size; ++i) {
      ASSERT_EQ(result[i], static_cast<float>(0.9 * start[i] - 0.3 * stored[i])) << i;
    }
    EXPECT_TRUE(testing::SameScan(scan, testing::ScanStateOne(*backend_, w.get(), size)));
  }
}

TEST_P(Muon, SixteenBitGradientsGiveTheSameStepAsTheirValues) {
  for (const Dtype dtype : {Dtype::kBF16, Dtype::kF16}) {
    const Buffer f32(*backend_, Gaussian(12, 8));
    std::vector<std::uint16_t> bits(12);
    Check(backend_->Round(bits.data(), dtype, f32.get(), 12));
    const Staged staged(*backend_, bits.data(), 24);
    const Buffer widened(*backend_, 12);
    Check(backend_->Accumulate(widened.get(), staged.get(), dtype, 12, true));
    MuonParameter narrow(*backend_, 3, 4, Gaussian(12, 9)), wide(*backend_, 3, 4, Gaussian(12, 9));
    narrow.Step(bits, dtype, {.unscale = 0.5f});
    wide.Step(widened.Read(), {.unscale = 0.5f});
    EXPECT_TRUE(testing::SameBits(narrow.w(), wide.w()));
    EXPECT_TRUE(testing::SameBits(narrow.m(), wide.m()));
  }
}

}  // namespace
}  // namespace muond::kernels

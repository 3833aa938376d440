// A momentum that is kept in bf16: the arithmetic of an fp32 one on what was kept, one more
// rounding at its end, and an update made of what is kept.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

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
using testing::IterateBuffer;

using Halves = std::vector<std::uint16_t>;

Halves ToBF16(const std::vector<float>& values) {
  Halves bits(values.size());
  std::transform(values.begin(), values.end(), bits.begin(), FloatToBF16);
  return bits;
}

std::vector<float> Widened(const Halves& bits) {
  std::vector<float> values(bits.size());
  std::transform(bits.begin(), bits.end(), values.begin(), BF16ToFloat);
  return values;
}

// bf16 values in a backend's memory, `shift` of them off its alignment.
class HalfBuffer {
 public:
  HalfBuffer(Backend& backend, const Halves& bits, std::size_t shift = 0)
      : elements_(bits.size()), bytes_(backend, bits.data(), 2 * bits.size(), 2 * shift) {}
  void* get() const { return bytes_.get(); }
  Halves Read() const {
    Halves bits(elements_);
    bytes_.Read(bits.data());
    return bits;
  }

 private:
  std::size_t elements_;
  Bytes bytes_;
};

// docs/semantics.md, by the letter; U without a scale.
struct Expected {
  Halves m;
  std::vector<double> u;
};
Expected Formula(const MomentumRule& rule, const std::vector<float>& gradient, float unscale,
                 const Halves& m) {
  Expected expected;
  const bool ema = rule.form == MomentumForm::kEma;
  for (std::size_t i = 0; i < m.size(); ++i) {
    const double g = static_cast<double>(gradient[i] * unscale) * rule.gradient_scale;
    const double old_m = BF16ToFloat(m[i]);
    const auto wide =
        static_cast<float>(ema ? old_m + (1 - rule.beta) * (g - old_m) : rule.beta * old_m + g);
    expected.m.push_back(FloatToBF16(wide));
    const double kept = BF16ToFloat(expected.m.back());
    expected.u.push_back(rule.nesterov ? (ema ? 1 - rule.beta : 1) * g + rule.beta * kept : kept);
  }
  return expected;
}

class MomentumDtype : public BackendTest {
 protected:
  // One update without decay of the old: M becomes the gradient, rounded.
  Halves Kept(const std::vector<float>& gradient, StateScan* scan = nullptr) {
    const Buffer g(*backend_, gradient);
    const HalfBuffer m(*backend_, Halves(gradient.size()));
    const IterateBuffer u(*backend_, gradient.size());
    const StateScan found = testing::MomentumOne(
        *backend_, {.gradient = {g.get(), Dtype::kF32, gradient.size(), 1},
                    .rule = {.form = MomentumForm::kSum, .m_dtype = Dtype::kBF16},
                    .m = m.get(),
                    .u = u.get(),
                    .u_scale = 0x1p-126});
    if (scan != nullptr) *scan = found;
    return m.Read();
  }
};
MUOND_FOR_EVERY_BACKEND(MomentumDtype);

// Of every form, in whole blocks and odd ends, at awkward addresses: M to the bit on every backend,
// and the same U whether M is written or only read, so that overlap changes nothing.
TEST_P(MomentumDtype, IsTheFormulaOnWhatIsKept) {
  const std::size_t size = kBlockElements + 131;
  const Halves start = ToBF16(Gaussian(size, 2));
  const std::vector<float> gradient = Gaussian(size, 1);
  const double u_error = backend_->iterate_dtype() == Dtype::kF32 ? 0 : 0x1p-8;
  for (int i = 0; i < 8; ++i) {
    const std::size_t shift = i % 2;
    const MomentumRule rule{.form = i & 2 ? MomentumForm::kSum : MomentumForm::kEma,
                            .nesterov = (i & 4) != 0,
                            .gradient_scale = shift ? 0.3 : 1.0,
                            .m_dtype = Dtype::kBF16};
    const Expected expected = Formula(rule, gradient, 0.5f, start);
    const Buffer g(*backend_, gradient, shift);
    const HalfBuffer m(*backend_, start, shift);
    const IterateBuffer early(*backend_, size), late(*backend_, size, shift);
    MomentumJob job{.gradient = {g.get(), Dtype::kF32, size, 0.5f},
                    .rule = rule,
                    .m = m.get(),
                    .write_m = false,
                    .u = early.get()};
    StateScan scan{.nonfinite = 5};
    Check(backend_->Momentum({&job, 1}, {&scan, 1}));
    EXPECT_EQ(m.Read(), start) << "M is only read before the verdict";
    EXPECT_EQ(scan.nonfinite, 5u) << "nothing was written";
    job.write_m = true;
    job.u = late.get();
    Check(backend_->Momentum({&job, 1}, {&scan, 1}));
    ASSERT_EQ(m.Read(), expected.m) << i;
    EXPECT_TRUE(testing::SameBits(early.Read(), late.Read())) << "U is the same before and after";
    const std::vector<float> u = late.Read();
    for (std::size_t e = 0; e < size; ++e) {
      ASSERT_NEAR(u[e], static_cast<float>(expected.u[e]),
                  u_error * (std::fabs(expected.u[e]) + 1e-4))
          << i << ", element " << e;
    }
    EXPECT_TRUE(testing::SameScan(
        scan, testing::ScanStateOne(*backend_, m.get(), size, Dtype::kBF16)));
    double squares = 0, largest = 0;
    for (const float value : Widened(expected.m)) {
      squares += static_cast<double>(value) * value;
      largest = std::max(largest, std::fabs(static_cast<double>(value)));
    }
    EXPECT_NEAR(scan.sum_squares, squares, 1e-12 * squares);
    EXPECT_EQ(scan.max_abs, largest);
    EXPECT_EQ(scan.nonfinite, 0u);
  }
}

TEST_P(MomentumDtype, GradientsOfSixteenBitsCountAsTheirValues) {
  for (const Dtype dtype : {Dtype::kBF16, Dtype::kF16}) {
    const std::size_t size = 1031;
    Halves bits(size);
    std::vector<float> gradient = Gaussian(size, 3);
    for (std::size_t i = 0; i < size; ++i) {
      bits[i] = dtype == Dtype::kBF16 ? FloatToBF16(gradient[i]) : FloatToF16(gradient[i]);
      gradient[i] = dtype == Dtype::kBF16 ? BF16ToFloat(bits[i]) : F16ToFloat(bits[i]);
    }
    const Halves start = ToBF16(Gaussian(size, 4));
    const HalfBuffer g(*backend_, bits), m(*backend_, start);
    const IterateBuffer u(*backend_, size);
    const MomentumRule rule{.m_dtype = Dtype::kBF16};
    testing::MomentumOne(
        *backend_,
        {.gradient = {g.get(), dtype, size, 0.25f}, .rule = rule, .m = m.get(), .u = u.get()});
    EXPECT_EQ(m.Read(), Formula(rule, gradient, 0.25f, start).m);
  }
}

// One call has jobs of both kinds: each is what it is alone.
TEST_P(MomentumDtype, BothKindsShareABatch) {
  const std::size_t size = 5000;
  const std::vector<float> gradient = Gaussian(size, 5), start = Gaussian(size, 6);
  const Buffer g(*backend_, gradient), wide(*backend_, start), alone(*backend_, start);
  const HalfBuffer narrow(*backend_, ToBF16(start));
  const IterateBuffer u(*backend_, size), v(*backend_, size);
  const GradientView view{g.get(), Dtype::kF32, size, 1};
  const MomentumRule rule{.m_dtype = Dtype::kBF16};
  const MomentumJob jobs[] = {{.gradient = view, .m = wide.get(), .u = u.get()},
                              {.gradient = view, .rule = rule, .m = narrow.get(), .u = v.get()}};
  StateScan scans[2];
  Check(backend_->Momentum(jobs, scans));
  EXPECT_EQ(narrow.Read(), Formula(rule, gradient, 1, ToBF16(start)).m);
  testing::MomentumOne(*backend_, {.gradient = view, .m = alone.get(), .u = u.get()});
  EXPECT_TRUE(testing::SameBits(wide.Read(), alone.Read()));
  const StateView views[] = {{wide.get(), size}, {narrow.get(), size, Dtype::kBF16}};
  StateScan found[2];
  Check(backend_->ScanState(views, found));
  EXPECT_TRUE(testing::SameScan(scans[0], found[0]));
  EXPECT_TRUE(testing::SameScan(scans[1], found[1]));
}

TEST_P(MomentumDtype, RoundsToNearestEven) {
  const float tie = 1 + 0x1p-8f;
  EXPECT_EQ(Widened(Kept({tie, -tie, tie + 0x1p-20f, 1 + 3 * 0x1p-8f, 1 + 0x1p-9f})),
            (std::vector<float>{1, -1, 1 + 0x1p-7f, 1 + 0x1p-6f, 1}));
  // Subnormal ones are kept: 2^-133 is the smallest.
  EXPECT_EQ(Widened(Kept({0x1p-133f, 0x1.8p-133f, 0x1p-134f, -0x1p-149f})),
            (std::vector<float>{0x1p-133f, 0x1p-132f, 0, -0.0f}));
}

// Finite in fp32, beyond the largest of bf16: what the state-overflow check keeps from coming true.
TEST_P(MomentumDtype, WhatRoundsToInfinityIsCounted) {
  StateScan scan;
  Kept({std::numeric_limits<float>::max(), 0x1.fep127f, 1}, &scan);
  EXPECT_EQ(scan.nonfinite, 1u);
  EXPECT_EQ(scan.max_abs, 0x1.fep127);
}

// PyTorch PR #194664: Newton-Schulz normalised the bf16 momentum in place.
TEST_P(MomentumDtype, Pytorch194664_MomentumIsNotNormalisedInPlace) {
  const std::vector<float> ones(40, 1);
  const Buffer g(*backend_, ones);
  const HalfBuffer m(*backend_, Halves(40));
  const IterateBuffer u(*backend_, 40), o(*backend_, 40);
  testing::MomentumOne(*backend_, {.gradient = {g.get(), Dtype::kF32, 40, 1},
                                   .rule = {.beta = .9, .nesterov = false, .m_dtype = Dtype::kBF16},
                                   .m = m.get(),
                                   .u = u.get()});
  const MatrixJob job{.u = u.get(), .o = o.get(), .rows = 8, .cols = 5};
  NewtonSchulzResult result;
  Check(backend_->NewtonSchulz({&job, 1}, testing::SimpleRule(), {&result, 1}));
  EXPECT_EQ(Widened(m.Read()), std::vector<float>(40, 0.10009765625f));
}

}  // namespace
}  // namespace muond::kernels

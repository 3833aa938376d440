// IterateScale: the power of two that 16-bit Newton-Schulz inputs are stored with.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/backend.h"

namespace muond::kernels {
namespace {

TEST(IterateScale, Fp32NeedsNone) {
  EXPECT_EQ(IterateScale(Dtype::kF32, 1e-30), 1);
  EXPECT_EQ(IterateScale(Dtype::kF32, 1e30), 1);
}

TEST(IterateScale, IsOneWhereThereIsNothingToScaleBy) {
  for (const double bound : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    EXPECT_EQ(IterateScale(Dtype::kF16, bound), 1) << bound;
    EXPECT_EQ(IterateScale(Dtype::kBF16, bound), 1) << bound;
  }
}

TEST(IterateScale, BringsEveryFp32MagnitudeJustBelowTheTarget) {
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBF16}) {
    for (int exponent = -149; exponent <= 127; ++exponent) {
      for (const double fraction : {1.0, 1.0000001, 1.5, 1.9999999}) {
        const double bound = std::ldexp(fraction, exponent);
        const double scale = IterateScale(dtype, bound);
        int unused = 0;
        EXPECT_EQ(std::frexp(scale, &unused), 0.5) << "not a power of two: " << scale;
        EXPECT_GT(bound * scale, 0x1p13) << bound;
        EXPECT_LE(bound * scale, 0x1p14) << bound;
      }
    }
  }
}

TEST(IterateScale, StaysFiniteBelowFp32) {
  EXPECT_TRUE(std::isfinite(IterateScale(Dtype::kF16, std::numeric_limits<double>::denorm_min())));
}

}  // namespace
}  // namespace muond::kernels

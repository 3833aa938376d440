// Conversions: every 16-bit pattern, every tie, by the definition and by the bulk passes.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/tensor.h"
#include "tests/conformance/kernels_driver.h"

namespace muond::kernels {
namespace {

using testing::BackendCases;
using testing::BackendTest;
using testing::Buffer;
using testing::CaseName;
using testing::Check;
using testing::Staged;

constexpr std::uint32_t kPatterns = 0x10000;

// The value of a 16-bit pattern by the definition of its format; NaN where it is one.
double Decode(std::uint32_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = static_cast<int>((bits & 0x7fff) >> fraction_bits);
  const int fraction = static_cast<int>(bits & ((1u << fraction_bits) - 1));
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

struct Format {
  Dtype dtype;
  int exponent_bits;
  float (*widen)(std::uint16_t);
  std::uint16_t (*narrow)(float);
};
constexpr Format kFormats[] = {{Dtype::kF16, 5, F16ToFloat, FloatToF16},
                               {Dtype::kBF16, 8, BF16ToFloat, FloatToBF16}};

TEST(Conversion, EveryPatternHasItsValueAndComesBack) {
  for (const Format& format : kFormats) {
    for (std::uint32_t bits = 0; bits < kPatterns; ++bits) {
      const double expected = Decode(bits, format.exponent_bits);
      const float value = format.widen(static_cast<std::uint16_t>(bits));
      const std::uint16_t back = format.narrow(value);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(value)) << DtypeName(format.dtype) << " " << bits;
        ASSERT_TRUE(std::isnan(format.widen(back))) << DtypeName(format.dtype) << " " << bits;
        ASSERT_EQ(back & 0x8000u, bits & 0x8000u);
      } else {
        ASSERT_EQ(static_cast<double>(value), expected) << DtypeName(format.dtype) << " " << bits;
        ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0);
        ASSERT_EQ(back, bits) << DtypeName(format.dtype);
      }
    }
  }
}

TEST(Conversion, TiesGoToEvenAndNeighboursToTheNearest) {
  for (const Format& format : kFormats) {
    const std::uint32_t infinity = ((1u << format.exponent_bits) - 1)
                                   << (15 - format.exponent_bits);
    for (std::uint32_t bits = 0; bits < infinity; ++bits) {
      const auto low = static_cast<std::uint16_t>(bits);
      const auto high = static_cast<std::uint16_t>(bits + 1);
      // Beyond the largest finite value, the tie is half way to what the next exponent would be.
      const double low_value = Decode(low, format.exponent_bits);
      const double ulp = bits + 1 == infinity ? low_value - Decode(bits - 1, format.exponent_bits)
                                              : Decode(high, format.exponent_bits) - low_value;
      const auto tie = static_cast<float>(low_value + ulp / 2);
      if (static_cast<double>(tie) != low_value + ulp / 2) continue;  // bf16's last subnormals
      const std::uint16_t even = bits % 2 == 0 ? low : high;
      ASSERT_EQ(format.narrow(tie), even) << DtypeName(format.dtype) << " " << bits;
      ASSERT_EQ(format.narrow(-tie), even | 0x8000) << DtypeName(format.dtype) << " " << bits;
      ASSERT_EQ(format.narrow(std::nextafter(tie, 0.0f)), low) << DtypeName(format.dtype);
      ASSERT_EQ(format.narrow(std::nextafter(tie, std::numeric_limits<float>::infinity())), high)
          << DtypeName(format.dtype) << " " << bits;
    }
  }
}

TEST(Conversion, BeyondTheLargestIsInfinityAndTinyIsSignedZero) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(FloatToF16(65519.99f), 0x7bff);
  EXPECT_EQ(FloatToF16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToF16(-1e30f), 0xfc00);
  EXPECT_EQ(FloatToF16(kInfinity), 0x7c00);
  EXPECT_EQ(FloatToF16(0x1p-25f), 0x0000);
  EXPECT_EQ(FloatToF16(-0x1.8p-25f), 0x8001);
  EXPECT_EQ(FloatToF16(std::numeric_limits<float>::denorm_min()), 0x0000);
  EXPECT_EQ(FloatToBF16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(FloatToBF16(-kInfinity), 0xff80);
  EXPECT_EQ(FloatToBF16(-std::numeric_limits<float>::denorm_min()), 0x8000);
  // A NaN whose payload sits in the bits that are cut off.
  EXPECT_TRUE(std::isnan(BF16ToFloat(FloatToBF16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(F16ToFloat(FloatToF16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(Conversion, DtypesHaveTheirSizesAndNames) {
  EXPECT_EQ(DtypeBytes(Dtype::kF32), 4u);
  EXPECT_EQ(DtypeBytes(Dtype::kBF16), 2u);
  EXPECT_EQ(DtypeBytes(Dtype::kF16), 2u);
  EXPECT_EQ(DtypeName(Dtype::kF32), "f32");
  EXPECT_EQ(DtypeName(Dtype::kBF16), "bf16");
  EXPECT_EQ(DtypeName(Dtype::kF16), "f16");
}

class BulkConversion : public BackendTest {};
MUOND_FOR_EVERY_BACKEND(BulkConversion);

TEST_P(BulkConversion, AccumulateWidensEveryPattern) {
  for (const Format& format : kFormats) {
    std::vector<std::uint16_t> bits(kPatterns);
    for (std::uint32_t i = 0; i < kPatterns; ++i) bits[i] = static_cast<std::uint16_t>(i);
    const Buffer acc(*backend_, kPatterns);
    const Staged staged(*backend_, bits.data(), 2 * kPatterns);
    Check(backend_->Accumulate(acc.get(), staged.get(), format.dtype, kPatterns, true));
    const std::vector<float> values = acc.Read();
    for (std::uint32_t i = 0; i < kPatterns; ++i) {
      const float expected = format.widen(bits[i]);
      // A NaN stays one; which one is nobody's business.
      if (std::isnan(expected) && std::isnan(values[i])) continue;
      ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]), std::bit_cast<std::uint32_t>(expected))
          << DtypeName(format.dtype) << " " << i;
    }
  }
}

TEST_P(BulkConversion, RoundNarrowsLikeTheDefinition) {
  // All exponents, with fractions around ties; then ragged lengths at odd addresses.
  std::vector<float> values;
  for (std::uint32_t high = 0; high < kPatterns; ++high) {
    for (const std::uint32_t low :
         {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x7fffu, 0x8000u, 0x8001u}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  const Buffer source(*backend_, values);
  for (const Format& format : kFormats) {
    std::vector<std::uint16_t> out(values.size());
    Check(backend_->Round(out.data(), format.dtype, source.get(), values.size()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(out[i], format.narrow(values[i]))
          << DtypeName(format.dtype) << " of bits " << std::bit_cast<std::uint32_t>(values[i]);
    }
    for (const std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{129}}) {
      std::vector<unsigned char> odd(2 * count + 2, 0xa5);
      Check(backend_->Round(odd.data() + 1, format.dtype, source.get() + 70000, count));
      EXPECT_EQ(std::memcmp(odd.data() + 1, out.data() + 70000, 2 * count), 0);
      EXPECT_EQ(odd.front(), 0xa5);
      EXPECT_EQ(odd.back(), 0xa5) << "wrote past the end";
    }
  }
}

}  // namespace
}  // namespace muond::kernels

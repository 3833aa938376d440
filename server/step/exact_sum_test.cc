#include "server/step/exact_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace muond {
namespace {

ExactSum Sum(const std::vector<double>& terms) {
  ExactSum sum;
  for (const double term : terms) sum.Add(term);
  return sum;
}

constexpr double kTiny = std::numeric_limits<double>::denorm_min();
constexpr double kHuge = std::numeric_limits<double>::max();
constexpr double kUlp = std::numeric_limits<double>::epsilon();  // of 1

TEST(ExactSum, EmptyIsZero) {
  EXPECT_EQ(ExactSum().Value(), 0.0);
  EXPECT_EQ(Sum({0.0, -0.0}).Value(), 0.0);
}

TEST(ExactSum, OneTermComesBackBitForBit) {
  for (const double value : {1.0, 0.1, kTiny, 3 * kTiny, std::numeric_limits<double>::min(),
                             std::nextafter(std::numeric_limits<double>::min(), 0.0), 0x1p31,
                             0x1.fffffffffffffp+52, 1e300, kHuge}) {
    EXPECT_EQ(Sum({value}).Value(), value);
  }
}

TEST(ExactSum, SmallTermsAreNotLostBesideALargeOne) {
  // Plain addition gives 1.
  std::vector<double> terms(1 << 12, 0x1p-60);
  terms.insert(terms.begin(), 1.0);
  EXPECT_EQ(Sum(terms).Value(), 1.0 + 0x1p-48);
}

TEST(ExactSum, TiesRoundToEven) {
  EXPECT_EQ(Sum({1.0, kUlp / 2}).Value(), 1.0);
  EXPECT_EQ(Sum({1.0 + kUlp, kUlp / 2}).Value(), 1.0 + 2 * kUlp);
}

TEST(ExactSum, TheSmallestTermBreaksATie) {
  EXPECT_EQ(Sum({1.0, kUlp / 2, kTiny}).Value(), 1.0 + kUlp);
}

TEST(ExactSum, JustUnderHalfRoundsDown) {
  EXPECT_EQ(Sum({1.0, kUlp / 4, kUlp / 8, kTiny}).Value(), 1.0);
}

TEST(ExactSum, RoundingMayCarryIntoTheNextPowerOfTwo) {
  EXPECT_EQ(Sum({0x1.fffffffffffffp+0, kUlp / 2}).Value(), 2.0);
}

TEST(ExactSum, SubnormalSumsAreExact) { EXPECT_EQ(Sum({kTiny, kTiny, kTiny}).Value(), 3 * kTiny); }

TEST(ExactSum, BeyondTheLargestDoubleIsInfinity) {
  EXPECT_EQ(Sum({kHuge, kHuge}).Value(), std::numeric_limits<double>::infinity());
  // Less than half a unit above the largest double still rounds to it.
  EXPECT_EQ(Sum({kHuge, 0x1p969}).Value(), kHuge);
}

// Expected values: exact rational sums, rounded once (Python's fractions).
TEST(ExactSum, EqualsTheRoundedRationalSum) {
  struct Case {
    std::vector<double> terms;
    double sum;
  };
  const Case cases[] = {
      {{0x0.001e54e9bc9a8p-1022, 0x0.29a8e91062e40p-1022, 0x0.00000000001a4p-1022,
        0x0.00000000005dap-1022, 0x0.0000000000074p-1022, 0x0.00000004cca86p-1022},
       0x0.29c73dfeeca60p-1022},
      {{0x1.ac355208f105cp-188, 0x1.738f7d1a22dd8p-586, 0x1.e43bb74eb2520p-210,
        0x1.fb17c3e518208p+80, 0x1.42e1666827ddap-618, 0x1.e53a1b43f58c3p+118},
       0x1.e53a1b43fd789p+118},
      {{0x1.2bcc15d963368p+12, 0x1.f3d7b58e26346p-55, 0x1.1d032e76f125bp-56, 0x1.288f5635a6592p-45,
        0x1.14d4c7c789e87p-43, 0x1.3be2a8c7b682ap+11},
       0x1.c9bd6a3d3e77dp+12},
      {{0x1.7220ac1a61dbcp+2, 0x1.2474e6e8e3f55p+3, 0x1.7d55c80c789aep-4, 0x1.6c99c84404bc0p+2,
        0x1.e840b679dda60p-1, 0x1.fc5414d71758ap-4},
       0x1.5ca4c01cbe1dcp+4},
      {{0x1.b5dac1e37c3b8p+966, 0x1.dcc6bc4af3b0ep+938, 0x1.7242a5265ec3cp+956,
        0x1.96b8e84b814c6p+930, 0x1.8f45d44f9f46fp+988, 0x1.261add5337481p+909},
       0x1.8f45db287c91ap+988},
  };
  for (const Case& c : cases) {
    std::vector<double> terms = c.terms;
    std::sort(terms.begin(), terms.end());
    do {
      ASSERT_EQ(Sum(terms).Value(), c.sum);
    } while (std::next_permutation(terms.begin(), terms.end()));
  }
}

// 128-bit integers hold such sums exactly, and convert to double rounded to nearest even.
TEST(ExactSum, EqualsIntegerArithmeticOnManyRandomTerms) {
  std::mt19937_64 random(20261130);
  for (int round = 0; round < 50; ++round) {
    ExactSum sum;
    unsigned __int128 exact = 0;
    for (int i = 0; i < 500; ++i) {
      const std::uint64_t mantissa = random() >> 11;
      const int shift = static_cast<int>(random() % 60);
      sum.Add(std::ldexp(static_cast<double>(mantissa), shift));
      exact += static_cast<unsigned __int128>(mantissa) << shift;
    }
    ASSERT_EQ(sum.Value(), static_cast<double>(exact));
  }
}

TEST(ExactSum, OrderAndGroupingDoNotMatter) {
  std::mt19937_64 random(5);
  std::vector<double> terms;
  for (int i = 0; i < 1000; ++i) {
    terms.push_back(
        std::ldexp(static_cast<double>(random() >> 11), static_cast<int>(random() % 600) - 300));
  }
  const ExactSum straight = Sum(terms);
  for (int round = 0; round < 20; ++round) {
    std::shuffle(terms.begin(), terms.end(), random);
    std::vector<ExactSum> parts(1 + random() % 7);
    for (const double term : terms) parts[random() % parts.size()].Add(term);
    ExactSum merged;
    for (const ExactSum& part : parts) merged.Merge(part);
    EXPECT_EQ(merged, straight);
    EXPECT_EQ(merged.Value(), straight.Value());
  }
}

TEST(ExactSum, EqualityIsExactNotRounded) {
  EXPECT_EQ(Sum({1.0, kTiny}).Value(), Sum({1.0}).Value());
  EXPECT_FALSE(Sum({1.0, kTiny}) == Sum({1.0}));
}

TEST(ExactSum, MergingWithItselfDoubles) {
  ExactSum sum = Sum({0.1, 1e-300});
  sum.Merge(sum);
  EXPECT_EQ(sum, Sum({0.2, 2e-300}));
}

TEST(ExactSum, AdditionsPastTheCarryLimitOfALimbStayExact) {
  // Doubling forty times is as many additions as no loop could make.
  ExactSum sum = Sum({0x1.fffffffffffffp+0});
  for (int i = 0; i < 40; ++i) sum.Merge(sum);
  EXPECT_EQ(sum.Value(), 0x1.fffffffffffffp+40);
}

TEST(ExactSumDeathTest, RefusesWhatIsNotFiniteOrNegative) {
  EXPECT_DEATH(Sum({std::nan("")}), "finite");
  EXPECT_DEATH(Sum({std::numeric_limits<double>::infinity()}), "finite");
  EXPECT_DEATH(Sum({-1.0}), "finite");
}

}  // namespace
}  // namespace muond

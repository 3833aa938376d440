#include "server/step/exact_sum.h"

#include <bit>
#include <cmath>

#include "proto/check.h"

namespace muond {
namespace {

constexpr std::uint64_t kDigitMask = 0xffffffff;
constexpr int kDigitBits = 32;
constexpr int kMantissaBits = 53;
constexpr int kLowestExponent = -1074;  // of the smallest subnormal double
// One addition puts less than 2^33 into a limb, so this many can't overflow 64 bits.
constexpr std::uint32_t kMaxPending = 1u << 30;

}  // namespace

void ExactSum::Add(double value) {
  MUOND_CHECK(std::isfinite(value) && value >= 0, "terms are finite and not negative");
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(value);
  const int biased = static_cast<int>(bits >> 52) & 0x7ff;
  std::uint64_t mantissa = bits & ((std::uint64_t{1} << 52) - 1);
  // Subnormals have the exponent of the smallest normals, but no hidden bit.
  if (biased != 0) mantissa |= std::uint64_t{1} << 52;
  const int position = biased == 0 ? 0 : biased - 1;
  const int limb = position / kDigitBits;
  const int shift = position % kDigitBits;
  const std::uint64_t low = (mantissa & kDigitMask) << shift;
  const std::uint64_t high = (mantissa >> kDigitBits) << shift;
  limbs_[limb] += low & kDigitMask;
  limbs_[limb + 1] += (low >> kDigitBits) + (high & kDigitMask);
  limbs_[limb + 2] += high >> kDigitBits;
  if (++pending_ >= kMaxPending) Normalize();
}

void ExactSum::Merge(const ExactSum& other) {
  ExactSum addend = other;
  addend.Normalize();
  Normalize();
  for (int i = 0; i < kLimbs; ++i) limbs_[i] += addend.limbs_[i];
  pending_ = 1;
}

double ExactSum::Value() const {
  ExactSum sum = *this;
  sum.Normalize();
  const auto& limbs = sum.limbs_;
  int top = kLimbs - 1;
  while (top > 0 && limbs[top] == 0) --top;
  const int bits =
      top * kDigitBits + static_cast<int>(std::bit_width(limbs[top]));  // bits in the sum
  if (bits <= kMantissaBits) {
    const std::uint64_t mantissa = limbs[0] | limbs[1] << kDigitBits;
    return std::ldexp(static_cast<double>(mantissa), kLowestExponent);
  }
  // The top 53 bits and the one that rounds them; `sticky` tells whether any below is set.
  const int lowest = bits - kMantissaBits - 1;
  const int limb = lowest / kDigitBits;
  const int shift = lowest % kDigitBits;
  const auto digit = [&](int i) { return i < kLimbs ? limbs[i] : 0; };
  std::uint64_t kept = (digit(limb) | digit(limb + 1) << kDigitBits) >> shift;
  if (shift > 0) kept |= digit(limb + 2) << (2 * kDigitBits - shift);
  bool sticky = (limbs[limb] & ((std::uint64_t{1} << shift) - 1)) != 0;
  for (int i = 0; i < limb && !sticky; ++i) sticky = limbs[i] != 0;
  std::uint64_t mantissa = kept >> 1;
  const bool half = (kept & 1) != 0;
  if (half && (sticky || (mantissa & 1) != 0)) ++mantissa;
  return std::ldexp(static_cast<double>(mantissa), lowest + 1 + kLowestExponent);
}

ExactSum::Digits ExactSum::ToDigits() const {
  ExactSum sum = *this;
  sum.Normalize();
  int first = 0, end = kLimbs;
  while (end > 0 && sum.limbs_[end - 1] == 0) --end;
  while (first < end && sum.limbs_[first] == 0) ++first;
  Digits result{first, {}};
  for (int i = first; i < end; ++i) {
    result.digits.push_back(static_cast<std::uint32_t>(sum.limbs_[i]));
  }
  return result;
}

std::optional<ExactSum> ExactSum::FromDigits(std::int64_t first,
                                             std::span<const std::uint32_t> digits) {
  // The last limb is room for carries: a sum of another machine that fills it is none.
  if (first < 0 || first + std::ssize(digits) >= kLimbs) return std::nullopt;
  ExactSum sum;
  for (std::size_t i = 0; i < digits.size(); ++i) sum.limbs_[first + i] = digits[i];
  return sum;
}

bool operator==(const ExactSum& a, const ExactSum& b) {
  ExactSum left = a;
  ExactSum right = b;
  left.Normalize();
  right.Normalize();
  return left.limbs_ == right.limbs_;
}

void ExactSum::Normalize() {
  std::uint64_t carry = 0;
  for (std::uint64_t& limb : limbs_) {
    limb += carry;
    carry = limb >> kDigitBits;
    limb &= kDigitMask;
  }
  MUOND_CHECK(carry == 0, "more terms than a 64-bit count can name");
  pending_ = 0;
}

}  // namespace muond

// The scale that keeps any fp32 magnitude inside a 16-bit iterate type.
#include <algorithm>
#include <cmath>

#include "kernels/backend.h"

namespace muond::kernels {
namespace {

// bound x scale ends in (2^13, 2^14]: a factor of four below binary16's largest value, and elements
// 2^27 times smaller than the bound are still normal numbers there.
constexpr int kTargetExponent = 14;
// The largest exponent of a finite double; only bounds below every fp32 number come near it.
constexpr int kLargestExponent = 1023;

}  // namespace

double IterateScale(Dtype dtype, double bound) {
  if (dtype == Dtype::kF32 || !std::isfinite(bound) || bound <= 0) return 1;
  int exponent = 0;
  // bound = fraction x 2^exponent, fraction in [1/2, 1): 2^exponent is the next power of two, but
  // for the powers of two themselves.
  const double fraction = std::frexp(bound, &exponent);
  if (fraction == 0.5) --exponent;
  return std::ldexp(1.0, std::min(kTargetExponent - exponent, kLargestExponent));
}

}  // namespace muond::kernels

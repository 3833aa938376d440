// Element types and their exact conversions, one element at a time.
//
// These are the definition; the bulk conversions of kernels/cpu/passes_impl.cc must give the same
// bits, which the conformance suite checks for all 65536 patterns of both 16-bit types.
#include "kernels/tensor.h"

#include <bit>

namespace muond::kernels {
namespace {

constexpr std::uint32_t kF32AbsMask = 0x7fffffffu;
constexpr std::uint32_t kF32Infinity = 0x7f800000u;
// 112 = 127 - 15, the difference of the exponent biases, at the exponent's place.
constexpr std::uint32_t kF16Rebias = 112u << 23;

}  // namespace

std::size_t DtypeBytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

std::string_view DtypeName(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return "f32";
    case Dtype::kBF16:
      return "bf16";
    case Dtype::kF16:
      return "f16";
  }
  return "unknown";
}

float BF16ToFloat(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

std::uint16_t FloatToBF16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  // Adding to a NaN's bits could carry it into infinity or zero; a NaN is made quiet instead.
  if ((bits & kF32AbsMask) > kF32Infinity) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  // Half a unit less one, plus the last kept bit: ties go to even. A carry beyond the largest
  // finite value gives exactly the pattern of infinity.
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float F16ToFloat(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  std::uint32_t result;
  if (magnitude >= 0x7c00u) {
    result = kF32Infinity | ((magnitude & 0x3ffu) << 13);
    if (magnitude > 0x7c00u) result |= 0x400000u;  // quiet, as the processor's own conversion does
  } else if (magnitude >= 0x400u) {
    result = (magnitude << 13) + kF16Rebias;
  } else {
    // Zero and subnormals are multiples of 2^-24, all of which fp32 holds exactly.
    result = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
  }
  return std::bit_cast<float>(sign | result);
}

std::uint16_t FloatToF16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & kF32AbsMask;
  std::uint32_t result;
  if (magnitude > kF32Infinity) {
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {  // 65536 and beyond, infinity too
    result = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14: the normal range of binary16
    result = (magnitude - kF16Rebias + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else {
    // Adding 0.5, whose last place is 2^-24, lets the adder round to the subnormal grid.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    result = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u;
  }
  return static_cast<std::uint16_t>(sign | result);
}

}  // namespace muond::kernels

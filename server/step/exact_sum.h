// An exact accumulator of finite non-negative doubles: the sum does not depend on the order of its
// terms or on how they were split among daemons. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace muond {

class ExactSum {
 public:
  // value must be finite and >= 0 (checked).
  void Add(double value);
  void Merge(const ExactSum& other);
  // The sum rounded once to nearest even; +infinity beyond the largest double.
  double Value() const;
  // The sum itself, for another machine: digit i of the result counts units of
  // 2^(32 (first + i) - 1074). No digits: zero.
  struct Digits {
    std::int64_t first = 0;
    std::vector<std::uint32_t> digits;  // the first and the last are not zero
  };
  Digits ToDigits() const;
  // None when they lie outside the range of sums.
  static std::optional<ExactSum> FromDigits(std::int64_t first,
                                            std::span<const std::uint32_t> digits);
  // Equal as numbers, before any rounding.
  friend bool operator==(const ExactSum& a, const ExactSum& b);

 private:
  // Fixed point over the whole exponent range of double (Kulisch accumulator): limb i counts units
  // of 2^(32 i - 1074). A limb holds a 32-bit digit and, above it, carries not yet propagated, so
  // that 2^30 additions fit in between. 2098 bits span the range; the rest is room for carries.
  static constexpr int kLimbs = 68;
  void Normalize();
  std::array<std::uint64_t, kLimbs> limbs_{};
  std::uint32_t pending_ = 0;  // additions since the last carry propagation
};

}  // namespace muond

// Randomness that is the same on every machine and in every standard library, and hashes that stand
// for data. Plain values.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

namespace muond::simulation {

// splitmix64's finalizer.
inline std::uint64_t Mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Of numbers in their order.
template <typename... Numbers>
std::uint64_t Hash(Numbers... numbers) {
  std::uint64_t hash = 0;
  ((hash = Mix(hash ^ static_cast<std::uint64_t>(numbers))), ...);
  return hash;
}
inline std::uint64_t Bits(double value) { return std::bit_cast<std::uint64_t>(value); }

// Whether something happens, by a hash instead of a sequence: `p` of all hashes say yes.
inline bool Happens(std::uint64_t hash, double p) {
  return static_cast<double>(hash >> 11) * 0x1p-53 < p;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t Next() { return Mix(state_++); }
  std::int64_t Below(std::int64_t n) {
    return static_cast<std::int64_t>(Next() % static_cast<std::uint64_t>(n));
  }
  std::int64_t Between(std::int64_t first, std::int64_t last) {
    return first + Below(last - first + 1);
  }
  bool Chance(double p) { return Happens(Next(), p); }
  // One of those given.
  template <typename T>
  T Pick(const std::vector<T>& values) {
    return values[Below(static_cast<std::int64_t>(values.size()))];
  }
  template <typename T>
  void Shuffle(std::vector<T>& values) {
    for (std::size_t i = values.size(); i > 1; --i) {
      std::swap(values[i - 1], values[Below(static_cast<std::int64_t>(i))]);
    }
  }

 private:
  std::uint64_t state_;
};

}  // namespace muond::simulation

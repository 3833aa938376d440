// The numbers of the benchmark: tensors of a model in one buffer, and a generator for them that is
// cheap, reproducible and like the real thing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/values.h"

namespace muond::bench {

// splitmix64: fast, and any seed is good.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t Bits() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  // Nearly normal, mean 0, standard deviation 1, within 3.5, never 0: the sum of the four 16-bit
  // quarters of one draw (Irwin-Hall). Gradients are never zero either, and processors multiply
  // zeros faster.
  float Normal() {
    const std::uint64_t z = Bits();
    const auto sum = static_cast<std::int32_t>((z & 0xffff) + ((z >> 16) & 0xffff) +
                                               ((z >> 32) & 0xffff) + (z >> 48));
    const std::int32_t centred = sum - 2 * 0xffff;
    return static_cast<float>(centred == 0 ? 1 : centred) * (1.0f / 37837.2f);
  }

 private:
  std::uint64_t state_;
};

// `elements` values of `dtype`, all tensors of a model one after another.
class Values {
 public:
  Values(std::int64_t elements, Dtype dtype)
      : dtype_(dtype), bytes_(static_cast<std::size_t>(elements) * DtypeBytes(dtype)) {}

  // Normal values of standard deviation `scale`.
  void Fill(std::uint64_t seed, float scale);
  // Every bit set: NaN in any dtype, so that what a pull leaves out is seen.
  void Poison();

  float At(std::size_t i) const;
  // Rounds to nearest even.
  void Set(std::size_t i, float value);

  bool AllFinite() const;
  // crc32c of the bytes.
  std::uint32_t Digest() const;

  Dtype dtype() const { return dtype_; }
  std::size_t size() const { return bytes_.size() / DtypeBytes(dtype_); }
  std::byte* data() { return bytes_.data(); }
  // Where element i lies.
  std::byte* data(std::size_t i) { return bytes_.data() + i * DtypeBytes(dtype_); }

 private:
  Dtype dtype_;
  std::vector<std::byte> bytes_;
};

}  // namespace muond::bench

#include "client/bench/values.h"

#include <cmath>
#include <cstring>

#include "proto/crc32c.h"

namespace muond::bench {

void Values::Fill(std::uint64_t seed, float scale) {
  Random random(seed);
  for (std::size_t i = 0; i < size(); ++i) Set(i, random.Normal() * scale);
}

void Values::Poison() { std::memset(bytes_.data(), 0xff, bytes_.size()); }

float Values::At(std::size_t i) const {
  if (dtype_ == Dtype::kF32) return reinterpret_cast<const float*>(bytes_.data())[i];
  const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(bytes_.data())[i];
  return dtype_ == Dtype::kBF16 ? kernels::BF16ToFloat(bits) : kernels::F16ToFloat(bits);
}

void Values::Set(std::size_t i, float value) {
  if (dtype_ == Dtype::kF32) {
    reinterpret_cast<float*>(bytes_.data())[i] = value;
  } else {
    reinterpret_cast<std::uint16_t*>(bytes_.data())[i] =
        dtype_ == Dtype::kBF16 ? kernels::FloatToBF16(value) : kernels::FloatToF16(value);
  }
}

bool Values::AllFinite() const {
  for (std::size_t i = 0; i < size(); ++i) {
    if (!std::isfinite(At(i))) return false;
  }
  return true;
}

std::uint32_t Values::Digest() const { return Crc32c(bytes_.data(), bytes_.size()); }

}  // namespace muond::bench

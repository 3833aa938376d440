#include "client/bench/values.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "proto/crc32c.h"

namespace muond::bench {

// Block by block, each from a seed of its own: a billion values take long, and must not depend on
// how many threads make them.
void Values::Fill(std::uint64_t seed, float scale) {
  constexpr std::size_t kBlock = std::size_t{1} << 20;
  const std::size_t blocks = (size() + kBlock - 1) / kBlock;
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t block = next++; block < blocks; block = next++) {
      Random random(seed * 0x9E3779B97F4A7C15u + block);
      const std::size_t end = std::min(size(), (block + 1) * kBlock);
      for (std::size_t i = block * kBlock; i < end; ++i) Set(i, random.Normal() * scale);
    }
  };
  std::vector<std::thread> threads;
  const std::size_t cores = std::max(std::thread::hardware_concurrency(), 1u);
  for (std::size_t i = 1; i < std::min(cores, blocks); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
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

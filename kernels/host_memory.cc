// Aligned host memory over std::aligned_alloc.
#include "kernels/host_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace muond::kernels {
namespace {

constexpr std::size_t kAlignment = 64;

}  // namespace

void* AllocateHost(std::size_t bytes) {
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) return nullptr;
  // aligned_alloc wants a multiple of the alignment.
  const std::size_t rounded =
      std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  void* memory = std::aligned_alloc(kAlignment, rounded);
  if (memory != nullptr) std::memset(memory, 0, rounded);
  return memory;
}

void FreeHost(void* memory) { std::free(memory); }

float* HostScratch::Reserve(std::size_t floats) {
  if (floats > floats_ || memory_ == nullptr) {
    FreeHost(memory_);
    memory_ = AllocateHost(floats * sizeof(float));
    floats_ = memory_ == nullptr ? 0 : floats;
  }
  return static_cast<float*>(memory_);
}

}  // namespace muond::kernels

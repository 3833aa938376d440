// Aligned, zeroed host memory: what both CPU backends hand out and keep their scratch in.
#pragma once

#include <cstddef>

namespace muond::kernels {

// `bytes` zeroed bytes aligned to 64 (a cache line, an AVX-512 register), or null when there are
// none left. Zero bytes give a valid pointer. Any thread.
void* AllocateHost(std::size_t bytes);

// Frees what AllocateHost gave; null is ignored.
void FreeHost(void* memory);

// Bytes that the kernel would still give without swapping (MemAvailable), 0 when it does not say.
std::size_t FreeHostBytes();

// Scratch that only grows. Contents are lost on growth. One thread at a time.
class HostScratch {
 public:
  HostScratch() = default;
  HostScratch(const HostScratch&) = delete;
  HostScratch& operator=(const HostScratch&) = delete;
  ~HostScratch() { FreeHost(memory_); }

  // At least `floats` floats, or null when there is no memory left.
  float* Reserve(std::size_t floats);

 private:
  void* memory_ = nullptr;
  std::size_t floats_ = 0;
};

}  // namespace muond::kernels

// The digest of a transfer: a sum that thousands of threads can take of what lies on a GPU, the
// same as the daemon takes of what arrived (kernels/device_memory.h):
//   sum over i of v(i) * c(i) mod 2^64,   c(i) = mix(i) | 1,
//   mix(i) = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9,   x = (i + 1) * 0x9E3779B97F4A7C15,
// v(i) being the bits of element i, i counted in the slice's own order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace muond::nccl {

#ifdef __CUDACC__
#define MUOND_NCCL_BOTH __host__ __device__
#else
#define MUOND_NCCL_BOTH
#endif

// The factor c(i).
MUOND_NCCL_BOTH inline std::uint64_t SumFactor(std::uint64_t i) {
  const std::uint64_t x = (i + 1) * 0x9E3779B97F4A7C15u;
  return ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u) | 1u;
}

// `elements` elements of element_bytes (2 or 4) each, the first of which is the slice's first-th.
struct SumJob {
  const void* data = nullptr;
  std::uint64_t elements = 0;
  std::uint64_t first = 0;
  std::uint64_t element_bytes = 4;
};

// Of what lies in host memory.
inline std::uint64_t SumOnHost(const SumJob& job) {
  const auto* const bytes = static_cast<const unsigned char*>(job.data);
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < job.elements; ++i) {
    std::uint32_t value = 0;  // little endian, as everywhere here
    std::memcpy(&value, bytes + i * job.element_bytes, job.element_bytes);
    sum += value * SumFactor(job.first + i);
  }
  return sum;
}

}  // namespace muond::nccl

// The digest of a transfer: a sum that thousands of threads can take of what lies on a GPU, the
// same as the daemon takes of what arrived (kernels/device_memory.h):
//   sum over g of w(g) * c(g) mod 2^64,   c(g) = mix(g) | 1,
//   mix(g) = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9,   x = (g + 1) * 0x9E3779B97F4A7C15,
// w(g) being the slice's g-th eight bytes in its own order, little endian, zeros beyond the end.
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

// The factor c(g).
MUOND_NCCL_BOTH inline std::uint64_t SumFactor(std::uint64_t g) {
  const std::uint64_t x = (g + 1) * 0x9E3779B97F4A7C15u;
  return ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u) | 1u;
}

// What element i adds, `per_word` of which are eight bytes.
MUOND_NCCL_BOTH inline std::uint64_t SumOfElement(std::uint64_t bits, std::uint64_t i,
                                                  std::uint64_t per_word) {
  return (bits << (64 / per_word * (i % per_word))) * SumFactor(i / per_word);
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
    sum += SumOfElement(value, job.first + i, 8 / job.element_bytes);
  }
  return sum;
}

}  // namespace muond::nccl

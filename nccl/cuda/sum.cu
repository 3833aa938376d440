// One pass over each job, 16 bytes a load; the order of the additions does not matter.
#include <algorithm>

#include "nccl/cuda/sum.h"

namespace muond::nccl {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kBlocksMax = 2048;  // of a job
constexpr std::uint64_t kElementsPerThread = 32;
constexpr int kJobsMax = 65535;  // of a launch: the grid's second dimension

__device__ __forceinline__ std::uint64_t SumWord(std::uint32_t word, std::uint64_t i, bool halves) {
  if (!halves) return word * SumFactor(i);
  return (word & 0xffffu) * SumFactor(i) + (word >> 16) * SumFactor(i + 1);
}

__global__ void __launch_bounds__(kThreads)
    SumKernel(const SumJob* __restrict__ jobs, std::uint64_t* __restrict__ sums) {
  const SumJob job = jobs[blockIdx.y];
  const bool halves = job.element_bytes == 2;
  const std::uint64_t threads = std::uint64_t{gridDim.x} * kThreads;
  const std::uint64_t me = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::uint64_t per_word = halves ? 2 : 1;
  std::uint64_t sum = 0, done = 0;
  if (reinterpret_cast<std::uintptr_t>(job.data) % 16 == 0) {
    const auto* const quads = static_cast<const uint4*>(job.data);
    const std::uint64_t count = job.elements * job.element_bytes / 16;
    for (std::uint64_t at = me; at < count; at += threads) {
      const uint4 quad = quads[at];
      const std::uint64_t i = job.first + at * 4 * per_word;
      sum += SumWord(quad.x, i, halves) + SumWord(quad.y, i + per_word, halves) +
             SumWord(quad.z, i + 2 * per_word, halves) + SumWord(quad.w, i + 3 * per_word, halves);
    }
    done = count * 4 * per_word;
  }
  for (std::uint64_t at = done + me; at < job.elements; at += threads) {
    const std::uint32_t value = halves ? static_cast<const std::uint16_t*>(job.data)[at]
                                       : static_cast<const std::uint32_t*>(job.data)[at];
    sum += value * SumFactor(job.first + at);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  if (threadIdx.x % 32 == 0 && sum != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(sums + blockIdx.y),
              static_cast<unsigned long long>(sum));
  }
}

}  // namespace

cudaError_t LaunchSum(const SumJob* jobs, std::uint64_t* sums, int count, std::uint64_t largest,
                      cudaStream_t stream) {
  constexpr std::uint64_t kPerBlock = kThreads * kElementsPerThread;
  const auto blocks = static_cast<unsigned>(
      std::clamp<std::uint64_t>((largest + kPerBlock - 1) / kPerBlock, 1, kBlocksMax));
  for (int first = 0; first < count; first += kJobsMax) {
    const auto part = static_cast<unsigned>(std::min(count - first, kJobsMax));
    SumKernel<<<dim3(blocks, part), kThreads, 0, stream>>>(jobs + first, sums + first);
  }
  return cudaGetLastError();
}

}  // namespace muond::nccl

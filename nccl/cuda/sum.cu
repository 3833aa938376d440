// One pass over each job, 16 bytes a load; the order of the additions does not matter.
#include <algorithm>

#include "nccl/cuda/sum.h"

namespace muond::nccl {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kBlocksMax = 2048;  // of a job
constexpr std::uint64_t kElementsPerThread = 32;
constexpr int kJobsMax = 65535;  // of a launch: the grid's second dimension

// Eight bytes that begin with element i: those of two words where a row does not begin with one.
__device__ __forceinline__ std::uint64_t SumWord(std::uint32_t low, std::uint32_t high,
                                                 std::uint64_t i, std::uint32_t per_word) {
  const std::uint64_t word = static_cast<std::uint64_t>(high) << 32 | low;
  const auto at = static_cast<std::uint32_t>(i % per_word);
  const std::uint64_t g = i / per_word;
  if (at == 0) return word * SumFactor(g);
  const std::uint32_t shift = 64 / per_word * at;
  return (word << shift) * SumFactor(g) + (word >> (64 - shift)) * SumFactor(g + 1);
}

__global__ void __launch_bounds__(kThreads)
    SumKernel(const SumJob* __restrict__ jobs, std::uint64_t* __restrict__ sums) {
  const SumJob job = jobs[blockIdx.y];
  const bool halves = job.element_bytes == 2;
  const std::uint64_t threads = std::uint64_t{gridDim.x} * kThreads;
  const std::uint64_t me = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::uint32_t per_word = halves ? 4 : 2;
  std::uint64_t sum = 0, done = 0;
  if (reinterpret_cast<std::uintptr_t>(job.data) % 16 == 0) {
    const auto* const quads = static_cast<const uint4*>(job.data);
    const std::uint64_t count = job.elements * job.element_bytes / 16;
    for (std::uint64_t at = me; at < count; at += threads) {
      const uint4 quad = quads[at];
      const std::uint64_t i = job.first + at * 2 * per_word;
      sum += SumWord(quad.x, quad.y, i, per_word) + SumWord(quad.z, quad.w, i + per_word, per_word);
    }
    done = count * 2 * per_word;
  }
  for (std::uint64_t at = done + me; at < job.elements; at += threads) {
    const std::uint32_t value = halves ? static_cast<const std::uint16_t*>(job.data)[at]
                                       : static_cast<const std::uint32_t*>(job.data)[at];
    sum += SumOfElement(value, job.first + at, per_word);
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

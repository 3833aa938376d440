// Copy and sum: bound by memory for fp32, and nearly so for 16 bits, where twice as many factors go
// by in a byte's time.
#include "kernels/cuda/move.h"
#include "kernels/cuda/parts.cuh"
#include "kernels/device_memory.h"

namespace muond::kernels::cuda {
namespace {

using Sum = unsigned long long;

__device__ inline Sum Factor(std::uint64_t i) {
  const std::uint64_t x = (i + 1) * 0x9E3779B97F4A7C15ull;
  return ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9ull) | 1ull;
}

__device__ inline Sum SumOfQuad(const uint4& quad, std::uint64_t i) {
  return quad.x * Factor(i) + quad.y * Factor(i + 1) + quad.z * Factor(i + 2) +
         quad.w * Factor(i + 3);
}
__device__ inline Sum SumOfQuad(const uint2& quad, std::uint64_t i) {
  return (quad.x & 0xffffu) * Factor(i) + (quad.x >> 16) * Factor(i + 1) +
         (quad.y & 0xffffu) * Factor(i + 2) + (quad.y >> 16) * Factor(i + 3);
}

// Byte by byte: what is not aligned is rare and short.
__device__ inline Sum MoveElement(char* dst, const char* src, std::uint32_t bytes,
                                  std::uint64_t i) {
  Sum value = 0;
  for (std::uint32_t b = 0; b < bytes; ++b) {
    const auto byte = static_cast<unsigned char>(src[b]);
    if (dst != nullptr) dst[b] = static_cast<char>(byte);
    value |= static_cast<Sum>(byte) << (8 * b);
  }
  return value * Factor(i);
}

template <typename Quad>
__device__ Sum MovePart(const Part& part, const MovePassJob& job) {
  constexpr std::uint32_t kBytes = sizeof(Quad) / 4;
  const char* src = static_cast<const char*>(job.src) + part.begin * kBytes;
  char* dst = static_cast<char*>(job.dst);
  if (dst != nullptr) dst += part.begin * kBytes;
  const std::uint64_t first = job.first + part.begin;
  Sum sum = 0;
  ForEachOfThread<4>(
      part, job.aligned,
      [&]<int kCount>(std::uint32_t q) {
        Quad held[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          held[k] = reinterpret_cast<const Quad*>(src)[q + k * part.stride];
        }
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          if (dst != nullptr) reinterpret_cast<Quad*>(dst)[q + k * part.stride] = held[k];
          sum += SumOfQuad(held[k], first + std::uint64_t{4} * (q + k * part.stride));
        }
      },
      [&](std::uint32_t e) {
        sum += MoveElement(dst == nullptr ? nullptr : dst + std::size_t{e} * kBytes,
                           src + std::size_t{e} * kBytes, kBytes, first + e);
      });
  return sum;
}

__global__ void __launch_bounds__(kThreads) MoveKernel(JobTable<MovePassJob> table, Sum* sums) {
  const Part part = FindPart(table);
  const MovePassJob job = table.jobs[part.job];
  Sum sum = job.element_bytes == 4 ? MovePart<uint4>(part, job) : MovePart<uint2>(part, job);
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_down_sync(0xffffffffu, sum, lane);
  // A sum of integers: the order in which blocks come does not matter.
  if (threadIdx.x % 32 == 0) atomicAdd(sums + job.sum, sum);
}

}  // namespace

cudaError_t MoveAll(const JobTable<MovePassJob>& table, unsigned long long* sums,
                    cudaStream_t stream) {
  if (table.chunks == 0) return cudaSuccess;
  MoveKernel<<<table.chunks, kThreads, 0, stream>>>(table, sums);
  return cudaGetLastError();
}

}  // namespace muond::kernels::cuda

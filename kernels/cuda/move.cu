// Copy and sum: bound by memory, as one factor serves eight bytes.
#include "kernels/cuda/move.h"
#include "kernels/cuda/parts.cuh"
#include "kernels/device_memory.h"

namespace muond::kernels::cuda {
namespace {

using Sum = unsigned long long;

__device__ inline Sum Factor(std::uint64_t g) {
  const std::uint64_t x = (g + 1) * 0x9E3779B97F4A7C15ull;
  return ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9ull) | 1ull;
}

// Eight bytes that begin with the slice's i-th element, kPerWord of which they are: those of two of
// its words where a row or a part does not begin with one.
template <std::uint32_t kPerWord>
__device__ inline Sum SumOfWord(std::uint32_t low, std::uint32_t high, std::uint64_t i) {
  const Sum word = static_cast<Sum>(high) << 32 | low;
  const auto at = static_cast<std::uint32_t>(i % kPerWord);
  if (at == 0) return word * Factor(i / kPerWord);
  const std::uint32_t shift = 64 / kPerWord * at;
  return (word << shift) * Factor(i / kPerWord) + (word >> (64 - shift)) * Factor(i / kPerWord + 1);
}

__device__ inline Sum SumOfQuad(const uint4& quad, std::uint64_t i) {
  return SumOfWord<2>(quad.x, quad.y, i) + SumOfWord<2>(quad.z, quad.w, i + 2);
}
__device__ inline Sum SumOfQuad(const uint2& quad, std::uint64_t i) {
  return SumOfWord<4>(quad.x, quad.y, i);
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
  const std::uint32_t per_word = 8 / bytes;
  return (value << (8 * bytes * (i % per_word))) * Factor(i / per_word);
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
  __shared__ Sum of_warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (std::uint32_t warp = 0; warp < kThreads / 32; ++warp) sum += of_warps[warp];
  // A sum of integers: the order in which blocks come does not matter. Thousands of them add to one
  // slice's, and additions to one place queue up: each block makes one.
  atomicAdd(sums + job.sum, sum);
}

}  // namespace

cudaError_t MoveAll(const JobTable<MovePassJob>& table, unsigned long long* sums,
                    cudaStream_t stream) {
  if (table.chunks == 0) return cudaSuccess;
  MoveKernel<<<table.chunks, kThreads, 0, stream>>>(table, sums);
  return cudaGetLastError();
}

}  // namespace muond::kernels::cuda

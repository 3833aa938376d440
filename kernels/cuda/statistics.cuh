// What a pass finds out about the values it makes: finite or not, maximum, sum of squares in fp64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/quads.cuh"

namespace muond::kernels::cuda {

// One thread's part of a chunk.
//
// Non-finite values are not looked for: they make the sum non-finite, which finite fp32 values
// can't, and only then the thread looks at its elements again (Recount).
class Observer {
 public:
  __device__ void Observe(const Quad& quad) {
    for (const float value : quad.x) Observe(value);
  }
  __device__ void Observe(float value) {
    const double wide = value;
    sum_ = fma(wide, wide, sum_);
    max_ = fmaxf(max_, fabsf(value));
  }

  __device__ bool finite() const { return isfinite(sum_); }

  // value(e) gives the thread's own elements once more.
  template <typename Value>
  __device__ void Recount(const Part& part, Value&& value) {
    *this = Observer();
    for (std::uint32_t q = part.first; 4 * q < part.elements; q += part.stride) {
      const std::uint32_t end = min(4 * q + 4, part.elements);
      for (std::uint32_t e = 4 * q; e < end; ++e) {
        const float x = value(e);
        const bool finite = isfinite(x);
        nonfinite_ += finite ? 0 : 1;
        Observe(finite ? x : 0.0f);
      }
    }
  }

  // The sum over the thread block, in a fixed tree; valid in thread 0. Every thread must call.
  __device__ ChunkStats SumOverBlock() const {
    ChunkStats stats{sum_, max_, nonfinite_};
    stats = SumOverWarp(stats);
    __shared__ ChunkStats warps[kThreads / 32];
    __syncthreads();  // the array may still be read for the observer before this one
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = stats;
    __syncthreads();
    if (threadIdx.x >= 32) return stats;
    stats = threadIdx.x < kThreads / 32 ? warps[threadIdx.x] : ChunkStats{};
    return SumOverWarp(stats);
  }

 private:
  __device__ static ChunkStats SumOverWarp(ChunkStats stats) {
    for (int offset = 16; offset > 0; offset /= 2) {
      stats.sum_squares += __shfl_down_sync(0xffffffffu, stats.sum_squares, offset);
      stats.max_abs = fmaxf(stats.max_abs, __shfl_down_sync(0xffffffffu, stats.max_abs, offset));
      stats.nonfinite += __shfl_down_sync(0xffffffffu, stats.nonfinite, offset);
    }
    return stats;
  }

  double sum_ = 0;
  float max_ = 0;
  std::uint32_t nonfinite_ = 0;
};

// Statistics of values that the calling threads have just written, or have read: `value` as Recount
// has it, `data` the beginning of their region.
template <typename Value>
__device__ inline void FinishPartOf(Observer& observer, const Part& part, ChunkStats* result,
                                    Value&& value) {
  if (!observer.finite()) observer.Recount(part, value);
  const ChunkStats stats = observer.SumOverBlock();
  if (threadIdx.x == 0) *result = stats;
}

__device__ inline void FinishPart(Observer& observer, const float* data, const Part& part,
                                  ChunkStats* result) {
  FinishPartOf(observer, part, result, [&](std::uint32_t e) { return data[e]; });
}

__device__ inline void FinishPart(Observer& observer, const __nv_bfloat16* data, const Part& part,
                                  ChunkStats* result) {
  FinishPartOf(observer, part, result,
               [&](std::uint32_t e) { return __bfloat162float(data[e]); });
}

}  // namespace muond::kernels::cuda

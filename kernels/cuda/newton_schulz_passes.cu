// The kernels behind newton_schulz_passes.h.
#include "kernels/cuda/newton_schulz_passes.h"

#include <algorithm>
#include <cmath>

namespace muond::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 1 << 16;

// The sum over the block, in thread 0, in a fixed order.
__device__ double BlockSum(double value) {
  __shared__ double warps[kThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (const double warp : warps) sum += warp;
  }
  __syncthreads();
  return sum;
}

__device__ float SquaresOfPair(std::uint32_t pair) {
  const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  return v.x * v.x + v.y * v.y;
}

// What thread 0 of the last block of a matrix leaves behind.
__device__ void FinishNorm(const NormJob& job, double sum) {
  *job.sum = sum;
  NormScalars scalars;
  if (!isfinite(sum)) {
    const float nan = nanf("");  // a non-finite input must come out as a failed result
    scalars = {nan, nan, nan, nan};
  } else if (sum > 0) {
    const double norm = sqrt(sum), floor = *job.floor;
    const double inverse = 1.0 / fmax(norm, floor);
    const double scale = OutputScale(norm, floor, job.growth);
    scalars = {static_cast<float>(inverse / scale), static_cast<float>(inverse * inverse),
               static_cast<float>(scale * scale), static_cast<float>(inverse)};
  }
  *job.scalars = scalars;
}

__global__ void __launch_bounds__(kThreads)
    NormKernel(const NormJob* jobs, const NormPiece* pieces) {
  const NormPiece piece = pieces[blockIdx.x];
  const NormJob job = jobs[piece.job];
  const std::int64_t begin = piece.piece * kNormPiece;
  const std::int64_t count = min(kNormPiece, job.elements - begin);
  const __half* data = job.data + begin;
  float sum = 0;
  std::int64_t tail = 0;
  if (reinterpret_cast<std::uintptr_t>(data) % 16 == 0) {
    const std::int64_t quads = count / 8;
    tail = quads * 8;
#pragma unroll 8
    for (std::int64_t i = threadIdx.x; i < quads; i += kThreads) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(data) + i);
      sum += (SquaresOfPair(v.x) + SquaresOfPair(v.y)) + (SquaresOfPair(v.z) + SquaresOfPair(v.w));
    }
  }
  for (std::int64_t i = tail + threadIdx.x; i < count; i += kThreads) {
    const float v = __half2float(data[i]);
    sum += v * v;
  }
  const double total = BlockSum(sum);
  __shared__ bool last;
  const auto all = static_cast<std::uint32_t>((job.elements + kNormPiece - 1) / kNormPiece);
  if (threadIdx.x == 0) {
    job.partials[piece.piece] = total;
    __threadfence();
    last = atomicAdd(job.done, 1u) == all - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  double parts = 0;
  for (std::uint32_t i = threadIdx.x; i < all; i += kThreads) parts += __ldcg(job.partials + i);
  const double whole = BlockSum(parts);
  if (threadIdx.x != 0) return;
  *job.done = 0;
  FinishNorm(job, whole);
}

__global__ void __launch_bounds__(kThreads) SumKernel(const SumJob* jobs) {
  const SumJob job = jobs[blockIdx.x];
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < job.count; i += kThreads) sum += job.from[i];
  const double total = BlockSum(sum);
  if (threadIdx.x == 0) *job.to = total;
}

__global__ void CopyRowsKernel(__half* to, std::int64_t to_ld, const __half* from,
                               std::int64_t from_ld, std::int64_t rows, std::int64_t cols) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * cols;
       i += step) {
    const std::int64_t row = i / cols, col = i % cols;
    to[row * to_ld + col] = from[row * from_ld + col];
  }
}

__global__ void SpoilKernel(__half* element) { *element = __ushort_as_half(0x7E00); }

__global__ void WidenKernel(float* x, const __half* u, const float* scale, std::int64_t rows,
                            std::int64_t cols, bool transposed) {
  const float factor = *scale;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * cols;
       i += step) {
    const std::int64_t from = transposed ? i % cols * rows + i / cols : i;
    x[i] = factor * __half2float(u[from]);
  }
}

__global__ void NarrowKernel(__half* o, const float* x, double scale, std::int64_t rows,
                             std::int64_t cols, bool transposed) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * cols;
       i += step) {
    const std::int64_t to = transposed ? i % cols * rows + i / cols : i;
    o[to] = __double2half(x[i] / scale);
  }
}

// 64 x 64 values by 16 x 16 threads, 4 x 4 each; plain FMA in order of k, as fp32 is meant.
__global__ void __launch_bounds__(256) Fp32Kernel(const Fp32Product p) {
  __shared__ float a[16][64 + 4];
  __shared__ float b[16][64 + 4];
  const int tx = static_cast<int>(threadIdx.x) % 16, ty = static_cast<int>(threadIdx.x) / 16;
  const std::int64_t row = std::int64_t{blockIdx.y} * 64, col = std::int64_t{blockIdx.x} * 64;
  float sum[4][4] = {};
  for (std::int64_t k = 0; k < p.k; k += 16) {
    for (int i = static_cast<int>(threadIdx.x); i < 64 * 16; i += 256) {
      const std::int64_t ar = row + i / 16, ak = k + i % 16;
      a[i % 16][i / 16] = ar < p.rows && ak < p.k ? p.a[ar * p.k + ak] : 0.0f;
      const std::int64_t bc = col + (p.b_transposed ? i / 16 : i % 64);
      const int bi = p.b_transposed ? i % 16 : i / 64;
      const std::int64_t bk = k + bi;
      const bool inside = bc < p.cols && bk < p.k;
      b[bi][bc - col] = inside ? p.b[p.b_transposed ? bc * p.k + bk : bk * p.cols + bc] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[r][c] = fmaf(a[i][ty * 4 + r], b[i][tx * 4 + c], sum[r][c]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const std::int64_t i = row + ty * 4 + r, j = col + tx * 4 + c;
      if (i >= p.rows || j >= p.cols) continue;
      float value = p.alpha * sum[r][c];
      if (p.c != nullptr) value = fmaf(p.beta, p.c[i * p.cols + j], value);
      p.d[i * p.cols + j] = value;
    }
  }
}

unsigned Blocks(std::int64_t elements) {
  return static_cast<unsigned>(
      std::clamp<std::int64_t>((elements + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

}  // namespace

cudaError_t LaunchNorms(const NormJob* jobs, const NormPiece* pieces, int count,
                        cudaStream_t stream) {
  NormKernel<<<static_cast<unsigned>(count), kThreads, 0, stream>>>(jobs, pieces);
  return cudaGetLastError();
}

cudaError_t LaunchSums(const SumJob* jobs, int count, cudaStream_t stream) {
  SumKernel<<<static_cast<unsigned>(count), kThreads, 0, stream>>>(jobs);
  return cudaGetLastError();
}

cudaError_t LaunchCopyRows(__half* to, std::int64_t to_ld, const __half* from, std::int64_t from_ld,
                           std::int64_t rows, std::int64_t cols, cudaStream_t stream) {
  CopyRowsKernel<<<Blocks(rows * cols), kThreads, 0, stream>>>(to, to_ld, from, from_ld, rows,
                                                               cols);
  return cudaGetLastError();
}

cudaError_t LaunchSpoil(__half* element, cudaStream_t stream) {
  SpoilKernel<<<1, 1, 0, stream>>>(element);
  return cudaGetLastError();
}

cudaError_t LaunchWiden(float* x, const __half* u, const float* scale, std::int64_t rows,
                        std::int64_t cols, bool transposed, cudaStream_t stream) {
  WidenKernel<<<Blocks(rows * cols), kThreads, 0, stream>>>(x, u, scale, rows, cols, transposed);
  return cudaGetLastError();
}

cudaError_t LaunchNarrow(__half* o, const float* x, double scale, std::int64_t rows,
                         std::int64_t cols, bool transposed, cudaStream_t stream) {
  NarrowKernel<<<Blocks(rows * cols), kThreads, 0, stream>>>(o, x, scale, rows, cols, transposed);
  return cudaGetLastError();
}

cudaError_t LaunchFp32Product(const Fp32Product& product, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((product.cols + 63) / 64),
                  static_cast<unsigned>((product.rows + 63) / 64));
  Fp32Kernel<<<grid, 256, 0, stream>>>(product);
  return cudaGetLastError();
}

}  // namespace muond::kernels::cuda

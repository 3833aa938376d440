// Parameters on their way out, many tensors in one launch: fp32 state in the trainer's dtype.
#include "kernels/cuda/parts.cuh"

namespace muond::kernels::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) RoundKernel(JobTable<RoundPassJob> table) {
  const Part part = FindPart(table);
  const RoundPassJob job = table.jobs[part.job];
  const float* src = job.src + part.begin;
  char* dst = static_cast<char*>(job.dst) + part.begin * (job.dtype == Dtype::kF32 ? 4 : 2);
  ForEachOfThread<4>(
      part, job.aligned,
      [&]<int kCount>(std::uint32_t q) {
        Quad held[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          held[k] = LoadQuad<Dtype::kF32>(src, q + k * part.stride);
        }
#pragma unroll
        for (int k = 0; k < kCount; ++k) StoreQuad(dst, job.dtype, q + k * part.stride, held[k]);
      },
      [&](std::uint32_t e) { StoreElement(dst, job.dtype, e, src[e]); });
}

}  // namespace

cudaError_t RoundAll(const JobTable<RoundPassJob>& table, cudaStream_t stream) {
  RoundKernel<<<table.chunks, kThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

}  // namespace muond::kernels::cuda

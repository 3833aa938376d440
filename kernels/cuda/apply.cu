// The weight update after Newton-Schulz: W <- decay W - step O, and the parameter in its own type.
//
// In fp64, rounded once, like kernels/cpu/passes_impl.cc: for the same O the same bits.
#include "kernels/cuda/iterate_dtype.h"
#include "kernels/cuda/statistics.cuh"

namespace muond::kernels::cuda {
namespace {

__device__ float ApplyElement(double decay, double step, float w, float o) {
  return static_cast<float>(decay * static_cast<double>(w) - step * static_cast<double>(o));
}

__global__ void __launch_bounds__(kThreads, 4)
    ApplyKernel(JobTable<ApplyPassJob> table, ChunkStats* stats) {
  const Part part = FindPart(table);
  const ApplyPassJob job = table.jobs[part.job];
  float* w_out = job.w + part.begin;
  const char* o_in = static_cast<const char*>(job.o) + part.begin * 2;
  char* rounded = static_cast<char*>(job.rounded);
  if (rounded != nullptr) rounded += part.begin * (job.rounded_dtype == Dtype::kF32 ? 4 : 2);
  Observer observer;
  ForEachOfThread<2>(
      part, job.aligned,
      [&]<int kCount>(std::uint32_t q) {
        Quad w[kCount];
        RawQuad<kIterateDtype> raw[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          w[k] = LoadQuad<Dtype::kF32>(w_out, q + k * part.stride);
          raw[k] = LoadRaw<kIterateDtype>(o_in, q + k * part.stride);
        }
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          const Quad o = Unpack(raw[k]);
          for (int i = 0; i < 4; ++i) {
            w[k].x[i] = ApplyElement(job.decay, job.step, w[k].x[i], o.x[i]);
          }
          StoreQuad(w_out, Dtype::kF32, q + k * part.stride, w[k]);
          if (rounded != nullptr) StoreQuad(rounded, job.rounded_dtype, q + k * part.stride, w[k]);
          observer.Observe(w[k]);
        }
      },
      [&](std::uint32_t e) {
        const float o = LoadElement(o_in, kIterateDtype, e);
        const float w = ApplyElement(job.decay, job.step, w_out[e], o);
        w_out[e] = w;
        if (rounded != nullptr) StoreElement(rounded, job.rounded_dtype, e, w);
        observer.Observe(w);
      });
  FinishPart(observer, w_out, part, stats + blockIdx.x);
}

}  // namespace

cudaError_t Apply(const JobTable<ApplyPassJob>& table, ChunkStats* stats, cudaStream_t stream) {
  static_assert(kIterateDtype != Dtype::kF32, "addresses of O count two bytes an element");
  ApplyKernel<<<table.chunks, kThreads, 0, stream>>>(table, stats);
  return cudaGetLastError();
}

}  // namespace muond::kernels::cuda

// Momentum and the input of Newton-Schulz, in one pass: reads g and M, writes M and U.
//
// In fp64 like kernels/cpu/passes_impl.cc, M to the same bits, in fp32 or bf16. The pass waits for
// memory, not for the adders: about 20 fp64 operations for 12 bytes.
#include <type_traits>

#include "kernels/cuda/iterate_dtype.h"
#include "kernels/cuda/statistics.cuh"

namespace muond::kernels::cuda {
namespace {

// A job's numbers, in shared memory: in registers throughout they would leave room for fewer
// threads. `volatile` makes every use a load of its own.
struct Terms {
  double gradient_scale, beta, rest, u_scale;
};

// Replaces m by the new M as it is kept; u becomes U times its scale.
template <Dtype kM, bool kEma, bool kNesterov, int N>
__device__ void NewMomentum(const volatile Terms& terms, const float (&gradient)[N], float unscale,
                            float (&m)[N], float (&u)[N]) {
  const double scale = terms.gradient_scale, beta = terms.beta, rest = terms.rest,
               u_scale = terms.u_scale;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const double g = static_cast<double>(gradient[i] * unscale) * scale;
    const double old_m = m[i];
    m[i] = static_cast<float>(kEma ? old_m + rest * (g - old_m) : beta * old_m + g);
    if constexpr (kM == Dtype::kBF16) m[i] = __bfloat162float(__float2bfloat16_rn(m[i]));
    const double new_m = m[i];
    const double wide = kNesterov ? (kEma ? rest * g : g) + beta * new_m : new_m;
    // A power of two: the product is exact, and a 16-bit type keeps what fp32 might have lost.
    u[i] = static_cast<float>(wide * u_scale);
  }
}

struct Pointers {
  const char* gradient;
  char* m;
  char* u;
  bool write_m;
};

template <Dtype kDtype, Dtype kM, bool kEma, bool kNesterov>
__device__ void MomentumPart(const volatile Terms& terms, float unscale, bool aligned,
                             const Pointers& at, const Part& part, Observer& observer) {
  ForEachOfThread<2>(
      part, aligned,
      [&]<int kCount>(std::uint32_t q) {
        RawQuad<kDtype> raw[kCount];
        Quad m[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          raw[k] = LoadRaw<kDtype>(at.gradient, q + k * part.stride);
          m[k] = LoadQuad<kM>(at.m, q + k * part.stride);
        }
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          Quad u;
          NewMomentum<kM, kEma, kNesterov>(terms, Unpack(raw[k]).x, unscale, m[k].x, u.x);
          StoreIterateQuad<kIterateDtype>(at.u, q + k * part.stride, u);
          if (!at.write_m) continue;
          if constexpr (kM == Dtype::kF32) {
            StoreQuad(at.m, kM, q + k * part.stride, m[k]);
          } else {
            StoreIterateQuad<kM>(at.m, q + k * part.stride, m[k]);
          }
          observer.Observe(m[k]);
        }
      },
      [&](std::uint32_t e) {
        const float g[1] = {LoadElement(at.gradient, kDtype, e)};
        float m[1] = {LoadElement(at.m, kM, e)}, u[1];
        NewMomentum<kM, kEma, kNesterov>(terms, g, unscale, m, u);
        StoreElement(at.u, kIterateDtype, e, u[0]);
        if (!at.write_m) return;
        StoreElement(at.m, kM, e, m[0]);
        observer.Observe(m[0]);
      });
}

template <Dtype kDtype, Dtype kM>
__device__ void MomentumOf(const MomentumPassJob& job, const volatile Terms& terms,
                           const Pointers& at, const Part& part, Observer& observer) {
  const auto run = [&]<bool kEma, bool kNesterov>() {
    MomentumPart<kDtype, kM, kEma, kNesterov>(terms, job.unscale, job.aligned, at, part, observer);
  };
  if (job.ema) {
    job.nesterov ? run.template operator()<true, true>() : run.template operator()<true, false>();
  } else {
    job.nesterov ? run.template operator()<false, true>() : run.template operator()<false, false>();
  }
}

// Of the jobs whose M is kept in kM: one kernel for both kinds would spill registers.
template <Dtype kM>
__global__ void __launch_bounds__(kThreads, 6)
    MomentumKernel(JobTable<MomentumPassJob> table, ChunkStats* stats) {
  const Part part = FindPart(table);
  const MomentumPassJob& job = table.jobs[part.job];
  if (job.m_dtype != kM) return;
  const Dtype dtype = job.dtype;
  const Pointers at{
      static_cast<const char*>(job.gradient) + part.begin * (dtype == Dtype::kF32 ? 4 : 2),
      static_cast<char*>(job.m) + part.begin * (kM == Dtype::kF32 ? 4 : 2),
      static_cast<char*>(job.u) + part.begin * 2, job.write_m};
  __shared__ Terms terms;
  if (threadIdx.x == 0) terms = {job.gradient_scale, job.beta, 1 - job.beta, job.u_scale};
  __syncthreads();
  Observer observer;
  if (dtype == Dtype::kF32) {
    MomentumOf<Dtype::kF32, kM>(job, terms, at, part, observer);
  } else if (dtype == Dtype::kBF16) {
    MomentumOf<Dtype::kBF16, kM>(job, terms, at, part, observer);
  } else {
    MomentumOf<Dtype::kF16, kM>(job, terms, at, part, observer);
  }
  using Kept = std::conditional_t<kM == Dtype::kF32, float, __nv_bfloat16>;
  FinishPart(observer, reinterpret_cast<const Kept*>(at.m), part, stats + blockIdx.x);
}

}  // namespace

cudaError_t Momentum(const JobTable<MomentumPassJob>& table, MomentumKinds kinds,
                     ChunkStats* stats, cudaStream_t stream) {
  static_assert(kIterateDtype != Dtype::kF32, "addresses of U count two bytes an element");
  if (kinds.f32) {
    MomentumKernel<Dtype::kF32><<<table.chunks, kThreads, 0, stream>>>(table, stats);
  }
  if (kinds.bf16) {
    MomentumKernel<Dtype::kBF16><<<table.chunks, kThreads, 0, stream>>>(table, stats);
  }
  return cudaGetLastError();
}

}  // namespace muond::kernels::cuda

// AdamW in one pass: reads g, w, m, v, writes w, m, v and the parameter in its own type.
//
// In fp64, rounded once per value, like kernels/cpu/passes_impl.cc and to the same bits.
#include "kernels/cuda/statistics.cuh"

namespace muond::kernels::cuda {
namespace {

// Square root and quotient, correctly rounded: the steps that the compiler makes of sqrt() and `/`,
// without their branches for numbers near the ends of fp64's range. The operands here come from
// fp32 values and settings and are far from there, and those branches cost half of the registers.
//
// The root of infinity is a number so large that a quotient by it vanishes beside any weight: an
// overflown v leaves w alone, as it does on the CPU.
__device__ double SquareRoot(float value) {
  const double x = value;
  double y;  // 1 / sqrt(x), 20 bits, then 60
  asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  const double e = fma(x, -(y * y), 1.0);
  y = fma(fma(e, 0.375, 0.5), e * y, y);
  const double root = x * y;
  const double rounded = fma(fma(root, -root, x), 0.5 * y, root);
  return value == 0 ? 0.0 : isinf(value) ? 1e200 : rounded;
}

// NaN where b is 0.
__device__ double Quotient(double a, double b) {
  double r;  // 1 / b, 20 bits, then 60
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(b));
  const double e = fma(r, -b, 1.0);
  r = fma(r, fma(e, e, e), r);
  r = fma(r, fma(r, -b, 1.0), r);
  const double q = a * r;
  return fma(r, fma(q, -b, a), q);
}

// What a job says, in shared memory: held in registers throughout it would leave room for half as
// many threads. `volatile` makes every use a load of its own.
struct Terms {
  double gradient_scale, beta1, rest1, beta2, rest2;
  double eps, decay, step, v_factor;
  // At the beginning of the region.
  const char* gradient;
  float* w;
  float* m;
  float* v;
  char* rounded;
  float unscale;
  Dtype rounded_dtype;
};

// Both steps work on N elements at a time.
template <int N>
__device__ void NewMoments(const volatile Terms& terms, const float (&gradient)[N], float (&m)[N],
                           float (&v)[N]) {
  const float unscale = terms.unscale;
  const double scale = terms.gradient_scale, beta1 = terms.beta1, rest1 = terms.rest1,
               beta2 = terms.beta2, rest2 = terms.rest2;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const double g = static_cast<double>(gradient[i] * unscale) * scale;
    m[i] = static_cast<float>(beta1 * static_cast<double>(m[i]) + rest1 * g);
    v[i] = static_cast<float>(beta2 * static_cast<double>(v[i]) + (rest2 * g) * g);
  }
}

template <int N>
__device__ void NewWeights(const volatile Terms& terms, const float (&m)[N], const float (&v)[N],
                           float (&w)[N]) {
  const double eps = terms.eps, decay = terms.decay, step = terms.step, v_factor = terms.v_factor;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const double denominator = SquareRoot(v[i]) * v_factor + eps;
    const double update = Quotient(step * static_cast<double>(m[i]), denominator);
    w[i] = static_cast<float>(decay * static_cast<double>(w[i]) - update);
  }
}

template <Dtype kDtype>
__device__ void AdamWPart(const volatile Terms& terms, bool aligned, const Part& part,
                          Observer (&observers)[3]) {
  ForEachOfThread<1>(
      part, aligned,
      [&]<int kCount>(std::uint32_t q) {
        static_assert(kCount == 1, "four loads of 16 bytes are enough in flight");
        const RawQuad<kDtype> raw = LoadRaw<kDtype>(terms.gradient, q);
        Quad m = LoadQuad<Dtype::kF32>(terms.m, q);
        Quad v = LoadQuad<Dtype::kF32>(terms.v, q);
        Quad w = LoadQuad<Dtype::kF32>(terms.w, q);
        NewMoments(terms, Unpack(raw).x, m.x, v.x);
        StoreQuad(terms.m, Dtype::kF32, q, m);
        StoreQuad(terms.v, Dtype::kF32, q, v);
        observers[1].Observe(m);
        observers[2].Observe(v);
        NewWeights(terms, m.x, v.x, w.x);
        StoreQuad(terms.w, Dtype::kF32, q, w);
        observers[0].Observe(w);
        char* const rounded = terms.rounded;
        if (rounded != nullptr) StoreQuad(rounded, terms.rounded_dtype, q, w);
      },
      [&](std::uint32_t e) {
        const float g[1] = {LoadElement(terms.gradient, kDtype, e)};
        float m[1] = {terms.m[e]}, v[1] = {terms.v[e]}, w[1] = {terms.w[e]};
        NewMoments(terms, g, m, v);
        NewWeights(terms, m, v, w);
        terms.m[e] = m[0];
        terms.v[e] = v[0];
        terms.w[e] = w[0];
        char* const rounded = terms.rounded;
        if (rounded != nullptr) StoreElement(rounded, terms.rounded_dtype, e, w[0]);
        observers[0].Observe(w[0]);
        observers[1].Observe(m[0]);
        observers[2].Observe(v[0]);
      });
}

__device__ Terms TermsOf(const AdamWPassJob& job, std::size_t begin) {
  const std::size_t gradient_bytes = job.dtype == Dtype::kF32 ? 4 : 2;
  const std::size_t rounded_bytes = job.rounded_dtype == Dtype::kF32 ? 4 : 2;
  return {.gradient_scale = job.gradient_scale,
          .beta1 = job.beta1,
          .rest1 = 1 - job.beta1,
          .beta2 = job.beta2,
          .rest2 = 1 - job.beta2,
          .eps = job.eps,
          .decay = job.decay,
          .step = job.step,
          .v_factor = job.v_factor,
          .gradient = static_cast<const char*>(job.gradient) + begin * gradient_bytes,
          .w = job.w + begin,
          .m = job.m + begin,
          .v = job.v + begin,
          .rounded = job.rounded == nullptr
                         ? nullptr
                         : static_cast<char*>(job.rounded) + begin * rounded_bytes,
          .unscale = job.unscale,
          .rounded_dtype = job.rounded_dtype};
}

__global__ void __launch_bounds__(kThreads, 6)
    AdamWKernel(JobTable<AdamWPassJob> table, ChunkStats* stats) {
  const Part part = FindPart(table);
  const AdamWPassJob& job = table.jobs[part.job];
  __shared__ Terms terms;
  if (threadIdx.x == 0) terms = TermsOf(job, part.begin);
  __syncthreads();
  Observer observers[3];
  if (job.dtype == Dtype::kF32) {
    AdamWPart<Dtype::kF32>(terms, job.aligned, part, observers);
  } else if (job.dtype == Dtype::kBF16) {
    AdamWPart<Dtype::kBF16>(terms, job.aligned, part, observers);
  } else {
    AdamWPart<Dtype::kF16>(terms, job.aligned, part, observers);
  }
  FinishPart(observers[0], terms.w, part, stats + blockIdx.x);
  FinishPart(observers[1], terms.m, part, stats + table.chunks + blockIdx.x);
  FinishPart(observers[2], terms.v, part, stats + 2 * std::size_t{table.chunks} + blockIdx.x);
}

}  // namespace

cudaError_t AdamW(const JobTable<AdamWPassJob>& table, ChunkStats* stats, cudaStream_t stream) {
  AdamWKernel<<<table.chunks, kThreads, 0, stream>>>(table, stats);
  return cudaGetLastError();
}

}  // namespace muond::kernels::cuda

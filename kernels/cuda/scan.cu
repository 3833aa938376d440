// The read-only passes over gradients and state; the kernel that combines every pass's statistics.
#include "kernels/cuda/statistics.cuh"

namespace muond::kernels::cuda {
namespace {

template <Dtype kDtype>
__device__ void ObserveAll(const void* data, const Part& part, float unscale, bool aligned,
                           Observer& observer) {
  constexpr int kUnroll = kDtype == Dtype::kF32 ? 4 : 8;
  ForEachOfThread<kUnroll>(
      part, aligned,
      [&]<int kCount>(std::uint32_t q) {
        RawQuad<kDtype> raw[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) raw[k] = LoadRaw<kDtype>(data, q + k * part.stride);
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          Quad quad = Unpack(raw[k]);
          for (float& x : quad.x) x *= unscale;
          observer.Observe(quad);
        }
      },
      [&](std::uint32_t e) { observer.Observe(LoadElement(data, kDtype, e) * unscale); });
}

__global__ void __launch_bounds__(kThreads, 4)
    ScanKernel(JobTable<ScanJob> table, ChunkStats* stats) {
  const std::uint32_t index = FindJob(table);
  const ScanJob job = table.jobs[index];
  const Part part = PartOf<kScanChunkElements, 1>(table.first_chunk, index, job.elements);
  const char* data = static_cast<const char*>(job.data) +
                     part.begin * (job.dtype == Dtype::kF32 ? sizeof(float) : 2);
  Observer observer;
  if (job.dtype == Dtype::kF32) {
    ObserveAll<Dtype::kF32>(data, part, job.unscale, job.aligned, observer);
  } else if (job.dtype == Dtype::kBF16) {
    ObserveAll<Dtype::kBF16>(data, part, job.unscale, job.aligned, observer);
  } else {
    ObserveAll<Dtype::kF16>(data, part, job.unscale, job.aligned, observer);
  }
  if (!observer.finite()) {
    observer.Recount(
        part, [&](std::uint32_t e) { return LoadElement(data, job.dtype, e) * job.unscale; });
  }
  const ChunkStats found = observer.SumOverBlock();
  if (threadIdx.x == 0) stats[blockIdx.x] = found;
}

__global__ void __launch_bounds__(kThreads, 4)
    ScanStateKernel(JobTable<StateScanJob> table, ChunkStats* stats) {
  const Part part = FindPart(table);
  const StateScanJob job = table.jobs[part.job];
  const char* data =
      static_cast<const char*>(job.data) + part.begin * (job.dtype == Dtype::kF32 ? 4 : 2);
  Observer observer;
  if (job.dtype == Dtype::kF32) {
    ObserveAll<Dtype::kF32>(data, part, 1.0f, job.aligned, observer);
    FinishPart(observer, reinterpret_cast<const float*>(data), part, stats + blockIdx.x);
  } else {
    ObserveAll<Dtype::kBF16>(data, part, 1.0f, job.aligned, observer);
    FinishPart(observer, reinterpret_cast<const __nv_bfloat16*>(data), part, stats + blockIdx.x);
  }
}

__device__ void Add(TensorStats& total, const TensorStats& more) {
  total.nonfinite += more.nonfinite;
  total.max_abs = fmax(total.max_abs, more.max_abs);
  total.sum_squares += more.sum_squares;
}

// One block of threads per job (x) and plane (y). Thread t takes chunks t, t + kCombineThreads, ...
// in order, several loads at a time; then a fixed tree.
constexpr std::uint32_t kCombineThreads = 512;

__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(const ChunkStats* stats, const std::uint32_t* first_chunk, std::uint32_t chunks,
                  TensorStats* tensors, double* chunk_sums) {
  constexpr std::uint32_t kInFlight = 8;
  const std::uint32_t first = first_chunk[blockIdx.x];
  const std::uint32_t count = first_chunk[blockIdx.x + 1] - first;
  const ChunkStats* mine = stats + static_cast<std::size_t>(blockIdx.y) * chunks + first;
  TensorStats total{};
  for (std::uint32_t c = threadIdx.x; c < count; c += kInFlight * kCombineThreads) {
    ChunkStats held[kInFlight];
#pragma unroll
    for (std::uint32_t k = 0; k < kInFlight; ++k) {
      const std::uint32_t chunk = c + k * kCombineThreads;
      held[k] = chunk < count ? mine[chunk] : ChunkStats{};
    }
#pragma unroll
    for (std::uint32_t k = 0; k < kInFlight; ++k) {
      const std::uint32_t chunk = c + k * kCombineThreads;
      Add(total, {held[k].nonfinite, held[k].max_abs, held[k].sum_squares});
      if (chunk_sums != nullptr && chunk < count) chunk_sums[first + chunk] = held[k].sum_squares;
    }
  }
  __shared__ TensorStats shared[kCombineThreads];
  shared[threadIdx.x] = total;
  for (std::uint32_t width = kCombineThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) Add(shared[threadIdx.x], shared[threadIdx.x + width]);
  }
  if (threadIdx.x == 0) tensors[blockIdx.x * gridDim.y + blockIdx.y] = shared[0];
}

}  // namespace

bool QuadAligned(const void* address, Dtype dtype) {
  return reinterpret_cast<std::uintptr_t>(address) % (4 * (dtype == Dtype::kF32 ? 4 : 2)) == 0;
}

cudaError_t Scan(const JobTable<ScanJob>& table, ChunkStats* stats, cudaStream_t stream) {
  ScanKernel<<<table.chunks, kThreads, 0, stream>>>(table, stats);
  return cudaGetLastError();
}

cudaError_t ScanState(const JobTable<StateScanJob>& table, ChunkStats* stats, cudaStream_t stream) {
  ScanStateKernel<<<table.chunks, kThreads, 0, stream>>>(table, stats);
  return cudaGetLastError();
}

cudaError_t Combine(const ChunkStats* stats, const std::uint32_t* first_chunk, std::uint32_t jobs,
                    std::uint32_t chunks, std::uint32_t planes, TensorStats* tensors,
                    double* chunk_sums, cudaStream_t stream) {
  CombineKernel<<<dim3(jobs, planes), kCombineThreads, 0, stream>>>(stats, first_chunk, chunks,
                                                                    tensors, chunk_sums);
  return cudaGetLastError();
}

}  // namespace muond::kernels::cuda

// The elementwise passes on the device: job tables in, one launch per batch, statistics out.
//
// Which thread of which thread block sees an element, and the order of every sum, depend on the
// number of elements and the element's index only: not on the grid, the alignment, the element type
// or the rest of the batch (kernels/cuda/parts.cuh). Pointers are device pointers or pinned host
// memory; they may have any alignment, `aligned` jobs are fast. Nothing here waits; the functions
// return the error of the launch. Host side: kernels/cuda/elementwise_runner.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"

namespace muond::kernels::cuda {

// What one thread block works on. Small enough that the last wave of thread blocks is short, large
// enough that its beginning and end don't show.
inline constexpr std::uint32_t kChunkElements = 4 * 1024;  // passes that write, scans of state
inline constexpr std::uint32_t kScanChunkElements = kBlockElements;  // one sum per block is wanted
inline constexpr std::uint32_t kCopyChunkBytes = 16 * 1024;
// So many neighbouring chunks are cut in stripes, not in pieces: thread blocks that run at the same
// time walk side by side through memory, which gains 2 to 5 % of the copy rate.
inline constexpr std::uint32_t kStripedChunks = 128;

// Of one chunk. Non-finite elements count as 0 in the sum and the maximum.
struct ChunkStats {
  double sum_squares;
  float max_abs;
  std::uint32_t nonfinite;
};

// Of one tensor: its chunks' statistics combined in fixed order.
struct TensorStats {
  std::uint64_t nonfinite;
  double max_abs;
  double sum_squares;
};

// `count` jobs, all in device memory. Job j has chunks first_chunk[j] to first_chunk[j + 1] - 1;
// first_chunk[count] is `chunks`.
template <typename Job>
struct JobTable {
  const Job* jobs;
  const std::uint32_t* first_chunk;
  std::uint32_t count;
  std::uint32_t chunks;
};

struct ScanJob {
  const void* data;
  std::size_t elements;
  float unscale;
  Dtype dtype;
  bool aligned;
};

struct StateScanJob {
  const void* data;
  std::size_t elements;
  Dtype dtype;  // kF32 or kBF16
  bool aligned;
};

struct MomentumPassJob {
  const void* gradient;
  void* m;  // m_dtype
  void* u;  // iterate dtype
  std::size_t elements;
  double gradient_scale;
  double beta;
  double u_scale;
  float unscale;
  Dtype dtype;    // of the gradient
  Dtype m_dtype;  // kF32 or kBF16
  bool ema, nesterov, write_m;
  bool aligned;
};

// What the momenta of a table are kept in: a launch for each.
struct MomentumKinds {
  bool f32, bf16;
};

struct ApplyPassJob {
  float* w;
  const void* o;  // iterate dtype
  void* rounded;  // null: none
  std::size_t elements;
  double decay;
  double step;
  Dtype rounded_dtype;
  bool aligned;
};

struct AdamWPassJob {
  const void* gradient;
  float* w;
  float* m;
  float* v;
  void* rounded;  // null: none
  std::size_t elements;
  double gradient_scale;
  double beta1, beta2, eps, decay;
  double step;      // lr / (1 - beta1^t)
  double v_factor;  // 1 / sqrt(1 - beta2^t)
  float unscale;
  Dtype dtype;  // of the gradient
  Dtype rounded_dtype;
  bool aligned;
};

// Chunks are of kCopyChunkBytes. `unit` divides both addresses: 16, 8, 4, 2 or 1.
struct CopyPassJob {
  void* dst;
  const void* src;
  std::size_t bytes;
  std::uint32_t unit;
};

// dst[i] = src[i] in `dtype`, to nearest even.
struct RoundPassJob {
  void* dst;
  const float* src;
  std::size_t elements;
  Dtype dtype;
  bool aligned;
};

// Whether quads of `dtype` at this address can be read and written at once: true also for null.
bool QuadAligned(const void* address, Dtype dtype);

// stats[c] is that of chunk c, a block of kBlockElements.
cudaError_t Scan(const JobTable<ScanJob>& table, ChunkStats* stats, cudaStream_t stream);
cudaError_t ScanState(const JobTable<StateScanJob>& table, ChunkStats* stats, cudaStream_t stream);
// stats[c] describes the new M, all zero where M is not written.
cudaError_t Momentum(const JobTable<MomentumPassJob>& table, MomentumKinds kinds,
                     ChunkStats* stats, cudaStream_t stream);
cudaError_t Apply(const JobTable<ApplyPassJob>& table, ChunkStats* stats, cudaStream_t stream);
// stats[s * chunks + c]: s is 0 for the new W, 1 for m, 2 for v.
cudaError_t AdamW(const JobTable<AdamWPassJob>& table, ChunkStats* stats, cudaStream_t stream);
cudaError_t CopyAll(const JobTable<CopyPassJob>& table, cudaStream_t stream);
cudaError_t RoundAll(const JobTable<RoundPassJob>& table, cudaStream_t stream);

// tensors[j * planes + s] combines job j's part of plane s, a plane being `chunks` ChunkStats.
// Where chunk_sums is not null, chunk_sums[c] is the sum of squares of chunk c in plane 0. Both
// outputs may be pinned host memory.
cudaError_t Combine(const ChunkStats* stats, const std::uint32_t* first_chunk, std::uint32_t jobs,
                    std::uint32_t chunks, std::uint32_t planes, TensorStats* tensors,
                    double* chunk_sums, cudaStream_t stream);

// acc[i] = first ? float(data[i]) : acc[i] + float(data[i]).
cudaError_t AddTo(float* acc, const void* data, Dtype dtype, std::size_t elements, bool first,
                  cudaStream_t stream);
// dst[i] = src[i] in `dtype`, to nearest even.
cudaError_t RoundTo(void* dst, Dtype dtype, const float* src, std::size_t elements,
                    cudaStream_t stream);
// iterate[i] = src[i] * scale in the iterate dtype, and back without the scale.
cudaError_t ToIterate(void* iterate, const float* src, std::size_t elements, double scale,
                      cudaStream_t stream);
cudaError_t FromIterate(float* dst, const void* iterate, std::size_t elements, cudaStream_t stream);

}  // namespace muond::kernels::cuda

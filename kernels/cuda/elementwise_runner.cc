// Tables of jobs for the elementwise passes.
#include "kernels/cuda/elementwise_runner.h"

#include <cmath>
#include <limits>

#include "kernels/cuda/iterate_dtype.h"

namespace muond::kernels::cuda {
namespace {

#define MUOND_RETURN_IF_CUDA_ERROR(expression) \
  if (const cudaError_t error = (expression); error != cudaSuccess) return error

std::size_t ChunksOf(const CopyPassJob& job) {
  return (job.bytes + kCopyChunkBytes - 1) / kCopyChunkBytes;
}
std::size_t ChunksOf(const ScanJob& job) { return BlockCount(job.elements); }
template <typename Job>
std::size_t ChunksOf(const Job& job) {
  return (job.elements + kChunkElements - 1) / kChunkElements;
}

bool Aligned(const GradientView& gradient) { return QuadAligned(gradient.data, gradient.dtype); }
bool Aligned(const float* state) { return QuadAligned(state, Dtype::kF32); }
bool AlignedIterate(const void* data) { return QuadAligned(data, kIterateDtype); }
bool Aligned(const RoundedCopy& copy) { return QuadAligned(copy.data, copy.dtype); }

CopyPassJob MakeJob(const CopyJob& job) {
  const auto both =
      reinterpret_cast<std::uintptr_t>(job.dst) | reinterpret_cast<std::uintptr_t>(job.src) | 16u;
  return {job.dst, job.src, job.bytes, static_cast<std::uint32_t>(both & -both)};
}

RoundPassJob MakeJob(const RoundJob& job) {
  return {job.dst, job.src, job.elements, job.dtype,
          QuadAligned(job.dst, job.dtype) && QuadAligned(job.src, Dtype::kF32)};
}

ScanJob MakeJob(const GradientView& gradient) {
  return {gradient.data, gradient.elements, gradient.unscale, gradient.dtype, Aligned(gradient)};
}

StateScanJob MakeJob(const StateView& state) {
  return {state.data, state.elements, state.dtype, QuadAligned(state.data, state.dtype)};
}

MomentumPassJob MakeJob(const MomentumJob& job) {
  return {
      .gradient = job.gradient.data,
      .m = job.m,
      .u = job.u,
      .elements = job.gradient.elements,
      .gradient_scale = job.rule.gradient_scale,
      .beta = job.rule.beta,
      .u_scale = job.u_scale,
      .unscale = job.gradient.unscale,
      .dtype = job.gradient.dtype,
      .m_dtype = job.rule.m_dtype,
      .ema = job.rule.form == MomentumForm::kEma,
      .nesterov = job.rule.nesterov,
      .write_m = job.write_m,
      .aligned =
          Aligned(job.gradient) && QuadAligned(job.m, job.rule.m_dtype) && AlignedIterate(job.u),
  };
}

ApplyPassJob MakeJob(const ApplyJob& job) {
  return {
      .w = job.w,
      .o = job.o,
      .rounded = job.rounded.data,
      .elements = job.elements,
      .decay = job.decay,
      .step = job.step,
      .rounded_dtype = job.rounded.dtype,
      .aligned = Aligned(job.w) && AlignedIterate(job.o) && Aligned(job.rounded),
  };
}

AdamWPassJob MakeJob(const AdamWJob& job) {
  const AdamWRule& rule = job.rule;
  const double t = static_cast<double>(rule.t);
  const AdamWState& state = job.state;
  return {
      .gradient = job.gradient.data,
      .w = state.w,
      .m = state.exp_avg,
      .v = state.exp_avg_sq,
      .rounded = job.rounded.data,
      .elements = job.gradient.elements,
      .gradient_scale = rule.gradient_scale,
      .beta1 = rule.beta1,
      .beta2 = rule.beta2,
      .eps = rule.eps,
      .decay = rule.decay,
      .step = rule.lr / (1 - std::pow(rule.beta1, t)),
      .v_factor = 1 / std::sqrt(1 - std::pow(rule.beta2, t)),
      .unscale = job.gradient.unscale,
      .dtype = job.gradient.dtype,
      .rounded_dtype = job.rounded.dtype,
      .aligned = Aligned(job.gradient) && Aligned(state.w) && Aligned(state.exp_avg) &&
                 Aligned(state.exp_avg_sq) && Aligned(job.rounded),
  };
}

StateScan ToScan(const TensorStats& stats) {
  return {stats.nonfinite, stats.max_abs, stats.sum_squares};
}

}  // namespace

template <typename Out, typename In, typename Make>
cudaError_t ElementwiseRunner::Upload(std::span<const In> jobs, const Make& make,
                                      JobTable<Out>& table) {
  const std::size_t jobs_bytes = jobs.size() * sizeof(Out);
  const std::size_t bytes = jobs_bytes + (jobs.size() + 1) * sizeof(std::uint32_t);
  MUOND_RETURN_IF_CUDA_ERROR(host_table_.Reserve(bytes));
  MUOND_RETURN_IF_CUDA_ERROR(device_table_.Reserve(bytes));
  auto* host_jobs = host_table_.get<Out>();
  auto* first_chunk = reinterpret_cast<std::uint32_t*>(host_table_.get<char>() + jobs_bytes);
  std::size_t chunks = 0;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    host_jobs[i] = make(jobs[i]);
    first_chunk[i] = static_cast<std::uint32_t>(chunks);
    chunks += ChunksOf(host_jobs[i]);
    // 2^31 thread blocks of 16 Ki elements: no device has that memory.
    if (chunks > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidValue;
  }
  first_chunk[jobs.size()] = static_cast<std::uint32_t>(chunks);
  const char* device = device_table_.get<char>();
  table = {reinterpret_cast<const Out*>(device),
           reinterpret_cast<const std::uint32_t*>(device + jobs_bytes),
           static_cast<std::uint32_t>(jobs.size()), static_cast<std::uint32_t>(chunks)};
  if (chunks == 0) return cudaSuccess;
  // As the argument of a kernel, the other way to send it, a large table takes longer.
  return cudaMemcpyAsync(device_table_.get<void>(), host_table_.get<void>(), bytes,
                         cudaMemcpyHostToDevice, stream_);
}

template <typename Out, typename Launch>
cudaError_t ElementwiseRunner::Run(const JobTable<Out>& table, std::uint32_t planes,
                                   bool chunk_sums, const Launch& launch) {
  const std::size_t results = std::size_t{table.count} * planes;
  MUOND_RETURN_IF_CUDA_ERROR(results_.Reserve(results * sizeof(TensorStats)));
  if (table.chunks == 0) {
    for (std::size_t i = 0; i < results; ++i) results_.get<TensorStats>()[i] = {};
    return cudaSuccess;
  }
  const std::size_t chunks = table.chunks;
  MUOND_RETURN_IF_CUDA_ERROR(chunk_stats_.Reserve(chunks * planes * sizeof(ChunkStats)));
  if (chunk_sums) MUOND_RETURN_IF_CUDA_ERROR(chunk_sums_.Reserve(chunks * sizeof(double)));
  auto* stats = chunk_stats_.get<ChunkStats>();
  MUOND_RETURN_IF_CUDA_ERROR(launch(table, stats, stream_));
  MUOND_RETURN_IF_CUDA_ERROR(Combine(stats, table.first_chunk, table.count, table.chunks, planes,
                                     results_.get<TensorStats>(),
                                     chunk_sums ? chunk_sums_.get<double>() : nullptr, stream_));
  return cudaStreamSynchronize(stream_);
}

cudaError_t ElementwiseRunner::Copy(std::span<const CopyJob> jobs) {
  JobTable<CopyPassJob> table;
  MUOND_RETURN_IF_CUDA_ERROR(Upload(
      jobs, [](const CopyJob& job) { return MakeJob(job); }, table));
  if (table.chunks == 0) return cudaSuccess;
  MUOND_RETURN_IF_CUDA_ERROR(CopyAll(table, stream_));
  return cudaStreamSynchronize(stream_);
}

cudaError_t ElementwiseRunner::Round(std::span<const RoundJob> jobs) {
  JobTable<RoundPassJob> table;
  MUOND_RETURN_IF_CUDA_ERROR(Upload(
      jobs, [](const RoundJob& job) { return MakeJob(job); }, table));
  if (table.chunks == 0) return cudaSuccess;
  MUOND_RETURN_IF_CUDA_ERROR(RoundAll(table, stream_));
  return cudaStreamSynchronize(stream_);
}

cudaError_t ElementwiseRunner::Scan(std::span<const GradientView> gradients,
                                    std::span<GradientScan> results) {
  JobTable<ScanJob> table;
  MUOND_RETURN_IF_CUDA_ERROR(Upload(
      gradients, [](const GradientView& view) { return MakeJob(view); }, table));
  MUOND_RETURN_IF_CUDA_ERROR(Run(table, 1, true, cuda::Scan));
  const double* sums = chunk_sums_.get<double>();
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const TensorStats& stats = statistics()[i];
    results[i].nonfinite = stats.nonfinite;
    results[i].max_abs = stats.max_abs;
    // assign, not a new vector: its memory is kept from step to step.
    const std::size_t blocks = BlockCount(gradients[i].elements);
    results[i].block_sums.assign(sums, sums + blocks);
    sums += blocks;
  }
  return cudaSuccess;
}

cudaError_t ElementwiseRunner::ScanState(std::span<const StateView> tensors,
                                         std::span<StateScan> results) {
  JobTable<StateScanJob> table;
  MUOND_RETURN_IF_CUDA_ERROR(Upload(
      tensors, [](const StateView& view) { return MakeJob(view); }, table));
  MUOND_RETURN_IF_CUDA_ERROR(Run(table, 1, false, cuda::ScanState));
  for (std::size_t i = 0; i < tensors.size(); ++i) results[i] = ToScan(statistics()[i]);
  return cudaSuccess;
}

cudaError_t ElementwiseRunner::Momentum(std::span<const MomentumJob> jobs,
                                        std::span<StateScan> states) {
  JobTable<MomentumPassJob> table;
  MUOND_RETURN_IF_CUDA_ERROR(Upload(
      jobs, [](const MomentumJob& job) { return MakeJob(job); }, table));
  MomentumKinds kinds{};
  for (const MomentumJob& job : jobs) {
    (job.rule.m_dtype == Dtype::kF32 ? kinds.f32 : kinds.bf16) = true;
  }
  const auto launch = [&](const JobTable<MomentumPassJob>& all, ChunkStats* stats,
                          cudaStream_t stream) {
    return cuda::Momentum(all, kinds, stats, stream);
  };
  MUOND_RETURN_IF_CUDA_ERROR(Run(table, 1, false, launch));
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (jobs[i].write_m) states[i] = ToScan(statistics()[i]);
  }
  return cudaSuccess;
}

cudaError_t ElementwiseRunner::Apply(std::span<const ApplyJob> jobs, std::span<StateScan> states) {
  JobTable<ApplyPassJob> table;
  MUOND_RETURN_IF_CUDA_ERROR(Upload(
      jobs, [](const ApplyJob& job) { return MakeJob(job); }, table));
  MUOND_RETURN_IF_CUDA_ERROR(Run(table, 1, false, cuda::Apply));
  for (std::size_t i = 0; i < jobs.size(); ++i) states[i] = ToScan(statistics()[i]);
  return cudaSuccess;
}

cudaError_t ElementwiseRunner::AdamW(std::span<const AdamWJob> jobs, std::span<AdamWScan> scans) {
  constexpr std::uint32_t kPlanes = 3;
  JobTable<AdamWPassJob> table;
  MUOND_RETURN_IF_CUDA_ERROR(Upload(
      jobs, [](const AdamWJob& job) { return MakeJob(job); }, table));
  MUOND_RETURN_IF_CUDA_ERROR(Run(table, kPlanes, false, cuda::AdamW));
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const TensorStats* stats = statistics() + kPlanes * i;
    scans[i] = {ToScan(stats[0]), ToScan(stats[1]), ToScan(stats[2])};
  }
  return cudaSuccess;
}

}  // namespace muond::kernels::cuda

// What happens around a batch: the cache of batches, the check of every result, the fp32 redo.
#include "kernels/cuda/newton_schulz.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kernels/coefficients.h"
#include "kernels/cuda/newton_schulz_passes.h"

namespace muond::kernels::cuda {
namespace {

// Lists of shapes kept ready: a daemon has one per coefficient set and piece of a step.
constexpr std::size_t kBatches = 16;

Error Report(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return {};
  cudaGetLastError();
  return Error(std::string("newton-schulz: ") + what + ": " + cudaGetErrorString(status) + " (" +
               cudaGetErrorName(status) + ")");
}

// Whether one more result is to be spoiled.
bool Take(std::atomic<int>& remaining) {
  int left = remaining.load();
  while (left > 0 && !remaining.compare_exchange_weak(left, left - 1)) {
  }
  return left > 0;
}

bool IsPlausible(double sum, std::int64_t m, double residual_max) {
  return std::isfinite(sum) && IsPlausibleNorm(sum, m, residual_max);
}

}  // namespace

Error NewtonSchulz::ChooseKernels() {
  if (chosen_) return {};
  int device = 0, major = 0, minor = 0, blocks = 0;
  cudaError_t status = cudaGetDevice(&device);
  const auto read = [&](int* value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(value, attribute, device);
  };
  read(&major, cudaDevAttrComputeCapabilityMajor);
  read(&minor, cudaDevAttrComputeCapabilityMinor);
  read(&blocks, cudaDevAttrMultiProcessorCount);
  if (Error e = Report("device", status)) return e;
  tuning_.machine.blocks = blocks;
  tuning_.machine.hopper = major == 9 && minor == 0;
  if (tuning_.machine.hopper) {
    if (Error e = PrepareGemmSm90()) return e;
  }
  chosen_ = true;
  return {};
}

void NewtonSchulz::set_tuning(const NewtonSchulzTuning& tuning) {
  batches_.clear();
  tuning_ = tuning;
  chosen_ = true;
}

std::size_t NewtonSchulz::ScratchBytes(std::span<const MatrixShape> shapes,
                                       const NewtonSchulzRule& rule) const {
  std::vector<MatrixJob> jobs;
  for (const MatrixShape& shape : shapes) {
    if (shape.rows > 0 && shape.cols > 0) jobs.push_back({.rows = shape.rows, .cols = shape.cols});
  }
  // Without the machine, which changes no layout and which another thread may be asking for.
  NewtonSchulzTuning tuning;
  tuning.group_tiles = tuning_.group_tiles;
  tuning.group_bytes = tuning_.group_bytes;
  return jobs.empty() ? 0 : NewtonSchulzBatch(jobs, rule, tuning).scratch_bytes();
}

Error NewtonSchulz::FindBatch(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                              cudaStream_t stream, NewtonSchulzBatch** batch) {
  const auto found = std::find_if(batches_.begin(), batches_.end(),
                                  [&](const auto& b) { return b->Fits(jobs, rule); });
  if (found != batches_.end()) {
    batches_.splice(batches_.begin(), batches_, found);
    *batch = batches_.front().get();
    return {};
  }
  if (batches_.size() == kBatches) batches_.pop_back();
  auto fresh = std::make_unique<NewtonSchulzBatch>(jobs, rule, tuning_);
  if (fresh->scratch_bytes() > scratch_bytes_) {
    batches_.clear();  // they know the old scratch by its address
    scratch_bytes_ = 0;
    if (Error e = Report("scratch", scratch_.ReserveExactly(fresh->scratch_bytes()))) return e;
    scratch_bytes_ = fresh->scratch_bytes();
  }
  if (Error e = fresh->Prepare(jobs, scratch_.get<std::byte>(), stream)) return e;
  batches_.push_front(std::move(fresh));
  *batch = batches_.front().get();
  return {};
}

Error NewtonSchulz::Run(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                        std::span<NewtonSchulzResult> results, cudaStream_t stream) {
  if (rule.steps.empty()) return Error("newton-schulz: the rule has no steps");
  if (Error e = ChooseKernels()) return e;
  std::vector<MatrixJob> present;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    results[i] = {};
    results[i].zero_input = jobs[i].rows == 0 || jobs[i].cols == 0;
    if (results[i].zero_input) continue;
    present.push_back(jobs[i]);
    places.push_back(i);
  }
  if (present.empty()) return {};
  NewtonSchulzBatch* batch = nullptr;
  if (Error e = FindBatch(present, rule, stream, &batch)) return e;
  if (Error e = batch->Enqueue(present, rule.norm_floor, stream)) return e;
  if (Error e = Report("products", cudaStreamSynchronize(stream))) return e;
  for (std::size_t k = 0; k < present.size(); ++k) {
    NewtonSchulzResult& result = results[places[k]];
    result.zero_input = batch->input_sum(k) == 0;
    if (result.zero_input) continue;
    result.o_scale = batch->output_scale(k);
    if (Error e =
            Judge(present[k], rule, batch->scalars(k), batch->output_sum(k), stream, &result)) {
      return e;
    }
  }
  return {};
}

// `stored_sum`: the sum of squares of what lies in `o`.
Error NewtonSchulz::Judge(const MatrixJob& job, const NewtonSchulzRule& rule,
                          const NormScalars* scalars, double stored_sum, cudaStream_t stream,
                          NewtonSchulzResult* result) {
  const std::int64_t m = std::min(job.rows, job.cols);
  auto* o = static_cast<__half*>(job.o);
  const double unit = result->o_scale * result->o_scale;
  if (fault_ != nullptr && Take(fault_->fast_path)) {
    if (Error e = Report("fault", LaunchSpoil(o, stream))) return e;
    if (Error e = Observe(job, stream, &stored_sum)) return e;
  }
  if (!IsPlausible(unit * stored_sum, m, rule.residual_max)) {
    result->fallback = true;
    if (Error e = Redo(job, rule, scalars, result->o_scale, stream)) return e;
    if (fault_ != nullptr && Take(fault_->fallback)) {
      if (Error e = Report("fault", LaunchSpoil(o, stream))) return e;
    }
    if (Error e = Observe(job, stream, &stored_sum)) return e;
    result->failed = !IsPlausible(unit * stored_sum, m, rule.residual_max);
  }
  result->output_norm = std::sqrt(unit * stored_sum);
  return {};
}

// X <- a X + (b R + c R^2) X with R = X X^T, in the wide view and in fp32.
Error NewtonSchulz::Redo(const MatrixJob& job, const NewtonSchulzRule& rule,
                         const NormScalars* scalars, double o_scale, cudaStream_t stream) {
  const std::int64_t m = std::min(job.rows, job.cols), n = std::max(job.rows, job.cols);
  const bool tall = job.rows > job.cols;
  const auto matrix = static_cast<std::size_t>(m * n), square = static_cast<std::size_t>(m * m);
  if (Error e = Report("memory", redo_.Reserve((2 * matrix + 2 * square) * sizeof(float)))) {
    return e;
  }
  float* x = redo_.get<float>();
  float* y = x + matrix;
  float* r = y + matrix;
  float* p = r + square;
  cudaError_t status = LaunchWiden(x, static_cast<const __half*>(job.u), &scalars->to_normalized, m,
                                   n, tall, stream);
  const auto multiply = [&](const Fp32Product& product) {
    if (status == cudaSuccess) status = LaunchFp32Product(product, stream);
  };
  for (const NewtonSchulzStep& step : rule.steps) {
    multiply({x, x, nullptr, r, m, m, n, true, 1, 0});
    multiply({r, r, r, p, m, m, m, false, static_cast<float>(step.c), static_cast<float>(step.b)});
    multiply({p, x, x, y, m, n, m, false, 1, static_cast<float>(step.a)});
    std::swap(x, y);
  }
  if (status == cudaSuccess) {
    status = LaunchNarrow(static_cast<__half*>(job.o), x, o_scale, m, n, tall, stream);
  }
  return Report("fp32 redo", status);
}

Error NewtonSchulz::Observe(const MatrixJob& job, cudaStream_t stream, double* sum) {
  const std::int64_t elements = job.rows * job.cols;
  const auto count = static_cast<std::size_t>((elements + kNormPiece - 1) / kNormPiece);
  // One norm job, its scalars, its partial sums, its pieces.
  constexpr std::size_t kPartials = 256;
  static_assert(sizeof(NormJob) + sizeof(NormScalars) + sizeof(std::uint32_t) <= kPartials);
  const std::size_t pieces_at = kPartials + count * sizeof(double);
  if (Error e = Report("memory", observed_.Reserve(pieces_at + count * sizeof(NormPiece)))) {
    return e;
  }
  if (Error e = Report("memory", observed_sum_.Reserve(2 * sizeof(double)))) return e;
  auto* base = observed_.get<std::byte>();
  auto* scalars = reinterpret_cast<NormScalars*>(base + sizeof(NormJob));
  double* host = observed_sum_.get<double>();
  host[0] = 0;
  const NormJob norm{static_cast<const __half*>(job.o),
                     elements,
                     reinterpret_cast<double*>(base + kPartials),
                     reinterpret_cast<std::uint32_t*>(scalars + 1),
                     scalars,
                     1,
                     host,
                     host + 1};
  std::vector<NormPiece> pieces;
  for (std::size_t i = 0; i < count; ++i) pieces.push_back({0, static_cast<std::int32_t>(i)});
  cudaError_t status = cudaMemsetAsync(base, 0, kPartials, stream);
  const auto upload = [&](std::byte* to, const void* from, std::size_t bytes) {
    if (status == cudaSuccess) {
      status = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
    }
  };
  upload(base, &norm, sizeof(norm));
  upload(base + pieces_at, pieces.data(), pieces.size() * sizeof(NormPiece));
  if (status == cudaSuccess) {
    status = LaunchNorms(reinterpret_cast<const NormJob*>(base),
                         reinterpret_cast<const NormPiece*>(base + pieces_at),
                         static_cast<int>(count), stream);
  }
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  *sum = host[1];
  return Report("check", status);
}

}  // namespace muond::kernels::cuda

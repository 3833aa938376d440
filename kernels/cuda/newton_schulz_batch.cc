// Layout of memory, tables and the graph of a batch.
#include "kernels/cuda/newton_schulz_batch.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace muond::kernels::cuda {
namespace {

Error Report(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return {};
  cudaGetLastError();
  return Error(std::string("newton-schulz: ") + what + ": " + cudaGetErrorString(status) + " (" +
               cudaGetErrorName(status) + ")");
}

std::size_t RoundUp(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

std::int64_t PaddedLd(std::int64_t cols) { return (cols + 7) / 8 * 8; }

std::size_t MatrixBytes(std::int64_t rows, std::int64_t ld) {
  return RoundUp(static_cast<std::size_t>(rows * ld) * sizeof(__half));
}

bool LiesWell(const void* data, std::int64_t cols) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && cols % 8 == 0;
}

bool SameSteps(std::span<const NewtonSchulzStep> x, std::span<const NewtonSchulzStep> y) {
  return std::equal(x.begin(), x.end(), y.begin(), y.end(), [](const auto& s, const auto& t) {
    return s.a == t.a && s.b == t.b && s.c == t.c;
  });
}

double GrowthOf(std::span<const NewtonSchulzStep> steps) {
  double growth = 1;
  for (const NewtonSchulzStep& step : steps) growth *= std::max(1.0, std::abs(step.a));
  return growth;
}

std::int64_t Pieces(std::int64_t elements) { return (elements + kNormPiece - 1) / kNormPiece; }

// Hands out parts of one allocation: first all sizes are counted, then all addresses given.
class Parts {
 public:
  explicit Parts(std::byte* base) : base_(base) {}
  template <typename T>
  T* Take(std::size_t count) {
    T* part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += RoundUp(count * sizeof(T));
    return part;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

template <typename T>
Error Upload(T* to, const std::vector<T>& from, cudaStream_t stream) {
  return Report("tables", cudaMemcpyAsync(to, from.data(), from.size() * sizeof(T),
                                          cudaMemcpyHostToDevice, stream));
}

}  // namespace

std::size_t NewtonSchulzBatch::MatrixScratchBytes(std::int64_t rows, std::int64_t cols,
                                                  NewtonSchulzMethod form) {
  const std::int64_t m = std::min(rows, cols);
  return MatrixBytes(rows, PaddedLd(cols)) +
         static_cast<std::size_t>(SquareCount(form)) * MatrixBytes(m, PaddedLd(m));
}

NewtonSchulzBatch::NewtonSchulzBatch(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                                     const NewtonSchulzTuning& tuning)
    : steps_(rule.steps),
      method_(rule.method),
      machine_(tuning.machine),
      growth_(GrowthOf(rule.steps)) {
  for (const MatrixJob& job : jobs) {
    Job& mine = jobs_.emplace_back();
    mine.rows = job.rows;
    mine.cols = job.cols;
    mine.ld = PaddedLd(job.cols);
    mine.copy_u = !LiesWell(job.u, job.cols);
    mine.copy_o = !LiesWell(job.o, job.cols);
    mine.form = ChooseForm(rule, job.rows, job.cols);
  }
  Group(tuning);
}

NewtonSchulzBatch::~NewtonSchulzBatch() {
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
}

bool NewtonSchulzBatch::Fits(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule) const {
  return rule.method == method_ && SameSteps(rule.steps, steps_) &&
         std::equal(jobs.begin(), jobs.end(), jobs_.begin(), jobs_.end(),
                    [](const MatrixJob& job, const Job& mine) {
                      return job.rows == mine.rows && job.cols == mine.cols &&
                             LiesWell(job.u, job.cols) != mine.copy_u &&
                             LiesWell(job.o, job.cols) != mine.copy_o;
                    });
}

// Cuts the list into groups of about equal work and lays out their scratch, one over the other.
void NewtonSchulzBatch::Group(const NewtonSchulzTuning& tuning) {
  const auto work = [&](const Job& job) {
    const auto m = static_cast<double>(std::min(job.rows, job.cols));
    return std::max(m * m / (2 * 128 * 256) / tuning.group_tiles,
                    static_cast<double>(MatrixScratchBytes(job.rows, job.cols, job.form)) /
                        static_cast<double>(tuning.group_bytes));
  };
  double all = 0;
  for (const Job& job : jobs_) all += work(job);
  const double share = all / std::max(1.0, std::ceil(all));
  std::size_t copies = 0;
  double begun = 0;
  std::size_t used = 0, largest = 0;
  for (Job& job : jobs_) {
    if (groups_ == 0 || begun + work(job) / 2 > share * static_cast<double>(groups_)) {
      ++groups_;
      used = 0;
    }
    begun += work(job);
    job.group = groups_ - 1;
    job.scratch = used;
    used += MatrixScratchBytes(job.rows, job.cols, job.form);
    largest = std::max(largest, used);
    job.copies = copies;
    copies += (std::size_t{job.copy_u} + std::size_t{job.copy_o}) * MatrixBytes(job.rows, job.ld);
  }
  for (Job& job : jobs_) job.copies += largest;
  scratch_bytes_ = largest + copies;
}

ProgramBuffers NewtonSchulzBatch::Buffers(std::size_t i) const {
  const Job& job = jobs_[i];
  const CUtensorMap* maps = maps_ + i * kMapsPerJob;
  std::byte* copies = scratch_ + job.copies;
  const std::size_t matrix = MatrixBytes(job.rows, job.ld);
  ProgramBuffers buffers;
  buffers.u = {maps, static_cast<__half*>(const_cast<void*>(job.u)), job.cols};
  buffers.o = {maps + 1, static_cast<__half*>(job.o), job.cols};
  if (job.copy_u) buffers.u = {maps, reinterpret_cast<__half*>(copies), job.ld};
  if (job.copy_o) {
    buffers.o = {maps + 1, reinterpret_cast<__half*>(copies + (job.copy_u ? matrix : 0)), job.ld};
  }
  std::byte* at = scratch_ + job.scratch;
  buffers.spare = {maps + 2, reinterpret_cast<__half*>(at), job.ld};
  at += matrix;
  const std::int64_t m = std::min(job.rows, job.cols);
  for (int k = 0; k < SquareCount(job.form); ++k) {
    buffers.squares[k] = {maps + 3 + k, reinterpret_cast<__half*>(at), PaddedLd(m)};
    at += MatrixBytes(m, PaddedLd(m));
  }
  buffers.scalars = scalars_ + i;
  buffers.sums = job.sums;
  return buffers;
}

Error NewtonSchulzBatch::ReserveState(cudaStream_t stream) {
  if (Error e = Report("pinned memory", host_.Reserve(3 * jobs_.size() * sizeof(double)))) return e;
  const auto lay_out = [&](std::byte* base) {
    Parts parts(base);
    maps_ = parts.Take<CUtensorMap>(jobs_.size() * kMapsPerJob);
    scalars_ = parts.Take<NormScalars>(jobs_.size());
    auto* done = parts.Take<std::uint32_t>(jobs_.size());
    for (std::size_t i = 0; i < jobs_.size(); ++i) {
      Job& job = jobs_[i];
      job.done = done == nullptr ? nullptr : done + i;
      job.partials = parts.Take<double>(static_cast<std::size_t>(Pieces(job.rows * job.cols)));
      job.sums = parts.Take<float>(SumsOf(job.rows, job.cols));
    }
    return parts.bytes();
  };
  const std::size_t bytes = lay_out(nullptr);
  if (Error e = Report("device memory", state_.Reserve(bytes))) return e;
  lay_out(state_.get<std::byte>());
  return Report("state", cudaMemsetAsync(state_.get<void>(), 0, bytes, stream));
}

Error NewtonSchulzBatch::EncodeMaps(cudaStream_t stream) {
  if (!machine_.hopper) return {};
  std::vector<CUtensorMap> maps(jobs_.size() * kMapsPerJob);
  for (std::size_t i = 0; i < jobs_.size(); ++i) {
    const Job& job = jobs_[i];
    const ProgramBuffers buffers = Buffers(i);
    const auto encode = [&](const GemmOperand& operand, std::int64_t rows, std::int64_t cols) {
      return EncodeMatrixMap(&maps[static_cast<std::size_t>(operand.map - maps_)], operand.data,
                             rows, cols, operand.ld);
    };
    for (const GemmOperand* operand : {&buffers.u, &buffers.o, &buffers.spare}) {
      if (Error e = encode(*operand, job.rows, job.cols)) return e;
    }
    const std::int64_t m = std::min(job.rows, job.cols);
    for (int k = 0; k < SquareCount(job.form); ++k) {
      if (Error e = encode(buffers.squares[k], m, m)) return e;
    }
  }
  return Upload(maps_, maps, stream);
}

std::vector<std::vector<GemmOp>> NewtonSchulzBatch::BuildOps() const {
  std::vector<std::vector<GemmOp>> launches;
  std::size_t first = 0;
  for (std::size_t group = 0; group < groups_; ++group) {
    for (std::size_t i = 0; i < jobs_.size(); ++i) {
      const Job& job = jobs_[i];
      if (job.group != group) continue;
      const auto phases = NewtonSchulzPhases(steps_, job.form, job.rows, job.cols, Buffers(i));
      launches.resize(std::max(launches.size(), first + phases.size()));
      for (std::size_t p = 0; p < phases.size(); ++p) {
        auto& launch = launches[first + p];
        launch.insert(launch.end(), phases[p].begin(), phases[p].end());
      }
    }
    // To and fro: a launch begins with what the one before it wrote last, in the L2 cache still.
    for (; first < launches.size(); ++first) {
      if (first % 2 == 1) std::reverse(launches[first].begin(), launches[first].end());
    }
  }
  return launches;
}

// Tables that don't depend on where the matrices lie; leaves room for those that do.
Error NewtonSchulzBatch::BuildTables(cudaStream_t stream) {
  std::vector<GemmTile> tiles;
  std::vector<std::int32_t> begin;
  int op_count = 0;
  for (const auto& ops : BuildOps()) {
    const GemmPlan plan = PlanGemm(ops, op_count, machine_);
    op_count += static_cast<int>(ops.size());
    // Offsets for now, addresses below.
    launches_.push_back({nullptr, nullptr, nullptr, plan.groups, plan.cluster, plan.width});
    const auto offset = static_cast<std::int32_t>(tiles.size());
    for (const std::int32_t at : plan.begin) begin.push_back(offset + at);
    tiles.insert(tiles.end(), plan.tiles.begin(), plan.tiles.end());
  }
  std::vector<NormPiece> pieces;
  for (std::size_t i = 0; i < jobs_.size(); ++i) {
    for (std::int64_t p = 0; p < Pieces(jobs_[i].rows * jobs_[i].cols); ++p) {
      pieces.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(p)});
    }
  }
  norm_piece_count_ = static_cast<int>(pieces.size());
  GemmTile* device_tiles = nullptr;
  std::int32_t* device_begin = nullptr;
  const auto lay_out = [&](std::byte* base) {
    Parts parts(base);
    ops_ = parts.Take<GemmOp>(static_cast<std::size_t>(op_count));
    norm_jobs_ = parts.Take<NormJob>(jobs_.size());
    sum_jobs_ = parts.Take<SumJob>(jobs_.size());
    norm_pieces_ = parts.Take<NormPiece>(pieces.size());
    device_tiles = parts.Take<GemmTile>(tiles.size());
    device_begin = parts.Take<std::int32_t>(begin.size());
    return parts.bytes();
  };
  if (Error e = Report("device memory", tables_.Reserve(lay_out(nullptr)))) return e;
  lay_out(tables_.get<std::byte>());
  std::size_t at = 0;
  for (GemmLaunch& launch : launches_) {
    launch.tiles = device_tiles;
    launch.begin = device_begin + at;
    launch.ops = ops_;
    at += static_cast<std::size_t>(launch.groups) + 1;
  }
  if (Error e = Upload(norm_pieces_, pieces, stream)) return e;
  if (Error e = Upload(device_tiles, tiles, stream)) return e;
  return Upload(device_begin, begin, stream);
}

Error NewtonSchulzBatch::UploadAddresses(cudaStream_t stream) {
  if (Error e = EncodeMaps(stream)) return e;
  std::vector<GemmOp> ops;
  for (const auto& launch : BuildOps()) ops.insert(ops.end(), launch.begin(), launch.end());
  std::vector<NormJob> norms;
  std::vector<SumJob> sums;
  auto* host = host_.get<double>();
  for (std::size_t i = 0; i < jobs_.size(); ++i) {
    const Job& job = jobs_[i];
    norms.push_back({static_cast<const __half*>(job.u), job.rows * job.cols, job.partials, job.done,
                     scalars_ + i, growth_, host + 2 * jobs_.size() + i, host + i});
    sums.push_back(
        {job.sums, static_cast<std::int64_t>(SumsOf(job.rows, job.cols)), host + jobs_.size() + i});
  }
  if (Error e = Upload(ops_, ops, stream)) return e;
  if (Error e = Upload(norm_jobs_, norms, stream)) return e;
  return Upload(sum_jobs_, sums, stream);
}

Error NewtonSchulzBatch::EnqueueKernels(cudaStream_t stream) const {
  if (Error e = Report("norms", LaunchNorms(norm_jobs_, norm_pieces_, norm_piece_count_, stream))) {
    return e;
  }
  for (const GemmLaunch& launch : launches_) {
    if (Error e =
            machine_.hopper ? LaunchGemmSm90(launch, stream) : LaunchGemmPortable(launch, stream)) {
      return e;
    }
  }
  return Report("sums", LaunchSums(sum_jobs_, static_cast<int>(jobs_.size()), stream));
}

Error NewtonSchulzBatch::Capture() {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  if (Error e = Report("stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking))) {
    return e;
  }
  Error error = Report("capture", cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  if (!error) {
    error = EnqueueKernels(stream);
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    if (!error) error = Report("capture", ended);
  }
  if (!error) error = Report("graph", cudaGraphInstantiate(&graph_, graph, 0));
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return error;
}

Error NewtonSchulzBatch::Prepare(std::span<const MatrixJob> jobs, std::byte* scratch,
                                 cudaStream_t stream) {
  scratch_ = scratch;
  for (std::size_t i = 0; i < jobs_.size(); ++i) {
    jobs_[i].u = jobs[i].u;
    jobs_[i].o = jobs[i].o;
  }
  if (Error e = ReserveState(stream)) return e;
  if (Error e = BuildTables(stream)) return e;
  if (Error e = UploadAddresses(stream)) return e;
  return Capture();
}

double NewtonSchulzBatch::output_scale(std::size_t i) const {
  return OutputScale(std::sqrt(input_sum(i)), host_.get<double>()[2 * jobs_.size() + i], growth_);
}

Error NewtonSchulzBatch::CopyPadded(bool input, cudaStream_t stream) const {
  for (std::size_t i = 0; i < jobs_.size(); ++i) {
    const Job& job = jobs_[i];
    const ProgramBuffers buffers = Buffers(i);
    cudaError_t status = cudaSuccess;
    if (input && job.copy_u) {
      status = LaunchCopyRows(buffers.u.data, job.ld, static_cast<const __half*>(job.u), job.cols,
                              job.rows, job.cols, stream);
    } else if (!input && job.copy_o) {
      status = LaunchCopyRows(static_cast<__half*>(job.o), job.cols, buffers.o.data, job.ld,
                              job.rows, job.cols, stream);
    }
    if (Error e = Report("padding", status)) return e;
  }
  return {};
}

Error NewtonSchulzBatch::Enqueue(std::span<const MatrixJob> jobs, double norm_floor,
                                 cudaStream_t stream) {
  bool moved = false;
  for (std::size_t i = 0; i < jobs_.size(); ++i) {
    moved = moved || jobs_[i].u != jobs[i].u || jobs_[i].o != jobs[i].o;
    jobs_[i].u = jobs[i].u;
    jobs_[i].o = jobs[i].o;
    // The floor is one of U itself.
    host_.get<double>()[2 * jobs_.size() + i] = norm_floor * jobs[i].u_scale;
  }
  if (moved) {
    if (Error e = UploadAddresses(stream)) return e;
  }
  if (Error e = CopyPadded(true, stream)) return e;
  if (Error e = Report("graph", cudaGraphLaunch(graph_, stream))) return e;
  return CopyPadded(false, stream);
}

}  // namespace muond::kernels::cuda

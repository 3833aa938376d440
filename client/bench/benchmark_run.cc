#include "client/bench/benchmark_run.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <set>
#include <span>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/bench/control_probe.h"
#include "client/bench/gpu_values.h"
#include "client/bench/process_memory.h"
#include "client/bench/values.h"
#include "client/cpp/admin.h"
#include "client/cpp/session.h"
#include "proto/check.h"

namespace muond::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLearningRate = 1e-3;
constexpr float kInitialScale = 0.02f;
constexpr float kGradientScale = 1e-3f;
constexpr std::int64_t kBareStreamBytes = std::int64_t{256} << 20;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Benchmark {
 public:
  explicit Benchmark(const BenchmarkOptions& options)
      : options_(options),
        gradients_(options.model.Elements(), options.dtype),
        parameters_(options.model.Elements(), options.dtype) {
    std::size_t offset = 0;
    for (const models::ModelTensor& tensor : options.model.tensors) {
      gradient_sources_.push_back({.parameter = tensor.name,
                                   .data = gradients_.data(offset),
                                   .elements = tensor.Elements(),
                                   .dtype = options.dtype});
      initial_sources_.push_back(gradient_sources_.back());
      initial_sources_.back().data = parameters_.data(offset);
      sinks_.push_back({.parameter = tensor.name,
                        .data = parameters_.data(offset),
                        .elements = tensor.Elements(),
                        .dtype = options.dtype});
      slices_[tensor.name] = {WholeBox(tensor.shape)};
      offset += static_cast<std::size_t>(tensor.Elements());
    }
    result_.elements = static_cast<std::int64_t>(offset);
    result_.transfer_bytes = static_cast<std::int64_t>(offset * DtypeBytes(options.dtype));
    parameters_.Fill(options.seed, kInitialScale);
    gradients_.Fill(options.seed + 1, kGradientScale);
  }

  absl::StatusOr<BenchmarkResult> Run() {
    MUOND_RETURN_IF_ERROR(AskDaemon());
    MUOND_RETURN_IF_ERROR(MeasureMachine());
    StartMemory();
    client::SessionOptions session;
    session.endpoint = options_.endpoint;
    session.tls = options_.tls;
    session.channel = options_.channel;
    session.chunk_bytes = options_.chunk_bytes;
    session.transport = options_.transport;
    session.gpu = options_.gpu;
    session.gpu_windows = 1;
    MUOND_ASSIGN_OR_RETURN(
        session_,
        client::Session::Open(models::MakeRunSpec(options_.model, options_.run, options_.dtype,
                                                  options_.momentum_dtype),
                              0, slices_, session));
    result_.transport = session_->transports().front().name;
    result_.transport_reason = session_->transports().front().reason;
    const absl::Status trained = Train();
    // The daemon must not keep a run whose trainer is gone; a failed training is the better
    // message.
    const auto closed = session_->Close();
    MUOND_RETURN_IF_ERROR(trained);
    MUOND_RETURN_IF_ERROR(closed.status());
    return std::move(result_);
  }

 private:
  client::Admin MakeAdmin() const {
    return options_.channel != nullptr ? client::Admin(options_.channel, absl::Seconds(30))
                                       : client::Admin(options_.endpoint, absl::Seconds(30),
                                                       options_.tls);
  }

  absl::Status AskDaemon() {
    MUOND_ASSIGN_OR_RETURN(const v1::StatusReply status, MakeAdmin().Status());
    result_.daemon_version = status.version();
    result_.backend = status.backend();
    result_.backend_description = status.backend_description();
    if (IsHere()) daemon_pid_ = options_.channel != nullptr ? getpid() : status.pid();
    return absl::OkStatus();
  }

  bool IsHere() const { return options_.channel != nullptr || IsLocalEndpoint(options_.endpoint); }

  absl::Status MeasureMachine() {
    if (!options_.ceilings) return absl::OkStatus();
    result_.ceilings = MeasureCeilings(options_.threads);
    MUOND_RETURN_IF_ERROR(CheckStop());
    if (options_.channel != nullptr || !options_.endpoint.starts_with("unix:") ||
        options_.bare_stream_program.empty()) {
      return absl::OkStatus();
    }
    MUOND_ASSIGN_OR_RETURN(result_.bare_stream,
                           MeasureBareStreamOfProcess(options_.bare_stream_program,
                                                      options_.chunk_bytes, kBareStreamBytes));
    return CheckStop();
  }

  void StartMemory() {
    const int cores = std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
    result_.memory_need = EstimateMemory(options_.model, options_.dtype, IsHere(),
                                         options_.threads > 0 ? options_.threads : cores,
                                         options_.momentum_dtype);
    memory_before_ = ResidentBytes(daemon_pid_);
    if (!ResetPeak(daemon_pid_)) memory_before_ = -1;
  }

  // What the peak has grown by since StartMemory; starts a new peak.
  std::int64_t TakePeak() {
    const std::int64_t peak = PeakResidentBytes(daemon_pid_);
    const bool known = memory_before_ >= 0 && peak >= 0 && ResetPeak(daemon_pid_);
    return known ? peak - memory_before_ : -1;
  }

  // Before the compared step: what is pulled for it is this program's.
  absl::Status EndMemory() {
    MUOND_ASSIGN_OR_RETURN(const v1::StatusReply status, MakeAdmin().Status(options_.run));
    if (status.runs_size() == 1) {
      result_.memory_use.state = status.runs(0).state_bytes();
      result_.memory_use.staging = status.runs(0).staging_bytes();
    }
    result_.memory_use.grown = TakePeak();
    return absl::OkStatus();
  }

  absl::Status CheckStop() const {
    if (options_.stop == nullptr || !*options_.stop) return absl::OkStatus();
    return absl::CancelledError(
        absl::StrFormat("interrupted after %d of %d measured steps; run \"%s\" is closed",
                        result_.times.size(), options_.steps, options_.run));
  }

  absl::Status Train() {
    result_.muon_matrices = session_->routing().muon_matrices();
    check_.emplace(options_.model, session_->routing(), &gradients_, options_.momentum_dtype);
    // In-process the daemon's memory is this program's.
    if (options_.channel != nullptr && memory_before_ >= 0) memory_before_ += check_->Bytes();
    const std::uint32_t initial = parameters_.Digest();
    MUOND_ASSIGN_OR_RETURN(const bool complete, session_->Initialize(initial_sources_));
    if (!complete)
      return absl::InternalError("the run still lacks initial values after Initialize");
    result_.memory_use.grown_initially = TakePeak();
    if (options_.gpu >= 0) {
      MUOND_ASSIGN_OR_RETURN(
          gpu_, GpuValues::Make(*session_, options_.gpu, gradient_sources_, sinks_));
      for (const client::SliceSink& sink : check_->Before()) sampled_.insert(sink.parameter);
    }

    parameters_.Poison();
    MUOND_RETURN_IF_ERROR(Step(0.0).status());
    if (gpu_ != nullptr) MUOND_RETURN_IF_ERROR(gpu_->Download());
    if (parameters_.Digest() != initial) {
      return absl::InternalError(
          "a step with learning rate 0 did not give back the initial values bit for bit");
    }
    for (std::int64_t i = 1; i < options_.warmup; ++i) {
      MUOND_RETURN_IF_ERROR(Step(kLearningRate).status());
    }
    if (options_.probe_control) probe_.emplace(MakeAdmin());
    for (std::int64_t i = 0; i < options_.steps; ++i) {
      if (options_.before_step != nullptr) MUOND_RETURN_IF_ERROR(options_.before_step());
      MUOND_ASSIGN_OR_RETURN(const StepTimes times, Step(kLearningRate));
      result_.times.push_back(times);
      if (options_.after_step != nullptr) options_.after_step(times);
    }
    if (probe_) result_.control = probe_->Stop();
    MUOND_RETURN_IF_ERROR(EndMemory());
    MUOND_RETURN_IF_ERROR(CompareStep());
    if (gpu_ != nullptr) MUOND_RETURN_IF_ERROR(gpu_->Download());
    if (!parameters_.AllFinite()) {
      return absl::InternalError("the parameters after the last step are not all finite");
    }
    if (parameters_.Digest() == initial) {
      return absl::InternalError("the parameters after the last step are still the initial ones");
    }
    MUOND_ASSIGN_OR_RETURN(const v1::DigestReply digest, MakeAdmin().Digest(options_.run));
    result_.digest = digest.tensor_digest();
    return absl::OkStatus();
  }

  // One more step, with the sample's masters before and after it.
  absl::Status CompareStep() {
    MUOND_RETURN_IF_ERROR(session_->Pull(session_->next_step(), check_->Before(), true));
    MUOND_RETURN_IF_ERROR(Step(kLearningRate).status());
    MUOND_RETURN_IF_ERROR(session_->Pull(session_->next_step(), check_->After(), true));
    const double lr = kLearningRate * options_.reference_lr_factor;
    result_.samples = check_->Compare({.lr = lr}, {.lr = lr});
    return absl::OkStatus();
  }

  absl::StatusOr<StepTimes> Step(double lr) {
    StepBegin begin;
    begin.step = session_->next_step();
    begin.loss_scale = session_->loss_scale();
    begin.muon["all"] = {.lr = lr};
    begin.adamw["all"] = {.lr = lr, .weight_decay = 0.01};
    check_->BeginStep(options_.seed + 2 + static_cast<std::uint64_t>(begin.step), kGradientScale);

    StepTimes times{.step = begin.step};
    MUOND_RETURN_IF_ERROR(CheckStop());
    if (gpu_ != nullptr) {
      SetFlowing(true);  // of a step in one call nobody knows when its bytes have arrived
      return GpuStep(begin, times);
    }
    Clock::time_point start = Clock::now();
    SetFlowing(true);
    MUOND_RETURN_IF_ERROR(session_->Begin(begin));
    MUOND_RETURN_IF_ERROR(session_->Push(gradient_sources_));
    SetFlowing(false);
    times.push = SecondsSince(start);
    MUOND_RETURN_IF_ERROR(CheckStop());
    start = Clock::now();
    MUOND_ASSIGN_OR_RETURN(const StepOutcome outcome, session_->Finish());
    times.finish = SecondsSince(start);
    MUOND_RETURN_IF_ERROR(CheckOutcome(outcome));
    MUOND_RETURN_IF_ERROR(CheckStop());
    start = Clock::now();
    SetFlowing(true);
    MUOND_RETURN_IF_ERROR(session_->Pull(outcome.version, sinks_));
    SetFlowing(false);
    times.pull = SecondsSince(start);
    return times;
  }

  void SetFlowing(bool flowing) {
    if (probe_) probe_->SetFlowing(flowing);
  }

  absl::StatusOr<StepTimes> GpuStep(const StepBegin& begin, StepTimes times) {
    MUOND_RETURN_IF_ERROR(gpu_->Upload(sampled_));
    const auto sources = gpu_->sources();
    Clock::time_point start = Clock::now();
    if (options_.backward_ms <= 0) {
      MUOND_ASSIGN_OR_RETURN(const StepOutcome outcome,
                             session_->StepAndPull(begin, sources, gpu_->sinks()));
      times.finish = SecondsSince(start);
      MUOND_RETURN_IF_ERROR(CheckOutcome(outcome));
      return times;
    }
    MUOND_RETURN_IF_ERROR(session_->Begin(begin));
    const double each = options_.backward_ms * 1e-3 / static_cast<double>(sources.size());
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const double ready = static_cast<double>(i + 1) * each;
      while (SecondsSince(start) < ready) std::this_thread::yield();
      MUOND_RETURN_IF_ERROR(
          session_->PushAsync(sources.subspan(sources.size() - 1 - i, 1)).status());
    }
    times.push = SecondsSince(start);
    start = Clock::now();
    MUOND_ASSIGN_OR_RETURN(const StepOutcome outcome, session_->FinishAndPull(gpu_->sinks()));
    times.finish = SecondsSince(start);
    MUOND_RETURN_IF_ERROR(CheckOutcome(outcome));
    return times;
  }

  absl::Status CheckOutcome(const StepOutcome& outcome) {
    if (!outcome.applied) {
      return absl::InternalError(
          absl::StrFormat("step %d: expected to be applied, was skipped (%s)", outcome.step,
                          SkipCauseName(outcome.cause)));
    }
    if (outcome.newton_schulz_calls != result_.muon_matrices) {
      return absl::InternalError(absl::StrFormat(
          "step %d: expected %d Newton-Schulz calls, one for each Muon matrix, got %d",
          outcome.step, result_.muon_matrices, outcome.newton_schulz_calls));
    }
    result_.fallbacks += outcome.newton_schulz_fallbacks;
    return absl::OkStatus();
  }

  const BenchmarkOptions& options_;
  Values gradients_, parameters_;
  std::vector<client::SliceSource> gradient_sources_, initial_sources_;
  std::vector<client::SliceSink> sinks_;
  RankSlices slices_;
  std::unique_ptr<client::Session> session_;
  std::optional<SampleCheck> check_;
  std::optional<ControlProbe> probe_;
  std::unique_ptr<GpuValues> gpu_;  // null: the host's
  std::set<std::string> sampled_;   // whose gradients change from step to step
  std::int64_t daemon_pid_ = -1;
  std::int64_t memory_before_ = -1;
  BenchmarkResult result_;
};

}  // namespace

bool BenchmarkResult::SamplesPassed() const {
  return std::all_of(samples.begin(), samples.end(),
                     [](const SampleError& sample) { return sample.passed(); });
}

absl::StatusOr<BenchmarkResult> RunBenchmark(const BenchmarkOptions& options) {
  return Benchmark(options).Run();
}

}  // namespace muond::bench

#include "client/bench/benchmark_run.h"

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/bench/statistics.h"
#include "client/cpp/admin.h"
#include "client/cpp/session.h"
#include "proto/check.h"
#include "proto/crc32c.h"

namespace muond::bench {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// splitmix64: fast, and any seed is good.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  // Uniform in [-1, 1).
  float Next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
    return static_cast<float>(static_cast<std::int32_t>(z >> 32)) * 0x1p-31f;
  }

 private:
  std::uint64_t state_;
};

// All tensors of the model, one after another.
class Values {
 public:
  Values(std::int64_t elements, Dtype dtype)
      : dtype_(dtype), bytes_(static_cast<std::size_t>(elements) * DtypeBytes(dtype)) {}

  void Fill(std::uint64_t seed, float scale) {
    Random random(seed);
    for (std::size_t i = 0; i < size(); ++i) {
      const float value = random.Next() * scale;
      if (dtype_ == Dtype::kF32) {
        reinterpret_cast<float*>(bytes_.data())[i] = value;
      } else {
        reinterpret_cast<std::uint16_t*>(bytes_.data())[i] =
            dtype_ == Dtype::kBF16 ? kernels::FloatToBF16(value) : kernels::FloatToF16(value);
      }
    }
  }

  float At(std::size_t i) const {
    if (dtype_ == Dtype::kF32) return reinterpret_cast<const float*>(bytes_.data())[i];
    const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(bytes_.data())[i];
    return dtype_ == Dtype::kBF16 ? kernels::BF16ToFloat(bits) : kernels::F16ToFloat(bits);
  }

  bool AllFinite() const {
    for (std::size_t i = 0; i < size(); ++i) {
      if (!std::isfinite(At(i))) return false;
    }
    return true;
  }

  std::uint32_t Digest() const { return Crc32c(bytes_.data(), bytes_.size()); }
  std::size_t size() const { return bytes_.size() / DtypeBytes(dtype_); }
  std::byte* data() { return bytes_.data(); }

 private:
  Dtype dtype_;
  std::vector<std::byte> bytes_;
};

class Benchmark {
 public:
  explicit Benchmark(const BenchmarkOptions& options)
      : options_(options),
        gradients_(options.model.Elements(), options.dtype),
        parameters_(options.model.Elements(), options.dtype) {
    std::int64_t offset = 0;
    const auto width = static_cast<std::int64_t>(DtypeBytes(options.dtype));
    for (const ModelTensor& tensor : options.model.tensors) {
      const std::int64_t elements = Model{.name = {}, .tensors = {tensor}}.Elements();
      gradient_sources_.push_back({.parameter = tensor.name,
                                   .data = gradients_.data() + offset * width,
                                   .elements = elements,
                                   .dtype = options.dtype});
      initial_sources_.push_back(gradient_sources_.back());
      initial_sources_.back().data = parameters_.data() + offset * width;
      sinks_.push_back({.parameter = tensor.name,
                        .data = parameters_.data() + offset * width,
                        .elements = elements,
                        .dtype = options.dtype});
      slices_[tensor.name] = {WholeBox(tensor.shape)};
      offset += elements;
    }
    const std::int64_t bytes = offset * width;
    result_.elements = offset;
    result_.phases = {{.name = "push", .bytes = bytes, .seconds = {}},
                      {.name = "step", .bytes = 0, .seconds = {}},
                      {.name = "pull", .bytes = bytes, .seconds = {}},
                      {.name = "total", .bytes = 0, .seconds = {}}};
  }

  absl::StatusOr<BenchmarkResult> Run() {
    result_.memcpy_bytes_per_second = MeasureMemcpy();
    MUOND_RETURN_IF_ERROR(AskDaemon());
    client::SessionOptions session;
    session.endpoint = options_.endpoint;
    session.channel = options_.channel;
    session.chunk_bytes = options_.chunk_bytes;
    MUOND_ASSIGN_OR_RETURN(
        session_, client::Session::Open(MakeRunSpec(options_.model, options_.run, options_.dtype),
                                        0, slices_, session));
    const absl::Status trained = Train();
    // The daemon must not keep a run whose trainer is gone; a failed training is the better
    // message.
    const auto closed = session_->Close();
    MUOND_RETURN_IF_ERROR(trained);
    MUOND_RETURN_IF_ERROR(closed.status());
    return std::move(result_);
  }

 private:
  absl::Status AskDaemon() {
    client::Admin admin = options_.channel != nullptr
                              ? client::Admin(options_.channel, absl::Seconds(10))
                              : client::Admin(options_.endpoint, absl::Seconds(10));
    MUOND_ASSIGN_OR_RETURN(const v1::StatusReply status, admin.Status());
    result_.daemon_version = status.version();
    result_.backend = status.backend();
    result_.backend_description = status.backend_description();
    return absl::OkStatus();
  }

  absl::Status Train() {
    result_.muon_matrices = session_->routing().muon_matrices();
    parameters_.Fill(options_.seed, 0.02f);
    gradients_.Fill(options_.seed + 1, 1e-3f);
    const std::uint32_t initial = parameters_.Digest();
    MUOND_ASSIGN_OR_RETURN(const bool complete, session_->Initialize(initial_sources_));
    if (!complete)
      return absl::InternalError("the run still lacks initial values after Initialize");

    std::memset(parameters_.data(), 0xff, parameters_.size() * DtypeBytes(options_.dtype));
    MUOND_RETURN_IF_ERROR(Step(0.0, false));
    if (parameters_.Digest() != initial) {
      return absl::InternalError(
          "a step with learning rate 0 did not give back the initial values bit for bit");
    }
    for (std::int64_t i = 1; i < options_.warmup; ++i) MUOND_RETURN_IF_ERROR(Step(1e-3, false));
    for (std::int64_t i = 0; i < options_.steps; ++i) MUOND_RETURN_IF_ERROR(Step(1e-3, true));
    if (!parameters_.AllFinite()) {
      return absl::InternalError("the parameters after the last step are not all finite");
    }
    if (parameters_.Digest() == initial) {
      return absl::InternalError("the parameters after the last step are still the initial ones");
    }
    return absl::OkStatus();
  }

  // One training step; its times are kept when `measured`.
  absl::Status Step(double lr, bool measured) {
    StepBegin begin;
    begin.step = session_->next_step();
    begin.loss_scale = session_->loss_scale();
    begin.muon["all"] = {.lr = lr};
    begin.adamw["all"] = {.lr = lr, .weight_decay = 0.01};

    const Clock::time_point start = Clock::now();
    MUOND_RETURN_IF_ERROR(session_->Begin(begin));
    MUOND_RETURN_IF_ERROR(session_->Push(gradient_sources_));
    const double push = SecondsSince(start);
    MUOND_ASSIGN_OR_RETURN(const StepOutcome outcome, session_->Finish());
    const double finish = SecondsSince(start);
    MUOND_RETURN_IF_ERROR(session_->Pull(outcome.version, sinks_));
    const double total = SecondsSince(start);

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
    if (!measured) return absl::OkStatus();
    const double seconds[] = {push, finish - push, total - finish, total};
    for (std::size_t i = 0; i < result_.phases.size(); ++i) {
      result_.phases[i].seconds.push_back(seconds[i]);
    }
    return absl::OkStatus();
  }

  const BenchmarkOptions& options_;
  Values gradients_, parameters_;
  std::vector<client::SliceSource> gradient_sources_, initial_sources_;
  std::vector<client::SliceSink> sinks_;
  RankSlices slices_;
  std::unique_ptr<client::Session> session_;
  BenchmarkResult result_;
};

}  // namespace

absl::StatusOr<BenchmarkResult> RunBenchmark(const BenchmarkOptions& options) {
  return Benchmark(options).Run();
}

double MeasureMemcpy() {
  constexpr std::size_t kBytes = std::size_t{128} << 20;  // beyond any cache
  const std::vector<std::byte> from(kBytes, std::byte{1});
  std::vector<std::byte> to(kBytes);
  std::vector<double> seconds;
  for (int i = 0; i < 5; ++i) {
    const Clock::time_point start = Clock::now();
    std::memcpy(to.data(), from.data(), kBytes);
    seconds.push_back(SecondsSince(start));
    // The copy must happen.
    MUOND_CHECK(to[kBytes - 1 - static_cast<std::size_t>(i)] == std::byte{1}, "memcpy copied");
  }
  return static_cast<double>(kBytes) / Summarize(seconds).median;
}

}  // namespace muond::bench

#include "client/bench/report.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>

#include "absl/strings/str_format.h"
#include "client/bench/statistics.h"

namespace muond::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Phase {
  const char* name;
  std::int64_t bytes;  // moved; 0: not a transfer
  std::vector<double> seconds;
  Summary summary;
  std::optional<double> rate;  // bytes per second, of the median
};

std::vector<Phase> PhasesOf(const BenchmarkResult& result) {
  std::vector<Phase> phases = {{"push", result.transfer_bytes, {}, {}, {}},
                               {"step", 0, {}, {}, {}},
                               {"pull", result.transfer_bytes, {}, {}, {}},
                               {"total", 0, {}, {}, {}}};
  for (const StepTimes& times : result.times) {
    const double seconds[] = {times.push, times.finish, times.pull, times.Total()};
    for (std::size_t i = 0; i < phases.size(); ++i) phases[i].seconds.push_back(seconds[i]);
  }
  for (Phase& phase : phases) {
    phase.summary = Summarize(phase.seconds);
    if (phase.bytes > 0) phase.rate = static_cast<double>(phase.bytes) / phase.summary.median;
  }
  return phases;
}

// Of one step in the standard form with five iterations, whatever form a backend takes: for each
// m x n matrix 5 (4 n m^2 + 2 m^3).
double NewtonSchulzFlops(const models::Model& model) {
  double flops = 0;
  for (const models::ModelTensor& tensor : model.tensors) {
    if (!tensor.IsMuon()) continue;
    const auto [short_side, long_side] = std::minmax(tensor.shape[0], tensor.shape[1]);
    const auto m = static_cast<double>(short_side), n = static_cast<double>(long_side);
    flops += 5 * (4 * n * m * m + 2 * m * m * m);
  }
  return flops;
}

// What the rates are of; missing where one of the two was not measured.
struct Shares {
  std::optional<double> push_of_memcpy, pull_of_memcpy;
  std::optional<double> push_of_bare_stream, pull_of_bare_stream;
  std::optional<double> step_of_sgemm, step_of_bf16;
};

Shares SharesOf(const BenchmarkOptions& options, const BenchmarkResult& result) {
  const std::vector<Phase> phases = PhasesOf(result);
  const double push = *phases[0].rate, pull = *phases[2].rate;
  Shares shares;
  if (result.ceilings) {
    shares.push_of_memcpy = push / result.ceilings->memcpy_one_thread;
    shares.pull_of_memcpy = pull / result.ceilings->memcpy_one_thread;
    const double flops = NewtonSchulzFlops(options.model) / phases[1].summary.median;
    shares.step_of_sgemm = flops / result.ceilings->sgemm_flops;
    if (result.ceilings->bf16_flops) shares.step_of_bf16 = flops / *result.ceilings->bf16_flops;
  }
  if (result.bare_stream) {
    shares.push_of_bare_stream = push / result.bare_stream->push;
    shares.pull_of_bare_stream = pull / result.bare_stream->pull;
  }
  return shares;
}

// A number, or null where there is none or it is not finite (JSON has no infinity).
Json Number(std::optional<double> value, double factor = 1) {
  if (!value.has_value() || !std::isfinite(*value)) return nullptr;
  return *value * factor;
}

std::string Percent(std::optional<double> share) {
  return share.has_value() ? absl::StrFormat("%.0f%%", 100 * *share) : "-";
}

double MiB(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

std::string Target(const BenchmarkOptions& options) {
  return options.channel != nullptr ? "in-process" : options.endpoint;
}

std::string PhaseTable(const BenchmarkOptions& options, const BenchmarkResult& result) {
  const Shares shares = SharesOf(options, result);
  std::string text = absl::StrFormat("%-6s %10s %10s %10s %10s %8s %10s %12s\n", "phase", "median",
                                     "min", "p90", "max", "GB/s", "of memcpy", "of a stream");
  for (const Phase& phase : PhasesOf(result)) {
    text +=
        absl::StrFormat("%-6s %10.2f %10.2f %10.2f %10.2f", phase.name, phase.summary.median * 1e3,
                        phase.summary.min * 1e3, phase.summary.p90 * 1e3, phase.summary.max * 1e3);
    if (phase.rate) {
      const bool push = phase.name == std::string("push");
      text +=
          absl::StrFormat(" %8.2f %10s %12s", *phase.rate / 1e9,
                          Percent(push ? shares.push_of_memcpy : shares.pull_of_memcpy),
                          Percent(push ? shares.push_of_bare_stream : shares.pull_of_bare_stream));
    }
    text += "\n";
  }
  return text;
}

std::string CeilingLines(const BenchmarkOptions& options, const BenchmarkResult& result) {
  if (!result.ceilings) return "";
  const Ceilings& at_best = *result.ceilings;
  const Shares shares = SharesOf(options, result);
  std::string text = absl::StrFormat(
      "ceilings, same run: memcpy %.2f GB/s copied by one thread, %.2f by %d; products %.0f "
      "GFLOP/s "
      "in fp32\n(%s)",
      at_best.memcpy_one_thread / 1e9, at_best.memcpy / 1e9, at_best.threads,
      at_best.sgemm_flops / 1e9, at_best.sgemm_library);
  text += at_best.bf16_flops ? absl::StrFormat(", %.0f in bf16 (%s)\n", *at_best.bf16_flops / 1e9,
                                               at_best.bf16_library)
                             : absl::StrFormat(", none in bf16: %s\n", at_best.bf16_library);
  if (result.bare_stream) {
    text += absl::StrFormat("bare stream, same run: %.2f GB/s there, %.2f GB/s back\n",
                            result.bare_stream->push / 1e9, result.bare_stream->pull / 1e9);
  }
  if (result.muon_matrices > 0) {
    text += absl::StrFormat(
        "step: %.3g GFLOP of Newton-Schulz in the standard form, %s of the fp32 products",
        NewtonSchulzFlops(options.model) / 1e9, Percent(shares.step_of_sgemm));
    if (shares.step_of_bf16) text += ", " + Percent(shares.step_of_bf16) + " of those in bf16";
    text += "\n";
  }
  return text;
}

std::string MemoryLine(const BenchmarkResult& result) {
  const MemoryNeed& need = result.memory_need;
  if (need.Daemon() == 0) return "";
  std::string text =
      absl::StrFormat("memory: needs %.0f MiB: state %.0f, gradients %.0f, scratch %.0f",
                      MiB(need.Daemon()), MiB(need.state), MiB(need.staging), MiB(need.scratch));
  if (result.memory_use.grown >= 0) {
    text += absl::StrFormat("; grew by %.0f MiB at most, %.0f at the start",
                            MiB(result.memory_use.grown), MiB(result.memory_use.grown_initially));
    if (!MemoryWithinNeed(need, result.memory_use)) text += ": MORE THAN 10 % BEYOND THE NEED";
  }
  return text + "\n";
}

std::string CheckLines(const BenchmarkResult& result) {
  std::string text = absl::StrFormat(
      "checked: a step with learning rate 0 gave the initial values back bit for bit; every step\n"
      "was applied with %d Newton-Schulz calls (%d fallbacks); the final parameters are finite\n",
      result.muon_matrices, result.fallbacks);
  for (const SampleError& sample : result.samples) {
    text += absl::StrFormat(
        "%s %s (%s, %d elements): step off by %.2g (at most %.2g), its length by %.2g (at most "
        "%.2g)\n",
        sample.passed() ? "checked:" : "WRONG:", sample.parameter, sample.algorithm,
        sample.elements, sample.error, sample.tolerance, sample.scale_error,
        sample.scale_tolerance);
  }
  return text + absl::StrFormat("digest of the state: %s\n", result.digest);
}

Json PhasesJson(const BenchmarkResult& result) {
  Json json = Json::object();
  for (const Phase& phase : PhasesOf(result)) {
    Json& entry = json[phase.name];
    entry = {{"median_seconds", phase.summary.median},
             {"min_seconds", phase.summary.min},
             {"p90_seconds", phase.summary.p90},
             {"max_seconds", phase.summary.max},
             {"seconds", phase.seconds}};
    if (phase.rate) {
      entry["bytes"] = phase.bytes;
      entry["bytes_per_second"] = *phase.rate;
    }
  }
  return json;
}

Json CeilingsJson(const BenchmarkResult& result) {
  Json json = {{"threads", nullptr},
               {"memcpy_gbps", nullptr},
               {"memcpy_one_thread_gbps", nullptr},
               {"sgemm_gflops", nullptr},
               {"sgemm_library", nullptr},
               {"bf16_gflops", nullptr},
               {"bf16_library", nullptr},
               {"bare_stream_push_gbps", nullptr},
               {"bare_stream_pull_gbps", nullptr}};
  if (const auto& at_best = result.ceilings) {
    json["threads"] = at_best->threads;
    json["memcpy_gbps"] = at_best->memcpy / 1e9;
    json["memcpy_one_thread_gbps"] = at_best->memcpy_one_thread / 1e9;
    json["sgemm_gflops"] = at_best->sgemm_flops / 1e9;
    json["sgemm_library"] = at_best->sgemm_library;
    json["bf16_gflops"] = Number(at_best->bf16_flops, 1e-9);
    json["bf16_library"] = at_best->bf16_library;
  }
  if (result.bare_stream) {
    json["bare_stream_push_gbps"] = result.bare_stream->push / 1e9;
    json["bare_stream_pull_gbps"] = result.bare_stream->pull / 1e9;
  }
  return json;
}

Json SharesJson(const Shares& shares) {
  return {{"push_of_memcpy", Number(shares.push_of_memcpy)},
          {"pull_of_memcpy", Number(shares.pull_of_memcpy)},
          {"push_of_bare_stream", Number(shares.push_of_bare_stream)},
          {"pull_of_bare_stream", Number(shares.pull_of_bare_stream)},
          {"step_of_sgemm", Number(shares.step_of_sgemm)},
          {"step_of_bf16", Number(shares.step_of_bf16)}};
}

// Of the probe's calls, one in a hundred takes longer.
std::optional<double> ControlP99(const BenchmarkResult& result) {
  if (result.control.empty()) return std::nullopt;
  std::vector<double> sorted = result.control;
  std::sort(sorted.begin(), sorted.end());
  return sorted[(sorted.size() * 99 - 1) / 100];
}

// What one transport achieved. Only gRPC is a stream that a bare one bounds.
Json TransportJson(const BenchmarkOptions& options, const BenchmarkResult& result) {
  const std::vector<Phase> phases = PhasesOf(result);
  const Shares shares = SharesOf(options, result);
  const bool grpc = result.transport != "arena";
  return {{"push_gbps", *phases[0].rate / 1e9},
          {"pull_gbps", *phases[2].rate / 1e9},
          {"step_ms", phases[3].summary.median * 1e3},
          {"exposed_ms", phases[1].summary.median * 1e3},
          {"digest", result.digest},
          {"reason", result.transport_reason},
          {"push_of_memcpy", Number(shares.push_of_memcpy)},
          {"pull_of_memcpy", Number(shares.pull_of_memcpy)},
          {"control_p99_ms", Number(ControlP99(result), 1e3)},
          {"share_of_bare_stream", grpc ? Number(shares.push_of_bare_stream) : Json(nullptr)},
          {"pull_share_of_bare_stream",
           grpc ? Number(shares.pull_of_bare_stream) : Json(nullptr)}};
}

Json CheckJson(const BenchmarkResult& result) {
  Json samples = Json::array();
  for (const SampleError& sample : result.samples) {
    samples.push_back({{"parameter", sample.parameter},
                       {"algorithm", sample.algorithm},
                       {"elements", sample.elements},
                       {"error", Number(sample.error)},
                       {"tolerance", sample.tolerance},
                       {"scale_error", Number(sample.scale_error)},
                       {"scale_tolerance", sample.scale_tolerance},
                       {"passed", sample.passed()}});
  }
  return {{"passed", result.SamplesPassed()}, {"samples", std::move(samples)}};
}

Json MemoryJson(const BenchmarkResult& result) {
  const MemoryNeed& need = result.memory_need;
  const MemoryUse& use = result.memory_use;
  const bool known = need.Daemon() > 0 && use.grown >= 0;
  return {{"client_bytes", need.client},
          {"need_bytes", need.Daemon()},
          {"need_state_bytes", need.state},
          {"need_staging_bytes", need.staging},
          {"need_scratch_bytes", need.scratch},
          {"daemon_state_bytes", use.state},
          {"daemon_staging_bytes", use.staging},
          {"grown_bytes", known ? Json(use.grown) : Json(nullptr)},
          {"grown_initially_bytes", known ? Json(use.grown_initially) : Json(nullptr)},
          {"within_need", known ? Json(MemoryWithinNeed(need, use)) : Json(nullptr)}};
}

}  // namespace

std::string ReportTable(const BenchmarkOptions& options, const BenchmarkResult& result) {
  return absl::StrFormat(
             "%s in %s: %d tensors, %d elements, %d Muon matrices\n"
             "daemon %s (%s), backend %s, chunks of %d bytes\n"
             "%d steps after %d to warm up, over %s (%s); times in ms\n\n",
             options.model.name, kernels::DtypeName(options.dtype), options.model.tensors.size(),
             result.elements, result.muon_matrices, result.daemon_version, Target(options),
             result.backend_description.empty() ? result.backend : result.backend_description,
             options.chunk_bytes, result.times.size(), options.warmup, result.transport,
             result.transport_reason) +
         PhaseTable(options, result) + "\n" + CeilingLines(options, result) + MemoryLine(result) +
         CheckLines(result);
}

Json ReportJson(const BenchmarkOptions& options, const BenchmarkResult& result) {
  return {
      {"model", options.model.name},
      {"dtype", kernels::DtypeName(options.dtype)},
      {"momentum_dtype", kernels::DtypeName(options.momentum_dtype)},
      {"tensors", options.model.tensors.size()},
      {"elements", result.elements},
      {"muon_matrices", result.muon_matrices},
      {"newton_schulz_flops", NewtonSchulzFlops(options.model)},
      {"target", Target(options)},
      {"daemon_version", result.daemon_version},
      {"backend", result.backend},
      {"backend_description", result.backend_description},
      {"chunk_bytes", options.chunk_bytes},
      {"steps", options.steps},
      {"warmup", options.warmup},
      {"newton_schulz_fallbacks", result.fallbacks},
      {"phases", PhasesJson(result)},
      {"transports",
       {{result.transport.empty() ? "grpc" : result.transport, TransportJson(options, result)}}},
      {"ceilings", CeilingsJson(result)},
      {"shares", SharesJson(SharesOf(options, result))},
      {"check", CheckJson(result)},
      {"memory", MemoryJson(result)},
  };
}

Json ReportJson(const BenchmarkOptions& options, const std::vector<BenchmarkResult>& results) {
  Json json = ReportJson(options, results.front());
  for (const BenchmarkResult& result : results) {
    if (&result == &results.front()) continue;
    json["transports"][result.transport] = TransportJson(options, result);
  }
  return json;
}

Json ReadyJson(const BenchmarkOptions& options) {
  Json tensors = Json::array();
  for (const models::ModelTensor& tensor : options.model.tensors) {
    tensors.push_back({{"name", tensor.name}, {"shape", tensor.shape}, {"muon", tensor.IsMuon()}});
  }
  return {{"steps", options.steps}, {"tensors", std::move(tensors)}};
}

Json StepJson(const StepTimes& times) {
  return {{"step", times.step},
          {"push_seconds", times.push},
          {"step_seconds", times.finish},
          {"pull_seconds", times.pull},
          {"total_seconds", times.Total()}};
}

}  // namespace muond::bench

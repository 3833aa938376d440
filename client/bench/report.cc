#include "client/bench/report.h"

#include "absl/strings/str_format.h"
#include "client/bench/statistics.h"

namespace muond::bench {

std::string ReportTable(const BenchmarkOptions& options, const BenchmarkResult& result) {
  std::string text = absl::StrFormat(
      "%s in %s: %d tensors, %d elements, %d Muon matrices\n"
      "daemon %s, backend %s, chunks of %d bytes\n"
      "%d steps after %d to warm up; times in ms\n\n"
      "%-6s %10s %10s %10s %8s %10s\n",
      options.model.name, kernels::DtypeName(options.dtype), options.model.tensors.size(),
      result.elements, result.muon_matrices, result.daemon_version,
      result.backend_description.empty() ? result.backend : result.backend_description,
      options.chunk_bytes, options.steps, options.warmup, "phase", "median", "min", "max", "GB/s",
      "of memcpy");
  for (const Phase& phase : result.phases) {
    const Summary summary = Summarize(phase.seconds);
    text += absl::StrFormat("%-6s %10.2f %10.2f %10.2f", phase.name, summary.median * 1e3,
                            summary.min * 1e3, summary.max * 1e3);
    if (phase.bytes > 0) {
      const double rate = static_cast<double>(phase.bytes) / summary.median;
      text += absl::StrFormat(" %8.2f %9.0f%%", rate / 1e9,
                              100 * rate / result.memcpy_bytes_per_second);
    }
    text += "\n";
  }
  text += absl::StrFormat(
      "\nmemcpy of one thread, same run: %.2f GB/s copied\n"
      "checked: a step with learning rate 0 gave the initial values back bit for bit; every step\n"
      "was applied with %d Newton-Schulz calls (%d fallbacks); the final parameters are finite\n",
      result.memcpy_bytes_per_second / 1e9, result.muon_matrices, result.fallbacks);
  return text;
}

nlohmann::ordered_json ReportJson(const BenchmarkOptions& options, const BenchmarkResult& result) {
  nlohmann::ordered_json json = {
      {"model", options.model.name},
      {"dtype", kernels::DtypeName(options.dtype)},
      {"tensors", options.model.tensors.size()},
      {"elements", result.elements},
      {"muon_matrices", result.muon_matrices},
      {"endpoint", options.endpoint},
      {"daemon_version", result.daemon_version},
      {"backend", result.backend},
      {"backend_description", result.backend_description},
      {"chunk_bytes", options.chunk_bytes},
      {"steps", options.steps},
      {"warmup", options.warmup},
      {"newton_schulz_fallbacks", result.fallbacks},
      {"memcpy_bytes_per_second", result.memcpy_bytes_per_second},
      {"phases", nlohmann::ordered_json::object()},
  };
  for (const Phase& phase : result.phases) {
    const Summary summary = Summarize(phase.seconds);
    nlohmann::ordered_json& entry = json["phases"][phase.name];
    entry = {{"median_seconds", summary.median},
             {"min_seconds", summary.min},
             {"max_seconds", summary.max},
             {"seconds", phase.seconds}};
    if (phase.bytes > 0) {
      entry["bytes"] = phase.bytes;
      entry["bytes_per_second"] = static_cast<double>(phase.bytes) / summary.median;
    }
  }
  return json;
}

}  // namespace muond::bench

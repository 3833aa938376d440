// muond-bench: how fast a daemon takes gradients, steps and gives parameters back.
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/bench/command_line.h"
#include "client/bench/report.h"
#include "server/daemon/embedded.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace muond::bench {
namespace {

constexpr int kError = 1, kUsage = 2, kWrongResult = 3, kInterrupted = 130;

std::atomic<bool> interrupted{false};

// The first signal lets the benchmark close its run; a second one ends the process.
void OnSignal(int signal) {
  interrupted = true;
  std::signal(signal, SIG_DFL);
}

int Fail(const absl::Status& status) {
  std::cerr << "muond-bench: " << status.message() << "\n";
  if (absl::IsCancelled(status)) return kInterrupted;
  return absl::IsInvalidArgument(status) ? kUsage : kError;
}

// Standard output belongs to whoever paces the steps, or to the JSON; the table goes where neither
// is.
int WriteReports(const CommandLine& line, const std::vector<BenchmarkResult>& results) {
  const std::string json = ReportJson(line.options, results).dump(2) + "\n";
  if (line.json == "-") {
    std::cout << json;
  } else if (!line.paced) {
    for (const BenchmarkResult& result : results) {
      std::cout << ReportTable(line.options, result) << "\n";
    }
  }
  if (!line.json.empty() && line.json != "-") {
    std::ofstream file(line.json);
    if (!(file << json << std::flush)) {
      return Fail(absl::UnknownError(absl::StrFormat("cannot write \"%s\"", line.json)));
    }
  }
  for (const BenchmarkResult& result : results) {
    if (!result.SamplesPassed()) {
      std::cerr << "muond-bench: the step disagrees with the fp64 reference\n";
      return kWrongResult;
    }
    if (line.memory_must_fit && !MemoryWithinNeed(result.memory_need, result.memory_use)) {
      std::cerr << "muond-bench: the daemon held more memory than the run needs\n";
      return kWrongResult;
    }
    if (result.digest != results.front().digest) {
      std::cerr << "muond-bench: transports lead to different states\n";
      return kWrongResult;
    }
  }
  return 0;
}

// One transport after another, with the ceilings of the first.
absl::StatusOr<std::vector<BenchmarkResult>> RunAll(BenchmarkOptions& options,
                                                    const std::vector<std::string>& transports) {
  std::vector<BenchmarkResult> results;
  for (const std::string& transport : transports) {
    options.transport = transport;
    auto result = RunBenchmark(options);
    if (!result.ok()) return result.status();
    if (!results.empty()) {
      result->ceilings = results.front().ceilings;
      result->bare_stream = results.front().bare_stream;
    }
    options.ceilings = false;
    results.push_back(*std::move(result));
  }
  return results;
}

void Pace(BenchmarkOptions& options) {
  options.before_step = [&options, told = false]() mutable {
    if (!told) std::cout << ReadyJson(options).dump() << std::endl;
    told = true;
    std::string line;
    if (std::getline(std::cin, line)) return absl::OkStatus();
    return absl::CancelledError("standard input ended before the last step");
  };
  options.after_step = [](const StepTimes& times) {
    std::cout << StepJson(times).dump() << std::endl;
  };
}

// Other users of the machine shall not feel a model that doesn't fit.
absl::Status CheckRoom(const CommandLine& line) {
  const BenchmarkOptions& options = line.options;
  const bool here = line.in_process || IsLocalEndpoint(options.endpoint);
  return CheckMemory(options.model, EstimateMemory(options.model, options.dtype, here, 1,
                                                   options.momentum_dtype),
                     AvailableMemory());
}

int Main(int argc, char** argv) {
  const char* endpoint = std::getenv("MUOND_ENDPOINT");
  absl::StatusOr<CommandLine> line =
      ParseCommandLine(argc, argv, endpoint == nullptr ? "" : endpoint);
  if (!line.ok()) return Fail(line.status());
  if (!line->text.empty()) {
    std::cout << line->text;
    return 0;
  }
  if (!line->bare_stream_socket.empty()) return ServeBareStream(line->bare_stream_socket);
  if (const absl::Status room = CheckRoom(*line); !room.ok()) return Fail(room);

  std::signal(SIGINT, OnSignal);
  std::signal(SIGTERM, OnSignal);
  BenchmarkOptions& options = line->options;
  options.stop = &interrupted;
  options.bare_stream_program = "/proc/self/exe";
  if (line->paced) Pace(options);
  std::unique_ptr<Service> service;
  if (line->in_process) {
    // Standard output is the benchmark's.
    spdlog::set_default_logger(spdlog::stderr_logger_mt("muond"));
    spdlog::set_level(spdlog::level::warn);
    auto started = Service::Start({.backend = line->backend, .threads = options.threads});
    if (!started.ok()) return Fail(started.status());
    service = *std::move(started);
    options.channel = service->channel();
  }
  const auto results = RunAll(options, line->transports);
  return results.ok() ? WriteReports(*line, *results) : Fail(results.status());
}

}  // namespace
}  // namespace muond::bench

int main(int argc, char** argv) { return muond::bench::Main(argc, argv); }

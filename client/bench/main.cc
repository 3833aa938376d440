// muond-bench: how fast a daemon takes gradients, steps and gives parameters back.
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "client/bench/benchmark_run.h"
#include "client/bench/memory_need.h"
#include "client/bench/report.h"

namespace muond::bench {
namespace {

constexpr char kDescription[] =
    "muond-bench - trains a synthetic model against a daemon and times push, step and pull.\n"
    "Opens a run of its own and closes it again. Exit codes: 0 fine, 1 error, 2 usage.";

struct Arguments {
  BenchmarkOptions options;
  std::string model = "tiny";
  std::string dtype = "f32";
  std::string json;  // file; empty: none
};

void AddOptions(CLI::App& app, Arguments& arguments) {
  BenchmarkOptions& options = arguments.options;
  app.set_version_flag("--version", "muond-bench " MUOND_VERSION);
  app.add_option("--model", arguments.model,
                 "tiny, gpt2, llama1b, 7b8 or custom:ROWSxCOLS[xCOUNT],... [tiny]");
  app.add_option("--dtype", arguments.dtype, "of gradients and parameters [f32]")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  app.add_option("--steps", options.steps, "measured steps [20]")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--warmup", options.warmup, "steps before them [2]")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--endpoint", options.endpoint,
                 "unix:///path or host:port [MUOND_ENDPOINT, else 127.0.0.1:7070]");
  app.add_option("--chunk-bytes", options.chunk_bytes, "payload of one message [1048576]")
      ->check(CLI::Range(4096, 1 << 30));
  app.add_option("--run", options.run, "name of the run [bench-<pid>]");
  app.add_option("--seed", options.seed, "of gradients and initial values [1]");
  app.add_option("--json", arguments.json, "write the result there too; - is stdout, and no table");
}

int Fail(const absl::Status& status) {
  std::cerr << "muond-bench: " << status.message() << "\n";
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

int WriteReports(const Arguments& arguments, const BenchmarkResult& result) {
  const std::string json = ReportJson(arguments.options, result).dump(2) + "\n";
  if (arguments.json == "-") {
    std::cout << json;
    return 0;
  }
  std::cout << ReportTable(arguments.options, result);
  if (arguments.json.empty()) return 0;
  std::ofstream file(arguments.json);
  if (file << json << std::flush) return 0;
  return Fail(absl::UnknownError(absl::StrFormat("cannot write \"%s\"", arguments.json)));
}

int Main(int argc, char** argv) {
  Arguments arguments;
  BenchmarkOptions& options = arguments.options;
  if (const char* endpoint = std::getenv("MUOND_ENDPOINT")) options.endpoint = endpoint;
  options.run = absl::StrFormat("bench-%d", getpid());
  CLI::App app(kDescription, "muond-bench");
  AddOptions(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (options.endpoint.empty()) options.endpoint = "127.0.0.1:7070";
  const std::map<std::string, Dtype> dtypes = {
      {"f32", Dtype::kF32}, {"bf16", Dtype::kBF16}, {"f16", Dtype::kF16}};
  options.dtype = dtypes.at(arguments.dtype);
  absl::StatusOr<Model> model = ParseModel(arguments.model);
  if (!model.ok()) return Fail(model.status());
  options.model = *std::move(model);

  const MemoryNeed need =
      EstimateMemory(options.model, options.dtype, IsLocalEndpoint(options.endpoint));
  const absl::Status fits = CheckMemory(options.model, need, AvailableMemory());
  if (!fits.ok()) return Fail(fits);
  const absl::StatusOr<BenchmarkResult> result = RunBenchmark(options);
  return result.ok() ? WriteReports(arguments, *result) : Fail(result.status());
}

}  // namespace
}  // namespace muond::bench

int main(int argc, char** argv) { return muond::bench::Main(argc, argv); }

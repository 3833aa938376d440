// One benchmark: a synthetic model trained for some steps against a daemon, every phase timed, the
// result checked in the same run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/model.h"

namespace grpc {
class Channel;
}

namespace muond::bench {

struct BenchmarkOptions {
  Model model;
  Dtype dtype = Dtype::kF32;  // of gradients and of pulled parameters
  std::int64_t steps = 20;    // measured, after `warmup` more
  std::int64_t warmup = 2;    // at least 1: the first step checks the transfer
  std::string endpoint;
  std::string run = "bench";
  std::int64_t chunk_bytes = std::int64_t{1} << 20;
  std::uint64_t seed = 1;
  std::shared_ptr<grpc::Channel> channel = nullptr;  // tests: takes the place of the endpoint
};

struct Phase {
  std::string name;
  std::int64_t bytes = 0;       // moved per step; 0: not a transfer
  std::vector<double> seconds;  // of each measured step
};

struct BenchmarkResult {
  std::string daemon_version, backend, backend_description;
  std::int64_t elements = 0;
  std::int64_t muon_matrices = 0;
  std::int64_t fallbacks = 0;  // Newton-Schulz results redone by the fp32 standard path
  std::vector<Phase> phases;   // push, step, pull, total
  double memcpy_bytes_per_second = 0;
};

// Registers the run, trains, closes the run again, also after a failure. Checks on the way, each an
// INTERNAL error that says what was expected: a step with learning rate 0 gives back the initial
// values bit for bit; every step is applied with one Newton-Schulz call for each Muon matrix; the
// parameters after the last step are finite and differ from the initial ones. Other errors are the
// session's.
absl::StatusOr<BenchmarkResult> RunBenchmark(const BenchmarkOptions& options);

// Bytes per second of one thread copying memory that is in no cache, median of five.
double MeasureMemcpy();

}  // namespace muond::bench

// One benchmark: a synthetic model trained for some steps against a daemon, every phase timed, the
// result checked in the same run.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/bare_stream.h"
#include "client/bench/ceilings.h"
#include "client/bench/memory_need.h"
#include "client/bench/sample_check.h"
#include "client/models/model.h"
#include "proto/tls.h"

namespace grpc {
class Channel;
}

namespace muond::bench {

// Seconds of one measured step: push includes Begin, step is Finish (reduction, verdict, update),
// pull brings every parameter back.
struct StepTimes {
  std::int64_t step = 0;
  double push = 0, finish = 0, pull = 0;
  double Total() const { return push + finish + pull; }
};

struct BenchmarkOptions {
  models::Model model;
  Dtype dtype = Dtype::kF32;  // of gradients and of pulled parameters
  Dtype momentum_dtype = Dtype::kF32;  // that the daemon keeps Muon's momentum in
  std::int64_t steps = 20;    // measured, after `warmup` more
  std::int64_t warmup = 2;    // at least 1: the first step checks the transfer
  std::string endpoint;
  TlsFiles tls;  // as in client::SessionOptions
  std::string transport = "grpc";  // of SessionOptions
  int gpu = -1;  // gradients and parameters lie in this GPU's memory; negative: in the host's
  // Of a GPU: gradients become ready one by one over this long, last tensor first, as backward
  // makes them, and are pushed as they do. `finish` of StepTimes is then what is exposed behind
  // the last of them. 0: all are there at once, and `finish` is a whole step, from gradients to
  // parameters.
  double backward_ms = 0;
  bool probe_control = false;  // time small calls while bytes flow
  std::string run = "bench";
  std::int64_t chunk_bytes = std::int64_t{1} << 20;
  std::uint64_t seed = 1;
  std::shared_ptr<grpc::Channel> channel = nullptr;  // in-process: takes the place of the endpoint
  int threads = 0;                                   // of the ceilings; 0: one per core
  bool ceilings = true;                              // false: saves about two seconds
  // Run as `program --serve-bare-stream SOCKET` it is the other end of the bare stream; empty: none
  // is measured.
  std::string bare_stream_program;
  // Tests of the check itself: what the reference multiplies its learning rates with.
  double reference_lr_factor = 1;
  // Set by a signal handler: the run is closed after the phase in hand, the error is CANCELLED.
  const std::atomic<bool>* stop = nullptr;
  // Around each measured step; a failure of the first ends the benchmark.
  std::function<absl::Status()> before_step = nullptr;
  std::function<void(const StepTimes&)> after_step = nullptr;
};

struct BenchmarkResult {
  std::string transport;         // that was used
  std::string transport_reason;  // as the session tells
  std::vector<double> control;   // seconds of each small call of the probe
  std::string daemon_version, backend, backend_description;
  std::int64_t elements = 0;
  std::int64_t muon_matrices = 0;
  std::int64_t fallbacks = 0;  // Newton-Schulz results redone by the fp32 standard path
  std::vector<StepTimes> times;
  std::int64_t transfer_bytes = 0;  // of one push, and of one pull
  std::string digest;               // of the optimizer state after the last step
  std::vector<SampleError> samples;
  std::optional<Ceilings> ceilings;
  std::optional<BareStreamRates> bare_stream;  // unix sockets only
  MemoryNeed memory_need;
  MemoryUse memory_use;

  bool SamplesPassed() const;
};

// Registers the run, trains, closes the run again, also after a failure. Checks on the way, each an
// INTERNAL error that says what was expected: a step with learning rate 0 gives back the initial
// values bit for bit; every step is applied with one Newton-Schulz call for each Muon matrix; the
// parameters after the last step are finite and differ from the initial ones. A sample that
// disagrees with the fp64 reference is a result, not an error: see `samples`. Other errors are the
// session's.
absl::StatusOr<BenchmarkResult> RunBenchmark(const BenchmarkOptions& options);

}  // namespace muond::bench

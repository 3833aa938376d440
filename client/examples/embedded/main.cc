// muond-example-embedded: the optimizer inside a program, without a daemon.
//
// The service starts in this process and is called through gRPC's in-process channel; no socket is
// opened. Given an address (unix:///path or host:port), the same trainer uses the daemon there and
// ends with the same digest:
//
//   muond-example-embedded
//   muond-example-embedded unix:///run/muond/muond.sock
#include <cstdio>
#include <memory>

#include "absl/strings/str_format.h"
#include "client/examples/embedded/trainer.h"
#include "server/daemon/embedded.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace muond::embedded_example {
namespace {

int Fail(const absl::Status& status) {
  absl::FPrintF(stderr, "muond-example-embedded: %s\n", status.message());
  return 1;
}

void Print(const StepOutcome& outcome) {
  absl::PrintF("step %d: %s, gradient norm %.4f, next loss scale %.0f\n", outcome.step,
               outcome.applied ? "applied" : "skipped", outcome.grad_norm, outcome.next_loss_scale);
}

int Main(int argc, char** argv) {
  client::SessionOptions options;
  std::unique_ptr<Service> service;
  if (argc > 1) {
    options.endpoint = argv[1];
  } else {
    // The service logs through spdlog's default logger: to stdout unless told otherwise.
    spdlog::set_default_logger(spdlog::stderr_logger_mt("muond"));
    auto started = Service::Start({.backend = "cpu"});
    if (!started.ok()) return Fail(started.status());
    service = *std::move(started);
    options.channel = service->channel();
  }
  const absl::StatusOr<Training> training = Train(options);
  if (!training.ok()) return Fail(training.status());
  for (const StepOutcome& outcome : training->outcomes) Print(outcome);
  const std::vector<float>& w = training->weights;
  absl::PrintF("w: [[%.6f, %.6f], [%.6f, %.6f]]\n", w[0], w[1], w[2], w[3]);
  absl::PrintF("digest of the state: %s\n", training->digest);
  return 0;
}

}  // namespace
}  // namespace muond::embedded_example

int main(int argc, char** argv) { return muond::embedded_example::Main(argc, argv); }

#include "tests/conformance/nccl_gpu_trainer.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <thread>

#include "absl/time/clock.h"
#include "server/daemon/embedded.h"

namespace muond::conformance {

using cluster::Must;
using cluster::Tensors;

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

RunSpec SomeSpec(int world) {
  return cluster::SpecOf({cluster::Matrix("w.big", 1024, 1536), cluster::Matrix("w.odd", 37, 53),
                          cluster::Vector("norm", 1019)},
                         world);
}

RunSpec LargeSpec(std::int64_t millions) {
  std::vector<ParameterSpec> parameters;
  for (int i = 0; i < 16; ++i) {
    parameters.push_back(cluster::Vector("layer." + std::to_string(i) + ".w", millions << 16));
    parameters.push_back(cluster::Vector("layer." + std::to_string(i) + ".norm", 2048));
  }
  return cluster::SpecOf(std::move(parameters));
}

std::string TwentySteps(DeviceTrainer& trainer) {
  Must(trainer.session().Initialize(trainer.Noise(1)));
  for (int step = 0; step < 20; ++step) {
    Tensors gradients = cluster::NoiseFor(trainer.spec(), 100 + step);
    if (step == 7) gradients.at("w.odd")[11] = std::numeric_limits<float>::infinity();
    const StepOutcome outcome =
        Must(trainer.session().StepAndPull({}, trainer.Sources(gradients), trainer.sinks()));
    MUOND_CHECK(outcome.applied == (step != 7), "step 7 is skipped and no other");
  }
  return trainer.Parameters();
}

void Fill(DeviceTrainer& trainer) {
  const auto driver = Must(client::LoadGpuDriver());
  for (const client::SliceSource& source : trainer.sources()) {
    const cluster::Floats noise =
        cluster::Noise(std::min<std::int64_t>(source.elements, 1 << 20), 3);
    for (std::int64_t at = 0; at < source.elements; at += std::ssize(noise)) {
      const std::int64_t n = std::min<std::int64_t>(std::ssize(noise), source.elements - at);
      Must(driver->Copy(source.place,
                        static_cast<char*>(const_cast<void*>(source.data)) + at * 4, noise.data(),
                        static_cast<std::size_t>(n) * 4));
    }
    Must(driver->Wait(source.place));
  }
}

namespace {

// What pushes and pulls of a model of that size take, and whole steps.
void Measure(client::SessionOptions options, std::int64_t millions, int steps) {
  DeviceTrainer trainer(options, LargeSpec(millions), 0);
  Fill(trainer);
  Must(trainer.session().Initialize(trainer.sources()));
  double bytes = 0;
  for (const auto& source : trainer.sources()) bytes += static_cast<double>(source.elements) * 4;
  std::vector<double> push, pull, step;
  for (int i = 0; i < steps + 2; ++i) {
    Must(trainer.session().Begin({}));
    const absl::Time start = absl::Now();
    Must(trainer.session().Push(trainer.sources()));
    const absl::Time pushed = absl::Now();
    const StepOutcome outcome = Must(trainer.session().Finish());
    const absl::Time finished = absl::Now();
    Must(trainer.session().Pull(outcome.version, trainer.sinks()));
    const absl::Time pulled = absl::Now();
    Must(trainer.session().StepAndPull({}, trainer.sources(), trainer.sinks()));
    if (i < 2) continue;
    push.push_back(absl::ToDoubleSeconds(pushed - start));
    pull.push_back(absl::ToDoubleSeconds(pulled - finished));
    step.push_back(absl::ToDoubleSeconds(absl::Now() - pulled));
  }
  const auto median = [](std::vector<double>& of) {
    std::sort(of.begin(), of.end());
    return of[of.size() / 2];
  };
  const double a = median(push), b = median(pull), c = median(step);
  std::printf("%-5s %.2f GB: push %.2f ms %.1f GB/s, pull %.2f ms %.1f GB/s, step and pull %.2f ms "
              "(medians of %d)\n",
              trainer.session().transports()[0].name.c_str(), bytes / 1e9, a * 1e3, bytes / a / 1e9,
              b * 1e3, bytes / b / 1e9, c * 1e3, steps);
  std::fflush(stdout);
}

[[noreturn]] void Die() {
  kill(getpid(), SIGKILL);
  std::abort();
}

}  // namespace

void RunChild() {
  const std::string what = Variable("MUOND_NCCL_CHILD");
  client::SessionOptions options;
  options.endpoint = Variable("MUOND_NCCL_ENDPOINT");
  options.transport = Variable("MUOND_NCCL_TRANSPORT");
  options.gpu = std::atoi(Variable("MUOND_NCCL_GPU").c_str());
  options.call_timeout = absl::Seconds(60);
  const int rank = std::atoi(Variable("MUOND_NCCL_RANK").c_str());
  const int world = std::max(1, std::atoi(Variable("MUOND_NCCL_WORLD").c_str()));
  if (what == "daemon") {
    ServiceOptions service{.backend = "cuda", .devices = {"1"}, .listen = {options.endpoint}};
    service.nccl = "auto";
    const auto running = Must(Service::Start(service));
    for (;;) pause();
  }
  if (what == "measure") {
    return Measure(options, std::atoi(Variable("MUOND_NCCL_MILLIONS").c_str()),
                   std::atoi(Variable("MUOND_NCCL_STEPS").c_str()));
  }
  if (what == "die") {
    DeviceTrainer trainer(options, LargeSpec(64), 0);
    Fill(trainer);
    if (trainer.session().state() == v1::RUN_STATE_OPENING) {
      Must(trainer.session().Initialize(trainer.sources()));
    }
    Must(trainer.session().Begin({}));
    std::thread([] {
      std::this_thread::sleep_for(
          std::chrono::microseconds(std::atoi(Variable("MUOND_NCCL_DIE_US").c_str())));
      Die();
    }).detach();
    for (;;) Must(trainer.session().Push(trainer.sources()));
  }
  if (what == "recover") {
    DeviceTrainer trainer(options, LargeSpec(64), 0);
    Fill(trainer);
    MUOND_CHECK(trainer.session().transports()[0].name == options.transport, "the path");
    Must(trainer.session().StepAndPull({}, trainer.sources(), trainer.sinks()));
    return;
  }
  DeviceTrainer trainer(options, SomeSpec(world), rank);
  for (const client::ChosenTransport& chosen : trainer.session().transports()) {
    std::printf("rank %d, daemon %s: %s (%s)\n", rank, chosen.daemon.c_str(), chosen.name.c_str(),
                chosen.reason.c_str());
  }
  if (options.transport != "auto") {
    MUOND_CHECK(trainer.session().transports()[0].name == options.transport, "the path");
  }
  const std::string parameters = TwentySteps(trainer);
  std::ofstream(Variable("MUOND_NCCL_OUT"), std::ios::binary) << parameters;
}

}  // namespace muond::conformance

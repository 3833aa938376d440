// muond: the optimizer daemon. Reads its configuration, starts the service, waits for a signal.
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <systemd/sd-daemon.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "server/daemon/config.h"
#include "server/daemon/embedded.h"
#include "server/daemon/logging.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

constexpr int kUsageError = 2;
constexpr int kDeviceLost = 3;

pthread_t main_thread;

void PassToMain(int signal_number) { pthread_kill(main_thread, signal_number); }

// Signals are taken by the main thread alone; every thread started later inherits the mask. Those
// that OpenBLAS starts before main pass on what reaches them: it would end the process there.
sigset_t BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  main_thread = pthread_self();
  for (const int number : {SIGTERM, SIGINT}) signal(number, &PassToMain);
  signal(SIGPIPE, SIG_IGN);
  return signals;
}

// Messages on their way are megabytes that come and go on all of gRPC's threads. An arena for each
// thread would keep as much again as passes through; arenas that shrink at once would spend a third
// of a push on fresh pages. Tensors are no part of this (kernels/host_memory.h).
void TuneAllocator() {
  constexpr int kLargestMessage = 8 << 20;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  mallopt(M_ARENA_MAX, std::max(2, cores / 2));
  mallopt(M_MMAP_THRESHOLD, kLargestMessage);
  mallopt(M_TRIM_THRESHOLD, 4 * kLargestMessage);
}

// No state on that device can be read again, and no later call will do better: only a new process
// has the device back, and goes on from a checkpoint or a buddy. Trainers see a daemon that died,
// and wait for it. Nothing is drained: what is to be read for that is lost.
[[noreturn]] void LeaveLostDevice(const std::string& what) {
  spdlog::critical("{}: this process can't use the device any more, and ends; started again, it "
                   "goes on from the last checkpoint, or from its buddy", what);
  spdlog::default_logger()->flush();
  sd_notify(0, "STOPPING=1\nSTATUS=a device is lost");
  std::_Exit(kDeviceLost);
}

void LogStart(const Config& config, const Service& service) {
  for (const std::string& warning : config.warnings) spdlog::warn("{}", warning);
  for (const std::string& address : service.addresses()) spdlog::info("listening on {}", address);
  if (!service.health_address().empty()) {
    spdlog::info("health probes on {}", service.health_address());
  }
  if (!service.metrics_address().empty()) {
    spdlog::info("metrics on http://{}/metrics", service.metrics_address());
  }
}

// Returns with the signal. Meanwhile systemd's watchdog, where there is one, hears that the daemon
// answers, for as long as it does.
int WaitForSignal(const sigset_t& signals, Service& service) {
  std::uint64_t watchdog_us = 0;
  if (sd_watchdog_enabled(0, &watchdog_us) <= 0) {
    int number = 0;
    sigwait(&signals, &number);
    return number;
  }
  // Asking may take as long as waiting: both fit into the time that systemd gives.
  const absl::Duration interval = absl::Microseconds(watchdog_us) / 3;
  const timespec wait = absl::ToTimespec(interval);
  for (;;) {
    const int number = sigtimedwait(&signals, nullptr, &wait);
    if (number > 0) return number;
    const absl::Status alive = service.CheckAlive(interval);
    if (alive.ok()) {
      sd_notify(0, "WATCHDOG=1");
    } else {
      spdlog::error("watchdog: the daemon does not answer itself: {}",
                    std::string(alive.message()));
    }
  }
}

int Main(const std::vector<std::string>& arguments) {
  TuneAllocator();
  const auto parsed = ParseCommandLine(arguments, ProcessEnvironment());
  if (!parsed.ok()) {
    std::fprintf(stderr, "muond: %s\n", std::string(parsed.status().message()).c_str());
    return kUsageError;
  }
  if (!parsed->text.empty()) {
    std::fputs(parsed->text.c_str(), stdout);
    return 0;
  }
  const Config& config = parsed->config;
  const sigset_t signals = BlockSignals();
  if (absl::Status ready = PrepareSocketDirectories(config); !ready.ok()) {
    std::fprintf(stderr, "muond: %s\n", std::string(ready.message()).c_str());
    return 1;
  }
  SetUpLogging(config.log_level, config.log_format);
  ServiceOptions options = config.service;
  options.settings = SettingsOf(config);
  options.on_device_lost = &LeaveLostDevice;
  auto service = Service::Start(options);
  if (!service.ok()) {
    std::fprintf(stderr, "muond: %s\n", std::string(service.status().message()).c_str());
    return absl::IsInvalidArgument(service.status()) ? kUsageError : 1;
  }
  SetLogListener([&service](std::string_view level) { (*service)->OnLogMessage(level); });
  LogStart(config, **service);
  sd_notify(0, "READY=1\nSTATUS=accepting runs");

  const int signal_number = WaitForSignal(signals, **service);
  spdlog::info("{}: draining for at most {}", signal_number == SIGTERM ? "SIGTERM" : "SIGINT",
               absl::FormatDuration(config.drain_grace));
  sd_notify(0, "STOPPING=1\nSTATUS=draining");
  (*service)->Stop(config.drain_grace);
  spdlog::info("stopped");
  SetLogListener(nullptr);
  return 0;
}

}  // namespace
}  // namespace muond

int main(int argc, char** argv) { return muond::Main({argv + 1, argv + argc}); }

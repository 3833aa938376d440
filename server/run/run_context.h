// What a run uses of its daemon.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/cluster/peers.h"
#include "server/engine/engines.h"
#include "server/engine/executor.h"
#include "server/metrics/daemon_metrics.h"
#include "server/registry/registry.h"
#include "server/run/observe_step.h"

namespace muond {

class Run;

// All of it outlives every run.
struct RunContext {
  std::vector<EngineDevice> devices;  // at least one
  EngineFaults faults;
  DaemonMetrics* metrics = nullptr;
  RegistryLimits limits;
  // This daemon and the others that its runs span.
  std::shared_ptr<Peers> peers;
  // For work that waits for other daemons.
  Executor* peer_executor = nullptr;
  std::string state_dir;  // where generations are kept; empty: nowhere
  bool overlap = false;   // Newton-Schulz before the verdict, where a run's rules allow it
  ObserveOptions observe;
  // Checkpoints: every so many steps each daemon copies its state, the same steps on all; 0: never.
  std::int64_t checkpoint_every_steps = 0;
  // Told, under the run's lock, that such a copy was taken, and that a run needs a restore.
  std::function<void()> checkpoint_wanted;
  // Told of a run that was made here, before any rank has joined it.
  std::function<void(Run&)> run_made;
};

}  // namespace muond

// What making a run and adding to it have in common. Internal to server/run/run*.cc.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "server/engine/engines.h"
#include "server/registry/registry.h"
#include "server/run/run.h"

namespace muond {

inline constexpr char kOverlapOn[] = "on";

// The status with the run's name in front, unless it begins with that already.
absl::Status Refused(const std::string& run, const absl::Status& status);

// How this daemon plans; all daemons of a run have equally many devices: another's plan would
// differ, and be refused. `overlap`: "on", or why not.
Placement PlacementOf(const RunContext& context, const std::string& overlap);

// Without a limit of the operator's the machine's free memory is one: what could never be filled
// must not get the daemon killed with all its runs. `before`: what is held already, or null.
absl::Status CheckFree(const Registry& registry, const Registry* before, const RunContext& context);

// What the operator's limit leaves for gradients beside the state; 0: there is no such limit.
std::int64_t StagingMax(const Registry& registry, const RegistryLimits& limits);

// What this daemon owns of the parameters from `first` on, by parameter that holds a state.
LocalShards ShardsFrom(const Registry& registry, std::size_t first);

bool WantsMuon(const RunSpec& spec);

}  // namespace muond

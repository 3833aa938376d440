// Whether a model fits into the memory of the machine, before anything is allocated.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "client/bench/model.h"

namespace muond::bench {

struct MemoryNeed {
  std::int64_t client_bytes = 0;
  std::int64_t daemon_bytes = 0;  // an estimate; 0 when the daemon is on another machine
};

// The client holds gradients and parameters once each in `dtype`. The daemon holds, for each
// element, 4 bytes of master weight and 4 of momentum (Muon) or 8 of moments (AdamW), the gradient
// as it arrived and its fp32 sum; and Newton-Schulz scratch of six times the largest matrix.
MemoryNeed EstimateMemory(const Model& model, Dtype dtype, bool daemon_here);

// Whether `endpoint` is on this machine, by its form: a unix socket or a loopback address.
bool IsLocalEndpoint(const std::string& endpoint);

// MemAvailable of /proc/meminfo; -1 when it can't be read.
std::int64_t AvailableMemory();

// RESOURCE_EXHAUSTED that says what is needed, what is there and what would fit. A machine whose
// available memory is unknown (-1) passes.
absl::Status CheckMemory(const Model& model, const MemoryNeed& need, std::int64_t available);

}  // namespace muond::bench

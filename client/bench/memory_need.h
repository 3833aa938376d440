// How much memory a model takes, before anything is allocated and beside what was measured.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "client/models/model.h"

namespace muond::bench {

struct MemoryNeed {
  std::int64_t client = 0;  // gradients and parameters, once each in the dtype
  // Of the daemon; all 0 when it is on another machine.
  std::int64_t state = 0;    // weights and momentum (Muon), weights and two moments (AdamW)
  std::int64_t staging = 0;  // the gradients once, as they arrived
  std::int64_t scratch = 0;  // U and O of one batch of matrices, Newton-Schulz's own products

  std::int64_t Daemon() const { return state + staging + scratch; }
  std::int64_t Total() const { return client + Daemon(); }
};

// `daemon_here`: it runs on this machine. `threads`: of its backend. Scratch is that of the cpu
// backend: a batch has 32 Mi elements or one larger matrix; each thread keeps the products of a
// matrix, or one set serves all threads for the largest.
MemoryNeed EstimateMemory(const models::Model& model, Dtype dtype, bool daemon_here, int threads,
                          Dtype momentum_dtype = Dtype::kF32);

// Whether `endpoint` is on this machine, by its form: a unix socket or a loopback address.
bool IsLocalEndpoint(const std::string& endpoint);

// MemAvailable of /proc/meminfo; -1 when it can't be read.
std::int64_t AvailableMemory();

// RESOURCE_EXHAUSTED that says what is needed, what is there and what would fit. A machine whose
// available memory is unknown (-1) passes.
absl::Status CheckMemory(const models::Model& model, const MemoryNeed& need,
                         std::int64_t available);

// What a daemon's process was seen to hold for the run.
struct MemoryUse {
  // Bytes that its resident memory had grown by at its peak in a step, and while the initial values
  // came in; -1: not known.
  std::int64_t grown = -1;
  std::int64_t grown_initially = -1;
  std::int64_t state = 0;    // as the daemon counts
  std::int64_t staging = 0;  // likewise
};

// A daemon that serves nothing else holds 10 % more than it needs at most. What does not grow with
// the model (stacks, stubs, messages on their way) is part of that for large models; kMemoryFixed
// allows for it in small ones. True when not known.
inline constexpr double kMemoryMargin = 0.10;
inline constexpr std::int64_t kMemoryFixed = std::int64_t{32} << 20;
bool MemoryWithinNeed(const MemoryNeed& need, const MemoryUse& use);

}  // namespace muond::bench

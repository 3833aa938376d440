// How long a step will take, before anything runs: the work of a plan by the rates of a machine.
// An estimate for choosing numbers of daemons; docs/planning.md says how well it fits. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/values.h"
#include "server/registry/plan.h"
#include "server/registry/routing.h"

namespace muond {

// What one device of a machine does, as measured; all but the fixed times are per owner, since each
// has a device and a way to the trainers of its own.
struct MachineRates {
  std::string name;
  double newton_schulz_tflops = 0;  // 1e12 of the operations of SymmetricFlops in a second
  double memory_gbps = 0;           // 1e9 bytes, read and written, in a second, by other passes
  double link_gbps = 0;             // 1e9 bytes in a second between an owner and the trainers
  double step_ms = 0;               // calls of a step, of whatever size
  double peer_ms = 0;               // for each further daemon: a vote told and one heard
};

// Names of the machines that were measured: "h200".
std::vector<std::string> KnownMachines();

// One of them. NOT_FOUND that lists the names.
absl::StatusOr<MachineRates> FindMachine(const std::string& name);

// INVALID_ARGUMENT that names the rate: rates must be finite and > 0, times finite and >= 0.
absl::Status ValidateRates(const MachineRates& rates);

// Operations of Newton-Schulz as the backends carry it out: with m the shorter side and r the ratio
// of the sides, m^3 times the cheaper of 3 r + 1 (the standard form, symmetric products at half
// their cost) and (6 r + 14) / 5 (the Gram form, one restart) a step (docs/kernels.md, "Counts").
double SymmetricFlops(std::int64_t rows, std::int64_t cols, std::int64_t steps);

// Of one owner, in milliseconds.
struct OwnerTime {
  double newton_schulz_ms = 0;
  double passes_ms = 0;  // scan, momentum, apply, AdamW: each byte that they must move, once
  double link_ms = 0;    // gradients in and parameters out, one after the other, nothing overlapped
  double Sum() const { return newton_schulz_ms + passes_ms + link_ms; }
};

struct StepTime {
  std::vector<OwnerTime> owners;  // as in Plan::owners
  std::size_t busiest = 0;        // of them
  double calls_ms = 0;            // MachineRates::step_ms, and peer_ms for each further daemon
  double step_ms = 0;             // the busiest owner and the calls
  // Of all owners together, if one could hold everything: T(1) / (owners * step_ms).
  double efficiency = 1;
};

// `plan` is MakePlan(run, routing, ...), iterate_bytes as in PlanOptions. INVALID_ARGUMENT as
// MakePlan and ValidateRates.
absl::StatusOr<StepTime> EstimateStepTime(const RunSpec& run, const Routing& routing,
                                          const Plan& plan, std::int64_t iterate_bytes,
                                          const MachineRates& rates);

}  // namespace muond

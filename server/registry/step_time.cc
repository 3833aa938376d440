#include "server/registry/step_time.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "server/registry/plan_cost.h"

namespace muond {
namespace {

// Where each figure comes from: docs/planning.md, "How long a step will take".
std::vector<MachineRates> Machines() {
  return {{.name = "h200",
           .newton_schulz_tflops = 570,
           .memory_gbps = 4100,
           .link_gbps = 4200,
           .step_ms = 2.2,
           .peer_ms = 0.1}};
}

// An owner's state is 8 bytes an element with Muon (6 where momentum is bf16), 12 with AdamW, each
// read and written once.
// Gradients are read twice: by the scan before the verdict and by the update after it. Muon's
// update also writes U and reads O.
double PassBytes(const OwnerLoad& load, std::int64_t iterate_bytes) {
  const double state = static_cast<double>(load.state_bytes);
  const double muon_elements = static_cast<double>(load.matrix_elements);
  return 2 * static_cast<double>(load.bytes_in) + static_cast<double>(load.bytes_out) + 2 * state +
         2 * static_cast<double>(iterate_bytes) * muon_elements;
}

}  // namespace

std::vector<std::string> KnownMachines() {
  std::vector<std::string> names;
  for (const MachineRates& machine : Machines()) names.push_back(machine.name);
  return names;
}

absl::StatusOr<MachineRates> FindMachine(const std::string& name) {
  for (MachineRates& machine : Machines()) {
    if (machine.name == name) return std::move(machine);
  }
  return absl::NotFoundError(absl::StrFormat("machine \"%s\": expected one of %s", name,
                                             absl::StrJoin(KnownMachines(), ", ")));
}

absl::Status ValidateRates(const MachineRates& rates) {
  const auto refuse = [&](const char* rate, const char* expected, double got) {
    return absl::InvalidArgumentError(absl::StrFormat("machine \"%s\": %s: expected %s, got %g",
                                                      rates.name, rate, expected, got));
  };
  for (const auto& [name, value] :
       {std::pair{"newton_schulz_tflops", rates.newton_schulz_tflops},
        std::pair{"memory_gbps", rates.memory_gbps}, std::pair{"link_gbps", rates.link_gbps}}) {
    if (!std::isfinite(value) || value <= 0) return refuse(name, "more than 0", value);
  }
  for (const auto& [name, value] :
       {std::pair{"step_ms", rates.step_ms}, std::pair{"peer_ms", rates.peer_ms}}) {
    if (!std::isfinite(value) || value < 0) return refuse(name, "0 or more", value);
  }
  return absl::OkStatus();
}

double SymmetricFlops(std::int64_t rows, std::int64_t cols, std::int64_t steps) {
  const double low = static_cast<double>(std::min(rows, cols));
  if (low == 0) return 0;
  const double ratio = static_cast<double>(std::max(rows, cols)) / low;
  return static_cast<double>(steps) * low * low * low *
         std::min(3 * ratio + 1, (6 * ratio + 14) / 5);
}

absl::StatusOr<StepTime> EstimateStepTime(const RunSpec& run, const Routing& routing,
                                          const Plan& plan, std::int64_t iterate_bytes,
                                          const MachineRates& rates) {
  MUOND_RETURN_IF_ERROR(ValidateRates(rates));
  std::map<std::string, std::int64_t> steps;
  for (const GroupSpec& group : run.groups) {
    MUOND_ASSIGN_OR_RETURN(steps[group.name], NewtonSchulzSteps(group));
  }
  StepTime time;
  time.owners.resize(plan.owners.size());
  for (const Shard& shard : plan.shards) {
    const RoutedParameter& routed = routing.parameters[shard.parameter];
    if (routed.algorithm != Algorithm::kMuon) continue;
    double flops = 0;
    for (const MatrixBlock& matrix : MatricesIn(routed, shard)) {
      flops += SymmetricFlops(matrix.rows, matrix.cols,
                              steps.at(run.parameters[shard.parameter].group));
    }
    time.owners[shard.owner].newton_schulz_ms += flops / (rates.newton_schulz_tflops * 1e9);
  }
  std::set<int> daemons;
  double together = 0;
  for (std::size_t i = 0; i < plan.owners.size(); ++i) {
    const OwnerLoad& load = plan.owners[i];
    daemons.insert(load.place.daemon);
    time.owners[i].passes_ms = PassBytes(load, iterate_bytes) / (rates.memory_gbps * 1e6);
    time.owners[i].link_ms =
        static_cast<double>(load.bytes_in + load.bytes_out) / (rates.link_gbps * 1e6);
    together += time.owners[i].Sum();
    if (time.owners[i].Sum() > time.owners[time.busiest].Sum()) time.busiest = i;
  }
  time.calls_ms = rates.step_ms + rates.peer_ms * static_cast<double>(daemons.size() - 1);
  time.step_ms = time.owners[time.busiest].Sum() + time.calls_ms;
  time.efficiency =
      (together + rates.step_ms) / (static_cast<double>(plan.owners.size()) * time.step_ms);
  return time;
}

}  // namespace muond

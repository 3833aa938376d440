// What a run tells about itself: plain values for Status, DescribeParameters and Digest.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "proto/values.h"
#include "server/metrics/run_metrics.h"
#include "server/registry/routing.h"

namespace muond {

using RunState = RunMetrics::State;

struct RunPosition {
  std::int64_t generation = 1;
  std::int64_t next_step = 0;
  std::optional<StepOutcome> last_outcome;
  RunState state = RunState::kOpening;
  std::int64_t resume_step = 0;  // of kNeedsRestore
  std::int64_t lineage = 0;      // of the state that is here (StepStart); 0: none
  std::int64_t promised = 0;     // above `generation`: it is being raised to this
  double loss_scale = 1;         // of next_step
};

// Since the run opened.
struct RunTotals {
  std::int64_t steps_applied = 0;
  std::map<std::string, std::int64_t> steps_skipped;  // by cause
  std::int64_t newton_schulz_calls = 0;
  std::int64_t newton_schulz_fallbacks = 0;
  std::int64_t momentum_nonfinite = 0;  // tensors, at the last commit
  std::int64_t state_nonfinite = 0;     // tensors of any state, likewise
  double momentum_norm = 0;             // over all Muon parameters, at the last commit
};

struct RunSnapshot {
  std::string name;
  RunPosition position;
  std::int64_t world_size = 1;
  std::vector<std::int64_t> ranks_registered;
  std::int64_t elements = 0;
  RunTotals totals;
  double grad_norm = 0;
  bool step_in_flight = false;
  double step_in_flight_seconds = 0;
  std::vector<std::int64_t> waiting_ranks;
  std::int64_t waiting_slices = 0;
  std::int64_t state_bytes = 0;
  std::int64_t staging_bytes = 0;
  std::string failure;
  std::string why_restore;            // of kNeedsRestore
  std::vector<std::string> daemons;   // of the run, the plan's order
  int daemon = 0;                     // this one
  std::string plan_hash;
  std::string overlap;                // "on", or why not
  std::vector<int> missing_votes;     // daemons, of the step in flight
  std::int64_t muon_parameters = 0, adamw_parameters = 0, muon_matrices = 0;
};

struct ParameterSnapshot {
  ParameterSpec spec;
  RoutedParameter routed;
  std::string tied_to;
  std::int64_t t = 0;
  double momentum_norm = 0;
  double weight_norm = 0;
  std::int64_t nonfinite_elements = 0;
  Hyperparameters hyperparameters;
};

struct DigestSnapshot {
  std::string tensor;
  std::string control;
  std::int64_t version = 0;
  std::map<std::string, std::string> parameters;
};

}  // namespace muond

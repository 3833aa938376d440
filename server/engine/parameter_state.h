// The optimizer state of one parameter.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "proto/values.h"
#include "server/engine/buffer.h"
#include "server/engine/state_bounds.h"
#include "server/registry/routing.h"

namespace muond {

struct ParameterState {
  const ParameterSpec* spec = nullptr;
  const RoutedParameter* routed = nullptr;
  const GroupSpec* group = nullptr;
  bool owned = false;        // false: a tied name, its state is elsewhere
  std::int64_t elements = 0;
  std::int64_t t = 0;        // applied steps of this parameter

  Buffer weight;             // fp32 master weights, row-major
  Buffer momentum;           // fp32: Muon's M, AdamW's exp_avg
  Buffer exp_avg_sq;         // fp32, AdamW only

  kernels::NewtonSchulzRule newton_schulz;  // Muon only
  // Bound on the elements of shape factor x O over its matrices: what is accepted as a result has
  // |O|_F^2 <= min(rows, cols) (1 + residual_max), and no element exceeds the norm.
  double update_element_max = 1;

  // While initial values come in, of replicated parameters: the elements that have one.
  std::vector<bool> initialized;

  // What the last pass over each tensor found.
  kernels::StateScan weight_scan, momentum_scan, exp_avg_sq_scan;

  // The reduced gradient of the step in flight: its memory, and how to read it.
  std::shared_ptr<Buffer> gradient_memory;
  kernels::GradientView gradient;
  bool reduced = false;

  bool muon() const { return routed->algorithm == Algorithm::kMuon; }
  StateMaxima Maxima() const {
    return {weight_scan.max_abs, momentum_scan.max_abs, exp_avg_sq_scan.max_abs};
  }
};

}  // namespace muond

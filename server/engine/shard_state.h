// The optimizer state of one shard: of a whole parameter, or of a range of its elements.
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

struct ShardState {
  int parameter = 0;  // index in the run: the holder of the state, never a tied name
  const ParameterSpec* spec = nullptr;
  const RoutedParameter* routed = nullptr;
  const GroupSpec* group = nullptr;
  std::int64_t first = 0;  // element of the row-major parameter
  std::int64_t elements = 0;
  // Where the shard begins in a packed tensor: what the daemon owns of the parameter, one shard
  // behind the other.
  std::int64_t packed = 0;
  std::vector<MatrixBlock> matrices;  // row ranges counted from `first`; Muon only
  std::int64_t t = 0;                 // applied steps of this parameter
  std::int64_t idle_steps = 0;        // applied steps since its last gradient that was not zero

  // In the backend's memory, each `elements` values, row-major, fp32 but for a momentum that a Muon
  // group keeps in bf16; the engine owns it.
  float* weight = nullptr;      // master weights
  void* momentum = nullptr;     // Muon's M, AdamW's exp_avg, in momentum_dtype()
  float* exp_avg_sq = nullptr;  // AdamW only

  const kernels::NewtonSchulzRule* newton_schulz = nullptr;  // its group's; Muon only
  // Bound on the elements of shape factor x O over its matrices: what is accepted as a result has
  // |O|_F^2 <= min(rows, cols) (1 + residual_max), and no element exceeds the norm.
  double update_element_max = 1;

  // While initial values come in, of replicated parameters: the elements that have one.
  std::vector<bool> initialized;

  // What the last pass over each tensor found.
  kernels::StateScan weight_scan, momentum_scan, exp_avg_sq_scan;

  // Where a gradient goes that is summed, or that must be on the device: `elements` fp32 values in
  // the backend's memory, kept from step to step. On a device it is there from registration on; on
  // the host from the first sum, since a gradient of one layer is read where it lies.
  float* gradient_memory = nullptr;
  Buffer gradient_sum;  // the host's gradient_memory

  // The reduced gradient of the step in flight.
  std::shared_ptr<StagingBuffer> gradient_layer;  // the layer that `gradient` reads in place
  kernels::GradientView gradient;
  double gradient_max = 0;
  double gradient_sum_squares = 0;
  bool reduced = false;

  // With overlap: where O of each of its matrices goes, one behind the other, and whether it is
  // there for the gradient of the step in flight, with these values. Muon only.
  char* o = nullptr;
  bool orthogonalized = false;
  Hyperparameters orthogonalized_with;
  std::vector<kernels::NewtonSchulzResult> results;  // by matrix

  bool muon() const { return routed->algorithm == Algorithm::kMuon; }
  Dtype momentum_dtype() const { return muon() ? group->momentum_dtype : Dtype::kF32; }
  // The state tensors by name: "master" and "momentum", or "exp_avg", "exp_avg_sq" and "master".
  struct Tensor {
    const char* name;
    void* data;
    Dtype dtype;
  };
  std::vector<Tensor> Tensors() const;
  StateMaxima Maxima() const {
    return {weight_scan.max_abs, momentum_scan.max_abs, exp_avg_sq_scan.max_abs};
  }
};

}  // namespace muond

// Where a run's optimizer state lives and how a step is applied to it.
//
// All state exists from creation on: master weights, momentum (Muon), exp_avg and exp_avg_sq
// (AdamW), all fp32, and t per parameter. Parameters are named by their index in the run;
// names tied together share the state of the first. Gradients are only read; nothing is written
// to state outside Commit.
//
// Thread rule: every method runs on the one Executor thread, except Create and AllocateTensor.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "proto/values.h"
#include "server/engine/buffer.h"
#include "server/engine/parameter_state.h"
#include "server/faults/fault_points.h"
#include "server/registry/routing.h"

namespace muond {

using HyperparametersByGroup = std::map<std::string, Hyperparameters>;

// A whole gradient tensor in the backend's memory, row-major.
struct GradientLayer {
  std::shared_ptr<Buffer> memory;
  Dtype dtype = Dtype::kF32;
};

// What the reduction of one parameter's gradient found (unscaled, unclipped).
struct ReducedGradient {
  std::int64_t nonfinite = 0;
  double max_abs = 0;
  std::vector<double> block_sums;
  bool state_overflow = false;
  double seconds = 0;
};

struct CommitRequest {
  double clip_coefficient = 1.0;
  std::set<int> absent;  // state indices that keep every byte
  HyperparametersByGroup muon;
  HyperparametersByGroup adamw;
};

// What a commit did, for the outcome, the metrics and the log.
struct CommitReport {
  std::int64_t newton_schulz_calls = 0;
  std::int64_t newton_schulz_fallbacks = 0;
  std::int64_t zero_inputs = 0;
  struct Group {
    std::int64_t ns_calls = 0, ns_zero = 0, ns_fallback = 0, updates = 0;
  };
  std::map<std::string, Group> groups;
  double momentum_seconds = 0, newton_schulz_seconds = 0, apply_seconds = 0, adamw_seconds = 0;
  // Not empty: a matrix could not be orthogonalized, and state is not to be trusted.
  std::string failure;
};

// Health of the state after the last commit, per group and in all.
struct StateHealth {
  struct Group {
    double muon_sum_squares = 0;      // Muon's M
    double momentum_sum_squares = 0;  // Muon's M and AdamW's exp_avg
    double weight_sum_squares = 0;
  };
  std::map<std::string, Group> groups;
  std::int64_t nonfinite_momentum = 0;  // tensors with a non-finite element
  std::int64_t nonfinite_second_moment = 0;
  std::int64_t nonfinite_weight = 0;
};

// Where tests spoil a commit; off in production.
struct EngineFaults {
  FaultInjector* points = nullptr;
  kernels::NewtonSchulzFault* newton_schulz = nullptr;  // the backend's, counted up by the points
  bool Fire(FaultPoint point) const { return points != nullptr && points->Fire(point); }
};

class Engine {
 public:
  // Allocates all state. INVALID_ARGUMENT for group settings that can't be carried out (rules.h),
  // RESOURCE_EXHAUSTED with the bytes wanted when memory is out. `spec` and `routing` must outlive
  // the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(kernels::Backend& backend,
                                                        const RunSpec& spec, const Routing& routing,
                                                        EngineFaults faults);

  // Memory for one gradient tensor or slice; any thread. RESOURCE_EXHAUSTED when there is none.
  absl::StatusOr<std::shared_ptr<Buffer>> AllocateTensor(std::int64_t elements, Dtype dtype) const;

  // Writes a slice of initial values, `values` being the row-major box in `dtype`. The first writer
  // of an element sets it; a later one (another replica) must bring the same bits, else
  // INVALID_ARGUMENT. Non-finite values are INVALID_ARGUMENT. Nothing is written on error.
  absl::Status WriteInitial(int state, const Box& box, const void* values, Dtype dtype);
  // All initial values are in: scans the weights.
  absl::Status FinishInitial();

  // The hyperparameters that the step in flight will be applied with: state-overflow bounds need
  // them while gradients are reduced.
  void SetHyperparameters(const HyperparametersByGroup& muon, const HyperparametersByGroup& adamw);

  // Sums the layers in their order (fp32), divides by `divisor`, scans. Keeps the result for
  // Commit.
  absl::StatusOr<ReducedGradient> Reduce(int state, const std::vector<GradientLayer>& layers,
                                         double divisor);

  // Applies the step to every state that is not absent, in registration order, Muon batched within
  // bounded scratch. Every state not absent must have been reduced. On OK the gradients are gone.
  absl::StatusOr<CommitReport> Commit(const CommitRequest& request);
  // Throws reduced gradients away.
  void Discard();

  // Reads elements [first, first + count) of a box as `dtype` into `out` (host memory).
  absl::Status Read(int state, const Box& box, std::int64_t first, std::int64_t count, Dtype dtype,
                    void* out);

  // XXH3-128, hex. Over all states in name order: name, shape, dtype and block hashes of every
  // state tensor, and t. Independent of slices, ranks and owners.
  std::string TensorDigest() const;
  std::string ParameterDigest(int state) const;

  const ParameterState& state(int parameter) const { return states_[parameter]; }
  StateHealth Health() const;
  std::int64_t state_bytes() const { return state_bytes_; }
  std::int64_t scratch_bytes() const { return static_cast<std::int64_t>(muon_scratch_.bytes()); }
  kernels::Backend& backend() const { return backend_; }

 private:
  friend class MuonCommit;
  friend class AdamWCommit;
  Engine(kernels::Backend& backend, const RunSpec& spec, const Routing& routing,
         EngineFaults faults);
  absl::Status AllocateState(int parameter);
  absl::Status PutInitial(ParameterState& state, const Box& box, const float* values);
  bool CouldOverflow(const ParameterState& state, double gradient_max) const;
  std::string HashState(int parameter) const;

  kernels::Backend& backend_;
  const RunSpec& spec_;
  const Routing& routing_;
  const EngineFaults faults_;
  std::vector<ParameterState> states_;  // by parameter index; tied names hold an empty one
  HyperparametersByGroup muon_, adamw_;
  std::int64_t state_bytes_ = 0;
  Buffer muon_scratch_;  // U and O of one batch: allocated once, so a step can't run out of memory
};

}  // namespace muond

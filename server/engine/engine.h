// Where a run's optimizer state lives and how a step is applied to it.
//
// All state exists from creation on: master weights, momentum (Muon), exp_avg and exp_avg_sq
// (AdamW), all fp32 but for momenta that a group keeps in bf16, and t per parameter. Parameters are
// named by their index in the run; names tied together share the state of the first. Gradients are
// only read; nothing is written to state outside Commit.
//
// One engine lives on one device. It holds the shards that the plan puts there: whole parameters,
// or ranges of their elements. What comes in of a tensor comes packed: the elements that the daemon
// owns, one shard behind the other, those of its other devices included. Where the backend's memory
// is not the host's, nothing here touches it but through the backend, and every byte a step needs
// there is allocated by Create.
//
// Thread rule: every method runs on its Executor's one thread, except Create, AllocateStaging and
// what is constant from Create on (`owns`, `state_bytes`, `backend`) or atomic (`scratch_bytes`).
#pragma once

#include <atomic>
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
#include "proto/shard.h"
#include "proto/values.h"
#include "server/engine/buffer.h"
#include "server/engine/diagnostics.h"
#include "server/engine/digest.h"
#include "server/engine/shard_state.h"
#include "server/engine/state_copy.h"
#include "server/engine/upload_pack.h"
#include "server/faults/fault_points.h"
#include "server/registry/plan.h"
#include "server/registry/routing.h"

namespace muond {

using HyperparametersByGroup = std::map<std::string, Hyperparameters>;

// A gradient as it came in: a packed tensor.
struct GradientLayer {
  std::shared_ptr<StagingBuffer> memory;
  Dtype dtype = Dtype::kF32;
};

// Memory of a trainer's that a commit writes parameters to, beside the master weights.
struct ParameterTargets {
  std::map<int, kernels::RoundedCopy> by_state;  // packed tensors, in memory that backends reach
  std::shared_ptr<void> keepalive;               // owns the memory
  // The commit that had them wrote them: all that were not absent.
  std::atomic<bool> written{false};

  // Of the elements of `state` from `element` on; null where it has none.
  kernels::RoundedCopy At(const ShardState& state, std::int64_t element) const;
};

// What is to be reduced: the layers of one parameter, summed in their order and divided.
struct ReduceRequest {
  int state = 0;
  std::vector<GradientLayer> layers;
  double divisor = 1;
};

// What the reduction of one parameter's gradient found (unscaled, unclipped), as far as it is here.
struct ReducedGradient {
  std::int64_t nonfinite = 0;
  double max_abs = 0;
  std::vector<double> block_sums;  // in the order of the elements
  bool state_overflow = false;
  // The layers were copied: their memory is not read any more.
  bool layers_free = false;
  // That a batch of reductions took, in its first result; 0 in the others.
  double seconds = 0;
  int device = 0;  // that it took them on
};

struct CommitRequest {
  double clip_coefficient = 1.0;
  std::set<int> absent;  // state indices that keep every byte
  HyperparametersByGroup muon;
  HyperparametersByGroup adamw;
  bool sample = false;  // compute the diagnostics that cost products and passes of their own
  // Where the new values of parameters also go, each a packed tensor, as the commit writes them.
  std::shared_ptr<ParameterTargets> targets;  // null: nowhere
};

// What a commit did, for the outcome, the metrics and the log.
struct CommitReport {
  std::int64_t newton_schulz_calls = 0;
  std::int64_t newton_schulz_fallbacks = 0;
  std::int64_t zero_inputs = 0;
  struct Group {
    std::int64_t ns_calls = 0, ns_zero = 0, ns_fallback = 0, ns_low_rank = 0, updates = 0;
  };
  std::map<std::string, Group> groups;
  double momentum_seconds = 0, newton_schulz_seconds = 0, apply_seconds = 0, adamw_seconds = 0;
  CommitDiagnostics diagnostics;
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
  std::int64_t nonfinite_momentum = 0;  // shards of tensors with a non-finite element
  std::int64_t nonfinite_second_moment = 0;
  std::int64_t nonfinite_weight = 0;
};

// What DescribeParameters tells of one parameter, as far as it is here.
struct ParameterFacts {
  std::int64_t t = 0;
  double momentum_sum_squares = 0;
  double weight_sum_squares = 0;
  std::int64_t nonfinite_elements = 0;
};

// The shards of a run that one daemon owns, by parameter: ascending, `owner` being the device.
using LocalShards = std::vector<std::vector<Shard>>;
// All of a run on device 0.
LocalShards WholeRun(const Routing& routing);

// Where tests spoil a commit; off in production.
struct EngineFaults {
  FaultInjector* points = nullptr;
  kernels::NewtonSchulzFault* newton_schulz = nullptr;  // the backend's, counted up by the points
  bool Fire(FaultPoint point) const { return points != nullptr && points->Fire(point); }
  void StopHere(FaultPoint point) const {
    if (points != nullptr) points->StopHere(point);
  }
};

class Engine {
 public:
  // Allocates all state of the shards that lie on `device`. INVALID_ARGUMENT for group settings
  // that can't be carried out (rules.h), RESOURCE_EXHAUSTED with the bytes needed and free when
  // memory is out. `spec` and `routing` must outlive the engine.
  // With `overlap` O of every matrix has a place, so that matrices can be orthogonalized early.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(kernels::Backend& backend,
                                                        const RunSpec& spec, const Routing& routing,
                                                        const LocalShards& shards, int device,
                                                        EngineFaults faults, bool overlap = false);

  // Whether any of this parameter's state lives here.
  bool owns(int parameter) const { return !ShardsOf(parameter).empty(); }

  // Host memory for one incoming tensor or slice; any thread. RESOURCE_EXHAUSTED if there is none.
  absl::StatusOr<std::shared_ptr<StagingBuffer>> AllocateStaging(std::int64_t elements,
                                                                 Dtype dtype) const;

  // Writes a slice of initial values. `values`, in `dtype` and staging memory, are the elements of
  // the box that the daemon owns, in the box's order. The first writer of an element sets it; a
  // later one (another replica) must bring the same bits, else INVALID_ARGUMENT. Non-finite values
  // are INVALID_ARGUMENT. Nothing is written on error.
  absl::Status WriteInitial(int state, const Box& box, const void* values, Dtype dtype);
  // All initial values are in: scans the weights.
  absl::Status FinishInitial();

  // The hyperparameters that the step in flight will be applied with: state-overflow bounds need
  // them while gradients are reduced.
  void SetHyperparameters(const HyperparametersByGroup& muon, const HyperparametersByGroup& adamw);

  // Sums the layers of each request in their order (fp32), divides, scans; results[i] belongs to
  // requests[i]. Keeps the gradients for Commit. Many at once cost little more than one.
  absl::StatusOr<std::vector<ReducedGradient>> Reduce(std::span<const ReduceRequest> requests);

  // What was reduced, in its dtype, to where the shards here lie in the packed tensor `out`, host
  // memory. INTERNAL unless it was reduced.
  absl::Status CopyGradient(int state, char* out) const;

  // Orthogonalizes, before anybody knows whether the step will be applied, what has been reduced:
  // a few matrices at a time, so that other jobs need not wait for long. Reads state and writes
  // none; what it finds waits for the commit, or is thrown away. False when nothing is ready:
  // without overlap, or when the step is known to be skipped. Same bits as in Commit.
  bool OrthogonalizeEarly();

  // Applies the step to every state that is not absent, in registration order, Muon batched within
  // bounded scratch. Every state not absent must have been reduced. On OK the gradients are gone.
  absl::StatusOr<CommitReport> Commit(const CommitRequest& request);
  // Throws reduced gradients away.
  void Discard();
  // Forgets everything: state is what it was after Create.
  absl::Status Reset();

  // Reads elements [first, first + count) of a box as `dtype` into `out` (host memory, or memory
  // that the backend reaches); those that are not here are left alone.
  absl::Status Read(int state, const Box& box, std::int64_t first, std::int64_t count, Dtype dtype,
                    void* out);

  // The same for many, each a read of its own, with few launches; into memory that the backend
  // reaches.
  struct ReadJob {
    int state = 0;
    Box box;
    ElementRange range;
    Dtype dtype = Dtype::kF32;
    void* out = nullptr;
  };
  absl::Status ReadAll(std::span<const ReadJob> jobs);

  // What digests are made of (digest.h).
  absl::StatusOr<std::vector<ShardHashes>> HashShards() const;

  // Memory for a copy of all state here, contents undefined; any thread.
  StateCopy MakeStateCopy() const;
  absl::Status CopyState(StateCopy& copy) const;
  // Takes over all state, t included, and scans it. `copy` as MakeStateCopy made it, filled.
  absl::Status RestoreState(const StateCopy& copy);
  // Its number among the engines of the run on this daemon (Engines).
  int place() const { return place_; }
  void set_place(int place) { place_ = place; }

  ParameterFacts Facts(int parameter) const;
  StateHealth Health() const;
  std::int64_t state_bytes() const { return state_bytes_; }
  // Everything else that is held: gradients that are kept, and the scratch of a commit.
  std::int64_t scratch_bytes() const { return scratch_bytes_; }
  kernels::Backend& backend() const { return backend_; }

 private:
  friend class MuonCommit;
  friend class AdamWCommit;
  friend class AdamWSample;
  Engine(kernels::Backend& backend, const RunSpec& spec, const Routing& routing,
         const LocalShards& shards, int device, EngineFaults faults, bool overlap);
  absl::Status BindShards();
  absl::Status AllocateStates();
  absl::Status BringGradients(std::span<const ReduceRequest> requests);
  absl::Status BringGradient(ShardState& state, const ReduceRequest& request, UploadPack& pack);
  absl::Status SumLayers(ShardState& state, const std::vector<GradientLayer>& layers);
  struct Incoming;
  absl::Status Widen(Incoming& part, const Box& box, const void* values, Dtype dtype);
  absl::Status CheckReplicas(const Incoming& part, const Box& box) const;
  absl::Status PutInitial(Incoming& part, const Box& box);
  kernels::Error Gather(const ShardState& state, const Box& box, const ElementRange& range,
                        Dtype dtype, char* out);
  bool CouldOverflow(const ShardState& state, double gradient_max) const;
  absl::Status PoisonMomentum(ShardState& state);
  void CountStale(const CommitRequest& request, CommitDiagnostics& diagnostics);
  std::span<ShardState> ShardsOf(int parameter);
  std::span<const ShardState> ShardsOf(int parameter) const;

  kernels::Backend& backend_;
  const RunSpec& spec_;
  const Routing& routing_;
  const LocalShards shards_;
  const int device_;
  int place_ = 0;
  const EngineFaults faults_;
  const bool overlap_;
  std::map<std::string, kernels::NewtonSchulzRule> rules_;  // by group
  std::vector<ShardState> states_;  // ascending by parameter and first element
  std::vector<std::size_t> begin_;  // of each parameter in states_, and the end
  HyperparametersByGroup muon_, adamw_;
  std::int64_t state_bytes_ = 0;
  std::atomic<std::int64_t> scratch_bytes_{0};
  // One allocation for all tensors of a kind; allocated once, so that a step can't run out of
  // memory.
  Buffer weights_, momenta_, second_moments_, gradients_;
  // Of one job at a time: U and O of a batch, rows on their way out, gradients on their way in.
  Buffer scratch_;
  Buffer results_;      // with overlap: O of every matrix
  // Of the step in flight: some gradient will have it skipped; what early work took, its error.
  bool doomed_ = false;
  double early_seconds_ = 0;
  absl::Status early_error_;
  StagingBuffer pack_;  // small gradients that go to a device together
};

}  // namespace muond

// The engines of a run on this daemon, one per device, behind one face: each call is posted to the
// executors that it concerns and answered when the last of them has done it, with results merged in
// an order that does not depend on timing.
//
// Thread rule: calls must come one at a time (under the run's mutex), since the order of calls is
// the order of effects on every device. Callbacks run on an executor's thread, without a lock of
// this class. A call may be made from a callback.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/engine/executor.h"

namespace muond {

// A backend, and the one thread that uses it; both outlive every run.
struct EngineDevice {
  kernels::Backend* backend = nullptr;
  Executor* executor = nullptr;
};

// What a commit did, and what the state is like after it.
struct Committed {
  CommitReport report;
  StateHealth health;
};

class Engines {
 public:
  // Makes an engine for each device that shards lie on; errors as Engine::Create, nothing is kept
  // then. `owner` is what queued jobs keep alive: it holds spec, routing and this object.
  static absl::StatusOr<std::unique_ptr<Engines>> Create(
      std::vector<EngineDevice> devices, const RunSpec& spec, const Routing& routing,
      const LocalShards& shards, EngineFaults faults, bool overlap,
      std::weak_ptr<const void> owner);

  // -- Constant; any thread.
  std::int64_t state_bytes() const;
  std::int64_t scratch_bytes() const;  // may grow with a step
  // The elements of the parameter that this daemon owns, and the backend whose staging memory their
  // gradients come in by.
  std::int64_t PackedElements(int state) const;
  kernels::Backend& StagingBackend(int state) const;
  // Memory of that kind. RESOURCE_EXHAUSTED when there is none.
  absl::StatusOr<std::shared_ptr<StagingBuffer>> AllocateStaging(int state, std::int64_t elements,
                                                                 Dtype dtype) const;

  // -- Initial values
  using Done = std::function<void(const absl::Status&)>;
  // As Engine::WriteInitial; on an error other devices may have written their part.
  void WriteInitial(int state, const Box& box, std::shared_ptr<StagingBuffer> values, Dtype dtype,
                    Done done);
  void FinishInitial(std::function<void(const absl::StatusOr<StateHealth>&)> done);

  // -- Steps
  void SetHyperparameters(const HyperparametersByGroup& muon, const HyperparametersByGroup& adamw);
  // Reductions that wait in a queue are carried out together. With overlap the matrices that are
  // complete are orthogonalized next, whenever their device has nothing else to do.
  void Reduce(ReduceRequest request,
              std::function<void(ReduceRequest, const absl::StatusOr<ReducedGradient>&)> done);
  // As Engine::CopyGradient, of all devices into one packed tensor. `out` lives until `done`.
  void CopyGradient(int state, char* out, Done done);
  void Commit(CommitRequest request, std::function<void(const absl::StatusOr<Committed>&)> done);
  void Discard();
  void Reset(Done done);

  // -- Reading
  // As Engine::Read, once `check` (called on the executor's thread, of each device) is OK.
  void Read(int state, const Box& box, const ElementRange& range, Dtype dtype, void* out,
            std::function<absl::Status()> check, Done done);
  void HashShards(std::function<void(absl::StatusOr<std::vector<ShardHashes>>)> done);
  // facts[i] is about parameters[i].
  // -- Checkpoints
  // Memory for copies of all state here, contents undefined; any thread.
  std::shared_ptr<StateCopies> MakeStateCopies() const;
  void CopyState(std::shared_ptr<StateCopies> copies, Done done);
  // As Engine::RestoreState.
  void RestoreState(std::shared_ptr<const StateCopies> copies,
                    std::function<void(const absl::StatusOr<StateHealth>&)> done);

  void Facts(std::vector<int> parameters, std::function<void(std::vector<ParameterFacts>)> done);

 private:
  struct Reduction;
  struct ReduceBatch;

  Engines(std::vector<EngineDevice> devices, LocalShards shards, std::weak_ptr<const void> owner);
  void Post(int device, std::function<void(Engine&)> job);
  template <typename Result>
  void PostTo(const std::vector<int>& devices, std::function<Result(Engine&)> work,
              std::function<void(std::vector<Result>)> done);
  std::vector<int> All() const;
  // The devices with elements of that range of the box, ascending; never none.
  std::vector<int> DevicesOf(int state, const Box& box, const ElementRange& range) const;
  void CloseBatches();
  void RunBatch(int device, const std::shared_ptr<ReduceBatch>& batch);
  void OrthogonalizeEarly(int device);

  const std::vector<EngineDevice> devices_;
  const LocalShards shards_;
  const std::weak_ptr<const void> owner_;
  bool overlap_ = false;
  std::vector<Dims> shapes_;
  std::vector<std::unique_ptr<Engine>> engines_;  // by device

  std::mutex mutex_;  // of batches_
  // By device: reductions whose job still waits. Later ones join it, unless a job that touches
  // gradients or rules was posted behind it.
  std::vector<std::shared_ptr<ReduceBatch>> batches_;
};

}  // namespace muond

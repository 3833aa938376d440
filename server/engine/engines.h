// The engines of a run on this daemon, one per device and one more per device for each addition of
// parameters, behind one face: each call is posted to the executors that it concerns and answered
// when the last of them has done it, with results merged in an order that does not depend on
// timing. What is there stays where it is when parameters are added.
//
// Thread rule: calls must come one at a time (under the run's mutex), since the order of calls is
// the order of effects on every device. Callbacks run on an executor's thread, without a lock of
// this class. A call may be made from a callback.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device_memory.h"
#include "proto/mutex.h"
#include "server/engine/engine.h"
#include "server/engine/executor.h"

namespace muond {

// A backend, and the one thread that uses it; both outlive every run.
struct EngineDevice {
  kernels::Backend* backend = nullptr;
  Executor* executor = nullptr;
  kernels::DeviceMemory* memory = nullptr;  // of the same device; null: there is none
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

  // Engines for parameters that are to be added, with all their memory.
  struct Addition {
    LocalShards shards;  // by parameter of the larger run; those that were there have none
    std::vector<std::unique_ptr<Engine>> engines;  // by device
  };
  // Any thread; `shards` are those of the added parameters. Errors as Create. `spec` and `routing`
  // are of the run with them, and owned by the owner once they are added.
  absl::StatusOr<std::unique_ptr<Addition>> MakeAddition(const RunSpec& spec,
                                                         const Routing& routing,
                                                         const LocalShards& shards) const;
  void Add(std::unique_ptr<Addition> addition, const RunSpec& spec);

  // -- Constant but for Add.
  std::size_t count() const { return units_.size(); }
  std::int64_t state_bytes() const;
  std::int64_t scratch_bytes() const;  // may grow with a step
  // The elements of the parameter that this daemon owns, and the backend whose staging memory their
  // gradients come in by.
  std::int64_t PackedElements(int state) const;
  kernels::Backend& StagingBackend(int state) const;
  // The device that holds all of the parameter, if a gradient may come in there: it is one, and its
  // memory is not the host's. -1 else.
  int DeviceFor(int state) const;
  kernels::DeviceMemory* MemoryOf(int device) const { return devices_[device].memory; }
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
  // As Engine::ReadAll, likewise.
  void ReadAll(std::vector<Engine::ReadJob> jobs, std::function<absl::Status()> check, Done done);
  void HashShards(std::function<void(absl::StatusOr<std::vector<ShardHashes>>)> done);
  // facts[i] is about parameters[i].
  // -- Checkpoints
  // Memory for copies of all state here, contents undefined; useless once parameters are added.
  std::shared_ptr<StateCopies> MakeStateCopies() const;
  void CopyState(std::shared_ptr<StateCopies> copies, Done done);
  // As Engine::RestoreState.
  void RestoreState(std::shared_ptr<const StateCopies> copies,
                    std::function<void(const absl::StatusOr<StateHealth>&)> done);

  void Facts(std::vector<int> parameters, std::function<void(std::vector<ParameterFacts>)> done);

 private:
  struct Reduction;
  struct ReduceBatch;
  // An engine and the thread that uses it. Jobs keep its address.
  struct Unit {
    std::unique_ptr<Engine> engine;
    Executor* executor = nullptr;
    int device = 0;
    Mutex mutex;
    // Reductions whose job still waits. Later ones join it, unless a job that touches gradients or
    // rules was posted behind it.
    std::shared_ptr<ReduceBatch> batch MUOND_GUARDED_BY(mutex);
  };

  Engines(std::vector<EngineDevice> devices, EngineFaults faults, bool overlap,
          std::weak_ptr<const void> owner);
  void Post(Unit& unit, std::function<void(Engine&)> job);
  template <typename Result>
  void PostTo(const std::vector<Unit*>& units, std::function<Result(Engine&)> work,
              std::function<void(std::vector<Result>)> done);
  std::vector<Unit*> All() const;
  // Those with elements of that range of the box, by device; never none.
  std::vector<Unit*> UnitsOf(int state, const Box& box, const ElementRange& range) const;
  // The one that holds state of the parameter on that device.
  Unit& UnitOf(int state, int device) const { return *units_[first_unit_[state] + device]; }
  int FirstDevice(int state) const { return shards_[state].empty() ? 0 : shards_[state][0].owner; }
  void CloseBatches();
  void RunBatch(Unit& unit, const std::shared_ptr<ReduceBatch>& batch);
  void OrthogonalizeEarly(Unit& unit);

  const std::vector<EngineDevice> devices_;
  const EngineFaults faults_;
  const bool overlap_;
  const std::weak_ptr<const void> owner_;
  LocalShards shards_;
  std::vector<Dims> shapes_;
  std::vector<std::unique_ptr<Unit>> units_;  // of all devices, then of all for each addition
  std::vector<int> first_unit_;               // by parameter: that of its device 0
};

}  // namespace muond

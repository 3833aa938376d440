#include "server/engine/engines.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <utility>

#include "proto/check.h"
#include "server/engine/engines_post.h"

namespace muond {
namespace {

// Devices work side by side: a phase lasts as long as on the slowest.
void Merge(const CommitReport& part, CommitReport& whole) {
  whole.newton_schulz_calls += part.newton_schulz_calls;
  whole.newton_schulz_fallbacks += part.newton_schulz_fallbacks;
  whole.zero_inputs += part.zero_inputs;
  for (const auto& [name, group] : part.groups) {
    CommitReport::Group& sum = whole.groups[name];
    sum.ns_calls += group.ns_calls;
    sum.ns_zero += group.ns_zero;
    sum.ns_fallback += group.ns_fallback;
    sum.ns_low_rank += group.ns_low_rank;
    sum.updates += group.updates;
  }
  whole.momentum_seconds = std::max(whole.momentum_seconds, part.momentum_seconds);
  whole.newton_schulz_seconds = std::max(whole.newton_schulz_seconds, part.newton_schulz_seconds);
  whole.apply_seconds = std::max(whole.apply_seconds, part.apply_seconds);
  whole.adamw_seconds = std::max(whole.adamw_seconds, part.adamw_seconds);
  Merge(part.diagnostics, whole.diagnostics);
  if (whole.failure.empty()) whole.failure = part.failure;
}

void Merge(const ParameterFacts& part, ParameterFacts& whole) {
  whole.t = std::max(whole.t, part.t);
  whole.momentum_sum_squares += part.momentum_sum_squares;
  whole.weight_sum_squares += part.weight_sum_squares;
  whole.nonfinite_elements += part.nonfinite_elements;
}

void Merge(const ReducedGradient& part, ReducedGradient& whole) {
  whole.nonfinite += part.nonfinite;
  whole.max_abs = std::max(whole.max_abs, part.max_abs);
  whole.block_sums.insert(whole.block_sums.end(), part.block_sums.begin(), part.block_sums.end());
  whole.state_overflow = whole.state_overflow || part.state_overflow;
  whole.layers_free = whole.layers_free && part.layers_free;
  whole.seconds += part.seconds;
  if (part.seconds > 0) whole.device = part.device;
}

}  // namespace

// One parameter's reduction, on all devices that hold any of it.
struct Engines::Reduction {
  ReduceRequest request;
  std::vector<Unit*> units;
  std::vector<absl::StatusOr<ReducedGradient>> parts;  // by place in `units`
  std::atomic<int> open{0};
  std::function<void(ReduceRequest, const absl::StatusOr<ReducedGradient>&)> done;

  void Finish() {
    absl::StatusOr<ReducedGradient> whole = ReducedGradient{.layers_free = true};
    if (const absl::Status status = First(parts); !status.ok()) {
      whole = status;
    } else {
      for (const auto& part : parts) Merge(*part, *whole);
    }
    done(std::move(request), whole);
  }
};

struct Engines::ReduceBatch {
  std::vector<std::shared_ptr<Reduction>> reductions;
};

Engines::Engines(std::vector<EngineDevice> devices, EngineFaults faults, bool overlap,
                 std::weak_ptr<const void> owner)
    : devices_(std::move(devices)),
      faults_(faults),
      overlap_(overlap),
      owner_(std::move(owner)) {}

absl::StatusOr<std::unique_ptr<Engines>> Engines::Create(
    std::vector<EngineDevice> devices, const RunSpec& spec, const Routing& routing,
    const LocalShards& shards, EngineFaults faults, bool overlap,
    std::weak_ptr<const void> owner) {
  std::unique_ptr<Engines> engines(
      new Engines(std::move(devices), faults, overlap, std::move(owner)));
  MUOND_ASSIGN_OR_RETURN(auto all, engines->MakeAddition(spec, routing, shards));
  engines->Add(std::move(all), spec);
  return engines;
}

absl::StatusOr<std::unique_ptr<Engines::Addition>> Engines::MakeAddition(
    const RunSpec& spec, const Routing& routing, const LocalShards& shards) const {
  auto addition = std::make_unique<Addition>(Addition{.shards = shards, .engines = {}});
  for (int device = 0; device < std::ssize(devices_); ++device) {
    MUOND_ASSIGN_OR_RETURN(auto engine, Engine::Create(*devices_[device].backend, spec, routing,
                                                       shards, device, faults_, overlap_));
    addition->engines.push_back(std::move(engine));
  }
  return addition;
}

void Engines::Add(std::unique_ptr<Addition> addition, const RunSpec& spec) {
  const int first_unit = static_cast<int>(units_.size());
  for (std::size_t p = shapes_.size(); p < spec.parameters.size(); ++p) {
    shapes_.push_back(*spec.parameters[p].shape);
    shards_.push_back(addition->shards[p]);
    first_unit_.push_back(first_unit);
  }
  for (int device = 0; device < std::ssize(devices_); ++device) {
    auto unit = std::make_unique<Unit>();
    unit->engine = std::move(addition->engines[device]);
    unit->engine->set_place(first_unit + device);
    unit->executor = devices_[device].executor;
    unit->device = device;
    units_.push_back(std::move(unit));
  }
}

// ---- Posting ----------------------------------------------------------------------------------

void Engines::Post(Unit& unit, std::function<void(Engine&)> job) {
  unit.executor->Post(
      [&unit, keep = owner_.lock(), job = std::move(job)] { job(*unit.engine); });
}

std::vector<Engines::Unit*> Engines::All() const {
  std::vector<Unit*> all;
  for (const auto& unit : units_) all.push_back(unit.get());
  return all;
}

std::vector<Engines::Unit*> Engines::UnitsOf(int state, const Box& box,
                                             const ElementRange& range) const {
  std::set<int> devices;
  for (const Shard& shard : shards_[state]) {
    const ElementRange here = RangeInShard(box, shapes_[state], shard);
    const bool meets = here.count > 0 && here.first < range.first + range.count &&
                       range.first < here.first + here.count;
    if (meets) devices.insert(shard.owner);
  }
  if (devices.empty()) devices.insert(0);
  std::vector<Unit*> units;
  for (const int device : devices) units.push_back(&UnitOf(state, device));
  return units;
}

// ---- What is constant -------------------------------------------------------------------------

std::int64_t Engines::state_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& unit : units_) bytes += unit->engine->state_bytes();
  return bytes;
}

std::int64_t Engines::scratch_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& unit : units_) bytes += unit->engine->scratch_bytes();
  return bytes;
}

std::int64_t Engines::PackedElements(int state) const {
  std::int64_t elements = 0;
  for (const Shard& shard : shards_[state]) elements += shard.elements;
  return elements;
}

kernels::Backend& Engines::StagingBackend(int state) const {
  return *devices_[FirstDevice(state)].backend;
}

int Engines::DeviceFor(int state) const {
  if (shards_[state].empty()) return -1;
  const int owner = shards_[state][0].owner;
  for (const Shard& shard : shards_[state]) {
    if (shard.owner != owner) return -1;
  }
  const EngineDevice& device = devices_[owner];
  return device.memory != nullptr && !device.backend->host_memory() ? owner : -1;
}

absl::StatusOr<std::shared_ptr<StagingBuffer>> Engines::AllocateStaging(int state,
                                                                        std::int64_t elements,
                                                                        Dtype dtype) const {
  return UnitOf(state, FirstDevice(state)).engine->AllocateStaging(elements, dtype);
}

// ---- Initial values ---------------------------------------------------------------------------

void Engines::WriteInitial(int state, const Box& box, std::shared_ptr<StagingBuffer> values,
                           Dtype dtype, Done done) {
  PostTo<absl::Status>(
      UnitsOf(state, box, {0, box.Elements()}),
      [state, box, values = std::move(values), dtype](Engine& engine) {
        return engine.WriteInitial(state, box, values->data(), dtype);
      },
      [done = std::move(done)](std::vector<absl::Status> statuses) { done(First(statuses)); });
}

void Engines::FinishInitial(std::function<void(const absl::StatusOr<StateHealth>&)> done) {
  PostTo<absl::StatusOr<StateHealth>>(
      All(),
      [](Engine& engine) -> absl::StatusOr<StateHealth> {
        MUOND_RETURN_IF_ERROR(engine.FinishInitial());
        return engine.Health();
      },
      [done = std::move(done)](std::vector<absl::StatusOr<StateHealth>> parts) {
        if (const absl::Status status = First(parts); !status.ok()) return done(status);
        StateHealth whole;
        for (const auto& part : parts) Merge(*part, whole);
        done(whole);
      });
}

// ---- Steps ------------------------------------------------------------------------------------

// Reductions that come from now on must not run before the job that is posted next.
void Engines::CloseBatches() {
  for (auto& unit : units_) {
    MutexLock lock(unit->mutex);
    unit->batch = nullptr;
  }
}

void Engines::SetHyperparameters(const HyperparametersByGroup& muon,
                                 const HyperparametersByGroup& adamw) {
  CloseBatches();
  for (Unit* unit : All()) {
    Post(*unit, [muon, adamw](Engine& engine) { engine.SetHyperparameters(muon, adamw); });
  }
}

void Engines::Reduce(
    ReduceRequest request,
    std::function<void(ReduceRequest, const absl::StatusOr<ReducedGradient>&)> done) {
  auto reduction = std::make_shared<Reduction>();
  std::set<int> owners;
  for (const Shard& shard : shards_[request.state]) owners.insert(shard.owner);
  MUOND_CHECK(!owners.empty(), "a reduction of what this daemon owns nothing of");
  for (const int device : owners) reduction->units.push_back(&UnitOf(request.state, device));
  reduction->parts.resize(owners.size());
  reduction->open = static_cast<int>(owners.size());
  reduction->request = std::move(request);
  reduction->done = std::move(done);
  for (Unit* unit : reduction->units) {
    std::shared_ptr<ReduceBatch> made;
    {
      MutexLock lock(unit->mutex);
      std::shared_ptr<ReduceBatch>& batch = unit->batch;
      if (batch == nullptr) batch = made = std::make_shared<ReduceBatch>();
      batch->reductions.push_back(reduction);
    }
    if (made != nullptr) Post(*unit, [this, unit, made](Engine&) { RunBatch(*unit, made); });
  }
}

// On the device's thread.
void Engines::RunBatch(Unit& unit, const std::shared_ptr<ReduceBatch>& batch) {
  {
    MutexLock lock(unit.mutex);
    if (unit.batch == batch) unit.batch = nullptr;
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<ReduceRequest> requests;
  for (const auto& reduction : batch->reductions) requests.push_back(reduction->request);
  auto results = unit.engine->Reduce(requests);
  requests.clear();
  if (results.ok()) {
    results->front().seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    results->front().device = unit.device;
  }
  for (std::size_t i = 0; i < batch->reductions.size(); ++i) {
    Reduction& reduction = *batch->reductions[i];
    const auto place = std::find(reduction.units.begin(), reduction.units.end(), &unit) -
                       reduction.units.begin();
    if (results.ok()) {
      reduction.parts[place] = std::move((*results)[i]);
    } else {
      reduction.parts[place] = results.status();
    }
    if (--reduction.open == 0) reduction.Finish();
  }
  if (overlap_) OrthogonalizeEarly(unit);
}

// On any thread. One job for a few matrices: what comes in meanwhile goes before the next.
void Engines::OrthogonalizeEarly(Unit& unit) {
  unit.executor->PostIdle([this, &unit, keep = owner_.lock()] {
    if (unit.engine->OrthogonalizeEarly()) OrthogonalizeEarly(unit);
  });
}

void Engines::Commit(CommitRequest request,
                     std::function<void(const absl::StatusOr<Committed>&)> done) {
  CloseBatches();
  PostTo<absl::StatusOr<Committed>>(
      All(),
      [request = std::move(request)](Engine& engine) -> absl::StatusOr<Committed> {
        MUOND_ASSIGN_OR_RETURN(CommitReport report, engine.Commit(request));
        return Committed{std::move(report), engine.Health()};
      },
      [done = std::move(done)](std::vector<absl::StatusOr<Committed>> parts) {
        if (const absl::Status status = First(parts); !status.ok()) return done(status);
        Committed whole;
        for (const auto& part : parts) {
          Merge(part->report, whole.report);
          Merge(part->health, whole.health);
        }
        done(whole);
      });
}

void Engines::Discard() {
  CloseBatches();
  for (Unit* unit : All()) Post(*unit, [](Engine& engine) { engine.Discard(); });
}

void Engines::Reset(Done done) {
  CloseBatches();
  PostTo<absl::Status>(
      All(), [](Engine& engine) { return engine.Reset(); },
      [done = std::move(done)](std::vector<absl::Status> statuses) { done(First(statuses)); });
}

// ---- Reading ----------------------------------------------------------------------------------

void Engines::Read(int state, const Box& box, const ElementRange& range, Dtype dtype, void* out,
                   std::function<absl::Status()> check, Done done) {
  PostTo<absl::Status>(
      UnitsOf(state, box, range),
      [state, box, range, dtype, out, check = std::move(check)](Engine& engine) {
        MUOND_RETURN_IF_ERROR(check());
        return engine.Read(state, box, range.first, range.count, dtype, out);
      },
      [done = std::move(done)](std::vector<absl::Status> statuses) { done(First(statuses)); });
}

void Engines::ReadAll(std::vector<Engine::ReadJob> jobs, std::function<absl::Status()> check,
                      Done done) {
  PostTo<absl::Status>(
      All(),
      [jobs = std::move(jobs), check = std::move(check)](Engine& engine) {
        MUOND_RETURN_IF_ERROR(check());
        return engine.ReadAll(jobs);
      },
      [done = std::move(done)](std::vector<absl::Status> statuses) { done(First(statuses)); });
}

void Engines::HashShards(std::function<void(absl::StatusOr<std::vector<ShardHashes>>)> done) {
  using Part = absl::StatusOr<std::vector<ShardHashes>>;
  PostTo<Part>(
      All(), [](Engine& engine) { return engine.HashShards(); },
      [done = std::move(done)](std::vector<Part> parts) {
        if (const absl::Status status = First(parts); !status.ok()) return done(status);
        std::vector<ShardHashes> whole;
        for (Part& part : parts) std::move(part->begin(), part->end(), std::back_inserter(whole));
        done(std::move(whole));
      });
}

void Engines::Facts(std::vector<int> parameters,
                    std::function<void(std::vector<ParameterFacts>)> done) {
  using Part = std::vector<ParameterFacts>;
  PostTo<Part>(
      All(),
      [parameters = std::move(parameters)](Engine& engine) {
        Part facts;
        for (const int parameter : parameters) facts.push_back(engine.Facts(parameter));
        return facts;
      },
      [done = std::move(done)](std::vector<Part> parts) {
        Part whole = std::move(parts[0]);
        for (std::size_t part = 1; part < parts.size(); ++part) {
          for (std::size_t i = 0; i < whole.size(); ++i) Merge(parts[part][i], whole[i]);
        }
        done(std::move(whole));
      });
}

}  // namespace muond

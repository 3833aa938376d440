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
  std::vector<int> devices;
  std::vector<absl::StatusOr<ReducedGradient>> parts;  // by place in `devices`
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

Engines::Engines(std::vector<EngineDevice> devices, LocalShards shards,
                 std::weak_ptr<const void> owner)
    : devices_(std::move(devices)),
      shards_(std::move(shards)),
      owner_(std::move(owner)),
      batches_(devices_.size()) {}

absl::StatusOr<std::unique_ptr<Engines>> Engines::Create(
    std::vector<EngineDevice> devices, const RunSpec& spec, const Routing& routing,
    const LocalShards& shards, EngineFaults faults, bool overlap,
    std::weak_ptr<const void> owner) {
  std::unique_ptr<Engines> engines(new Engines(std::move(devices), shards, std::move(owner)));
  engines->overlap_ = overlap;
  for (const ParameterSpec& parameter : spec.parameters) {
    engines->shapes_.push_back(*parameter.shape);
  }
  for (int device = 0; device < std::ssize(engines->devices_); ++device) {
    MUOND_ASSIGN_OR_RETURN(auto engine, Engine::Create(*engines->devices_[device].backend, spec,
                                                       routing, shards, device, faults, overlap));
    engines->engines_.push_back(std::move(engine));
  }
  return engines;
}

// ---- Posting ----------------------------------------------------------------------------------

void Engines::Post(int device, std::function<void(Engine&)> job) {
  devices_[device].executor->Post(
      [this, device, keep = owner_.lock(), job = std::move(job)] { job(*engines_[device]); });
}

std::vector<int> Engines::All() const {
  std::vector<int> devices;
  for (int device = 0; device < std::ssize(devices_); ++device) devices.push_back(device);
  return devices;
}

std::vector<int> Engines::DevicesOf(int state, const Box& box, const ElementRange& range) const {
  std::set<int> devices;
  for (const Shard& shard : shards_[state]) {
    const ElementRange here = RangeInShard(box, shapes_[state], shard);
    const bool meets = here.count > 0 && here.first < range.first + range.count &&
                       range.first < here.first + here.count;
    if (meets) devices.insert(shard.owner);
  }
  if (devices.empty()) devices.insert(0);
  return {devices.begin(), devices.end()};
}

// ---- What is constant -------------------------------------------------------------------------

std::int64_t Engines::state_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& engine : engines_) bytes += engine->state_bytes();
  return bytes;
}

std::int64_t Engines::scratch_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& engine : engines_) bytes += engine->scratch_bytes();
  return bytes;
}

std::int64_t Engines::PackedElements(int state) const {
  std::int64_t elements = 0;
  for (const Shard& shard : shards_[state]) elements += shard.elements;
  return elements;
}

kernels::Backend& Engines::StagingBackend(int state) const {
  return *devices_[shards_[state].empty() ? 0 : shards_[state][0].owner].backend;
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
  const int device = shards_[state].empty() ? 0 : shards_[state][0].owner;
  return engines_[device]->AllocateStaging(elements, dtype);
}

// ---- Initial values ---------------------------------------------------------------------------

void Engines::WriteInitial(int state, const Box& box, std::shared_ptr<StagingBuffer> values,
                           Dtype dtype, Done done) {
  PostTo<absl::Status>(
      DevicesOf(state, box, {0, box.Elements()}),
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
  std::lock_guard lock(mutex_);
  for (auto& batch : batches_) batch = nullptr;
}

void Engines::SetHyperparameters(const HyperparametersByGroup& muon,
                                 const HyperparametersByGroup& adamw) {
  CloseBatches();
  for (const int device : All()) {
    Post(device, [muon, adamw](Engine& engine) { engine.SetHyperparameters(muon, adamw); });
  }
}

void Engines::Reduce(
    ReduceRequest request,
    std::function<void(ReduceRequest, const absl::StatusOr<ReducedGradient>&)> done) {
  auto reduction = std::make_shared<Reduction>();
  std::set<int> owners;
  for (const Shard& shard : shards_[request.state]) owners.insert(shard.owner);
  MUOND_CHECK(!owners.empty(), "a reduction of what this daemon owns nothing of");
  reduction->devices = {owners.begin(), owners.end()};
  reduction->parts.resize(owners.size());
  reduction->open = static_cast<int>(owners.size());
  reduction->request = std::move(request);
  reduction->done = std::move(done);
  for (const int device : reduction->devices) {
    std::shared_ptr<ReduceBatch> made;
    {
      std::lock_guard lock(mutex_);
      std::shared_ptr<ReduceBatch>& batch = batches_[device];
      if (batch == nullptr) batch = made = std::make_shared<ReduceBatch>();
      batch->reductions.push_back(reduction);
    }
    if (made != nullptr) Post(device, [this, device, made](Engine&) { RunBatch(device, made); });
  }
}

// On the device's thread.
void Engines::RunBatch(int device, const std::shared_ptr<ReduceBatch>& batch) {
  {
    std::lock_guard lock(mutex_);
    if (batches_[device] == batch) batches_[device] = nullptr;
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<ReduceRequest> requests;
  for (const auto& reduction : batch->reductions) requests.push_back(reduction->request);
  auto results = engines_[device]->Reduce(requests);
  requests.clear();
  if (results.ok()) {
    results->front().seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    results->front().device = device;
  }
  for (std::size_t i = 0; i < batch->reductions.size(); ++i) {
    Reduction& reduction = *batch->reductions[i];
    const auto place = std::find(reduction.devices.begin(), reduction.devices.end(), device) -
                       reduction.devices.begin();
    if (results.ok()) {
      reduction.parts[place] = std::move((*results)[i]);
    } else {
      reduction.parts[place] = results.status();
    }
    if (--reduction.open == 0) reduction.Finish();
  }
  if (overlap_) OrthogonalizeEarly(device);
}

// On any thread. One job for a few matrices: what comes in meanwhile goes before the next.
void Engines::OrthogonalizeEarly(int device) {
  devices_[device].executor->PostIdle([this, device, keep = owner_.lock()] {
    if (engines_[device]->OrthogonalizeEarly()) OrthogonalizeEarly(device);
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
  for (const int device : All()) Post(device, [](Engine& engine) { engine.Discard(); });
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
      DevicesOf(state, box, range),
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
        for (std::size_t device = 1; device < parts.size(); ++device) {
          for (std::size_t i = 0; i < whole.size(); ++i) Merge(parts[device][i], whole[i]);
        }
        done(std::move(whole));
      });
}

}  // namespace muond

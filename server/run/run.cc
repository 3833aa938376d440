// Joining, initial values, leaving.
#include "server/run/run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "server/run/free_memory.h"
#include "server/run/registry_layout.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

// The status with the run's name in front, unless it begins with that already.
absl::Status Refused(const std::string& run, const absl::Status& status) {
  const std::string object = absl::StrFormat("run \"%s\"", run);
  if (absl::StartsWith(status.message(), object)) return status;
  return absl::Status(status.code(), absl::StrFormat("%s: %s", object, status.message()));
}

// Without a limit of the operator's the machine's free memory is one: a run that could never be
// filled must not get the daemon killed with all its other runs.
absl::Status CheckFree(const std::string& name, const Registry& registry,
                       const kernels::Backend& backend) {
  const std::int64_t free = FreeMemoryBytes();
  // A device's own memory is asked for by the engine.
  const bool here = backend.host_memory();
  const std::int64_t need = registry.run_bytes() - (here ? 0 : registry.state_bytes());
  if (free == 0 || need <= free) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrFormat("run \"%s\": needs %d bytes of %sstaged gradients, the machine has %d free",
                      name, need, here ? "optimizer state and " : "", free));
}

// What the operator's limit leaves for gradients beside the state; 0: there is no such limit.
std::int64_t StagingMax(const Registry& registry, const RegistryLimits& limits) {
  if (limits.run_bytes_max == 0) return 0;
  return std::max<std::int64_t>(limits.run_bytes_max - registry.state_bytes(), 1);
}

bool WantsMuon(const RunSpec& spec) {
  return std::any_of(spec.groups.begin(), spec.groups.end(),
                     [](const GroupSpec& group) { return group.algorithm != Algorithm::kAdamW; });
}

constexpr char kOverlapOn[] = "on";

// Whether Newton-Schulz may come before the verdict: "on", or why not.
std::string OverlapOf(const RunSpec& spec, bool wanted) {
  if (!wanted) return "off: --overlap is not set";
  if (!WantsMuon(spec)) return "off: no group uses Muon";
  if (spec.clip_policy == ClipPolicy::kAll && spec.max_grad_norm > 0) {
    return "off: clip policy \"all\" scales Muon's gradients, too, by the norm of all gradients, "
           "which is known with the verdict only";
  }
  return kOverlapOn;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Run>> Run::Create(RunSpec spec, const RunContext& context) {
  const std::string name = spec.name;
  if (const absl::Status valid = ValidateLossScale(spec.loss_scale); !valid.ok()) {
    return Refused(name, valid);
  }
  const VerdictRules rules{spec.max_grad_norm, spec.grad_norm_skip_threshold};
  if (const absl::Status valid = ValidateVerdictRules(rules); !valid.ok()) {
    return Refused(name, valid);
  }
  // All daemons of a run have equally many devices: another's plan would differ, and be refused.
  const std::string overlap = OverlapOf(spec, context.overlap);
  if (context.overlap) spdlog::info("run \"{}\": overlap is {}", name, overlap);
  const Placement placement{
      .plan = {.devices_per_daemon = std::vector<int>(context.peers->count(),
                                                      static_cast<int>(context.devices.size())),
               .overlap = overlap == kOverlapOn,
               .iterate_bytes = static_cast<std::int64_t>(
                   kernels::DtypeBytes(context.devices[0].backend->iterate_dtype())),
               .device_memory = !context.devices[0].backend->host_memory()},
      .daemon = context.peers->self()};
  auto registry = Registry::Create(std::move(spec), context.limits, placement);
  if (!registry.ok()) return Refused(name, registry.status());
  if (context.limits.run_bytes_max == 0) {
    MUOND_RETURN_IF_ERROR(CheckFree(name, *registry, *context.devices[0].backend));
  }
  std::shared_ptr<Run> run(new Run(*std::move(registry), context, overlap));
  LocalShards shards;
  for (int i = 0; i < std::ssize(run->spec().parameters); ++i) {
    const bool holds = run->routing().parameters[i].state == i;
    shards.push_back(holds ? run->registry_.ShardsHere(i) : std::vector<Shard>{});
  }
  auto engines = Engines::Create(context.devices, run->spec(), run->routing(), shards,
                                 context.faults, overlap == kOverlapOn, run);
  if (!engines.ok()) return Refused(name, engines.status());
  run->engines_ = *std::move(engines);
  MUOND_RETURN_IF_ERROR(run->RecallGeneration());
  run->OpenMetrics();
  run->CountMemory(1);
  run->OpenBuddy();
  return run;
}

Run::Run(Registry registry, const RunContext& context, std::string overlap)
    : context_(context),
      registry_(std::move(registry)),
      overlap_(std::move(overlap)),
      generation_file_(context.state_dir, spec().name),
      staging_(StagingMax(registry_, context.limits)) {
  for (const GroupSpec& group : spec().groups) group_names_.push_back(group.name);
}

Run::~Run() {
  CloseBuddy();
  if (engines_ != nullptr) CountMemory(-1);
  context_.metrics->AddMemory(MemoryKind::kStaging, -staging_.bytes());
}

// Adds what the run holds from opening to end to the daemon's memory, or takes it off (-1).
void Run::CountMemory(int sign) {
  std::int64_t weights = 0;
  for (std::size_t i = 0; i < routing().parameters.size(); ++i) {
    const RoutedParameter& routed = routing().parameters[i];
    if (routed.state != static_cast<int>(i)) continue;
    weights += registry_.ElementsHere(static_cast<int>(i)) * sizeof(float);
  }
  const std::int64_t second_moments = engines_->state_bytes() - 2 * weights;
  context_.metrics->AddMemory(MemoryKind::kMaster, sign * weights);
  context_.metrics->AddMemory(MemoryKind::kMomentum, sign * weights);
  context_.metrics->AddMemory(MemoryKind::kSecondMoment, sign * second_moments);
  if (sign > 0) {
    CountWorkspace();
  } else {
    context_.metrics->AddMemory(MemoryKind::kWorkspace, -workspace_bytes_);
  }
}

// The lock is held, or nobody else knows the run.
void Run::CountWorkspace() {
  const std::int64_t now = engines_->scratch_bytes();
  context_.metrics->AddMemory(MemoryKind::kWorkspace, now - workspace_bytes_);
  workspace_bytes_ = now;
}

void Run::OpenMetrics() {
  const LossScaler scaler(spec().loss_scale);
  metrics_ = context_.metrics->OpenRun({.run = name(),
                                        .groups = group_names_,
                                        .trainers_expected = spec().world_size,
                                        .muon_expected = WantsMuon(spec()),
                                        .loss_scale = scaler.scale(),
                                        .loss_scale_min = scaler.minimum(),
                                        .opened = absl::Now()});
  std::map<std::string, RunMetrics::GroupParameters> counts;
  for (std::size_t i = 0; i < routing().parameters.size(); ++i) {
    const RoutedParameter& routed = routing().parameters[i];
    if (routed.state != static_cast<int>(i)) continue;
    RunMetrics::GroupParameters& group = counts[spec().parameters[i].group];
    const bool muon = routed.algorithm == Algorithm::kMuon;
    (muon ? group.muon : group.adamw) += 1;
    (muon ? group.muon_elements : group.adamw_elements) += routed.elements;
  }
  std::vector<RunMetrics::GroupParameters> groups;
  for (std::size_t i = 0; i < group_names_.size(); ++i) {
    groups.push_back(counts[group_names_[i]]);
    metrics_->SetLearningRate(static_cast<int>(i), spec().groups[i].algorithm == Algorithm::kAdamW
                                                       ? spec().groups[i].adamw.lr
                                                       : spec().groups[i].muon.lr);
  }
  metrics_->SetParameters(groups);
  std::int64_t here = 0;
  for (int i = 0; i < std::ssize(routing().parameters); ++i) {
    if (routing().parameters[i].state == i) here += registry_.ElementsHere(i);
  }
  metrics_->SetShardElements(here);
  observer_ =
      std::make_unique<StepObserver>(spec(), context_.observe, metrics_.get(), context_.metrics);
  metrics_->SetState(RunState::kOpening);
}

absl::StatusOr<Run::JoinReply> Run::Join(const RunSpec& spec, std::int64_t rank,
                                         const std::string& session, const RankSlices& slices) {
  std::lock_guard lock(mutex_);
  if (!stopped_.ok()) return stopped_;
  if (absl::Status same = registry_.CheckSameSpec(spec); !same.ok()) return Refused(name(), same);
  auto joined = registry_.Join(rank, session, slices);
  if (!joined.ok()) return Refused(name(), joined.status());
  left_.erase(rank);
  metrics_->SetTrainersConnected(static_cast<std::int64_t>(registry_.joined_ranks().size()));
  if (machine_ == nullptr && registry_.complete()) {
    MakeMachine();
    StartIfReady();
  }
  return JoinReply{joined->rejoined, joined->missing_ranks};
}

absl::Status Run::CheckOpen(std::int64_t generation) const {
  if (!stopped_.ok()) return stopped_;
  const std::int64_t now = GenerationLocked();
  if (generation == now) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("run \"%s\": generation %d is not the current one, %d: register again",
                      name(), generation, now));
}

absl::Status Run::CheckJoined(std::int64_t rank) const {
  const auto joined = registry_.joined_ranks();
  if (std::find(joined.begin(), joined.end(), rank) != joined.end()) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrFormat("run \"%s\": rank %d has not registered", name(), rank));
}

absl::StatusOr<SliceId> Run::Resolve(const SliceAddress& address) const {
  const int parameter = registry_.Find(address.parameter);
  if (parameter < 0) {
    return absl::NotFoundError(absl::StrFormat("run \"%s\": parameter \"%s\" is not registered",
                                               name(), address.parameter));
  }
  MUOND_RETURN_IF_ERROR(CheckJoined(address.rank));
  const auto count = registry_.SlicesOf(parameter, address.rank).size();
  if (address.slice < 0 || address.slice >= static_cast<std::int64_t>(count)) {
    const int holder = routing().parameters[parameter].state;
    if (holder != parameter && count == 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("parameter \"%s\": is the same tensor as \"%s\": send that one",
                          address.parameter, spec().parameters[holder].name));
    }
    return absl::NotFoundError(
        absl::StrFormat("parameter \"%s\": rank %d registered %d slices, there is no slice %d",
                        address.parameter, address.rank, count, address.slice));
  }
  return SliceId{parameter, address.rank, address.slice, address.micro_batch};
}

std::string Run::SliceObject(const SliceId& id, const std::string& action) const {
  return absl::StrFormat("parameter \"%s\": %s of slice %d from rank %d",
                         spec().parameters[id.parameter].name, action, id.slice, id.rank);
}

absl::Status Run::CheckInitial(std::int64_t generation) const {
  MUOND_RETURN_IF_ERROR(CheckOpen(generation));
  if (!lost_.empty()) return NeedsRestore();
  if (restored_) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": initial values are refused: the run was restored from a checkpoint, pull "
        "version %d",
        name(), machine_ == nullptr ? start_.next_step : machine_->version()));
  }
  if (machine_ == nullptr || machine_->version() == start_.next_step) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("run \"%s\": initial values are refused once a step was consumed (%d were)",
                      name(), machine_->version()));
}

absl::StatusOr<OpenSlice> Run::OpenInitial(const SliceAddress& address, std::int64_t generation,
                                           Dtype dtype) {
  std::lock_guard lock(mutex_);
  MUOND_RETURN_IF_ERROR(CheckInitial(generation));
  MUOND_ASSIGN_OR_RETURN(const SliceId id, Resolve(address));
  const int holder = routing().parameters[id.parameter].state;
  if (holder != id.parameter) {
    return absl::InvalidArgumentError(
        absl::StrFormat("parameter \"%s\": shares its state with \"%s\": send that one's values",
                        address.parameter, spec().parameters[holder].name));
  }
  const Box& box = registry_.SlicesOf(id.parameter, id.rank)[id.slice];
  OpenSlice slice{.id = id, .generation = generation, .step = -1};
  // The values arrive in the order of the box and are spread over the tensor by the engines. What
  // lies in shards that are here is kept.
  SliceTarget target{.shape = {box.Elements()}};
  std::int64_t elements = 0;
  for (const Shard& shard : registry_.ShardsHere(id.parameter)) {
    const ElementRange range = RangeInShard(box, *spec().parameters[id.parameter].shape, shard);
    if (range.count > 0) target.shards.push_back({.first = range.first, .elements = range.count});
    elements += range.count;
  }
  if (elements == 0 && box.Elements() > 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: has no element in what this daemon owns of it", SliceObject(id, "initial values")));
  }
  MUOND_ASSIGN_OR_RETURN(slice.memory, engines_->AllocateStaging(id.parameter, elements, dtype));
  target.keepalive = slice.memory;
  target.base = static_cast<std::byte*>(slice.memory->data());
  slice.receiver =
      std::make_shared<SliceReceiver>(SliceObject(id, "initial values"),
                                      Box{{0}, {box.Elements()}, true}, dtype, std::move(target));
  initial_slices_.Open(id, slice.receiver);
  return slice;
}

void Run::CloseInitial(const OpenSlice& slice, ArrivalCallback done) {
  absl::Status status = slice.receiver->CheckComplete();
  bool duplicate = false;
  {
    std::lock_guard lock(mutex_);
    initial_slices_.Drop(slice.id, slice.receiver.get());
    if (status.ok()) status = CheckInitial(slice.generation);
    const auto writing = writing_.find(slice.id);
    if (status.ok() && writing != writing_.end()) {
      // Another stream's copy of the slice is on its way in: then it is known what this one is.
      auto self = shared_from_this();
      writing->second.push_back([self, slice, done] { self->CloseInitial(slice, done); });
      return;
    }
    if (status.ok()) {
      const auto arrival = initial_.Check(slice.id, spec().parameters[slice.id.parameter].name,
                                          slice.receiver->digest());
      status = arrival.status();
      duplicate = status.ok() && *arrival == InitialValues::Arrival::kDuplicate;
    }
    if (duplicate) metrics_->OnDuplicateRequest();
    if (status.ok() && !duplicate) {
      writing_[slice.id];
      const Box& box = registry_.SlicesOf(slice.id.parameter, slice.id.rank)[slice.id.slice];
      auto self = shared_from_this();
      engines_->WriteInitial(slice.id.parameter, box, slice.memory, slice.receiver->dtype(),
                             [self, slice, life = life_, done](const absl::Status& written) {
                               self->FinishWriteInitial(slice, life, written, done);
                             });
      return;
    }
  }
  if (status.ok()) return done(SliceArrival::kDuplicate);
  done(status);
}

// On an executor's thread.
void Run::FinishWriteInitial(const OpenSlice& slice, std::int64_t life, absl::Status status,
                             const ArrivalCallback& done) {
  std::vector<std::function<void()>> waiting;
  {
    std::lock_guard lock(mutex_);
    waiting = std::move(writing_[slice.id]);
    writing_.erase(slice.id);
    if (status.ok() && life != life_) {
      status = absl::AbortedError(absl::StrFormat("%s: the run is initialized anew",
                                                  SliceObject(slice.id, "initial values")));
    }
    if (status.ok()) {
      initial_.Written(slice.id, slice.receiver->digest());
      StartIfReady();
    }
  }
  done(status.ok() ? absl::StatusOr<SliceArrival>(SliceArrival::kAccepted) : status);
  for (const auto& call : waiting) call();
}

// The lock is held. Posts the last piece of work of the opening, once everything is there.
void Run::StartIfReady() {
  if (running_ || machine_ == nullptr || !(restored_ || initial_.complete())) return;
  running_ = true;
  metrics_->SetState(StateLocked());
  if (restored_) return;
  auto self = shared_from_this();
  engines_->FinishInitial([self, life = life_](const absl::StatusOr<StateHealth>& health) {
    if (!health.ok()) return self->FailEngine(life, std::string(health.status().message()));
    std::lock_guard lock(self->mutex_);
    if (life == self->life_) self->PublishHealth({}, *health);
  });
}

Run::InitialProgress Run::initial_progress() const {
  std::lock_guard lock(mutex_);
  return {initial_.complete(), initial_.MissingNames(8)};
}

absl::StatusOr<bool> Run::Leave(std::int64_t rank, std::int64_t generation,
                                std::vector<std::int64_t>& open_ranks) {
  std::lock_guard lock(mutex_);
  MUOND_RETURN_IF_ERROR(CheckOpen(generation));
  MUOND_RETURN_IF_ERROR(CheckJoined(rank));
  left_.insert(rank);
  for (std::int64_t other : registry_.joined_ranks()) {
    if (left_.count(other) == 0) open_ranks.push_back(other);
  }
  metrics_->SetTrainersConnected(static_cast<std::int64_t>(open_ranks.size()));
  return open_ranks.empty();
}

void Run::Stop(const absl::Status& status) {
  After after;
  {
    std::lock_guard lock(mutex_);
    if (!stopped_.ok()) return;
    stopped_ = status;
    initial_slices_.Clear(stopped_);
    Effects effects;
    if (machine_ != nullptr) machine_->OnStop(status, effects);
    Carry(effects, after);
    metrics_->SetState(StateLocked());
  }
  CallAll(after);
}

}  // namespace muond

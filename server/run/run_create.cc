// Making a run, and what it tells of its size.
#include "server/run/run_create.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/check.h"
#include "server/run/free_memory.h"
#include "server/run/pending_addition.h"
#include "spdlog/spdlog.h"

namespace muond {

absl::Status Refused(const std::string& run, const absl::Status& status) {
  const std::string object = absl::StrFormat("run \"%s\"", run);
  if (absl::StartsWith(status.message(), object)) return status;
  return absl::Status(status.code(), absl::StrFormat("%s: %s", object, status.message()));
}

Placement PlacementOf(const RunContext& context, const std::string& overlap) {
  const kernels::Backend& backend = *context.devices[0].backend;
  return {.plan = {.devices_per_daemon = std::vector<int>(context.peers->count(),
                                                          static_cast<int>(context.devices.size())),
                   .overlap = overlap == kOverlapOn,
                   .iterate_bytes =
                       static_cast<std::int64_t>(kernels::DtypeBytes(backend.iterate_dtype())),
                   .device_memory = !backend.host_memory()},
          .daemon = context.peers->self()};
}

absl::Status CheckFree(const Registry& registry, const Registry* before,
                       const RunContext& context) {
  if (context.limits.run_bytes_max > 0) return absl::OkStatus();
  const std::int64_t free = FreeMemoryBytes();
  // A device's own memory is asked for by the engine.
  const bool here = context.devices[0].backend->host_memory();
  const auto bytes = [here](const Registry& of) {
    return of.run_bytes() - (here ? 0 : of.state_bytes());
  };
  const std::int64_t need = bytes(registry) - (before == nullptr ? 0 : bytes(*before));
  if (free == 0 || need <= free) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrFormat("run \"%s\": needs %d %sbytes of %sstaged gradients, the machine has %d free",
                      registry.spec().name, need, before == nullptr ? "" : "more ",
                      here ? "optimizer state and " : "", free));
}

std::int64_t StagingMax(const Registry& registry, const RegistryLimits& limits) {
  if (limits.run_bytes_max == 0) return 0;
  return std::max<std::int64_t>(limits.run_bytes_max - registry.state_bytes(), 1);
}

LocalShards ShardsFrom(const Registry& registry, std::size_t first) {
  LocalShards shards(registry.spec().parameters.size());
  for (std::size_t i = first; i < shards.size(); ++i) {
    const int parameter = static_cast<int>(i);
    const bool holds = registry.routing().parameters[i].state == parameter;
    if (holds) shards[i] = registry.ShardsHere(parameter);
  }
  return shards;
}

bool WantsMuon(const RunSpec& spec) {
  return std::any_of(spec.groups.begin(), spec.groups.end(),
                     [](const GroupSpec& group) { return group.algorithm != Algorithm::kAdamW; });
}

namespace {

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
  const std::string overlap = OverlapOf(spec, context.overlap);
  if (context.overlap) spdlog::info("run \"{}\": overlap is {}", name, overlap);
  auto registry = Registry::Create(std::move(spec), context.limits, PlacementOf(context, overlap));
  if (!registry.ok()) return Refused(name, registry.status());
  MUOND_RETURN_IF_ERROR(CheckFree(*registry, nullptr, context));
  std::shared_ptr<Run> run(new Run(*std::move(registry), context, overlap));
  auto engines =
      Engines::Create(context.devices, run->spec(), run->routing(), ShardsFrom(run->registry(), 0),
                      context.faults, overlap == kOverlapOn, run);
  if (!engines.ok()) return Refused(name, engines.status());
  run->engines_ = *std::move(engines);
  MUOND_RETURN_IF_ERROR(run->RecallGeneration());
  {
    MutexLock lock(run->mutex_);
    if (!run->spec().additions.empty()) run->adopted_ = AdditionName(run->registry());
    run->OpenMetrics();
    run->CountMemory(1);
  }
  run->OpenBuddy();
  return run;
}

RunFields::RunFields(Registry registry, const RunContext& context, std::string overlap)
    : context_(context),
      registries_(std::move(registry)),
      overlap_(std::move(overlap)),
      generation_file_(context.state_dir, registries_.newest().spec().name),
      staging_(StagingMax(registries_.newest(), context.limits)) {}

Run::Run(Registry registry, const RunContext& context, std::string overlap)
    : RunFields(std::move(registry), context, std::move(overlap)) {}

Run::~Run() {
  CloseBuddy();
  if (engines_ != nullptr) CountMemory(-1);
  context_.metrics->AddMemory(MemoryKind::kStaging, -staging_.bytes());
}

// Adds what the run holds from opening to end to the daemon's memory, or takes it off (-1).
void Run::CountMemory(int sign) {
  std::map<std::string, const GroupSpec*> groups;
  for (const GroupSpec& group : spec().groups) groups[group.name] = &group;
  std::int64_t weights = 0, momenta = 0;
  for (std::size_t i = 0; i < routing().parameters.size(); ++i) {
    const RoutedParameter& routed = routing().parameters[i];
    if (routed.state != static_cast<int>(i)) continue;
    const std::int64_t elements = registry().ElementsHere(static_cast<int>(i));
    const bool muon = routed.algorithm == Algorithm::kMuon;
    const Dtype dtype =
        muon ? groups.at(spec().parameters[i].group)->momentum_dtype : Dtype::kF32;
    weights += elements * static_cast<std::int64_t>(sizeof(float));
    momenta += elements * static_cast<std::int64_t>(DtypeBytes(dtype));
  }
  const std::int64_t second_moments = engines_->state_bytes() - weights - momenta;
  context_.metrics->AddMemory(MemoryKind::kMaster, sign * weights);
  context_.metrics->AddMemory(MemoryKind::kMomentum, sign * momenta);
  context_.metrics->AddMemory(MemoryKind::kSecondMoment, sign * second_moments);
  if (sign > 0) {
    CountWorkspace();
  } else {
    context_.metrics->AddMemory(MemoryKind::kWorkspace, -workspace_bytes_);
    workspace_bytes_ = 0;
  }
}

void Run::CountWorkspace() {
  const std::int64_t now = engines_->scratch_bytes();
  context_.metrics->AddMemory(MemoryKind::kWorkspace, now - workspace_bytes_);
  workspace_bytes_ = now;
}

void Run::OpenMetrics() {
  const LossScaler scaler(spec().loss_scale);
  metrics_ = context_.metrics->OpenRun({.run = name(),
                                        .groups = {},
                                        .trainers_expected = spec().world_size,
                                        .muon_expected = WantsMuon(spec()),
                                        .loss_scale = scaler.scale(),
                                        .loss_scale_min = scaler.minimum(),
                                        .opened = absl::Now()});
  observer_ =
      std::make_unique<StepObserver>(spec(), context_.observe, metrics_.get(), context_.metrics);
  PublishParameters();
  metrics_->SetState(RunState::kOpening);
}

// Of a new run, and again when parameters were added.
void Run::PublishParameters() {
  const std::size_t known = group_names_.size();
  for (std::size_t i = known; i < spec().groups.size(); ++i) {
    group_names_.push_back(spec().groups[i].name);
  }
  metrics_->AddGroups({group_names_.begin() + known, group_names_.end()}, WantsMuon(spec()));
  observer_->OnParameters(spec());
  std::map<std::string, RunMetrics::GroupParameters> counts;
  std::int64_t here = 0;
  for (int i = 0; i < std::ssize(routing().parameters); ++i) {
    const RoutedParameter& routed = routing().parameters[i];
    if (routed.state != i) continue;
    here += registry().ElementsHere(i);
    RunMetrics::GroupParameters& group = counts[spec().parameters[i].group];
    const bool muon = routed.algorithm == Algorithm::kMuon;
    (muon ? group.muon : group.adamw) += 1;
    (muon ? group.muon_elements : group.adamw_elements) += routed.elements;
  }
  std::vector<RunMetrics::GroupParameters> groups;
  for (const std::string& group : group_names_) groups.push_back(counts[group]);
  metrics_->SetParameters(groups);
  metrics_->SetShardElements(here);
  for (std::size_t i = known; i < group_names_.size(); ++i) {
    const GroupSpec& group = spec().groups[i];
    metrics_->SetLearningRate(
        static_cast<int>(i), group.algorithm == Algorithm::kAdamW ? group.adamw.lr : group.muon.lr);
  }
}

}  // namespace muond

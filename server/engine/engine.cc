#include "server/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/engine/adamw_commit.h"
#include "server/engine/muon_commit.h"
#include "server/engine/rules.h"

namespace muond {
namespace {

absl::Status OutOfMemory(const ParameterSpec& spec, const char* what, std::int64_t bytes) {
  return absl::ResourceExhaustedError(absl::StrFormat(
      "parameter \"%s\": allocate %s: no memory for %d bytes", spec.name, what, bytes));
}

absl::Status FromKernel(const ParameterSpec& spec, const char* what, const kernels::Error& error) {
  return absl::InternalError(
      absl::StrFormat("parameter \"%s\": %s: %s", spec.name, what, error.message()));
}

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Engine::Engine(kernels::Backend& backend, const RunSpec& spec, const Routing& routing,
               EngineFaults faults)
    : backend_(backend), spec_(spec), routing_(routing), faults_(faults) {}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(kernels::Backend& backend,
                                                       const RunSpec& spec, const Routing& routing,
                                                       EngineFaults faults) {
  std::unique_ptr<Engine> engine(new Engine(backend, spec, routing, faults));
  std::map<std::string, kernels::NewtonSchulzRule> rules;
  for (const GroupSpec& group : spec.groups) {
    MUOND_ASSIGN_OR_RETURN(rules[group.name], NewtonSchulzRuleOf(group));
    engine->muon_[group.name] = group.muon;
    engine->adamw_[group.name] = group.adamw;
  }
  engine->states_.resize(spec.parameters.size());
  for (std::size_t i = 0; i < spec.parameters.size(); ++i) {
    ParameterState& state = engine->states_[i];
    state.spec = &spec.parameters[i];
    state.routed = &routing.parameters[i];
    state.group =
        &*std::find_if(spec.groups.begin(), spec.groups.end(),
                       [&](const GroupSpec& group) { return group.name == state.spec->group; });
    state.elements = state.routed->elements;
    state.owned = state.routed->state == static_cast<int>(i);
    state.newton_schulz = rules[state.group->name];
    if (state.owned) MUOND_RETURN_IF_ERROR(engine->AllocateState(static_cast<int>(i)));
  }
  const std::size_t scratch = MuonCommit::ScratchBytes(engine->states_);
  engine->muon_scratch_ = Buffer(backend, scratch);
  if (!engine->muon_scratch_.ok()) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "run \"%s\": allocate Newton-Schulz scratch: no memory for %d bytes", spec.name, scratch));
  }
  return engine;
}

absl::Status Engine::AllocateState(int parameter) {
  ParameterState& state = states_[parameter];
  const auto bytes = static_cast<std::size_t>(state.elements) * sizeof(float);
  state.weight = Buffer(backend_, bytes);
  if (!state.weight.ok()) return OutOfMemory(*state.spec, "master weights", bytes);
  state.momentum = Buffer(backend_, bytes);
  if (!state.momentum.ok()) return OutOfMemory(*state.spec, "momentum", bytes);
  state_bytes_ += 2 * bytes;
  if (!state.muon()) {
    state.exp_avg_sq = Buffer(backend_, bytes);
    if (!state.exp_avg_sq.ok()) return OutOfMemory(*state.spec, "second moment", bytes);
    state_bytes_ += bytes;
  }
  state.update_element_max = 0;
  for (const MatrixBlock& block : state.routed->matrices) {
    const double norm_max = std::sqrt(static_cast<double>(std::min(block.rows, block.cols)) *
                                      (1 + state.newton_schulz.residual_max));
    const double factor = ShapeFactorOf(state.group->shape_factor, state.group->extra_factor,
                                        block.rows, block.cols);
    state.update_element_max = std::max(state.update_element_max, factor * norm_max);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Buffer>> Engine::AllocateTensor(std::int64_t elements,
                                                               Dtype dtype) const {
  const std::size_t bytes = static_cast<std::size_t>(elements) * DtypeBytes(dtype);
  auto buffer = std::make_shared<Buffer>(backend_, bytes);
  if (!buffer->ok()) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("staging: allocate %d bytes: no memory left", bytes));
  }
  return buffer;
}

absl::Status Engine::WriteInitial(int parameter, const Box& box, const void* values, Dtype dtype) {
  ParameterState& state = states_[parameter];
  const std::int64_t count = box.Elements();
  if (count == 0) return absl::OkStatus();
  Buffer wide(backend_, count * sizeof(float));
  if (!wide.ok()) return OutOfMemory(*state.spec, "initial values", count * sizeof(float));
  if (auto error = backend_.Accumulate(wide.floats(), values, dtype, count, true)) {
    return FromKernel(*state.spec, "initial values", error);
  }
  kernels::StateScan scan;
  if (auto error = backend_.ScanState(wide.floats(), count, scan)) {
    return FromKernel(*state.spec, "initial values", error);
  }
  if (scan.nonfinite > 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("parameter \"%s\": initial values of %s: %d non-finite elements",
                        state.spec->name, box.ToString(), scan.nonfinite));
  }
  return PutInitial(state, box, wide.floats());
}

absl::Status Engine::PutInitial(ParameterState& state, const Box& box, const float* values) {
  const std::int64_t count = box.Elements();
  std::vector<bool>& initialized = state.initialized;
  if (state.spec->replicated) {
    initialized.resize(state.elements);
    bool same = true;
    ForEachRun(box, *state.spec->shape, 0, count,
               [&](std::int64_t at, std::int64_t from, std::int64_t n) {
                 const float* master = state.weight.floats() + at;
                 for (std::int64_t i = 0; i < n; ++i) {
                   if (!initialized[at + i]) continue;
                   same = same && std::memcmp(master + i, values + from + i, sizeof(float)) == 0;
                 }
               });
    if (!same) {
      return absl::InvalidArgumentError(
          absl::StrFormat("parameter \"%s\": initial values of %s: replicas disagree: another rank "
                          "sent other values",
                          state.spec->name, box.ToString()));
    }
  }
  ForEachRun(box, *state.spec->shape, 0, count,
             [&](std::int64_t at, std::int64_t from, std::int64_t n) {
               std::memcpy(state.weight.floats() + at, values + from, n * sizeof(float));
               if (!initialized.empty()) {
                 std::fill_n(initialized.begin() + at, n, true);
               }
             });
  return absl::OkStatus();
}

absl::Status Engine::FinishInitial() {
  for (ParameterState& state : states_) {
    if (!state.owned) continue;
    if (auto error = backend_.ScanState(state.weight.floats(), state.elements, state.weight_scan)) {
      return FromKernel(*state.spec, "scan weights", error);
    }
    state.initialized = {};
  }
  return absl::OkStatus();
}

void Engine::SetHyperparameters(const HyperparametersByGroup& muon,
                                const HyperparametersByGroup& adamw) {
  muon_ = muon;
  adamw_ = adamw;
}

bool Engine::CouldOverflow(const ParameterState& state, double gradient_max) const {
  // State that is damaged already must not spread: no step is applied to it.
  if (state.weight_scan.nonfinite + state.momentum_scan.nonfinite +
          state.exp_avg_sq_scan.nonfinite >
      0) {
    return true;
  }
  if (state.muon()) {
    const Hyperparameters& now = muon_.at(state.group->name);
    return MuonStateCouldOverflow(state.Maxima(), gradient_max,
                                  MomentumRuleOf(*state.group, now, 1.0),
                                  DecayFactor(*state.group, now),
                                  now.lr * state.update_element_max);
  }
  const Hyperparameters& now = adamw_.at(state.group->name);
  return AdamWStateCouldOverflow(state.Maxima(), gradient_max,
                                 AdamWRuleOf(*state.group, now, state.t + 1, 1.0));
}

absl::StatusOr<ReducedGradient> Engine::Reduce(int parameter,
                                               const std::vector<GradientLayer>& layers,
                                               double divisor) {
  const auto start = std::chrono::steady_clock::now();
  ParameterState& state = states_[parameter];
  MUOND_CHECK(!layers.empty(), "a reduction without layers");
  if (faults_.Fire(FaultPoint::kFailReduce)) {
    return absl::InternalError(
        absl::StrFormat("parameter \"%s\": reduce gradient: injected fault", state.spec->name));
  }
  state.gradient.elements = state.elements;
  state.gradient.unscale = static_cast<float>(1.0 / divisor);
  if (layers.size() == 1) {
    // One layer is read where it lies, in the trainer's dtype: no copy.
    state.gradient_memory = layers[0].memory;
    state.gradient.dtype = layers[0].dtype;
  } else {
    MUOND_ASSIGN_OR_RETURN(state.gradient_memory, AllocateTensor(state.elements, Dtype::kF32));
    state.gradient.dtype = Dtype::kF32;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if (auto error =
              backend_.Accumulate(state.gradient_memory->floats(), layers[i].memory->data(),
                                  layers[i].dtype, state.elements, i == 0)) {
        return FromKernel(*state.spec, "sum gradient", error);
      }
    }
  }
  state.gradient.data = state.gradient_memory->data();
  kernels::GradientScan scan;
  if (auto error = backend_.Scan(state.gradient, scan)) {
    return FromKernel(*state.spec, "scan gradient", error);
  }
  state.reduced = true;
  ReducedGradient result;
  result.nonfinite = static_cast<std::int64_t>(scan.nonfinite);
  result.max_abs = scan.max_abs;
  result.block_sums = std::move(scan.block_sums);
  result.state_overflow = scan.nonfinite == 0 && CouldOverflow(state, scan.max_abs);
  result.seconds = SecondsSince(start);
  return result;
}

absl::StatusOr<CommitReport> Engine::Commit(const CommitRequest& request) {
  if (faults_.Fire(FaultPoint::kDelayCommit)) std::this_thread::sleep_for(std::chrono::seconds(1));
  std::vector<int> muon, adamw;
  for (int i = 0; i < static_cast<int>(states_.size()); ++i) {
    const ParameterState& state = states_[i];
    if (!state.owned || state.elements == 0 || request.absent.count(i) > 0) continue;
    MUOND_CHECK(state.reduced, "a commit of a gradient that was not reduced");
    (state.muon() ? muon : adamw).push_back(i);
  }
  CommitReport report;
  MUOND_RETURN_IF_ERROR(AdamWCommit(*this, request).Run(adamw, report));
  if (faults_.Fire(FaultPoint::kFailCommit)) return absl::InternalError("commit: injected fault");
  MUOND_RETURN_IF_ERROR(MuonCommit(*this, request).Run(muon, report));
  if (faults_.Fire(FaultPoint::kMomentumNan) && !muon.empty()) {
    ParameterState& state = states_[muon[0]];
    state.momentum.floats()[0] = std::numeric_limits<float>::quiet_NaN();
    if (auto error =
            backend_.ScanState(state.momentum.floats(), state.elements, state.momentum_scan)) {
      return FromKernel(*state.spec, "scan momentum", error);
    }
  }
  Discard();
  return report;
}

void Engine::Discard() {
  for (ParameterState& state : states_) {
    state.gradient_memory.reset();
    state.gradient = {};
    state.reduced = false;
  }
}

absl::Status Engine::Read(int parameter, const Box& box, std::int64_t first, std::int64_t count,
                          Dtype dtype, void* out) {
  const ParameterState& state = states_[parameter];
  kernels::Error error;
  ForEachRun(box, *state.spec->shape, first, count,
             [&](std::int64_t at, std::int64_t from, std::int64_t n) {
               if (error) return;
               auto* to = static_cast<char*>(out) + (from - first) * DtypeBytes(dtype);
               error = backend_.Round(to, dtype, state.weight.floats() + at, n);
             });
  return error ? FromKernel(*state.spec, "read", error) : absl::OkStatus();
}

StateHealth Engine::Health() const {
  StateHealth health;
  for (const ParameterState& state : states_) {
    if (!state.owned) continue;
    StateHealth::Group& group = health.groups[state.group->name];
    group.momentum_sum_squares += state.momentum_scan.sum_squares;
    if (state.muon()) group.muon_sum_squares += state.momentum_scan.sum_squares;
    group.weight_sum_squares += state.weight_scan.sum_squares;
    health.nonfinite_momentum += state.momentum_scan.nonfinite > 0;
    health.nonfinite_second_moment += state.exp_avg_sq_scan.nonfinite > 0;
    health.nonfinite_weight += state.weight_scan.nonfinite > 0;
  }
  return health;
}

}  // namespace muond

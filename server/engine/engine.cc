#include "server/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "server/engine/adamw_commit.h"
#include "server/engine/muon_commit.h"
#include "server/engine/muon_scratch.h"
#include "server/engine/rules.h"

namespace muond {
namespace {

// Every tensor begins at a multiple of this many elements: of 256 bytes, what devices like.
constexpr std::size_t kTensorAlignment = 64;

// The least scratch on a device: rows on their way out, small gradients on their way in.
constexpr std::size_t kDeviceScratchBytes = std::size_t{8} << 20;

std::size_t Padded(std::int64_t elements) {
  return (static_cast<std::size_t>(elements) + kTensorAlignment - 1) / kTensorAlignment *
         kTensorAlignment;
}

double UpdateElementMax(const ShardState& state) {
  double largest = 0;
  for (const MatrixBlock& block : state.matrices) {
    const double norm_max = std::sqrt(static_cast<double>(std::min(block.rows, block.cols)) *
                                      (1 + state.newton_schulz->residual_max));
    const double factor =
        ShapeFactorOf(state.group->shape_factor, state.group->extra_factor, block.rows, block.cols);
    largest = std::max(largest, factor * norm_max);
  }
  return largest;
}

// What a run takes of a backend's memory, in bytes.
struct MemoryNeed {
  std::size_t weights = 0, momenta = 0, second_moments = 0, gradients = 0, scratch = 0, results = 0;
  std::size_t in_calls = 0;  // scratch that the backend takes by itself
  std::size_t State() const { return weights + momenta + second_moments; }
  std::size_t Total() const { return State() + gradients + scratch + results + in_calls; }
};

absl::Status OutOfMemory(const RunSpec& spec, const kernels::Backend& backend,
                         const MemoryNeed& need, std::size_t free) {
  return absl::ResourceExhaustedError(absl::StrFormat(
      "run \"%s\": needs %d bytes of memory on backend \"%s\" (%d of state, %d of gradients, %d of "
      "scratch), which has %s",
      spec.name, need.Total(), std::string(backend.name()), need.State(), need.gradients,
      need.scratch + need.results + need.in_calls,
      free > 0 ? absl::StrFormat("%d free", free) : "too little"));
}

}  // namespace

Engine::Engine(kernels::Backend& backend, const RunSpec& spec, const Routing& routing,
               const LocalShards& shards, int device, EngineFaults faults, bool overlap)
    : backend_(backend),
      spec_(spec),
      routing_(routing),
      shards_(shards),
      device_(device),
      faults_(faults),
      overlap_(overlap) {}

LocalShards WholeRun(const Routing& routing) {
  LocalShards shards(routing.parameters.size());
  for (int i = 0; i < std::ssize(routing.parameters); ++i) {
    const RoutedParameter& routed = routing.parameters[i];
    if (routed.state == i) shards[i] = {{.parameter = i, .elements = routed.elements}};
  }
  return shards;
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(kernels::Backend& backend,
                                                       const RunSpec& spec, const Routing& routing,
                                                       const LocalShards& shards, int device,
                                                       EngineFaults faults, bool overlap) {
  std::unique_ptr<Engine> engine(
      new Engine(backend, spec, routing, shards, device, faults, overlap));
  MUOND_RETURN_IF_ERROR(engine->BindShards());
  MUOND_RETURN_IF_ERROR(engine->AllocateStates());
  return engine;
}

absl::Status Engine::BindShards() {
  std::map<std::string, const GroupSpec*> groups;
  for (const GroupSpec& group : spec_.groups) {
    groups[group.name] = &group;
    MUOND_ASSIGN_OR_RETURN(rules_[group.name], NewtonSchulzRuleOf(group));
    muon_[group.name] = group.muon;
    adamw_[group.name] = group.adamw;
  }
  for (std::size_t i = 0; i < spec_.parameters.size(); ++i) {
    begin_.push_back(states_.size());
    std::int64_t packed = 0;
    for (const Shard& shard : shards_[i]) {
      const std::int64_t at = packed;
      packed += shard.elements;
      if (shard.owner != device_) continue;
      ShardState state{.parameter = static_cast<int>(i), .spec = &spec_.parameters[i]};
      state.routed = &routing_.parameters[i];
      state.group = groups.at(state.spec->group);
      state.first = shard.first;
      state.elements = shard.elements;
      state.packed = at;
      state.matrices = MatricesIn(*state.routed, shard);
      state.newton_schulz = &rules_.at(state.group->name);
      state.update_element_max = UpdateElementMax(state);
      states_.push_back(std::move(state));
    }
  }
  begin_.push_back(states_.size());
  return absl::OkStatus();
}

// None of a parameter that was added after this engine was made: another has it.
std::span<ShardState> Engine::ShardsOf(int parameter) {
  if (parameter + 1 >= std::ssize(begin_)) return {};
  return std::span(states_).subspan(begin_[parameter], begin_[parameter + 1] - begin_[parameter]);
}

std::span<const ShardState> Engine::ShardsOf(int parameter) const {
  if (parameter + 1 >= std::ssize(begin_)) return {};
  return std::span(states_).subspan(begin_[parameter], begin_[parameter + 1] - begin_[parameter]);
}

absl::Status Engine::AllocateStates() {
  const bool device = !backend_.host_memory();
  MemoryNeed need;
  for (const ShardState& state : states_) {
    const std::size_t bytes = Padded(state.elements) * sizeof(float);
    need.weights += bytes;
    need.momenta += Padded(state.elements) * DtypeBytes(state.momentum_dtype());
    if (!state.muon()) need.second_moments += bytes;
    if (device) need.gradients += bytes;
    state_bytes_ +=
        StateBytesPerElement(state.routed->algorithm, *state.group) * state.elements;
  }
  need.in_calls = NewtonSchulzBytes(states_, overlap_, backend_);
  need.scratch = std::max(MuonScratchBytes(states_, backend_, overlap_),
                          device ? kDeviceScratchBytes : std::size_t{0});
  if (overlap_) need.results = MuonResultBytes(states_, backend_);
  // Asked before anything is taken: other runs on the device must not feel the attempt.
  const std::size_t free = device ? backend_.FreeBytes() : 0;
  if (free > 0 && need.Total() > free) return OutOfMemory(spec_, backend_, need, free);
  weights_ = Buffer(backend_, need.weights);
  momenta_ = Buffer(backend_, need.momenta);
  second_moments_ = Buffer(backend_, need.second_moments);
  gradients_ = Buffer(backend_, need.gradients);
  scratch_ = Buffer(backend_, need.scratch);
  results_ = Buffer(backend_, need.results);
  if (device) pack_ = StagingBuffer(backend_, UploadPack::kBytes);
  if (!weights_.ok() || !momenta_.ok() || !second_moments_.ok() || !gradients_.ok() ||
      !scratch_.ok() || !results_.ok() || !pack_.ok()) {
    return OutOfMemory(spec_, backend_, need, free);
  }
  scratch_bytes_ = static_cast<std::int64_t>(need.gradients + need.scratch + need.results);
  std::size_t at = 0, second_at = 0;
  char* momentum = static_cast<char*>(momenta_.data());
  char* o = static_cast<char*>(results_.data());
  for (ShardState& state : states_) {
    state.weight = weights_.floats() + at;
    state.momentum = momentum;
    momentum += Padded(state.elements) * DtypeBytes(state.momentum_dtype());
    if (device) state.gradient_memory = gradients_.floats() + at;
    at += Padded(state.elements);
    if (state.muon() && overlap_) {
      state.o = o;
      o += MuonResultBytes({&state, 1}, backend_);
    }
    if (state.muon()) continue;
    state.exp_avg_sq = second_moments_.floats() + second_at;
    second_at += Padded(state.elements);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<StagingBuffer>> Engine::AllocateStaging(std::int64_t elements,
                                                                       Dtype dtype) const {
  const std::size_t bytes = static_cast<std::size_t>(elements) * DtypeBytes(dtype);
  auto buffer = std::make_shared<StagingBuffer>(backend_, bytes);
  if (!buffer->ok()) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("staging: allocate %d bytes: no memory left", bytes));
  }
  return buffer;
}

void Engine::SetHyperparameters(const HyperparametersByGroup& muon,
                                const HyperparametersByGroup& adamw) {
  muon_ = muon;
  adamw_ = adamw;
}

bool Engine::CouldOverflow(const ShardState& state, double gradient_max) const {
  // State that is damaged already must not spread: no step is applied to it.
  if (state.weight_scan.nonfinite + state.momentum_scan.nonfinite +
          state.exp_avg_sq_scan.nonfinite >
      0) {
    return true;
  }
  if (state.muon()) {
    const Hyperparameters& now = muon_.at(state.group->name);
    return MuonStateCouldOverflow(
        state.Maxima(), gradient_max, MomentumRuleOf(*state.group, now, 1.0),
        DecayFactor(*state.group, now), now.lr * state.update_element_max);
  }
  const Hyperparameters& now = adamw_.at(state.group->name);
  return AdamWStateCouldOverflow(state.Maxima(), gradient_max,
                                 AdamWRuleOf(*state.group, now, state.t + 1, 1.0));
}

bool Engine::OrthogonalizeEarly() {
  if (!overlap_ || doomed_ || !early_error_.ok()) return false;
  std::vector<int> ready;
  std::int64_t elements = 0;
  bool full = false, last = true;
  for (int i = 0; i < std::ssize(states_); ++i) {
    const ShardState& state = states_[i];
    if (!state.muon() || state.elements == 0 || state.orthogonalized) continue;
    last = last && state.reduced;
    if (!state.reduced) continue;
    const std::int64_t more = Footprint(state);
    if (!ready.empty() && elements + more > EarlyElements(backend_)) {
      full = true;
      break;
    }
    ready.push_back(i);
    elements += more;
  }
  full = full || elements >= EarlyLeast(backend_);
  if (ready.empty() || (!full && !last)) return false;
  const auto start = std::chrono::steady_clock::now();
  const CommitRequest request{.clip_coefficient = 1.0, .absent = {}, .muon = muon_, .adamw = {}};
  early_error_ = MuonCommit(*this, request).OrthogonalizeEarly(ready);
  early_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return early_error_.ok();
}

absl::StatusOr<CommitReport> Engine::Commit(const CommitRequest& request) {
  MUOND_RETURN_IF_ERROR(early_error_);
  if (faults_.Fire(FaultPoint::kDelayCommit)) std::this_thread::sleep_for(std::chrono::seconds(1));
  std::vector<int> muon, adamw;
  for (int i = 0; i < std::ssize(states_); ++i) {
    const ShardState& state = states_[i];
    if (state.elements == 0 || request.absent.count(state.parameter) > 0) continue;
    MUOND_CHECK(state.reduced, "a commit of a gradient that was not reduced");
    (state.muon() ? muon : adamw).push_back(i);
  }
  CommitReport report;
  report.diagnostics.sampled = request.sample;
  CountStale(request, report.diagnostics);
  report.newton_schulz_seconds = early_seconds_;
  MUOND_RETURN_IF_ERROR(AdamWCommit(*this, request).Run(adamw, report));
  faults_.StopHere(FaultPoint::kStopInCommit);
  if (faults_.Fire(FaultPoint::kFailCommit)) return absl::InternalError("commit: injected fault");
  if (faults_.Fire(FaultPoint::kKernelTrap)) {
    return absl::InternalError("commit: " + backend_.Trap().message());
  }
  MUOND_RETURN_IF_ERROR(MuonCommit(*this, request).Run(muon, report));
  if (faults_.Fire(FaultPoint::kMomentumNan) && !muon.empty()) {
    MUOND_RETURN_IF_ERROR(PoisonMomentum(states_[muon[0]]));
  }
  Discard();
  // Devices carry out one commit each: what any of them has not written is not asked for here.
  if (request.targets != nullptr && report.failure.empty()) request.targets->written = true;
  return report;
}

void Engine::CountStale(const CommitRequest& request, CommitDiagnostics& diagnostics) {
  for (ShardState& state : states_) {
    if (state.elements == 0) continue;
    const bool present = request.absent.count(state.parameter) == 0 && state.gradient_max > 0;
    state.idle_steps = present ? 0 : state.idle_steps + 1;
    diagnostics.stale += state.idle_steps >= kStaleSteps;
    if (!present) continue;
    Enter(diagnostics.gradient_norms, std::sqrt(state.gradient_sum_squares), state.parameter);
  }
}

// What the fault point asks for: a momentum that is damaged, and known to be.
absl::Status Engine::PoisonMomentum(ShardState& state) {
  const Dtype dtype = state.momentum_dtype();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::uint16_t bf16_nan = kernels::FloatToBF16(nan);
  const void* bits = dtype == Dtype::kF32 ? static_cast<const void*>(&nan) : &bf16_nan;
  kernels::Error error = backend_.Upload(state.momentum, bits, DtypeBytes(dtype));
  const kernels::StateView view{state.momentum, static_cast<std::size_t>(state.elements), dtype};
  if (!error) error = backend_.ScanState({&view, 1}, {&state.momentum_scan, 1});
  return error ? absl::InternalError(error.message()) : absl::OkStatus();
}

void Engine::Discard() {
  doomed_ = false;
  early_seconds_ = 0;
  early_error_ = absl::OkStatus();
  for (ShardState& state : states_) {
    if (!state.reduced) continue;
    state.gradient_layer.reset();
    state.gradient = {};
    state.gradient_max = 0;
    state.gradient_sum_squares = 0;
    state.reduced = state.orthogonalized = false;
  }
}

absl::Status Engine::Reset() {
  Discard();
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  const std::vector<std::byte> zeros(kPiece);
  for (const Buffer* tensors : {&weights_, &momenta_, &second_moments_}) {
    for (std::size_t at = 0; at < tensors->bytes(); at += kPiece) {
      if (auto error = backend_.Upload(static_cast<char*>(tensors->data()) + at, zeros.data(),
                                       std::min(kPiece, tensors->bytes() - at))) {
        return absl::InternalError(absl::StrFormat("reset: %s", error.message()));
      }
    }
  }
  for (ShardState& state : states_) {
    state.t = state.idle_steps = 0;
    state.initialized = {};
    state.weight_scan = state.momentum_scan = state.exp_avg_sq_scan = {};
  }
  for (const GroupSpec& group : spec_.groups) {
    muon_[group.name] = group.muon;
    adamw_[group.name] = group.adamw;
  }
  return absl::OkStatus();
}

ParameterFacts Engine::Facts(int parameter) const {
  ParameterFacts facts;
  for (const ShardState& state : ShardsOf(parameter)) {
    facts.t = state.t;
    facts.momentum_sum_squares += state.momentum_scan.sum_squares;
    facts.weight_sum_squares += state.weight_scan.sum_squares;
    facts.nonfinite_elements +=
        static_cast<std::int64_t>(state.weight_scan.nonfinite + state.momentum_scan.nonfinite +
                                  state.exp_avg_sq_scan.nonfinite);
  }
  return facts;
}

StateHealth Engine::Health() const {
  StateHealth health;
  for (const ShardState& state : states_) {
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

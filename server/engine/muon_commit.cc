#include "server/engine/muon_commit.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/engine/muon_scratch.h"
#include "server/engine/note_momentum.h"
#include "server/engine/rules.h"

namespace muond {
namespace {

using Clock = std::chrono::steady_clock;

// Ends a phase: it lasted since `since`, and the next one begins.
void EndPhase(const char* phase, int device, double* total, Clock::time_point& since,
              CommitReport& report) {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - since).count();
  if (total != nullptr) *total += seconds;
  report.diagnostics.spans.push_back(SpanUntilNow(phase, device, seconds));
  since = now;
}

absl::Status KernelError(const char* what, const kernels::Error& error) {
  return absl::InternalError(absl::StrFormat("commit: %s: %s", what, error.message()));
}

// What the residual would tell, for free and at every call; a redone result has told already.
bool IsLowRank(const kernels::NewtonSchulzResult& result, std::int64_t k) {
  return !result.zero_input && !result.fallback && !result.failed &&
         result.output_norm * result.output_norm < kLowRankShare * static_cast<double>(k);
}

// Scans of parts of one tensor, combined in the order of the parts.
void Merge(const kernels::StateScan& part, kernels::StateScan& whole) {
  whole.nonfinite += part.nonfinite;
  whole.max_abs = std::max(whole.max_abs, part.max_abs);
  whole.sum_squares += part.sum_squares;
}

}  // namespace

MuonCommit::MuonCommit(Engine& engine, const CommitRequest& request)
    : engine_(engine),
      request_(request),
      element_bytes_(kernels::DtypeBytes(engine.backend_.iterate_dtype())) {}

absl::Status MuonCommit::Run(const std::vector<int>& states, CommitReport& report) {
  for (const std::vector<int>& batch : BatchesOf(engine_.states_, states, engine_.backend_)) {
    MUOND_RETURN_IF_ERROR(RunBatch(batch, report));
    if (!report.failure.empty()) break;
  }
  return absl::OkStatus();
}

absl::Status MuonCommit::RunBatch(const std::vector<int>& states, CommitReport& report) {
  auto clock = Clock::now();
  Batch batch{.states = states};
  LayOut(batch, /*write_m=*/true);
  const int device = engine_.device_;
  MUOND_RETURN_IF_ERROR(UpdateMomenta(batch, &report));
  EndPhase("momentum", device, &report.momentum_seconds, clock, report);
  MUOND_RETURN_IF_ERROR(OrthogonalizeAll(batch));
  Count(batch, report);
  EndPhase("newton_schulz", device, &report.newton_schulz_seconds, clock, report);
  if (!report.failure.empty()) return absl::OkStatus();
  MUOND_RETURN_IF_ERROR(ApplyAll(batch, report));
  EndPhase("apply", device, &report.apply_seconds, clock, report);
  if (request_.sample) {
    MeasureResiduals(batch, report);
    EndPhase("diagnose", device, nullptr, clock, report);
  }
  return absl::OkStatus();
}

absl::Status MuonCommit::OrthogonalizeEarly(const std::vector<int>& states) {
  Batch batch{.states = states};
  LayOut(batch, /*write_m=*/false);
  MUOND_RETURN_IF_ERROR(UpdateMomenta(batch, nullptr));
  MUOND_RETURN_IF_ERROR(OrthogonalizeAll(batch));
  for (const int index : states) {
    ShardState& state = engine_.states_[index];
    state.orthogonalized = true;
    state.orthogonalized_with = request_.muon.at(state.group->name);
    state.results.clear();
  }
  for (std::size_t i = 0; i < batch.parts.size(); ++i) {
    engine_.states_[batch.parts[i].state].results.push_back(batch.results[i]);
  }
  return absl::OkStatus();
}

// O is there already, and is what this commit would make.
bool MuonCommit::Ready(const ShardState& state) const {
  const bool unclipped =
      engine_.spec_.clip_policy != ClipPolicy::kAll || request_.clip_coefficient == 1.0;
  return state.orthogonalized && unclipped &&
         state.orthogonalized_with == request_.muon.at(state.group->name);
}

// The scratch holds U of all states, then O of all matrices where it has no place of its own, then
// the rows that are gathered.
void MuonCommit::LayOut(Batch& batch, bool write_m) const {
  std::int64_t elements = 0;
  for (int index : batch.states) elements += Footprint(engine_.states_[index]);
  char* u = static_cast<char*>(engine_.scratch_.data());
  char* o = u + elements * element_bytes_;
  char* packed = o + (engine_.overlap_ ? 0 : elements * element_bytes_);
  char* spare = u;
  for (int index : batch.states) {
    const ShardState& state = engine_.states_[index];
    batch.momenta.push_back(MomentumJobOf(state, u));
    batch.momenta.back().write_m = write_m;
    if (engine_.overlap_) o = state.o;
    const bool ready = Ready(state);
    const bool gather = Packed(state) && !ready;
    std::size_t matrix = 0;
    for (const MatrixBlock& block : state.matrices) {
      const char* input = u + block.ranges[0].begin * block.cols * element_bytes_;
      if (gather) {
        char* to = packed;
        for (const RowRange& range : block.ranges) {
          const std::size_t bytes = range.count * block.cols * element_bytes_;
          batch.gathers.push_back({to, u + range.begin * block.cols * element_bytes_, bytes});
          to += bytes;
        }
        input = packed;
        packed += Aligned(block.rows * block.cols) * element_bytes_;
      }
      batch.matrices.push_back({.u = input,
                                .o = o,
                                .rows = block.rows,
                                .cols = block.cols,
                                .u_scale = batch.momenta.back().u_scale});
      batch.parts.push_back({index, &block, spare});
      batch.results.push_back(ready ? state.results[matrix++] : kernels::NewtonSchulzResult{});
      o += Aligned(block.rows * block.cols) * element_bytes_;
      spare += Aligned(block.rows * block.cols) * element_bytes_;
    }
    u += Aligned(state.elements) * element_bytes_;
  }
}

kernels::MomentumJob MuonCommit::MomentumJobOf(const ShardState& state, char* u) const {
  const kernels::MomentumRule rule = MomentumRuleOf(
      *state.group, request_.muon.at(state.group->name),
      engine_.spec_.clip_policy == ClipPolicy::kAll ? request_.clip_coefficient : 1.0);
  return {
      .gradient = state.gradient,
      .rule = rule,
      .m = state.momentum,
      .u = u,
      .u_scale = kernels::IterateScale(engine_.backend_.iterate_dtype(),
                                       MuonInputBound(state.Maxima(), state.gradient_max, rule))};
}

absl::Status MuonCommit::UpdateMomenta(const Batch& batch, CommitReport* report) {
  std::vector<kernels::StateScan> scans(batch.states.size());
  if (auto error = engine_.backend_.Momentum(batch.momenta, scans)) {
    return KernelError("momentum", error);
  }
  for (std::size_t i = 0; i < scans.size() && report != nullptr; ++i) {
    ShardState& state = engine_.states_[batch.states[i]];
    const kernels::MomentumRule& rule = batch.momenta[i].rule;
    const bool ema = rule.form == kernels::MomentumForm::kEma;
    NoteMomentum(state, rule.beta, (ema ? 1 - rule.beta : 1) * rule.gradient_scale,
                 scans[i].sum_squares, *report);
    state.momentum_scan = scans[i];
  }
  if (batch.gathers.empty()) return absl::OkStatus();
  if (auto error = engine_.backend_.Copy(batch.gathers)) return KernelError("gather rows", error);
  return absl::OkStatus();
}

// Groups may differ in coefficients: the matrices of one group go in one call.
absl::Status MuonCommit::OrthogonalizeAll(Batch& batch) {
  std::vector<std::pair<const GroupSpec*, std::vector<std::size_t>>> groups;
  for (std::size_t i = 0; i < batch.parts.size(); ++i) {
    const ShardState& state = engine_.states_[batch.parts[i].state];
    if (Ready(state)) continue;
    auto found = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& entry) { return entry.first == state.group; });
    if (found == groups.end()) found = groups.insert(groups.end(), {state.group, {}});
    found->second.push_back(i);
  }
  for (const auto& [group, members] : groups) {
    MUOND_RETURN_IF_ERROR(Orthogonalize(batch, members));
  }
  return absl::OkStatus();
}

absl::Status MuonCommit::Orthogonalize(Batch& batch, const std::vector<std::size_t>& members) {
  const ShardState& first = engine_.states_[batch.parts[members[0]].state];
  std::vector<kernels::MatrixJob> jobs;
  for (const std::size_t member : members) {
    jobs.push_back(batch.matrices[member]);
    const EngineFaults& faults = engine_.faults_;
    if (faults.Fire(FaultPoint::kNewtonSchulzFastPathNan)) ++faults.newton_schulz->fast_path;
    if (faults.Fire(FaultPoint::kNewtonSchulzFallbackNan)) ++faults.newton_schulz->fallback;
  }
  std::vector<kernels::NewtonSchulzResult> results(jobs.size());
  if (auto error = engine_.backend_.NewtonSchulz(jobs, *first.newton_schulz, results)) {
    return KernelError("Newton-Schulz", error);
  }
  for (std::size_t i = 0; i < members.size(); ++i) batch.results[members[i]] = results[i];
  return absl::OkStatus();
}

void MuonCommit::Count(const Batch& batch, CommitReport& report) const {
  for (std::size_t i = 0; i < batch.parts.size(); ++i) {
    const kernels::NewtonSchulzResult& result = batch.results[i];
    const ShardState& state = engine_.states_[batch.parts[i].state];
    const MatrixBlock& block = *batch.parts[i].block;
    CommitReport::Group& group = report.groups[state.group->name];
    ++report.newton_schulz_calls;
    report.zero_inputs += result.zero_input;
    report.newton_schulz_fallbacks += result.fallback;
    group.ns_low_rank += IsLowRank(result, std::min(block.rows, block.cols));
    group.ns_zero += result.zero_input;
    group.ns_fallback += result.fallback;
    ++group.ns_calls;
    if (result.failed && report.failure.empty()) {
      report.failure = absl::StrFormat(
          "parameter \"%s\": Newton-Schulz of a %d x %d matrix: the fp32 standard path gave no "
          "usable result for a finite input; its weights were not changed; the run needs a restore",
          state.spec->name, block.rows, block.cols);
    }
  }
}

absl::Status MuonCommit::ApplyAll(const Batch& batch, CommitReport& report) {
  std::vector<kernels::ApplyJob> jobs;
  std::vector<int> states;  // of each job
  std::map<int, double> update_squares;
  for (std::size_t i = 0; i < batch.parts.size(); ++i) {
    const ShardState& state = engine_.states_[batch.parts[i].state];
    const MatrixBlock& block = *batch.parts[i].block;
    const Hyperparameters& now = request_.muon.at(state.group->name);
    const double factor =
        ShapeFactorOf(state.group->shape_factor, state.group->extra_factor, block.rows, block.cols);
    const char* o = static_cast<const char*>(batch.matrices[i].o);
    const kernels::NewtonSchulzResult& result = batch.results[i];
    update_squares[batch.parts[i].state] += std::pow(now.lr * factor * result.output_norm, 2);
    for (const RowRange& range : block.ranges) {
      const std::size_t count = range.count * block.cols;
      jobs.push_back({.w = state.weight + range.begin * block.cols,
                      .o = o,
                      .elements = count,
                      .decay = DecayFactor(*state.group, now),
                      .step = now.lr * factor * result.o_scale});
      if (request_.targets != nullptr) {
        jobs.back().rounded = request_.targets->At(state, range.begin * block.cols);
      }
      states.push_back(batch.parts[i].state);
      o += count * element_bytes_;
    }
  }
  std::vector<kernels::StateScan> scans(jobs.size());
  if (auto error = engine_.backend_.Apply(jobs, scans)) return KernelError("apply", error);
  for (int index : batch.states) {
    ShardState& state = engine_.states_[index];
    NoteUpdate(state, update_squares[index], report);
    state.weight_scan = {};
    ++state.t;
    ++report.groups[state.group->name].updates;
  }
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    Merge(scans[i], engine_.states_[states[i]].weight_scan);
  }
  return absl::OkStatus();
}

}  // namespace muond

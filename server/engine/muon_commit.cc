#include "server/engine/muon_commit.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/engine/rules.h"

namespace muond {
namespace {

using Clock = std::chrono::steady_clock;

void AddSeconds(double& total, Clock::time_point& since) {
  const auto now = Clock::now();
  total += std::chrono::duration<double>(now - since).count();
  since = now;
}

absl::Status KernelError(const ParameterState& state, const char* what,
                         const kernels::Error& error) {
  return absl::InternalError(
      absl::StrFormat("parameter \"%s\": %s: %s", state.spec->name, what, error.message()));
}

bool Packed(const ParameterState& state) {
  return std::any_of(state.routed->matrices.begin(), state.routed->matrices.end(),
                     [](const MatrixBlock& block) { return block.ranges.size() > 1; });
}

// Scans of parts of one tensor, combined in the order of the parts.
void Merge(const kernels::StateScan& part, kernels::StateScan& whole) {
  whole.nonfinite += part.nonfinite;
  whole.max_abs = std::max(whole.max_abs, part.max_abs);
  whole.sum_squares += part.sum_squares;
}

}  // namespace

std::size_t MuonCommit::ScratchBytes(const std::vector<ParameterState>& states) {
  std::int64_t total = 0, largest = 0;
  bool packed = false;
  for (const ParameterState& state : states) {
    if (!state.owned || !state.muon()) continue;
    total += state.elements;
    largest = std::max(largest, state.elements);
    packed = packed || Packed(state);
  }
  const std::int64_t batch = std::max(largest, std::min(total, kMuonBatchElements));
  return static_cast<std::size_t>(batch) * sizeof(float) * (packed ? 3 : 2);
}

absl::Status MuonCommit::Run(const std::vector<int>& states, CommitReport& report) {
  std::vector<int> batch;
  std::int64_t elements = 0;
  for (int index : states) {
    const std::int64_t more = engine_.states_[index].elements;
    if (!batch.empty() && elements + more > kMuonBatchElements) {
      MUOND_RETURN_IF_ERROR(RunBatch(batch, report));
      batch.clear();
      elements = 0;
    }
    batch.push_back(index);
    elements += more;
  }
  return batch.empty() ? absl::OkStatus() : RunBatch(batch, report);
}

absl::Status MuonCommit::RunBatch(const std::vector<int>& states, CommitReport& report) {
  std::int64_t elements = 0;
  for (int index : states) elements += engine_.states_[index].elements;
  float* u = engine_.muon_scratch_.floats();
  float* o = u + elements;
  float* packed = o + elements;
  std::vector<kernels::MatrixJob> jobs;
  std::vector<Part> parts;
  for (int index : states) {
    ParameterState& state = engine_.states_[index];
    auto clock = Clock::now();
    MUOND_RETURN_IF_ERROR(UpdateMomentum(state, u, report));
    const bool gather = Packed(state);
    float* from = gather ? packed : u;
    for (const MatrixBlock& block : state.routed->matrices) {
      const float* input = gather ? from : u + block.ranges[0].begin * block.cols;
      if (gather) {
        for (const RowRange& range : block.ranges) {
          const std::size_t count = range.count * block.cols;
          if (auto error = engine_.backend_.Copy(from, u + range.begin * block.cols,
                                                 count * sizeof(float))) {
            return KernelError(state, "gather rows", error);
          }
          from += count;
        }
      }
      jobs.push_back({.u = input, .o = o, .rows = block.rows, .cols = block.cols});
      parts.push_back({index, &block, o});
      o += block.rows * block.cols;
    }
    u += state.elements;
    packed = gather ? from : packed;
    AddSeconds(report.momentum_seconds, clock);
  }
  // Groups may differ in coefficients: runs of parts with one group go in one call.
  for (std::size_t begin = 0; begin < jobs.size();) {
    const GroupSpec* group = engine_.states_[parts[begin].state].group;
    std::size_t end = begin;
    while (end < jobs.size() && engine_.states_[parts[end].state].group == group) ++end;
    MUOND_RETURN_IF_ERROR(Orthogonalize(jobs, parts, begin, end, report));
    if (!report.failure.empty()) return absl::OkStatus();
    begin = end;
  }
  auto clock = Clock::now();
  for (std::size_t i = 0; i < parts.size();) {
    ParameterState& state = engine_.states_[parts[i].state];
    kernels::StateScan scan;
    for (const int index = parts[i].state; i < parts.size() && parts[i].state == index; ++i) {
      MUOND_RETURN_IF_ERROR(ApplyPart(parts[i], scan));
    }
    state.weight_scan = scan;
    ++state.t;
    ++report.groups[state.group->name].updates;
  }
  AddSeconds(report.apply_seconds, clock);
  return absl::OkStatus();
}

absl::Status MuonCommit::UpdateMomentum(ParameterState& state, float* u, CommitReport& report) {
  const Hyperparameters& now = request_.muon.at(state.group->name);
  const kernels::MomentumRule rule = MomentumRuleOf(
      *state.group, now,
      engine_.spec_.clip_policy == ClipPolicy::kAll ? request_.clip_coefficient : 1.0);
  if (auto error = engine_.backend_.Momentum(state.gradient, rule, state.momentum.floats(),
                                             /*write_m=*/true, u, state.momentum_scan)) {
    return KernelError(state, "momentum", error);
  }
  return absl::OkStatus();
}

absl::Status MuonCommit::Orthogonalize(std::vector<kernels::MatrixJob>& jobs,
                                       const std::vector<Part>& parts, std::size_t begin,
                                       std::size_t end, CommitReport& report) {
  auto clock = Clock::now();
  const ParameterState& first = engine_.states_[parts[begin].state];
  std::vector<kernels::NewtonSchulzResult> results(end - begin);
  for (std::size_t i = begin; i < end; ++i) {
    const EngineFaults& faults = engine_.faults_;
    if (faults.Fire(FaultPoint::kNewtonSchulzFastPathNan)) ++faults.newton_schulz->fast_path;
    if (faults.Fire(FaultPoint::kNewtonSchulzFallbackNan)) ++faults.newton_schulz->fallback;
  }
  if (auto error = engine_.backend_.NewtonSchulz(std::span(jobs).subspan(begin, end - begin),
                                                 first.newton_schulz, results)) {
    return KernelError(first, "Newton-Schulz", error);
  }
  CommitReport::Group& group = report.groups[first.group->name];
  for (std::size_t i = 0; i < results.size(); ++i) {
    const kernels::NewtonSchulzResult& result = results[i];
    ++report.newton_schulz_calls;
    report.zero_inputs += result.zero_input;
    report.newton_schulz_fallbacks += result.fallback;
    group.ns_zero += result.zero_input;
    group.ns_fallback += result.fallback;
    ++group.ns_calls;
    if (result.failed && report.failure.empty()) {
      const Part& part = parts[begin + i];
      report.failure = absl::StrFormat(
          "parameter \"%s\": Newton-Schulz of a %d x %d matrix: the fp32 standard path gave no "
          "usable result for a finite input; its weights were not changed; the run needs a restore",
          engine_.states_[part.state].spec->name, part.block->rows, part.block->cols);
    }
  }
  AddSeconds(report.newton_schulz_seconds, clock);
  return absl::OkStatus();
}

absl::Status MuonCommit::ApplyPart(const Part& part, kernels::StateScan& scan) {
  ParameterState& state = engine_.states_[part.state];
  const Hyperparameters& now = request_.muon.at(state.group->name);
  const MatrixBlock& block = *part.block;
  const double step = now.lr * ShapeFactorOf(state.group->shape_factor, state.group->extra_factor,
                                             block.rows, block.cols);
  const float* o = part.o;
  for (const RowRange& range : block.ranges) {
    kernels::StateScan piece;
    const std::size_t count = range.count * block.cols;
    if (auto error = engine_.backend_.Apply(state.weight.floats() + range.begin * block.cols, o,
                                            count, DecayFactor(*state.group, now), step, piece)) {
      return KernelError(state, "apply", error);
    }
    Merge(piece, scan);
    o += count;
  }
  return absl::OkStatus();
}

}  // namespace muond

// What a sampled commit measures of Muon's matrices.
#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_format.h"
#include "server/engine/muon_commit.h"

namespace muond {
namespace {

// X + t X X^T X, X = O / |O|_F, by the backend's own iteration: any size is plausible.
kernels::NewtonSchulzRule Probe(double t) {
  return {.steps = {{1, t, 0}},
          .method = kernels::NewtonSchulzMethod::kStandard,
          .norm_floor = 0,
          .residual_max = 1e30};
}

}  // namespace

// Matrices of one short side k share their calls, since t = k makes both terms of a healthy O
// equally large: its singular values squared are about 1 / k of the sum.
void MuonCommit::MeasureResiduals(const Batch& batch, CommitReport& report) {
  std::map<std::int64_t, std::vector<std::size_t>> by_k;
  for (std::size_t i = 0; i < batch.parts.size(); ++i) {
    const kernels::MatrixJob& job = batch.matrices[i];
    if (batch.results[i].output_norm > 0) by_k[std::min(job.rows, job.cols)].push_back(i);
  }
  for (const auto& [k, members] : by_k) {
    std::vector<kernels::MatrixJob> jobs;
    for (const std::size_t i : members) {
      const kernels::MatrixJob& done = batch.matrices[i];
      jobs.push_back({.u = done.o,
                      .o = batch.parts[i].spare,
                      .rows = done.rows,
                      .cols = done.cols});
    }
    const double t = static_cast<double>(k);
    std::vector<kernels::NewtonSchulzResult> plus(jobs.size()), minus(jobs.size());
    kernels::Error error = engine_.backend_.NewtonSchulz(jobs, Probe(t), plus);
    if (!error) error = engine_.backend_.NewtonSchulz(jobs, Probe(-t), minus);
    if (error) {
      // The update is made already; a device may have no memory left for this.
      report.diagnostics.left_out = absl::StrFormat("residuals: %s", error.message());
      return;
    }
    for (std::size_t i = 0; i < members.size(); ++i) {
      const auto residual = Residual({.k = t,
                                      .t = t,
                                      .output = batch.results[members[i]].output_norm,
                                      .plus = plus[i].output_norm,
                                      .minus = minus[i].output_norm});
      if (!residual) continue;
      const ShardState& state = engine_.states_[batch.parts[members[i]].state];
      report.diagnostics.groups[state.group->name].residuals.push_back(*residual);
      Enter(report.diagnostics.residuals, *residual, state.parameter);
    }
  }
}

// Before the weights' new scan replaces that of the old ones.
void MuonCommit::NoteUpdate(const ShardState& state, double update_squares, CommitReport& report) {
  const double ratio = std::sqrt(update_squares / state.weight_scan.sum_squares);
  if (!std::isfinite(ratio)) return;
  report.diagnostics.groups[state.group->name].update_ratios.push_back(ratio);
  Enter(report.diagnostics.update_ratios, ratio, state.parameter);
}

}  // namespace muond

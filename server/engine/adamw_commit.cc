#include "server/engine/adamw_commit.h"

#include <chrono>
#include <string>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/engine/adamw_sample.h"
#include "server/engine/note_momentum.h"
#include "server/engine/rules.h"

namespace muond {

kernels::AdamWRule AdamWRuleOf(const GroupSpec& group, const Hyperparameters& now, std::int64_t t,
                               double gradient_scale) {
  return {.lr = now.lr,
          .beta1 = now.beta1,
          .beta2 = now.beta2,
          .eps = now.eps,
          .decay = 1.0 - now.lr * now.weight_decay,
          .t = t,
          .gradient_scale = gradient_scale};
}

absl::Status AdamWCommit::Run(const std::vector<int>& states, CommitReport& report) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<kernels::AdamWJob> jobs;
  jobs.reserve(states.size());
  for (int index : states) {
    const ShardState& state = engine_.states_[index];
    jobs.push_back(
        {.gradient = state.gradient,
         .rule = AdamWRuleOf(*state.group, request_.adamw.at(state.group->name), state.t + 1,
                             request_.clip_coefficient),
         .state = {.w = state.weight,
                   .exp_avg = static_cast<float*>(state.momentum),
                   .exp_avg_sq = state.exp_avg_sq}});
    if (request_.targets != nullptr) jobs.back().rounded = request_.targets->At(state, 0);
  }
  std::vector<kernels::AdamWScan> scans(jobs.size());
  AdamWSample sample(engine_, request_, states);
  // What a sample can't get it leaves out: it must not cost the step.
  absl::Status sampled = request_.sample ? sample.Before() : absl::OkStatus();
  if (auto error = engine_.backend_.AdamW(jobs, scans)) {
    return absl::InternalError(absl::StrFormat("AdamW: %s", error.message()));
  }
  if (request_.sample && sampled.ok()) sampled = sample.After(report);
  if (!sampled.ok()) report.diagnostics.left_out = std::string(sampled.message());
  for (std::size_t i = 0; i < states.size(); ++i) {
    ShardState& state = engine_.states_[states[i]];
    const kernels::AdamWRule& rule = jobs[i].rule;
    NoteMomentum(state, rule.beta1, (1 - rule.beta1) * rule.gradient_scale,
                 scans[i].exp_avg.sum_squares, report);
    state.weight_scan = scans[i].weight;
    state.momentum_scan = scans[i].exp_avg;
    state.exp_avg_sq_scan = scans[i].exp_avg_sq;
    ++state.t;
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  report.adamw_seconds += seconds;
  if (!states.empty()) {
    report.diagnostics.spans.push_back(SpanUntilNow("adamw", engine_.device_, seconds));
  }
  return absl::OkStatus();
}

}  // namespace muond

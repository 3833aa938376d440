#include "server/engine/adamw_commit.h"

#include <chrono>

#include "absl/strings/str_format.h"
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
         .state = {.w = state.weight, .exp_avg = state.momentum, .exp_avg_sq = state.exp_avg_sq}});
  }
  std::vector<kernels::AdamWScan> scans(jobs.size());
  if (auto error = engine_.backend_.AdamW(jobs, scans)) {
    return absl::InternalError(absl::StrFormat("AdamW: %s", error.message()));
  }
  for (std::size_t i = 0; i < states.size(); ++i) {
    ShardState& state = engine_.states_[states[i]];
    state.weight_scan = scans[i].weight;
    state.momentum_scan = scans[i].exp_avg;
    state.exp_avg_sq_scan = scans[i].exp_avg_sq;
    ++state.t;
  }
  report.adamw_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return absl::OkStatus();
}

}  // namespace muond

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
  for (int index : states) {
    ParameterState& state = engine_.states_[index];
    const kernels::AdamWRule rule = AdamWRuleOf(*state.group, request_.adamw.at(state.group->name),
                                                state.t + 1, request_.clip_coefficient);
    const kernels::AdamWState memory{.w = state.weight.floats(),
                                     .exp_avg = state.momentum.floats(),
                                     .exp_avg_sq = state.exp_avg_sq.floats()};
    kernels::AdamWScan scan;
    if (auto error = engine_.backend_.AdamW(state.gradient, rule, memory, scan)) {
      return absl::InternalError(
          absl::StrFormat("parameter \"%s\": AdamW: %s", state.spec->name, error.message()));
    }
    state.weight_scan = scan.weight;
    state.momentum_scan = scan.exp_avg;
    state.exp_avg_sq_scan = scan.exp_avg_sq;
    ++state.t;
  }
  report.adamw_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return absl::OkStatus();
}

}  // namespace muond

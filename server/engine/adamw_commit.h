// AdamW's half of a commit.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "server/engine/engine.h"

namespace muond {

// The rule of step t of a parameter; gradient_scale is the clip coefficient.
kernels::AdamWRule AdamWRuleOf(const GroupSpec& group, const Hyperparameters& now, std::int64_t t,
                               double gradient_scale);

class AdamWCommit {
 public:
  AdamWCommit(Engine& engine, const CommitRequest& request) : engine_(engine), request_(request) {}
  // Applies the step to `states` (indices of AdamW states, all reduced).
  absl::Status Run(const std::vector<int>& states, CommitReport& report);

 private:
  Engine& engine_;
  const CommitRequest& request_;
};

}  // namespace muond

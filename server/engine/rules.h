// A group's settings as the rules that the kernels take. Pure; checked once at registration, so
// that a step never meets a setting it cannot carry out.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "proto/values.h"

namespace muond {

// INVALID_ARGUMENT naming the group and the field: unknown coefficient set or method, ns_steps
// other than the set's length (a set is a schedule: cycling it shrinks the update), custom steps
// not in threes or not finite, a negative or non-finite norm floor or factor, gram asked for with a
// set that is unstable in Gram form.
absl::StatusOr<kernels::NewtonSchulzRule> NewtonSchulzRuleOf(const GroupSpec& group);

kernels::MomentumRule MomentumRuleOf(const GroupSpec& group, const Hyperparameters& now,
                                     double gradient_scale);

// Muon's factor on W before the update: 1 - lr * weight_decay, or 1 - weight_decay when independent
// (AdamW's decay is always decoupled).
double DecayFactor(const GroupSpec& group, const Hyperparameters& now);

}  // namespace muond

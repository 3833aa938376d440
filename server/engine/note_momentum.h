// What a momentum update tells about gradient and momentum, from the sums that it makes anyway.
#pragma once

#include "server/engine/engine.h"

namespace muond {

// The momentum of `state`, whose last scan is of before the update M' = a M + b G, has the sum of
// squares `after` now. Enters the cosine in the report.
void NoteMomentum(const ShardState& state, double a, double b, double after, CommitReport& report);

}  // namespace muond

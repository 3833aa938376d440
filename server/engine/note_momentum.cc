#include "server/engine/note_momentum.h"

namespace muond {

void NoteMomentum(const ShardState& state, double a, double b, double after,
                  CommitReport& report) {
  const auto cosine = MomentumCosine({.a = a,
                                      .b = b,
                                      .before = state.momentum_scan.sum_squares,
                                      .gradient = state.gradient_sum_squares,
                                      .after = after,
                                      .dtype = state.momentum_dtype()});
  if (cosine) report.diagnostics.groups[state.group->name].cosines.push_back(*cosine);
}

}  // namespace muond

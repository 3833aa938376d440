// Could a finite gradient make an element of the new state non-finite? Answered from maxima alone,
// without another pass over memory, before anything is touched. Pure.
//
// Bounds hold in real arithmetic and are compared with a little less than the largest fp32 number,
// so rounding inside the kernels can't carry a state over the edge. They may err on the safe side:
// a step close to the edge of fp32 is skipped (cause state_overflow) though it might have fitted.
#pragma once

#include <cstdint>

#include "kernels/backend.h"

namespace muond {

// Maxima of magnitudes kept since the last commit.
struct StateMaxima {
  double weight = 0;
  double momentum = 0;    // Muon's M, AdamW's m
  double exp_avg_sq = 0;  // AdamW's v
};

// Bound on the elements of U, the Newton-Schulz input that the rule makes of these. The gradient's
// maximum is unscaled; the rule's gradient_scale is applied to it.
double MuonInputBound(const StateMaxima& now, double gradient_max,
                      const kernels::MomentumRule& rule);

// `update_max` bounds the elements of lr x shape factor x O over the parameter's matrices. The
// gradient's maximum is unscaled and unclipped.
bool MuonStateCouldOverflow(const StateMaxima& now, double gradient_max,
                            const kernels::MomentumRule& rule, double decay, double update_max);

bool AdamWStateCouldOverflow(const StateMaxima& now, double gradient_max,
                             const kernels::AdamWRule& rule);

}  // namespace muond

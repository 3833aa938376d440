// The named Newton-Schulz coefficient sets and the limits that belong to each of them.
//
// p below is the polynomial that a set's steps compose to: it maps every singular value of the
// normalised input, a number in [0, 1], to the singular value of the result. All functions may be
// called from any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/backend.h"

namespace muond::kernels {

struct CoefficientSet {
  std::string_view name;
  std::vector<NewtonSchulzStep> steps;
  std::string_view source;  // where the numbers come from
  // RMS residual |O^T O - I|_F / sqrt(k), k = min(rows, cols), from which a result counts as
  // `low_rank`: a quarter of the directions is missing while the rest looks like a Gaussian matrix.
  // Equal to residual_max where healthy results overshoot so far that the residual cannot tell.
  double low_rank_residual;
  // RMS residual above which a result counts as diverged: 5 % above the largest |p(s)^2 - 1| that
  // exact arithmetic can give, so no input whatever trips it.
  double residual_max;
  // Stable in Gram form with one restart after step 2. False also where no one has shown it.
  bool gram_safe;
};

// Every set, in documentation order.
std::span<const CoefficientSet> CoefficientSets();

// Null when there is no set of that name.
const CoefficientSet* FindCoefficientSet(std::string_view name);

// True when `steps` are exactly those of a gram-safe set. A custom list is never gram-safe.
bool IsGramSafe(std::span<const NewtonSchulzStep> steps);

// p(x) after all steps, in fp64.
double EvaluateSteps(std::span<const NewtonSchulzStep> steps, double x);

// The cheap form of the residual limit: a result of k = min_side directions with RMS residual at
// most r has |O|_F^2 <= k (1 + r). False for NaN and infinity.
bool IsPlausibleNorm(double sum_squares, std::int64_t min_side, double residual_max);

}  // namespace muond::kernels

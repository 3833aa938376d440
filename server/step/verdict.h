// The verdict: the same pure function of all votes on every daemon. Nothing is touched before it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/values.h"
#include "server/step/exact_sum.h"

namespace muond {

// How many names an outcome, a vote or a message lists at most.
inline constexpr std::size_t kMaxNames = 8;

// What one daemon knows of a step once all its gradients are in: facts about unscaled, reduced,
// unclipped gradients, both algorithms.
struct Vote {
  std::int64_t generation = 0;
  std::int64_t step = 0;
  // Of what the trainers told this daemon of the step: loss scale, micro-batches, hyperparameters,
  // absent parameters, or their skip. Equal on all daemons, or there is no verdict.
  std::uint64_t terms = 0;
  ExactSum sum_squares;                       // of the block sums of all owned parameters
  std::int64_t nonfinite = 0;                 // non-finite gradient elements
  std::int64_t state_overflows = 0;           // parameters whose new state could be non-finite
  SkipCause trainer_skip = SkipCause::kNone;  // the trainers' own word (Skip)
  std::vector<std::string> offenders;         // names, registration order, at most kMaxNames
  friend bool operator==(const Vote&, const Vote&) = default;
};

struct VerdictRules {
  double max_grad_norm = 0;             // 0: no clipping
  double grad_norm_skip_threshold = 0;  // 0: off
};

// INVALID_ARGUMENT naming the field and the value unless both are finite and not negative.
absl::Status ValidateVerdictRules(const VerdictRules& rules);

struct Verdict {
  bool apply = false;
  SkipCause cause = SkipCause::kNone;
  double grad_norm = 0;  // sqrt of the exact sum, fp64; 0 when a gradient was not finite
  double clip_coefficient =
      1;  // min(1, max_norm / (norm + 1e-6)); 1 when the norm is 0 or on skips
  std::int64_t nonfinite = 0;
  // Of all votes, by name, each once. The first kMaxNames in registration order are among them:
  // each daemon listed the first of its own.
  std::vector<std::string> offenders;
  friend bool operator==(const Verdict&, const Verdict&) = default;
};

// Order of causes: the trainers' word, overflow, state overflow, norm threshold. Independent of the
// order of the votes. All votes must name one step, generation and terms (checked: a programmer's
// error).
Verdict Decide(const VerdictRules& rules, std::span<const Vote> votes);

}  // namespace muond

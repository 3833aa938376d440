// What a commit can tell about the health of the optimizer beside the update itself: how gradient
// and momentum agree, how large updates are against weights, how orthogonal Newton-Schulz's results
// are, which tensors get no gradients.
//
// Most of it costs nothing: it follows from sums that a commit makes anyway. What costs products or
// passes of its own is computed in sampled commits only (CommitRequest::sample): the residual, by
// two further Newton-Schulz steps per matrix, and the update of AdamW's parameters, on at most
// kSampleElements of them. Formulas and their limits: docs/diagnostics.md.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kernels/tensor.h"

namespace muond {

// A stretch of time in which a device worked on a step.
struct PhaseSpan {
  const char* phase = "";  // "reduce", "momentum", "newton_schulz", "apply", "adamw", "diagnose"
  int device = 0;          // -1: none
  double start_seconds = 0;  // Unix time
  double seconds = 0;
};

// The span that ends now.
PhaseSpan SpanUntilNow(const char* phase, int device, double seconds);

// A parameter, by its index in the run, and what is remarkable about it.
struct Remarkable {
  double value = 0;
  int parameter = 0;
};

// Descending, one entry a parameter, at most this many.
inline constexpr std::size_t kRemarkableMax = 5;
using RemarkableList = std::vector<Remarkable>;

// Enters the value, unless it is not finite or too small for the list.
void Enter(RemarkableList& list, double value, int parameter);

struct CommitDiagnostics {
  // One value per shard (cosines, ratios) or matrix (residuals); never one that is not finite.
  struct Group {
    std::vector<double> cosines, update_ratios, residuals;
  };
  std::map<std::string, Group> groups;
  RemarkableList residuals, update_ratios, gradient_norms;
  std::int64_t stale = 0;  // shards without a gradient for kStaleSteps applied steps or more
  bool sampled = false;
  std::string left_out;  // why a sample is not whole: it never fails the commit; empty: it is
  std::vector<PhaseSpan> spans;
};

void Merge(const CommitDiagnostics& part, CommitDiagnostics& whole);

// Applied steps without a gradient (absent, or all zero) after which a shard's momentum is stale.
inline constexpr std::int64_t kStaleSteps = 100;

// A momentum update M' = a M + b G, a b != 0, in sums of squares.
struct MomentumSums {
  double a = 0, b = 0;
  double before = 0, gradient = 0, after = 0;  // |M|^2, |G|^2, |M'|^2
  kernels::Dtype dtype = kernels::Dtype::kF32;  // that M' was rounded to
};

// Cosine of gradient and momentum before the update, from |M'|^2 = a^2 |M|^2 + 2ab <M, G> +
// b^2 |G|^2. Empty where one of them is zero or not finite, or where rounding of M' could hide it.
std::optional<double> MomentumCosine(const MomentumSums& sums);

// RMS residual |O^T O - I|_F / sqrt(k), k = min(rows, cols), from |O|^2 and from the norms of
// X + t X X^T X and X - t X X^T X, where X = O / |O|: their squares differ by 4 t sum(s^4), s the
// singular values of X. Empty when a value is not finite or O is zero.
struct ResidualSums {
  double k = 0, t = 0;
  double output = 0;       // |O|
  double plus = 0, minus = 0;  // norms
};
std::optional<double> Residual(const ResidualSums& sums);

// Below this share |O|^2 / k most directions of O are dead: (1 - share)^2 bounds the residual's
// square from below, whatever the coefficients, so that the residual is at least 0.81.
inline constexpr double kLowRankShare = 0.19;

// Elements of AdamW's parameters whose update is measured in a sampled commit, all together.
inline constexpr std::int64_t kSampleElements = std::int64_t{1} << 19;

}  // namespace muond

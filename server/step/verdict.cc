#include "server/step/verdict.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond {
namespace {

constexpr double kClipEpsilon = 1e-6;  // torch.nn.utils.clip_grad_norm_

double ClipCoefficient(double max_norm, double norm) {
  if (max_norm == 0 || norm == 0) return 1.0;
  return std::min(1.0, max_norm / (norm + kClipEpsilon));
}

absl::Status CheckLimit(const char* field, double value) {
  if (std::isfinite(value) && value >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "field \"%s\": expected 0 (off) or a finite positive number, got %g", field, value));
}

}  // namespace

absl::Status ValidateVerdictRules(const VerdictRules& rules) {
  MUOND_RETURN_IF_ERROR(CheckLimit("max_grad_norm", rules.max_grad_norm));
  return CheckLimit("grad_norm_skip_threshold", rules.grad_norm_skip_threshold);
}

Verdict Decide(const VerdictRules& rules, std::span<const Vote> votes) {
  MUOND_CHECK(!votes.empty(), "a verdict needs votes");
  Verdict verdict;
  ExactSum sum_squares;
  std::int64_t state_overflows = 0;
  SkipCause word = SkipCause::kNone;
  for (const Vote& vote : votes) {
    MUOND_CHECK(vote.step == votes[0].step && vote.generation == votes[0].generation &&
                    vote.terms == votes[0].terms,
                "votes are about one step of one generation, on the same terms");
    sum_squares.Merge(vote.sum_squares);
    verdict.nonfinite += vote.nonfinite;
    state_overflows += vote.state_overflows;
    // Daemons that heard different words agree on the one that moves the loss scale.
    if (vote.trainer_skip != SkipCause::kNone) {
      word = word == SkipCause::kNone ? vote.trainer_skip : std::min(word, vote.trainer_skip);
    }
    verdict.offenders.insert(verdict.offenders.end(), vote.offenders.begin(), vote.offenders.end());
  }
  std::sort(verdict.offenders.begin(), verdict.offenders.end());
  verdict.offenders.erase(std::unique(verdict.offenders.begin(), verdict.offenders.end()),
                          verdict.offenders.end());

  const bool finite = verdict.nonfinite == 0;
  // 2^63 squares of fp32 numbers stay below 2^320: the sum of finite gradients is finite in fp64.
  if (finite) verdict.grad_norm = std::sqrt(sum_squares.Value());
  if (word != SkipCause::kNone) {
    verdict.cause = word;
  } else if (!finite) {
    verdict.cause = SkipCause::kOverflow;
  } else if (state_overflows > 0) {
    verdict.cause = SkipCause::kStateOverflow;
  } else if (rules.grad_norm_skip_threshold > 0 &&
             verdict.grad_norm > rules.grad_norm_skip_threshold) {
    verdict.cause = SkipCause::kNormThreshold;
  } else {
    verdict.apply = true;
    verdict.clip_coefficient = ClipCoefficient(rules.max_grad_norm, verdict.grad_norm);
  }
  return verdict;
}

}  // namespace muond

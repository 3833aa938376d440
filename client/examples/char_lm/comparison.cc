#include "client/examples/char_lm/comparison.h"

#include <cmath>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace muond::char_lm {

int BestCandidate(std::span<const Candidate> candidates) {
  int best = -1;
  for (int i = 0; i < static_cast<int>(candidates.size()); ++i) {
    if (!std::isfinite(candidates[i].validation_loss)) continue;
    if (best < 0 || candidates[i].validation_loss < candidates[best].validation_loss) best = i;
  }
  return best;
}

std::optional<std::int64_t> StepReaching(std::span<const LossPoint> curve, double loss) {
  for (const LossPoint& point : curve) {
    if (point.validation <= loss) return point.step;
  }
  return std::nullopt;
}

Verdict Compare(std::span<const LossPoint> muon, std::span<const LossPoint> adamw) {
  const double difference = adamw.back().validation - muon.back().validation;
  Verdict verdict{.margin = std::abs(difference), .steps = muon.back().step};
  if (difference == 0) return verdict;
  const bool muon_ahead = difference > 0;
  verdict.ahead = muon_ahead ? Optimizer::kMuon : Optimizer::kAdamW;
  const auto& winner = muon_ahead ? muon : adamw;
  const auto& loser = muon_ahead ? adamw : muon;
  verdict.reached_at = StepReaching(winner, loser.back().validation).value_or(verdict.steps);
  return verdict;
}

absl::Status CheckMuonRun(const TrainResult& result) {
  const v1::RunStatus& status = result.status;
  const std::int64_t expected = status.muon_matrices() * status.steps_applied();
  if (status.muon_matrices() == 0) {
    return absl::InternalError("muon run: no parameter is trained by Muon");
  }
  if (status.newton_schulz_calls() != expected) {
    return absl::InternalError(absl::StrFormat(
        "muon run: expected %d Newton-Schulz calls (%d matrices x %d applied steps), the daemon "
        "made %d",
        expected, status.muon_matrices(), status.steps_applied(), status.newton_schulz_calls()));
  }
  if (status.momentum_nonfinite() != 0) {
    return absl::InternalError(absl::StrFormat(
        "muon run: %d momentum tensors have non-finite elements", status.momentum_nonfinite()));
  }
  if (status.steps_skipped().empty()) {
    return absl::InternalError("muon run: no step was skipped, so no overflow was seen through");
  }
  if (!result.unmoved.empty()) {
    return absl::InternalError(absl::StrFormat("muon run: parameters that did not move: %s",
                                               absl::StrJoin(result.unmoved, ", ")));
  }
  return absl::OkStatus();
}

}  // namespace muond::char_lm

// What the runs say together: which learning rate wins a sweep, who is ahead and since when, and
// whether the Muon run was what it claims to be.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/examples/char_lm/trainer.h"

namespace muond::char_lm {

// A short run of a sweep.
struct Candidate {
  double lr = 0;
  double validation_loss = 0;
};

// The candidate with the lowest finite loss, the first of equals; -1 when none is finite.
int BestCandidate(std::span<const Candidate> candidates);

// The first validated step at which the loss was `loss` or lower.
std::optional<std::int64_t> StepReaching(std::span<const LossPoint> curve, double loss);

struct Verdict {
  std::optional<Optimizer> ahead;     // none: a tie
  double margin = 0;                  // nats a character between the final validation losses
  std::int64_t steps = 0;             // of both
  // When the one ahead had what the other ended with.
  std::int64_t reached_at = 0;
};
Verdict Compare(std::span<const LossPoint> muon, std::span<const LossPoint> adamw);

// OK iff the daemon's own numbers prove the Muon run: Newton-Schulz ran once for every Muon matrix
// in every applied step, some step was skipped, no momentum is non-finite, and every parameter
// moved.
absl::Status CheckMuonRun(const TrainResult& result);

}  // namespace muond::char_lm

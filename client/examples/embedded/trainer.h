// A trainer of three steps and an overflow, which does not know where its optimizer runs: behind a
// socket or in its own process.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/session.h"

namespace muond::embedded_example {

struct Training {
  std::vector<StepOutcome> outcomes;  // of every step, in order
  std::vector<float> weights;         // of "w" after the last one
  std::string digest;                 // of the whole optimizer state
};

// Registers a run of one matrix, "w", and one vector, "b", trains it and leaves it. Errors are the
// session's.
absl::StatusOr<Training> Train(const client::SessionOptions& options);

}  // namespace muond::embedded_example

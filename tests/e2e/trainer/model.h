// What the test trainer trains: a run, what each rank holds of it, and values and gradients that
// follow from a seed, so that a trainer that was killed makes the same gradient once more.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/values.h"

namespace muond::test_trainer {

struct ModelOptions {
  std::string run = "run";
  // "mixed": matrices cut in all the ways that trainers cut them, a replicated vector, and an
  // AdamW tensor of several blocks. "one": a single matrix of 16 x 16. "square:N,SIZE": N matrices
  // of SIZE x SIZE.
  std::string kind = "mixed";
  std::int64_t world_size = 4;
  std::uint64_t seed = 1;
  int skip_every = 0;  // of n steps one, at random, overflows on one of the ranks; 0: none
};

// One box of one parameter, and the values that this rank has there.
struct Slice {
  std::string parameter;
  int parameter_index = 0;
  std::int64_t index = 0;  // among the rank's boxes of the parameter
  Box box;
  Dims shape;
  std::vector<float> values;
  std::vector<float> gradient;
};

// INVALID_ARGUMENT for a kind that does not exist.
absl::StatusOr<RunSpec> MakeRun(const ModelOptions& options);

// What `rank` holds, with its starting values.
std::vector<Slice> MakeSlices(const RunSpec& run, const ModelOptions& options, std::int64_t rank);
RankSlices BoxesOf(const std::vector<Slice>& slices);

// Fills in the gradients of a step: noise of (seed, step, element), plus half of the value, times
// `loss_scale`. So a trainer that has pulled wrong values goes another way from then on. A
// replicated parameter's noise is another one on each rank.
void MakeGradients(const RunSpec& run, const ModelOptions& options, std::int64_t rank,
                   std::int64_t step, double loss_scale, std::vector<Slice>& slices);

// One rank's gradient has an infinity in this step.
bool Overflows(const ModelOptions& options, std::int64_t step);

}  // namespace muond::test_trainer

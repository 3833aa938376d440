// Which parameter gets which algorithm, with the reason in words. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/values.h"
#include "server/registry/matrix_view.h"

namespace muond {

struct RoutedParameter {
  std::string name;
  Algorithm algorithm = Algorithm::kAdamW;  // never kAuto
  std::string reason;  // "hidden matrix", "embedding by role", "name contains \"lm_head\"", ...
  std::vector<MatrixBlock> matrices;  // empty for AdamW
  std::int64_t elements = 0;
  int state = 0;  // index of the parameter that holds the state (its own unless tied)
};

struct Routing {
  std::vector<RoutedParameter> parameters;  // registration order
  std::vector<std::string> unmatched_rules;
  std::int64_t muon_parameters = 0;  // states, each tie once
  std::int64_t adamw_parameters = 0;
  std::int64_t muon_matrices = 0;  // Newton-Schulz calls when everything is present
};

// Routes every parameter of the run. Errors name every parameter concerned and the remedy:
//   INVALID_ARGUMENT    shape missing or placeholder-like, kind and rank disagree, unknown group,
//                       bad pattern, split that does not tile the rows, non-matrix where a muon
//                       group or rule asks for Muon, exclusion in a muon group
//   ALREADY_EXISTS      a name twice; tied names that differ in shape, dtype, group, algorithm,
//                       matrix view or reduction
//   FAILED_PRECONDITION Muon silently inactive: a muon group without parameters, a muon rule that
//                       sends none to Muon, or a non-degenerate hidden matrix that a rule sends to
//                       AdamW
//   RESOURCE_EXHAUSTED  too many rules or matrices
//
// A parameter without elements goes to AdamW and trips none of the refusals about Muon.
absl::StatusOr<Routing> RouteParameters(const RunSpec& run);

// Bytes of optimizer state of one element: fp32 master weights and Muon's momentum, in the dtype
// that the group keeps it in, or AdamW's two fp32 moments.
inline std::int64_t StateBytesPerElement(Algorithm algorithm, const GroupSpec& group) {
  if (algorithm != Algorithm::kMuon) return 4 + 4 + 4;
  return 4 + static_cast<std::int64_t>(DtypeBytes(group.momentum_dtype));
}

}  // namespace muond

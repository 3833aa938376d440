// What must be alike between a checkpoint and the run that it is restored into. Pure.
//
// Daemons, devices, world size, the trainers' dtypes, names of groups and hyperparameters may
// differ; which tensors there are, how Newton-Schulz sees them and what momentum means may not.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/values.h"
#include "server/checkpoint/manifest.h"
#include "server/registry/matrix_view.h"
#include "server/registry/routing.h"

namespace muond::checkpoint {

// "8x4 @ 0+8; 8x4 @ 8+8": rows, cols and row ranges of each matrix; where there are very many,
// their number and a hash.
std::string MatricesText(const std::vector<MatrixBlock>& matrices);

// Of every parameter that holds state: no t, and tensors without pieces. By name.
std::vector<Parameter> LayoutOf(const RunSpec& spec, const Routing& routing);

// XXH3-128 as 32 hex digits over one line per parameter, in name order:
// name|shape|algorithm|momentum form|matrices|tied names, joined by commas. The form of a momentum
// that is kept in bf16 is followed by " bf16".
std::string Fingerprint(const std::vector<Parameter>& layout);

// FAILED_PRECONDITION naming the first parameter that is missing, too many or other, with both
// values; a tensor too many or too few, or of another dtype, too. `allow_relayout`: matrices may
// differ (whole or split): Newton-Schulz then goes on with the new ones.
absl::Status CheckLayout(const Manifest& manifest, const std::vector<Parameter>& run,
                         bool allow_relayout);

}  // namespace muond::checkpoint
